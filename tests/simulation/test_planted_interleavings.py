"""The interleavings catch what they are there for: bugs planted on purpose, each within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.transports.inproc import InprocTransport, Network
from ferrorpc.transports.mailbox import Box, Mailbox
from ferrorpc.wire.frames import Frame
from tests.simulation.test_interleavings import run_seed

SEEDS = 40


def stream_operations_are_numbered_by_order(patch: pytest.MonkeyPatch) -> None:
    honest = Dispatch.perform
    counters: dict[tuple[int, int], int] = {}

    def perform(self: Dispatch, *given: Any, stream: int = 0, number: int | None = None) -> Any:
        if stream:
            number = counters[id(self), stream] = counters.get((id(self), stream), -1) + 1
        return honest(self, *given, stream=stream, number=number)

    patch.setattr(Dispatch, "perform", perform)


def messages_of_a_pair_overtake_each_other(patch: pytest.MonkeyPatch) -> None:
    def carry(self: Network, source: int, target: int, action: Callable[[], None]) -> None:
        assert self._faults is not None
        self._clock.call_at(self._clock.now() + self._faults.delay(self._random, source, target), action)

    patch.setattr(Network, "carry", carry)


def what_came_early_is_forgotten_on_entry(patch: pytest.MonkeyPatch) -> None:
    honest = Mailbox.enter

    def enter(self: Mailbox, key: Any, signature: str, wake: Callable[[], None]) -> Box:
        box = honest(self, key, signature, wake)
        if key.number % 5 == 4:
            box.frames.clear()
        return box

    patch.setattr(Mailbox, "enter", enter)


def payloads_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    def send(self: InprocTransport, peer: int, key: Any, header: Any, offset: int, payload: Any, room: Any) -> bool:
        frame = Frame(key, self.rank, header, offset, memoryview(b"" if payload is None else payload))
        self._carry(peer, lambda end: end.mailbox.deliver(frame), needed=True)
        return True

    patch.setattr(InprocTransport, "send", send)


def failure_of(seed: int) -> Exception | None:
    try:
        run_seed(seed)
    except Exception as failure:
        return failure
    return None


@pytest.mark.parametrize(
    "plant",
    [
        stream_operations_are_numbered_by_order,
        messages_of_a_pair_overtake_each_other,
        what_came_early_is_forgotten_on_entry,
        payloads_are_not_copied,
    ],
)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    caught = next(((seed, failure) for seed in range(SEEDS) if (failure := failure_of(seed)) is not None), None)
    assert caught is not None, f"{SEEDS} seeds did not catch it"
    seed, failure = caught
    assert any(f"FERRORPC_SEED={seed} " in note for note in failure.__notes__)
