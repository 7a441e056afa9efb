"""A described deployment as a drawing: prefill ranks left, decode ranks right, arrows for what is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

from ..bench.sizes import size_text
from ..plan import Description, LinkDescription, RankDescription
from ..worker import Rank
from .table import Request, mean_run, ranges_text, rank_text

WIDTH, BOX, MARGIN = 1000, 300, 20
LEFT, RIGHT = MARGIN, WIDTH - MARGIN - BOX
TOP, BOTTOM, GAP = 112, 46, 12
LINE, PADDING = 16, 10
THICKEST = 10
HEAD = PADDING + 3 * LINE
"""The room that a box needs for its own lines."""
MOST_NAMED = 40
"""With more arrows than this, a decode rank's box does not name each of its arrows; the arrows' titles, which a browser
shows under the pointer, still do."""

COLOURS = ("#1f6fb4", "#d1620a", "#2d8a39", "#b3322f", "#7a55a8", "#80594d", "#c0559b", "#5f6b73")
GREY = "#555"


class Box(NamedTuple):
    """A rank's box: its top, its height, and where its arrows end, by the other rank."""

    top: float
    height: float
    ports: dict[tuple[int, int], float]


def svg(request: Request, described: Description) -> str:
    """The drawing."""
    links = described["links"]
    named = len(links) <= MOST_NAMED
    left = _place(described["producers"], _peers(links, "producer", "consumer"), False)
    right = _place(described["consumers"], _peers(links, "consumer", "producer"), named)
    height = max(box.top + box.height for box in (*left.values(), *right.values())) + BOTTOM
    most = max((link["bytes"] for link in links), default=0)
    colours = {_key(rank["rank"]): COLOURS[i % len(COLOURS)] for i, rank in enumerate(described["producers"])}
    total, operations = (sum(link[key] for link in links) for key in ("bytes", "operations"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
        _text(WIDTH / 2, 26, f"{request.text}: {size_text(total)} in {operations:,} operations", "middle", 15, True),
        *_heading("prefill", LEFT, request.prefill),
        *_heading("decode", RIGHT, request.decode),
        *_arrows(links, left, right, colours),
        *_boxes("prefill", LEFT, described["producers"], left, colours),
        *_boxes("decode", RIGHT, described["consumers"], right, {}),
        *(_names(links, right) if named else ()),
        _text(LEFT, height - 16, _legend(most), colour=GREY),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _heading(engine: str, x: int, shape: str) -> Iterator[str]:
    sizes, _, rest = shape.partition(", ")
    yield _text(x, 58, engine, size=14, bold=True)
    yield _text(x, 77, sizes, colour=GREY)
    yield _text(x, 94, rest, colour=GREY)


def _key(rank: Rank) -> tuple[int, int]:
    return rank["pp"], rank["tp"]


def _peers(links: list[LinkDescription], side: str, other: str) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For every rank of `side`, those that it has an arrow with."""
    peers = defaultdict(list)
    for link in links:
        peers[_key(link[side])].append(_key(link[other]))  # type: ignore[literal-required]
    return peers


def _place(
    ranks: list[RankDescription], peers: dict[tuple[int, int], list[tuple[int, int]]], named: bool
) -> dict[tuple[int, int], Box]:
    placed: dict[tuple[int, int], Box] = {}
    top = float(TOP)
    for rank in ranks:
        key = _key(rank["rank"])
        ends = sorted(peers.get(key, []))
        if named:
            height = HEAD + LINE * len(ends) + PADDING
            ports = {end: top + HEAD + LINE * (i + 0.5) for i, end in enumerate(ends)}
        else:
            height = HEAD + PADDING
            ports = {end: top + height * (i + 1) / (len(ends) + 1) for i, end in enumerate(ends)}
        placed[key] = Box(top, height, ports)
        top += height + GAP
    return placed


def _arrows(
    links: list[LinkDescription],
    left: dict[tuple[int, int], Box],
    right: dict[tuple[int, int], Box],
    colours: dict[tuple[int, int], str],
) -> Iterator[str]:
    start, tip = LEFT + BOX, RIGHT - 1
    bend = (tip - start) * 0.45
    most = max((link["bytes"] for link in links), default=0)
    # Neighbouring arrows must not lie on each other.
    boxes = (*left.values(), *right.values())
    thickest = max(1.0, min(THICKEST, *(0.8 * box.height / (len(box.ports) + 1) for box in boxes)))
    for link in links:
        producer, consumer = _key(link["producer"]), _key(link["consumer"])
        from_y, to_y = left[producer].ports[consumer], right[consumer].ports[producer]
        width = 1 + (thickest - 1) * link["bytes"] / most if most else 1.0
        half = width / 2 + 2
        dash = "" if link["operations"] else ' stroke-dasharray="4 4"'
        curve = (
            f"M{start} {from_y:.1f} C{start + bend:.0f} {from_y:.1f} {tip - bend:.0f} {to_y:.1f} {tip - 8} {to_y:.1f}"
        )
        points = f"{tip},{to_y:.1f} {tip - 9},{to_y - half:.1f} {tip - 9},{to_y + half:.1f}"
        title = f"decode {rank_text(link['consumer'])} from prefill {rank_text(link['producer'])}: {_work(link)}"
        yield f'<g class="link" data-from="{_id(producer)}" data-to="{_id(consumer)}"><title>{escape(title)}</title>'
        yield (
            f'<path d="{curve}" fill="none" stroke="{colours[producer]}" stroke-width="{width:.1f}" '
            f'stroke-opacity="0.7"{dash}/>'
        )
        yield f'<polygon points="{points}" fill="{colours[producer]}"/></g>'


def _work(link: LinkDescription) -> str:
    if not link["operations"]:
        return "nothing; tells it when it is over"
    return f"{size_text(link['bytes'])}, {link['operations']:,} x {size_text(mean_run(link))}"


def _names(links: list[LinkDescription], right: dict[tuple[int, int], Box]) -> Iterator[str]:
    for link in links:
        y = right[_key(link["consumer"])].ports[_key(link["producer"])] + 4
        yield _text(RIGHT + PADDING, y, f"{rank_text(link['producer'])}: {_work(link)}", size=11)


def _boxes(
    engine: str,
    x: int,
    ranks: list[RankDescription],
    boxes: dict[tuple[int, int], Box],
    colours: dict[tuple[int, int], str],
) -> Iterator[str]:
    for rank in ranks:
        key = _key(rank["rank"])
        box = boxes[key]
        peers = f"{rank['peers']} rank{'' if rank['peers'] == 1 else 's'}"
        held = f"layers {ranges_text(rank['layers'])}, heads {ranges_text(rank['heads'])}"
        shares = {share for share in rank["tokens"] if share[1] > 1}
        held += "".join(f", tokens {number + 1} of {count}" for number, count in sorted(shares))
        verb = "is read" if engine == "prefill" else "reads"
        work = f"{verb} {size_text(rank['bytes'])} in {rank['operations']:,} operations"
        if not rank["operations"]:
            work = f"{verb} nothing"
        y = box.top + LINE + 3
        yield f'<g class="rank" id="{engine}-{_id(key)}">'
        yield (
            f'<rect x="{x}" y="{box.top:.1f}" width="{BOX}" height="{box.height:.1f}" rx="6" fill="#f4f6f8" '
            f'stroke="{colours.get(key, "#333")}" stroke-width="1.5"/>'
        )
        yield _text(x + PADDING, y, rank_text(rank["rank"]), bold=True)
        dealt = f"hears from {peers}" if engine == "prefill" else f"deals with {peers}"
        yield _text(x + BOX - PADDING, y, dealt, "end", 11, colour=GREY)
        yield _text(x + PADDING, y + LINE, held)
        yield _text(x + PADDING, y + 2 * LINE, work, size=11)
        yield "</g>"


def _legend(most: int) -> str:
    if not most:
        return "nothing is read"
    return f"The widest arrow is {size_text(most)}; the others are as wide as their bytes. Dashed: nothing is read."


def _id(key: tuple[int, int]) -> str:
    return f"pp{key[0]}-tp{key[1]}"


def _text(
    x: float, y: float, words: str, anchor: str = "start", size: int = 12, bold: bool = False, colour: str = "#222"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )
