"""The store of a job, kept by its coordinator."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

from ferrorpc.coordination import limits
from ferrorpc.coordination.base import Store
from ferrorpc.coordination.condition import Condition
from ferrorpc.coordination.connection import Connection
from ferrorpc.coordination.local_store import timed_out
from ferrorpc.errors import StoreTimeoutError
from ferrorpc.guard import SYSTEM_CLOCK, seconds_of
from ferrorpc.v1 import store_pb2 as wire
from ferrorpc.wire.limits import WRITES_MAX

_BINDING: Final = {
    "job": wire.KEY_BINDING_JOB,
    "session": wire.KEY_BINDING_SESSION,
    "generation": wire.KEY_BINDING_GENERATION,
}


def milliseconds(seconds: float) -> int:
    """Seconds in milliseconds, clamped to unsigned 32 bits."""
    return max(0, round(min(seconds * 1000, (1 << 32) - 1)))


class RemoteStore(Store):
    """The store, over a member's connection. Every write has a request id, so that it is applied once however often it is sent.

    The coordinator remembers the results of the last WRITES_MAX writes. So many threads may write at a time, and others wait.

    Args:
        connection: the connection to the coordinator.
        timeout: seconds that a request may take; for `get` and `wait` the default.
        waiting: makes a context in which this member is seen to wait.
    """

    def __init__(
        self, connection: Connection, timeout: float, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._connection = connection
        self._timeout = timeout
        self._waiting = waiting
        self._turns = Condition(SYSTEM_CLOCK)
        self._writing = set[object]()
        self._request_ids = itertools.count(secrets.randbits(31) << 32 | 1)

    def set(self, key: str, value: bytes, *, bind: str = "job") -> None:
        limits.check_key(key)
        value = limits.check_value(value)
        limits.check_binding(bind)
        self._write(f"store.set({key!r})", set=wire.SetOperation(key=key, value=value, binding=_BINDING[bind]))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        limits.check_key(key)
        seconds = seconds_of(timeout, self._timeout)
        operation = wire.GetOperation(key=key, wait_ms=milliseconds(seconds))
        with self._waiting():
            response = self._ask(f"store.get({key!r})", seconds, get=operation)
        if not response.found:
            raise timed_out([key], seconds)
        return response.value

    def add(self, key: str, amount: int = 1) -> int:
        limits.check_key(key)
        operation = wire.AddOperation(key=key, amount=limits.check_amount(amount))
        return self._write(f"store.add({key!r})", add=operation).number

    def compare_set(self, key: str, expected: bytes | None, value: bytes, *, bind: str = "job") -> bool:
        limits.check_key(key)
        wanted, value = limits.check_values(expected, value)
        limits.check_binding(bind)
        operation = wire.CompareSetOperation(
            key=key,
            expected=wanted or b"",
            expect_absent=wanted is None,
            value=value,
            binding=wire.KEY_BINDING_UNSPECIFIED if bind == "job" else _BINDING[bind],
        )
        return self._write(f"store.compare_set({key!r})", compare_set=operation).found

    def wait(self, keys: str | Iterable[str], timeout: float | None = None) -> None:
        keys = limits.check_keys(keys)
        if not keys:
            return
        seconds = seconds_of(timeout, self._timeout)
        operation = wire.WaitOperation(keys=keys, wait_ms=milliseconds(seconds))
        with self._waiting():
            self._ask(f"store.wait({keys[:4]})", seconds, wait=operation)

    def delete(self, key: str) -> bool:
        limits.check_key(key)
        return self._write(f"store.delete({key!r})", delete=wire.DeleteOperation(key=key)).found

    def keys(self, prefix: str = "") -> list[str]:
        limits.check_prefix(prefix)
        found: list[str] = []
        while True:
            page = wire.KeysOperation(prefix=prefix, after=found[-1] if found else "")
            response = self._ask(f"store.keys({prefix!r})", keys=page)
            found.extend(response.keys)
            if not response.more:
                return found

    def _write(self, label: str, **operation: Any) -> wire.StoreResponse:
        if self._connection.ended_by is not None:  # as in a forked child, where nobody may ever release the lock
            raise self._connection.ended_by.again()
        turn = object()
        try:
            while not self._turns.wait_for(partial(self._take_turn, turn), SYSTEM_CLOCK.now() + self._timeout):
                if not self._connection.outage():
                    text = f"{label} had no turn for {self._timeout:g} s: {WRITES_MAX} others have no answer"
                    hint = "look at the coordinator's log; this write was not sent"
                    raise StoreTimeoutError(text, hint=hint, retryable=True)
            return self._ask(label, **operation)
        finally:
            with self._turns.lock:
                self._writing.discard(turn)
                self._turns.notify_all()

    def _take_turn(self, turn: object) -> bool | None:
        if len(self._writing) >= WRITES_MAX:
            return None
        self._writing.add(turn)
        return True

    def _ask(self, label: str, seconds: float | None = None, **operation: object) -> wire.StoreResponse:
        memory = self._connection.memory
        memory.check()
        request = wire.StoreRequest(request_id=next(self._request_ids), **operation)  # type: ignore[arg-type]
        seconds = seconds_of(seconds, self._timeout)
        response: wire.StoreResponse = self._connection.ask(label, seconds, StoreTimeoutError, memory, store=request)
        return response
