"""The store of a job whose members share one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ferrorpc.coordination import limits
from ferrorpc.coordination.base import Store
from ferrorpc.coordination.monitor import Monitor
from ferrorpc.errors import StoreTimeoutError, UsageError
from ferrorpc.guard import seconds_of

_NUMBER: Final = re.compile(rb"-?[0-9]{1,20}")
Owner = tuple[str, int]
"""What a key is bound to: ("job", 0), ("session", its number) or ("generation", its number)."""


class Keyspace:
    """Keys, their values and what they are bound to. The monitor's lock is held around every use."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._owners: dict[str, Owner] = {}

    def put(self, key: str, value: bytes, owner: Owner) -> None:
        """Sets a key and what it is bound to."""
        self.values[key] = value
        self._owners[key] = owner

    def remove(self, key: str) -> bool:
        """Removes a key. Returns whether it existed."""
        self._owners.pop(key, None)
        return self.values.pop(key, None) is not None

    def release(self, owner: Owner) -> None:
        """Removes all keys bound to an owner that is no more."""
        for key in [key for key, bound_to in self._owners.items() if bound_to == owner]:
            self.remove(key)


class LocalStore(Store):
    """One member's view of the keyspace.

    Args:
        monitor: guards the keyspace and wakes those who wait for keys.
        timeout: seconds that `get` and `wait` take when they are not told.
        check: raises when the member is no longer part of the job.
        owner_of: what a binding means for this member now.
    """

    def __init__(
        self, keyspace: Keyspace, monitor: Monitor, timeout: float, check: Callable[[], None], owner_of: Callable[[str], Owner]
    ) -> None:
        self._keyspace = keyspace
        self._monitor = monitor
        self._timeout = timeout
        self._check = check
        self._owner_of = owner_of

    def set(self, key: str, value: bytes, *, bind: str = "job") -> None:
        limits.check_key(key)
        value = limits.check_value(value)
        limits.check_binding(bind)
        with self._monitor.lock:
            self._check()
            self._put(key, value, self._owner_of(bind))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        limits.check_key(key)
        seconds = seconds_of(timeout, self._timeout)

        def value() -> bytes | None:
            self._check()
            return self._keyspace.values.get(key)

        found = self._monitor.wait(value, self._monitor.clock.now() + seconds)
        if found is None:
            raise timed_out([key], seconds)
        return found

    def add(self, key: str, amount: int = 1) -> int:
        limits.check_key(key)
        amount = limits.check_amount(amount)
        with self._monitor.lock:
            self._check()
            text = self._keyspace.values.get(key, b"0")
            if not _NUMBER.fullmatch(text):
                raise UsageError(f"key {key!r} holds {text[:40]!r}, which is no decimal integer")
            total = int(text) + amount
            if not -(1 << 63) <= total < 1 << 63:
                raise UsageError(f"key {key!r} would hold {total}, which does not fit into 64 bits")
            self._put(key, str(total).encode(), self._owner_of("job"))
        return total

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        limits.check_key(key)
        value = limits.check_value(value)
        wanted = None if expected is None else limits.check_value(expected)
        with self._monitor.lock:
            self._check()
            swapped = self._keyspace.values.get(key) == wanted
            if swapped:
                self._put(key, value, self._owner_of("job"))
        return swapped

    def wait(self, keys: str | Iterable[str], timeout: float | None = None) -> None:
        keys = limits.check_keys(keys)
        seconds = seconds_of(timeout, self._timeout)

        def all_exist() -> bool | None:
            self._check()
            return all(key in self._keyspace.values for key in keys) or None

        if self._monitor.wait(all_exist, self._monitor.clock.now() + seconds) is None:
            with self._monitor.lock:
                absent = [key for key in keys if key not in self._keyspace.values]
            raise timed_out(absent, seconds)

    def delete(self, key: str) -> bool:
        limits.check_key(key)
        with self._monitor.lock:
            self._check()
            return self._keyspace.remove(key)

    def keys(self, prefix: str = "") -> list[str]:
        limits.check_prefix(prefix)
        with self._monitor.lock:
            self._check()
            return sorted(key for key in self._keyspace.values if key.startswith(prefix))

    def _put(self, key: str, value: bytes, owner: Owner) -> None:
        self._keyspace.put(key, value, owner)
        self._monitor.changed()


def timed_out(absent: Sequence[str], seconds: float) -> StoreTimeoutError:
    """The error of a wait for keys that nobody set in time."""
    names = ", ".join(repr(key) for key in absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return StoreTimeoutError(f"nobody set {names} within {seconds:g} s", missing=list(absent)[:64])
