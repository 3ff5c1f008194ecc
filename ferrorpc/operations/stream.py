"""Streams: operations apart from program order, numbered by what they mean."""

from __future__ import annotations

from typing import Any

from ferrorpc.arrays.kinds import view
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.operations.arguments import one_result, seconds_of
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.types import ReduceOp
from ferrorpc.work import Work


class Stream:
    """Operations that ranks may start in different orders, because each has a number that says which it is.

    For data parallelism and others that know, without counting, which operation of one rank belongs to which of another.
    Made by `ProcessGroup.stream`.
    """

    def __init__(self, dispatch: Dispatch, channels: int | None) -> None:
        self._dispatch = dispatch
        self._number = dispatch.open_stream(channels)
        self._unordered = channels is None and dispatch.backend.arena is not None

    def all_reduce(
        self,
        x: Any,
        number: int,
        *,
        op: ReduceOp | str = "sum",
        out: Any = None,
        timeout: float | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Work[Any]:
        """As `ProcessGroup.all_reduce(async_op=True)`; operations with the same number belong together.

        Args:
            number: from 0; used once on every rank.
        """
        self._dispatch.check_open()
        seconds = seconds_of(timeout, self._dispatch.timeout)
        source, chosen = view(x), ReduceOp.named(op)
        signature = (Operation.ALL_REDUCE, (source.spec,), chosen, None, wire, algorithm)
        prepared = self._dispatch.prepared(
            (*signature, "unordered") if self._unordered else signature,
            lambda: Call(*signature, unordered=self._unordered),
        )
        result = one_result(out, source.kind, source.spec, [source])
        execution = self._dispatch.start(prepared, [source], result, seconds, stream=self._number, number=number)
        return self._dispatch.submit(execution, result)
