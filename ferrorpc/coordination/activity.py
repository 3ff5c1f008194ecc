"""What a member reports with each heartbeat about its generation: its last operation, the time it spent in operations and
training steps, and the bytes it sent to each peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident, main_thread
from typing import Final, TypeAlias

from ferrorpc.guard import Clock
from ferrorpc.v1 import identity_pb2, session_pb2

Traffic: TypeAlias = Mapping[int, tuple[str, int]]
"""World rank of a peer -> kind of the link, and bytes sent over it so far."""

ACTIVITY_CHARACTERS_MAX: Final = 200
LINKS_EVERY_BEATS: Final = 2
LINKS_MAX: Final = 32
"""Links in one heartbeat; the others follow in later ones."""


class Activity:
    """Counters of one generation, which operations update and heartbeats report.

    Any thread may update them, without a lock: a lost addition does no harm. The methods are cheap, because some are called for
    every operation. Only the main thread's time in operations counts, and that of training steps: another thread may wait all
    the time, as for a message that ends the job.

    Attributes:
        operations: how many operations have begun.
        last: the last of them, or what a pipeline has sent or computed since, as text.
    """

    def __init__(self) -> None:
        self.operations = 0
        self.last = ""
        self._main_thread = main_thread().ident
        self._operation_seconds = 0.0
        self._since: float | None = None
        """When the main thread entered the operation that it is in."""
        self._reported_ms = 0
        self._steps = 0
        self._step_seconds = (0.0, 0.0, 0.0)
        self._traffic: Callable[[], Traffic] = dict
        self._reported_bytes: dict[int, int] = {}
        self._beats = 0

    def note(self, operation: str) -> None:
        """Counts an operation that begins."""
        self.last = operation
        self.operations += 1

    def operating(self, began: float) -> None:
        """The calling thread entered an operation, or began to wait for one, at clock time `began`. `operated` ends this."""
        if get_ident() == self._main_thread:
            self._since = began

    def operated(self, seconds: float) -> None:
        """The calling thread left the operation. Adds the seconds that it spent in operations or waiting for them."""
        if get_ident() == self._main_thread:
            self._since = None
            self._operation_seconds += seconds

    @contextmanager
    def waiting(self, clock: Clock, *, in_training: bool = False) -> Iterator[None]:
        """A context in which the calling thread waits.

        Args:
            in_training: for the gradients of a training step, which counts on whichever thread: on GPUs a backward pass ends on
                one of its own, and the main thread waits for that.
        """
        began, counts = clock.now(), in_training or get_ident() == self._main_thread
        if counts:
            self._since = began
        try:
            yield
        finally:
            if counts:
                self._since = None
                self._operation_seconds += clock.now() - began

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """Counts a training step."""
        compute, exposed, hidden = self._step_seconds
        self._step_seconds = compute + compute_seconds, exposed + exposed_seconds, hidden + hidden_seconds
        self._steps += 1

    def set_traffic_source(self, traffic: Callable[[], Traffic]) -> None:
        """Reports these links from now on."""
        self._traffic = traffic

    def beat(self, generation: int, now: float, *, is_last: bool = False) -> session_pb2.Beat:
        """The next heartbeat. Time in operations includes those in progress, so a rank that hangs in one is seen to wait.
        Not every heartbeat has links, but the last one does."""
        self._beats += 1
        seconds, since = self._operation_seconds, self._since
        if since is not None:
            seconds += now - since
        self._reported_ms = max(self._reported_ms, int(seconds * 1000))
        return session_pb2.Beat(
            step=self.operations,
            activity=self.last[:ACTIVITY_CHARACTERS_MAX],
            generation=generation,
            operation_ms=self._reported_ms,
            links=self._links() if is_last or self._beats % LINKS_EVERY_BEATS == 0 else (),
            training=self._training() if self._steps else None,
        )

    def _training(self) -> identity_pb2.Training:
        compute, exposed, hidden = (int(seconds * 1000) for seconds in self._step_seconds)
        return identity_pb2.Training(steps=self._steps, compute_ms=compute, exposed_ms=exposed, hidden_ms=hidden)

    def _links(self) -> list[identity_pb2.Link]:
        """Links with bytes that were not reported yet, those that were reported least recently first."""
        reported = self._reported_bytes
        changed = [(peer, kind, sent) for peer, (kind, sent) in self._traffic().items() if sent > reported.get(peer, 0)]
        order = {peer: index for index, peer in enumerate(reported)}
        changed.sort(key=lambda link: order.get(link[0], -1))
        for peer, _, sent in changed[:LINKS_MAX]:
            reported.pop(peer, None)
            reported[peer] = sent
        return [identity_pb2.Link(peer_rank=peer, kind=kind, sent_bytes=sent) for peer, kind, sent in changed[:LINKS_MAX]]


class ReportingActivity(Activity):
    """An Activity that calls `on_operation` for every operation."""

    def __init__(self, on_operation: Callable[[], None]) -> None:
        super().__init__()
        self._on_operation = on_operation

    def note(self, operation: str) -> None:
        super().note(operation)
        self._on_operation()
