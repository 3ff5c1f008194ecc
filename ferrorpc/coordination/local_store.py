"""The store of a job whose members share one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ferrorpc.coordination import limits
from ferrorpc.coordination.base import Store
from ferrorpc.coordination.condition import Condition
from ferrorpc.errors import StoreTimeoutError, require
from ferrorpc.guard import seconds_of
from ferrorpc.wire.limits import KEYS_MAX, STORE_BYTES_MAX, sum_of

Owner = tuple[str, int]
"""What a key is bound to: ("job", 0), ("session", number) or ("generation", number)."""


class Keyspace:
    """Keys, their values and owners. The caller holds the condition's lock around every use."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.values: dict[str, bytes] = {}
        self._owners: dict[str, Owner] = {}
        self._bytes = 0

    def put(self, key: str, value: bytes, owner: Owner | None) -> None:
        """Sets a key's value and owner; None for the owner that it has, which is the job for a new key.

        Raises:
            LimitExceededError: too many keys or too many bytes; nothing has changed.
        """
        before = self.values.get(key)
        grown = self._bytes + len(value) + (len(key) if before is None else -len(before))
        require(f"bytes in the store of job {self._job}", grown, "store_bytes", STORE_BYTES_MAX)
        require(f"keys of job {self._job}", len(self.values) + (before is None), "keys", KEYS_MAX)
        self.values[key], self._bytes = value, grown
        if owner is not None:
            self._owners[key] = owner

    def remove(self, key: str) -> bool:
        """Removes a key. Returns whether it existed."""
        self._owners.pop(key, None)
        value = self.values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(key) + len(value)
        return True

    def release(self, owner: Owner) -> None:
        """Removes all keys of an owner that has ended."""
        for key in [key for key, bound_to in self._owners.items() if bound_to == owner]:
            self.remove(key)


class LocalStore(Store):
    """One member's view of the keyspace. Other threads go before each of its operations, as they may during a request to a
    coordinator: a loop that asks for what another member will set would keep a simulated world from that member.

    Args:
        condition: protects the keyspace and wakes waits for keys.
        timeout: default of `get` and `wait`, in seconds.
        check: raises if the member is no longer part of the job.
        owner_of: the owner that a binding means for this member now.
    """

    def __init__(
        self,
        keyspace: Keyspace,
        condition: Condition,
        timeout: float,
        check: Callable[[], None],
        owner_of: Callable[[str], Owner],
    ) -> None:
        self._keyspace = keyspace
        self._condition = condition
        self._timeout = timeout
        self._check = check
        self._owner_of = owner_of

    @contextmanager
    def _request(self) -> Iterator[None]:
        """A context with the lock, for an operation that does not wait."""
        self._condition.clock.give_way()
        with self._condition.lock:
            self._check()
            yield

    def set(self, key: str, value: bytes, *, bind: str = "job") -> None:
        limits.check_key(key)
        value = limits.check_value(value)
        limits.check_binding(bind)
        with self._request():
            self._put(key, value, self._owner_of(bind))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        limits.check_key(key)
        seconds = seconds_of(timeout, self._timeout)

        def value() -> bytes | None:
            self._check()
            return self._keyspace.values.get(key)

        self._condition.clock.give_way()
        found = self._condition.wait_for(value, self._condition.clock.now() + seconds)
        if found is None:
            raise timed_out([key], seconds)
        return found

    def add(self, key: str, amount: int = 1) -> int:
        limits.check_key(key)
        amount = limits.check_amount(amount)
        with self._request():
            total = sum_of(key, self._keyspace.values.get(key, b"0"), amount)
            self._put(key, str(total).encode(), None)
        return total

    def compare_set(self, key: str, expected: bytes | None, value: bytes, *, bind: str = "job") -> bool:
        limits.check_key(key)
        wanted, value = limits.check_values(expected, value)
        limits.check_binding(bind)
        with self._request():
            swapped = self._keyspace.values.get(key) == wanted
            if swapped:
                self._put(key, value, None if bind == "job" else self._owner_of(bind))
        return swapped

    def wait(self, keys: str | Iterable[str], timeout: float | None = None) -> None:
        keys = limits.check_keys(keys)
        seconds = seconds_of(timeout, self._timeout)

        def all_exist() -> bool | None:
            self._check()
            return all(key in self._keyspace.values for key in keys) or None

        self._condition.clock.give_way()
        if self._condition.wait_for(all_exist, self._condition.clock.now() + seconds) is None:
            with self._condition.lock:
                absent = [key for key in keys if key not in self._keyspace.values]
            raise timed_out(absent, seconds)

    def delete(self, key: str) -> bool:
        limits.check_key(key)
        with self._request():
            return self._keyspace.remove(key)

    def keys(self, prefix: str = "") -> list[str]:
        limits.check_prefix(prefix)
        with self._request():
            return sorted(key for key in self._keyspace.values if key.startswith(prefix))

    def _put(self, key: str, value: bytes, owner: Owner | None) -> None:
        self._keyspace.put(key, value, owner)
        self._condition.notify_all()


def timed_out(absent: Sequence[str], seconds: float) -> StoreTimeoutError:
    """The error for keys that nobody set in time."""
    names = ", ".join(repr(key) for key in absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return StoreTimeoutError(f"nobody set {names} within {seconds:g} s", missing=list(absent)[:64])
