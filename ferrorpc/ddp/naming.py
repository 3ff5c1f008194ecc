"""Errors about an array say which one it is."""

from __future__ import annotations

from types import TracebackType

from ferrorpc.errors import UsageError


class Named:
    """A context in which a UsageError about an array begins with what it is, such as "buffer 'mask'".

    A class of its own because it stands around the reading of every gradient.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(problem, UsageError):
            raise type(problem)(f"{self._what}: {problem.message}", hint=problem.hint) from None
