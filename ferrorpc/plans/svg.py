"""Pictures as SVG, with the name of every box as a tooltip."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ferrorpc.plans.drawing import FONT, PAPER, Box, Panel, Sheet, Text, lay_out


def render(panels: Sequence[Panel]) -> str:
    """The SVG document of these panels."""
    sheet = lay_out(panels)
    lines = [_head(sheet)]
    lines += [_box(box) for box in sheet.boxes]
    lines += [_text(text) for text in sheet.texts if text.words]
    return "\n".join([*lines, "</svg>", ""])


def _head(sheet: Sheet) -> str:
    width, height = f"{sheet.width:.0f}", f"{sheet.height:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="{FONT}">\n'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    )


def _box(box: Box) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" fill="{box.colour}"'
    return f"<rect {place}><title>{escape(box.name)}</title></rect>" if box.name else f"<rect {place}/>"


def _text(text: Text) -> str:
    weight = ' font-weight="bold"' if text.bold else ""
    # y is the baseline: some viewers do not support "dominant-baseline".
    place = f'x="{text.x:.2f}" y="{text.y + FONT * 0.36:.2f}" fill="{text.colour}" text-anchor="{text.anchor}"{weight}'
    return f"<text {place}>{escape(text.words)}</text>"
