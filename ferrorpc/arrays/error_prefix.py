"""A context that adds to errors about an array which array it is."""

from __future__ import annotations

from types import TracebackType

from ferrorpc.errors import UsageError


class ErrorPrefix:
    """A context that puts a prefix, such as "buffer 'mask'", before the message of a UsageError.

    It is a class, and not a generator, because it is entered for every gradient.
    """

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(problem, UsageError):
            raise type(problem)(f"{self._prefix}: {problem.message}", hint=problem.hint) from None
