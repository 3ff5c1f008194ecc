"""Ends the generation where an error on one rank would leave the others waiting for it until their timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ferrorpc.generation_errors import is_interrupt

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup


def tell_others(group: ProcessGroup, error: BaseException) -> None:
    """Ends the generation with this error as its cause. Not with a SystemExit: the end of this process does that."""
    if not isinstance(error, SystemExit):
        group.abort(error)


@contextmanager
def others_told(group: ProcessGroup) -> Iterator[None]:
    """A context whose errors end the generation."""
    try:
        yield
    except BaseException as error:
        tell_others(group, error)
        raise


@contextmanager
def interrupts_told(group: ProcessGroup) -> Iterator[None]:
    """A context whose interrupts end the generation. Errors do not."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            group.abort(error)
        raise
