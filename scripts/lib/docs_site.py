"""Hooks of mkdocs that make the site out of the repository's own pages, and a check of the built site's links.

The pages link to each other and to files of the repository by relative paths, as they do on a code host. Here the pages
beside docs/ get an address of their own in the site, and files are copied to `source/`.

`docs_site.py FOLDER` checks every link between the HTML files of a built site.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
}
"""Pages beside docs/, and where they are in the site."""
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")


def rewritten(text: str, folder: PurePosixPath, files: set[str]) -> str:
    """The links of a page in `folder` of the repository, as they are in the site. Adds the files linked to `files`."""

    def of_link(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        parts: list[str] = []
        for part in (*folder.parts, *PurePosixPath(target).parts):
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        path = "/".join(parts)
        if path in PAGES:
            place = PAGES[path]
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        else:
            if (ROOT / path).is_dir():
                return f"{match[1]}https://github.com/kvferry/kvferry/tree/main/{path}{match[3]}"
            files.add(path)
            place = f"source/{path}"
        return f"{match[1]}{place}{match[3]}"

    out, end = [], 0
    for fence in FENCE.finditer(text):
        out += [LINK.sub(of_link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*out, LINK.sub(of_link, text[end:])])


def _header() -> str:
    text = (ROOT / "include/kvferry.h").read_text(encoding="utf-8")
    return (
        "# C header\n\nThe C ABI as a program includes it: `#include <kvferry.h>`. [c-abi.md](c-abi.md) says which "
        f"function to call when.\n\n```c\n{text}```\n"
    )


RUST = (
    "# Rust API\n\n<!-- rustdoc -->\n[The reference that rustdoc makes](rustdoc/kvferry/index.html) of `kvferry`. "
    "[rust.md](rust.md) says how to use it.\n"
)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages beside docs/, the C header, and every file of the repository that a page links to."""
    from mkdocs.structure.files import File

    linked: set[str] = set()
    for page in files.documentation_pages():
        rewritten(page.content_string, PurePosixPath("docs"), linked)
    for path, place in PAGES.items():
        text = rewritten((ROOT / path).read_text(encoding="utf-8"), PurePosixPath(), linked)
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "header.md", content=_header()))
    files.append(File.generated(config, "rust-api.md", content=RUST))
    # A place for links to lead to; scripts/docs puts the whole reference there.
    files.append(File.generated(config, "rustdoc/kvferry/index.html", content="Run scripts/docs without --no-rust.\n"))
    for path in sorted(linked):
        # A file ending in .md would be a page, one ending in .html its neighbour's rival.
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of the pages in docs/; those of the others are rewritten already."""
    return markdown if page.file.generated_by else rewritten(markdown, PurePosixPath("docs"), set())


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.targets.append(value)


def broken_links(site: Path) -> list[str]:
    """What leads nowhere in the pages of a built site, rustdoc's own pages left out."""
    pages: dict[Path, _Links] = {}

    def read(path: Path) -> _Links:
        if path not in pages:
            pages[path] = _Links()
            pages[path].feed(path.read_text(encoding="utf-8"))
        return pages[path]

    found = []
    for path in sorted(site.rglob("*.html")):
        if path.is_relative_to(site / "rustdoc") or path.name == "404.html":
            continue
        for target in read(path).targets:
            if re.match(r"[a-z]+:|//", target):
                continue
            file, anchor = urldefrag(target)
            goal = (path.parent / unquote(file)).resolve() if file else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file():
                found.append(f"{path.relative_to(site)}: {target} leads nowhere")
            elif anchor and goal.suffix == ".html" and unquote(anchor) not in read(goal).anchors:
                found.append(f"{path.relative_to(site)}: {target}: no such anchor")
    return found


if __name__ == "__main__":
    problems = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(problems) or "every link leads somewhere")
    sys.exit(bool(problems))
