"""Figures as a drawing: lines over an axis of rounds or sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 640, 50, 400
LINE = 18
COLOURS = ("#1f6fb4", "#d1620a", "#2d8a39", "#b3322f", "#7a55a8", "#80594d", "#c0559b", "#5f6b73")
GREY = "#555"

Points = Sequence[tuple[float, float]]


def svg(title: str, x_label: str, y_label: str, series: Mapping[str, Points], doubling: bool = False) -> str:
    """Lines, one per name. `doubling`: both axes are logarithmic, as for what is doubled step by step; all values must
    be above 0 then."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    if not xs:
        raise ValueError("there is nothing to draw")
    across = _Axis(min(xs), max(xs), LEFT, RIGHT, doubling)
    up = _Axis(min(ys) if doubling else 0.0, max(ys), BOTTOM, TOP, doubling)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 26, title, "middle", 14),
        f'<path d="M{LEFT} {TOP} V{BOTTOM} H{RIGHT}" fill="none" stroke="{GREY}"/>',
        _text((LEFT + RIGHT) / 2, HEIGHT - 16, x_label, "middle"),
        _text(LEFT, TOP - 8, y_label, "middle"),
    ]
    for value in across.marks(sorted(set(xs)) if doubling else None):
        lines.append(_text(across(value), BOTTOM + 18, f"{value:,.6g}", "middle", 11))
    for value in up.marks(None):
        y = up(value)
        lines.append(f'<path d="M{LEFT} {y:.1f} H{RIGHT}" stroke="#ddd"/>')
        lines.append(_text(LEFT - 6, y + 4, f"{value:,.6g}", "end", 11))
    for index, (name, points) in enumerate(series.items()):
        lines += _series(name, points, across, up, COLOURS[index % len(COLOURS)], TOP + LINE * index)
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Axis:
    def __init__(self, low: float, high: float, start: int, end: int, logarithmic: bool) -> None:
        self._log = logarithmic
        self.low, self.high = low, high if high > low else low + 1
        self._start, self._end = start, end

    def _scale(self, value: float) -> float:
        return math.log(value) if self._log else value

    def __call__(self, value: float) -> float:
        low, high = self._scale(self.low), self._scale(self.high)
        return self._start + (self._scale(value) - low) / (high - low) * (self._end - self._start)

    def marks(self, values: list[float] | None) -> list[float]:
        """Where to write numbers: at `values`, or at round ones."""
        if values is not None:
            return values[:: max(1, len(values) // 8)]
        if self._log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1,)):
                marks = [digit * 10.0**power for power in powers for digit in digits]
                marks = [mark for mark in marks if self.low <= mark <= self.high]
                if 3 <= len(marks) <= 8:
                    return marks
        least = (self.high - self.low) / 8
        power = 10.0 ** math.floor(math.log10(least))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _series(name: str, points: Points, across: _Axis, up: _Axis, colour: str, key_y: float) -> Iterator[str]:
    places = [(across(x), up(y)) for x, y in points]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<g class="series"><title>{escape(name)}</title>'
    yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    yield f'<path d="M{RIGHT + 14} {key_y:.0f} h20" stroke="{colour}" stroke-width="3"/>'
    yield _text(RIGHT + 40, key_y + 4, name, size=11)
    yield "</g>"


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222">{escape(words)}</text>'
