"""Six bugs for mutation tests, each of which real coordinators have had. The simulation must find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from ferrorpc_coordinator.state.barriers import Barrier, Barriers, Key, Participants
from ferrorpc_coordinator.state.context import JobContext, SharedState
from ferrorpc_coordinator.state.generations import Generation, Generations
from ferrorpc_coordinator.state.keyspace import TABLE, Entry, Keyspace
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.running_time import RunningTime
from ferrorpc_coordinator.state.write_results import WriteResults

from ferrorpc.v1 import store_pb2


@contextmanager
def no_fencing() -> Iterator[None]:
    """Requests that name any generation are taken for the newest."""

    def require(self: Generations, member: Member, number: int) -> Generation:
        return self.newest

    with mock.patch.object(Generations, "require", require):
        yield


@contextmanager
def no_dedupe() -> Iterator[None]:
    """A repeated request is carried out again."""

    def find(self: WriteResults, client: str, request_id: int) -> store_pb2.StoreResponse | None:
        return None

    def resend(self: JobContext, member: Member, number: int) -> bool:
        return False

    with mock.patch.object(WriteResults, "find", find), mock.patch.object(JobContext, "resend", resend):
        yield


@contextmanager
def wall_clock() -> Iterator[None]:
    """Leases expire by the clock, even while the coordinator itself was stopped."""

    def advance(self: RunningTime, now_ns: int, *, tick_requested: bool = True) -> int:
        self._last = max(now_ns, self._last)
        return self._last

    with mock.patch.object(RunningTime, "advance", advance):
        yield


@contextmanager
def cut_off() -> Iterator[None]:
    """A coordinator whose own network has failed takes all members for dead."""
    with mock.patch.object(SharedState, "hears_nobody", False):
        yield


@contextmanager
def early_release() -> Iterator[None]:
    """A barrier is released when all but one have arrived."""

    def complete(self: Barrier) -> bool:
        return len(self.arrivals) >= max(1, self.participants.size - 1)

    def release(self: Barriers, key: Key, barrier: Barrier) -> None:
        if barrier.participants.ranks:
            barrier.participants = Participants(tuple(sorted(barrier.arrivals)), len(barrier.arrivals))  # type: ignore[arg-type]
        honest(self, key, barrier)

    honest = Barriers._release
    with mock.patch.object(Barrier, "complete", property(complete)), mock.patch.object(Barriers, "_release", release):
        yield


@contextmanager
def lost_write() -> Iterator[None]:
    """A key that exists already is changed in memory, but not in the journal."""
    honest = Keyspace.set

    def set_(self: Keyspace, key: str, *rest: Any) -> Entry:
        existed = self.get(key) is not None
        entry = honest(self, key, *rest)
        if existed:
            self._context.durable_state._written.pop((TABLE, f"{self._context.job}/{key}"), None)
        return entry

    with mock.patch.object(Keyspace, "set", set_):
        yield


BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no_fencing": no_fencing,
    "no_dedupe": no_dedupe,
    "wall_clock": wall_clock,
    "cut_off": cut_off,
    "early_release": early_release,
    "lost_write": lost_write,
}
