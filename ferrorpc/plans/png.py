"""Pictures as PNG, where matplotlib is installed, with the same layout as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrorpc.errors import BackendUnavailableError
from ferrorpc.plans.drawing import FONT, PAPER, Panel, lay_out

_DOTS_PER_INCH = 96.0
_SCALE = 1.5
"""Dots for each pixel of the page."""
_ALIGNED = {"start": "left", "middle": "center", "end": "right"}


def render(panels: Sequence[Panel], path: Path) -> None:
    """Writes the PNG of these panels.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as missing:
        hint = 'install it with pip install "ferrorpc[examples]", or write an SVG'
        raise BackendUnavailableError("PNG pictures need matplotlib", hint) from missing
    sheet = lay_out(panels)
    size = (sheet.width / _DOTS_PER_INCH, sheet.height / _DOTS_PER_INCH)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH * _SCALE, facecolor=PAPER)
    canvas: Any = FigureCanvasAgg(figure)  # whose methods have no types
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(sheet.height, 0)
    axes.axis("off")
    for box in sheet.boxes:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=box.colour, edgecolor="none"))
    points = FONT * 72 / _DOTS_PER_INCH
    for text in sheet.texts:
        weight = "bold" if text.bold else "normal"
        words = text.words.replace("$", r"\$")  # otherwise matplotlib parses formulas
        axes.text(
            text.x, text.y, words, color=text.colour, fontsize=points, fontweight=weight, ha=_ALIGNED[text.anchor], va="center"
        )
    canvas.print_png(str(path))
