"""Lays out timelines as pictures, in pixels, for all formats.

    title                                    makespan 33, bubble 27.3 %
    rank 0 | 0 | 1 | 2 |  .  .  .  | 0 | 1 |                   idle 27%
    rank 1 |     0 | 1 | ...
           0        5        10       15        20        time units
    forward  backward  idle

Each lane has a row of boxes to scale, with a word each; idle time has the background's colour. Panels are stacked and share
one time scale, so that two timelines can be compared by eye.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ferrorpc.plans.span import Span

PALETTE: Final = {
    "forward": ("#4c78a8", "#9ecae9"),
    "backward": ("#2f8f6b", "#8fd3b6"),
    "backward input": ("#54a24b", "#a7dc9e"),
    "backward weight": ("#e8913a", "#f8cf9b"),
    "send": ("#4c78a8", "#9ecae9"),
    "receive": ("#54a24b", "#a7dc9e"),
    "fold": ("#e8913a", "#f8cf9b"),
}
"""Colours of the known kinds, each from its first shade to its last."""
OTHERS: Final = (("#7a6fac", "#c2badf"), ("#b5597d", "#e6b3c7"), ("#6b7785", "#c0c7cf"))
INK, FAINT, PAPER, EMPTY = "#20262e", "#6f7883", "#ffffff", "#eceff2"
FONT: Final = 12
CHARACTER: Final = 7.0
"""Approximate width of a character of this size, in pixels."""
ROW, GAP, MARGIN = 26, 4, 16
WIDTH_MIN, WIDTH_MAX = 960.0, 2400.0


@dataclass(frozen=True, slots=True)
class Row:
    """A lane: its name at the left, a box for each span, its note at the right."""

    name: str
    spans: tuple[Span, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline: title, figures, rows, length, a key to the words in boxes, and the time unit."""

    title: str
    summary: str
    rows: tuple[Row, ...]
    makespan: float
    key: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; `name` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Text; `anchor` ("start", "middle", "end") says which point of it is at x. y is its middle."""

    x: float
    y: float
    words: str
    colour: str = INK
    anchor: str = "start"
    bold: bool = False


@dataclass(slots=True)
class Sheet:
    """A page: shapes in the order in which they are drawn."""

    width: float
    height: float
    boxes: list[Box] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def lay_out(panels: Sequence[Panel]) -> Sheet:
    """The page of these panels, one below the other."""
    left = MARGIN + CHARACTER * max((len(row.name) for panel in panels for row in panel.rows), default=0) + 10
    beside = [words for panel in panels for words in (panel.unit, *(row.note for row in panel.rows))]
    right = MARGIN + CHARACTER * max(map(len, beside), default=0) + 10
    longest = max((panel.makespan for panel in panels), default=0.0) or 1.0
    wide = _chart_width(panels, longest)
    sheet = Sheet(left + wide + right, 0)
    colours = _colours(panels)
    y = float(MARGIN)
    for panel in panels:
        y = _panel(sheet, panel, colours, left, wide, wide / longest, y) + MARGIN
    _legend(sheet, colours, next((panel.key for panel in panels if panel.key), ""), left, y)
    sheet.height = y + ROW + (MARGIN if colours else 0)
    return sheet


def _chart_width(panels: Sequence[Panel], longest: float) -> float:
    """Wide enough for the words in all boxes but the shortest, within limits."""
    demands = sorted(
        (len(span.text) * CHARACTER + 4) / (span.stop - span.start)
        for panel in panels
        for row in panel.rows
        for span in row.spans
        if span.text and span.stop > span.start
    )
    scale = demands[int(0.95 * (len(demands) - 1))] if demands else 0.0
    return min(max(WIDTH_MIN, scale * longest), WIDTH_MAX)


def _panel(
    sheet: Sheet, panel: Panel, colours: Mapping[tuple[str, int], str], left: float, wide: float, scale: float, y: float
) -> float:
    """Draws one panel from y on. Returns where it ends."""
    sheet.texts.append(Text(left, y + 8, panel.title, bold=True))
    after = left + CHARACTER * 1.1 * len(panel.title) + 14 if panel.title else left
    sheet.texts.append(Text(after, y + 8, panel.summary, FAINT))
    y += 24
    for row in panel.rows:
        sheet.boxes.append(Box(left, y, wide, ROW, EMPTY))
        sheet.texts.append(Text(left - 8, y + ROW / 2, row.name, anchor="end"))
        sheet.texts.append(Text(left + wide + 8, y + ROW / 2, row.note, FAINT))
        for span in row.spans:
            _span(sheet, span, colours, left + span.start * scale, y, (span.stop - span.start) * scale)
        y += ROW + GAP
    step = _step(wide / scale)
    for tick in range(int(wide / scale / step + 1e-9) + 1):
        x = left + tick * step * scale
        sheet.boxes.append(Box(x, y - GAP, 1, 5, FAINT))
        sheet.texts.append(Text(x, y + 10, f"{tick * step:g}", FAINT, "middle"))
    sheet.texts.append(Text(left + wide + 8, y + 10, panel.unit, FAINT))
    return y + 20


def _span(sheet: Sheet, span: Span, colours: Mapping[tuple[str, int], str], x: float, y: float, width: float) -> None:
    colour = colours[span.kind, span.shade]
    inset = min(0.75, width / 8)
    sheet.boxes.append(Box(x + inset, y + 1, max(width - 2 * inset, 0.0), ROW - 2, colour, span.name))
    if span.text and len(span.text) * CHARACTER <= width:
        ink = PAPER if _is_dark(colour) else INK
        sheet.texts.append(Text(x + width / 2, y + ROW / 2, span.text, ink, "middle"))


def _legend(sheet: Sheet, colours: dict[tuple[str, int], str], key: str, x: float, y: float) -> None:
    shades = {kind: sum(1 for other, _ in colours if other == kind) for kind, _ in colours}
    named = [
        ((kind or "task") + (f", chunk {shade}" if shades[kind] > 1 else ""), colour)
        for (kind, shade), colour in colours.items()
    ]
    for words, colour in [*named, ("idle", EMPTY)]:
        sheet.boxes.append(Box(x, y, 16, 16, colour))
        sheet.texts.append(Text(x + 22, y + 8, words))
        x += 22 + CHARACTER * len(words) + 22
    sheet.texts.append(Text(x, y + 8, key, FAINT))
    sheet.width = max(sheet.width, x + CHARACTER * len(key) + MARGIN)


def _colours(panels: Sequence[Panel]) -> dict[tuple[str, int], str]:
    """The colour of each (kind, shade) that occurs, in the order of the palette."""
    found = sorted({(span.kind, span.shade) for panel in panels for row in panel.rows for span in row.spans})
    unknown = [kind for kind in dict.fromkeys(kind for kind, _ in found) if kind not in PALETTE]
    ranges = {**PALETTE, **{kind: OTHERS[place % len(OTHERS)] for place, kind in enumerate(unknown)}}
    last = {kind: max(shade for other, shade in found if other == kind) for kind, _ in found}
    place = {kind: number for number, kind in enumerate(ranges)}
    ordered = sorted(found, key=lambda each: (place[each[0]], each[1]))
    return {(kind, shade): _between(*ranges[kind], shade / max(last[kind], 1)) for kind, shade in ordered}


def _between(first: str, last: str, share: float) -> str:
    channels = [(int(first[at : at + 2], 16), int(last[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in channels)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def _step(longest: float) -> float:
    """The distance of two ticks: 1, 2 or 5 times a power of ten, for about a dozen ticks."""
    rough = longest / 12
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
