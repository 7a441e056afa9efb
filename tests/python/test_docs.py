"""The documents: links lead somewhere, included files are as they are, commands have the options that are shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from commands import GENEROUS, ROOT

BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """A document without its code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{slug.rstrip('0123456789').rstrip('-')}-{number}"
        found.add(slug)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), f"{name(document)}: {target} leads nowhere"
        assert path.is_relative_to(ROOT), f"{name(document)}: {target} leaves the repository"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{name(document)}: {target}: {name(path)} has no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_included_files_are_as_they_are(document: Path) -> None:
    """`<!-- include: PATH -->` before a block says whose text it is; with KVFERRY_BLESS it is put there."""
    text = document.read_text(encoding="utf-8")

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}{(ROOT / match[2]).read_text(encoding='utf-8')}```\n"

    included = re.sub(r"(<!-- include: (\S+) -->\n+```\w+\n)(.*?)^```\n", fresh, text, flags=re.MULTILINE | re.DOTALL)
    if "KVFERRY_BLESS" in os.environ:
        document.write_text(included, encoding="utf-8")
    else:
        assert included == text, f"{name(document)}: run this test with KVFERRY_BLESS=1 and commit it"


def test_the_index_and_the_site_have_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert pages <= set(re.findall(r": ([\w-]+\.md)$", site, re.MULTILINE))


UNMADE = {"fuzz/regressions/TARGET", "tests/mutants.txt"}
"""A name with a part to fill in, and a file that comes with its first entry."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    folders = "benches|docs|examples|fuzz|include|loom|proto|python|scripts|src|tests|ucx-sys"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*[\w/])`", text)) | set(
        re.findall(r"\bscripts/[a-z][a-z-]+\b", text)
    )
    missing = {path for path in named - UNMADE if not (ROOT / path).exists() and not path.startswith("scripts/lib")}
    assert not missing, f"{name(document)}: {missing}"


# --- commands


def commands(document: Path) -> Iterator[list[str]]:
    """The words of every `kvferry` and `scripts/...` command in a document's shell blocks."""
    for language, block in FENCE.findall(document.read_text(encoding="utf-8")):
        if language not in ("", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"\s*(?:\$ )?((?:kvferry|scripts/[a-z-]+)(?:\s.*)?)$", line)
            if match is None:
                continue
            words = shlex.split(match[1], comments=True)
            for end in ("&&", "|", ";", ">"):
                words = words[: words.index(end)] if end in words else words
            yield words


def program(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "kvferry", *words[1:]] if words[0] == "kvferry" else list(words)


