"""How much of a text a row of a terminal shows: letters of East Asia and most emoji take two cells, escape sequences none."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~])")
"""Of colours and the cursor, of titles and links, and of character sets."""


def cells(text: str) -> int:
    """How many cells it takes."""
    shown = plain(text)
    return len(shown) if shown.isascii() else sum(map(_cells_of, shown))


def cut(text: str, most: int) -> str:
    """The text if it takes so many cells at most; else what fits of it, without escape sequences, whose end may be missing."""
    if cells(text) <= most:
        return text
    shown, left = plain(text), most
    for place, character in enumerate(shown):
        left -= _cells_of(character)
        if left < 0:
            return shown[:place]
    return shown


def plain(text: str) -> str:
    """The text without escape sequences, and with spaces for tabs."""
    return _ESCAPES.sub("", text).expandtabs()


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
