"""The coordinator as a state machine: `step(event, now) -> effects`. No clock, socket, thread or log inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ferrorpc_coordinator.state.effects import Effect, Row
from ferrorpc_coordinator.state.events import Event
from ferrorpc_coordinator.state.settings import Settings


class Coordinator:
    """Decides for every job on this service.

    Args:
        settings: durations and limits.
        recovered: every durable row of the journal; empty for a new cluster.
        mint: gives a fresh unguessable text at each call (cluster id, resume tokens).
        now_ns: the present, on the monotonic clock that later steps are given.
    """

    def __init__(self, settings: Settings, recovered: Iterable[Row] = (), *, mint: Callable[[], str], now_ns: int) -> None:
        self.settings = settings
        self.cluster_id = mint()
        self.epoch = 1

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Takes in one event; returns what is to be done, in order. Never raises for what a client sent."""
        return []

    def next_deadline(self) -> int | None:
        """When to call `step(Tick(), now)` at the latest; None while nothing can expire."""
        return None