@cache
def help_of(words: tuple[str, ...]) -> str | None:
    """What `--help` says; None if that is no command."""
    done = subprocess.run(
        [*program(words), "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GENEROUS,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout if done.returncode == 0 else None


def check_options(words: list[str]) -> None:
    """Each option must be in the help of the command or of its subcommand."""
    known = (words[0],)
    text = help_of(known)
    assert text is not None, f"{words[0]} --help fails"
    for word in words[1:]:
        # A subcommand is a plain word that the help so far names.
        if not re.fullmatch(r"[a-z][a-z-]*", word) or not re.search(rf"(?<![-\w]){word}(?![-\w])", text):
            break
        deeper = help_of((*known, word))
        if deeper is None:
            break
        known, text = (*known, word), f"{text}\n{deeper}"
    for word in words[1:]:
        option = word.split("=", 1)[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", option):
            assert re.search(rf"(?<![-\w]){option}(?![-\w])", text), f"{' '.join(words)}: {option} is not in the help"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_have_the_options_that_are_shown(document: Path) -> None:
    for words in commands(document):
        check_options(words)


def test_commands_that_are_wrong_are_found() -> None:
    for wrong in (
        ["kvferry", "plan", "--no-such-option", "1"],
        ["kvferry", "nothing", "--json"],
        ["scripts/check", "-z"],
    ):
        with pytest.raises(AssertionError, match="is not in the help"):
            check_options(wrong)


CONFIGS = [
    (name(document), words) for document in DOCUMENTS for words in commands(document) if words[1:2] == ["config"]
]


@pytest.mark.parametrize(("document", "words"), CONFIGS)
def test_configurations_that_are_shown_are_right(document: str, words: list[str]) -> None:
    done = subprocess.run(program(tuple(words)), cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS)
    assert done.returncode == 0, f"{document}: {done.stderr}"


# --- the life of a block id


def _defines(text: str, function: str) -> bool:
    """Whether a Rust or Python file has a function, such as `Owner::name`, and names its owner as a type or class."""
    *owner, name = re.split(r"::|\.", function)
    defined = re.search(
        rf"^ *(?:pub(?:\([^)]*\))? )?(?:unsafe )?(?:extern \"C\" )?(?:fn|def) {name}\b", text, re.MULTILINE
    )
    return defined is not None and all(
        re.search(rf"^(?:impl\b.*|class )\b{one}\b", text, re.MULTILINE) for one in owner
    )


def _functions(text: str) -> list[tuple[str, str]]:
    """Every function that a text names after its file."""
    named = re.findall(r"`([\w./]+\.(?:rs|py))`:\s((?:`[\w:.]+`(?:, )?)+)", text)
    return [(file, function) for file, functions in named for function in re.findall(r"`([\w:.]+)`", functions)]


def test_the_functions_on_the_way_of_a_block_id_exist() -> None:
    page = (ROOT / "docs/internals.md").read_text(encoding="utf-8")
    section = page.split("\n## The life of a block id\n")[1].split("\n## ")[0]
    alone = set(re.findall(r"`([\w./]+\.(?:rs|py))`(?!:\s`)", section))
    assert not alone, f"named without a function: {alone}"
    assert len(_functions(section)) > 50
    for file, function in _functions(section):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert _defines(text, function), f"{file} has no {function}"
    assert not _defines("impl Other {\n    fn get() {}\n}\n", "Endpoint::get")
    assert not _defines("impl Endpoint {\n    fn gets() {}\n}\n", "Endpoint::get")


def test_the_copies_of_a_list_of_block_ids_are_counted() -> None:
    page = (ROOT / "docs/internals.md").read_text(encoding="utf-8")
    section = page.split("\n## The life of a block id\n")[1].split("\n## ")[0]
    told = re.search(
        r"D's list passes (\d+) functions in (\d+) files.*?"
        r"D's list is copied or converted (\d+) times, P's (\d+) times",
        section,
        re.DOTALL,
    )
    assert told is not None
    # Of the two lists' tables.
    rows = [row for row in section.splitlines() if row.startswith("|") and row.count("|") == 5]
    way = {named for row in rows for named in _functions(row)}
    copies = [int(number) for row in rows for number in re.findall(r"\*\*(\d+)\*\*", row.split("|")[4])]
    assert copies == list(range(1, int(told[3]) + 1))
    everywhere = {int(number) for number in re.findall(r"\*\*(\d+)\*\*", section)}
    assert everywhere == set(range(1, int(told[4]) + 1))
    assert (len(way), len({file for file, _ in way})) == (int(told[1]), int(told[2]))


# --- tables


def test_every_cause_of_a_failure_has_a_line() -> None:
    source = (ROOT / "proto/src/wire/cause.rs").read_text(encoding="utf-8")
    causes = re.findall(r'Cause::\w+ => "(\w+)"', source)
    assert len(causes) > 5
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in text.splitlines() if row.startswith("| `")]
    listed = {word for row in rows for word in row}
    assert set(causes) <= listed, f"without a line: {set(causes) - listed}"


def test_the_header_of_the_documents_is_the_librarys() -> None:
    """Every function that a document names is declared, but for those that a recipe adds."""
    declared = set(re.findall(r"\bkvf_\w+", (ROOT / "include/kvferry.h").read_text(encoding="utf-8")))
    for document in DOCUMENTS:
        text = re.sub(r"```diff\n.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for word in re.findall(r"\bkvf_\w+", text):
            if not word.endswith("_"):
                assert word in declared or any(w.startswith(word) for w in declared), f"{name(document)}: {word}"
