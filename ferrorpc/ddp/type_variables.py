"""Type variables with a default, as type checkers know them; typing itself has them from Python 3.13 on."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVar  # type checkers bring it
else:

    def TypeVar(name: str, *, default: Any = None, **given: Any) -> Any:
        """The type variable without its default."""
        return typing.TypeVar(name, **given)
