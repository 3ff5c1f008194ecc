"""What happens in which order where GPU arrays go over host lanes, and what is made to wait for what."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.pinned import Pool, Ring
from ferrorpc.arrays.staging import POOL_BYTES, Staging
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import run_world
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.reference import check_same
from ferrorpc.transports.inproc import InprocTransport
from tests.waiting import eventually

SECONDS: Final = 30.0


def with_small_slots(cupy: StandIn, slot_bytes: int, slots: int, pool_bytes: int = POOL_BYTES) -> Iterator[None]:
    """For a fixture: pinned memory of that size, all of which has to be free again in the end."""
    stagings = [
        Staging(device_of(cupy, index), slot_bytes=slot_bytes, slots=slots, pool_bytes=pool_bytes) for index in range(4)
    ]
    for index, staging in enumerate(stagings):
        vars(device_of(cupy, index))["staging"] = staging
    yield
    rings = [ring for staging in stagings for ring in (staging.downloads, staging.uploads)]
    # A progress thread may just be ending what failed.
    eventually(lambda: not any(taken(ring) for ring in rings), "all slots are free", SECONDS)
    gc.collect()  # a failure that a test holds refers to arrays
    eventually(lambda: not any(_lent_bytes(cupy, staging) for staging in stagings), "no bytes are on loan", SECONDS)


def taken(ring: Ring) -> int:
    """How many slots are in use."""
    return ring._made - len(ring._free)


def lent_bytes(pool: Pool) -> int:
    """How many bytes are on loan."""
    pool._take_back()
    return sum(stop - start for segment in pool._segments for start, stop in segment.lent)


def _lent_bytes(cupy: StandIn, staging: Staging) -> int:
    """How much is on loan once the GPUs have finished everything."""
    cupy.machine.settle()
    for ring in (staging.downloads, staging.uploads):
        ring.let_go()
    return lent_bytes(staging.pool)


def world(size: int, cupy: StandIn, body: Callable[[ProcessGroup], Any]) -> list[Any]:
    """body on every rank, on its own GPU and in a stream of its own."""

    def on_gpu(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank), cupy.cuda.Stream(non_blocking=True):
            return body(group)

    return run_world(size, on_gpu, clock=SYSTEM_CLOCK, timeout=SECONDS)


def same(cupy: StandIn, found: Any, expected: Any, what: str) -> None:
    if expected is None:
        assert found is None
        return
    assert isinstance(found, cupy.ndarray), what
    check_same(cupy.asnumpy(found), expected, what)


class Events:
    """What happened, in order: "down 0" when a chunk has left GPU 0, "sent 0" when rank 0 has sent one, "up 0" when one has
    come to GPU 0. A copy waits until `first` has happened, if it is the last of its kind."""

    def __init__(self, cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.refused: set[str] = set()
        """What was put off."""
        self.puts_off: dict[str, tuple[int, str]] = {}
        """Event -> how many of it may happen before another one has."""
        self._lock = threading.Lock()
        self._machine = cupy.machine
        self._machine.copying = self._copying
        send = InprocTransport.send

        def sending(transport: InprocTransport, *args: Any) -> bool:
            if args[4] is not None:
                self._note(f"sent {transport.rank}")
            return send(transport, *args)

        monkeypatch.setattr(InprocTransport, "send", sending)

    def clear(self, puts_off: dict[str, tuple[int, str]]) -> None:
        """From now on."""
        with self._lock:
            self.seen, self.refused, self.puts_off = [], set(), puts_off

    def wait_until_put_off(self, event: str) -> None:
        """Returns once this event was put off, and rank 0 is in the operation."""

        def is_put_off() -> bool:
            self._machine.step()
            return event in self.refused and "down 0" in {*self.seen, *self.refused}

        eventually(is_put_off, f"{event} is put off", SECONDS)

    def _copying(self, direction: str, gpu: int, size_bytes: int) -> bool:
        return self._note(f"{direction} {gpu}")

    def _note(self, event: str) -> bool:
        with self._lock:
            if event in self.puts_off:
                most, first = self.puts_off[event]
                if self.seen.count(event) >= most and first not in self.seen:
                    self.refused.add(event)
                    return False
            self.seen.append(event)
            return True
