"""Plain text tables: columns as wide as their content, two spaces apart."""

from __future__ import annotations

from collections.abc import Sequence

from ferrorpc.logs import escape_unprintable


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> str:
    """The header and the rows as text. Columns named in `right` are right-aligned, for numbers."""
    rows = [[escape_unprintable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in (header, *rows)
    )
