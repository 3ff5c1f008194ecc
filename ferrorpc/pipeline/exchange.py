"""The messages of one step on one rank: sent without waiting, received a little ahead of their use.

Every message has a tag of its own, made from its transfer. So the order of arrival does not matter, and no order of actions can
make two ranks wait for each other's sends. Arrays on GPUs may go over lanes of their own (`device_lanes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ferrorpc.arrays.base import Kind as ArrayKind
from ferrorpc.coordination.base import Session
from ferrorpc.errors import BackendUnavailableError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from ferrorpc.group import ProcessGroup
from ferrorpc.operations.expected import Expected
from ferrorpc.pipeline import device_lanes
from ferrorpc.pipeline.messages import Envelope, Message, pack, pack_split, parse
from ferrorpc.pipeline.schedules.lowering import Link
from ferrorpc.pipeline.transfers import Transfer, TransferKind
from ferrorpc.work import Work

RECEIVES_AHEAD: Final = 2
"""How many messages are expected before they are needed: long ones then travel while the rank computes."""


class Exchange:
    """Sends and receives the messages of one step.

    Args:
        group: the pipeline's ranks.
        placement: the rank of each piece.
        receives: what comes from other ranks, in the order in which it is used.
        pipeline: the pipeline's name in messages.
        step: the number of the step.
        seconds: how long to wait for any one message.
        lanes: the GPU lanes to and from this rank.
        orders: for each rank with a lane to this one, the transfers on that lane in the order in which it sends them.
    """

    def __init__(
        self,
        group: ProcessGroup,
        placement: Sequence[int],
        receives: Iterable[Transfer],
        pipeline: str,
        step: int,
        seconds: float,
        lanes: Mapping[Link, ProcessGroup],
        orders: Mapping[int, Iterable[Transfer]],
    ) -> None:
        self._group = group
        self._session: Session | None = None
        with suppress(BackendUnavailableError):  # raised if there is no coordinator
            self._session = group.session
        self._placement = placement
        self._pipeline = pipeline
        self._step = step
        self._seconds = seconds
        self._later = deque(receives)
        self._expected: dict[Transfer, Expected] = {}
        self._sends: deque[tuple[Transfer, Work[Any]]] = deque()
        self._arrivals: deque[tuple[Transfer, Work[Any]]] = deque()
        """What the GPU has still to receive, although the host has gone on."""
        self._outgoing = {target: lane for (_, target), lane in lanes.items() if target != group.rank}
        self._incoming = {
            source: device_lanes.LaneReceiver(lane, orders[source])
            for (source, _), lane in lanes.items()
            if source != group.rank
        }
        self._expect_next()

    def send(self, transfer: Transfer, value: Any) -> None:
        """Starts to send a copy of a value."""
        target, tag = self._placement[transfer.target], transfer.tag(len(self._placement))
        lane = None if transfer.kind is TransferKind.TIED else self._outgoing.get(target)
        envelope = self._envelope(transfer)
        message, arrays = (pack(envelope, value), None) if lane is None else pack_split(envelope, value)
        # The arrays first: their receiver begins with the message, and finds them launched then.
        works = [] if lane is None or arrays is None else [device_lanes.send(lane, arrays)]
        works.append(self._group.send(message, target, tag, async_op=True, timeout=device_lanes.SEND_SECONDS))
        self._sends += [(transfer, _observed(work)) for work in works]
        _drop_complete(self._sends)
        self.show(envelope.transfer)

    def receive(self, transfer: Transfer, kind: ArrayKind) -> Any:
        """Waits for the value of a transfer; its arrays are of this kind. Where they come from another GPU, only the current
        stream waits for them, until `finish`.

        Raises:
            CollectiveTimeoutError: it did not come in time.
            CollectiveMismatchError: what came belongs to another step or pipeline.
        """
        source = self._placement[transfer.source]
        receiver = None if transfer.kind is TransferKind.TIED else self._incoming.get(source)
        if receiver is None:
            message, work = self._message(transfer), None
        else:
            _drop_complete(self._arrivals)
            # Each may take `seconds` after the one before, and this deadline once more: `finish` says more about what is late.
            message, work = receiver.begin(transfer, kind, self._message, (len(self._arrivals) + 2) * self._seconds)
        if work is None:
            return message.value(message.payload, kind)
        self._arrivals.append((transfer, _observed(work)))
        return message.value(self._wait_to_receive(transfer, work), kind)

    def show(self, action: str) -> None:
        """Shows this rank in an action, where its last receive, which is over, would look like one that still waits, and its
        last send has a tag that says nothing."""
        if self._session is not None:
            self._session.activity.last = action

    def _message(self, transfer: Transfer) -> Message:
        """Waits for the message of a transfer."""
        source = self._placement[transfer.source]
        if transfer not in self._expected:  # the order on a lane is not the order of use
            self._later.remove(transfer)
            self._expect(transfer)
        expected = self._expected.pop(transfer)
        try:
            raw = expected.take(self._seconds)
        except CollectiveTimeoutError as error:
            raise self._timed_out(f"{transfer} of rank {self._group.world_ranks[source]}", source) from error
        except PeerLostError as error:  # perhaps only this rank knows, and the others wait for it
            raise self._group.fail(PeerLostError(error.rank, error.reason)) from None
        self._expect_next()
        message, wanted = parse(raw), self._envelope(transfer)
        if message.envelope != wanted:
            ranks = self._group.world_ranks
            signatures = {ranks[self._group.rank]: f"waits for {_describe(wanted)}", ranks[source]: _describe(message.envelope)}
            raise self._group.fail(CollectiveMismatchError(signatures))
        return message

    def finish(self) -> None:
        """Blocks the host until everything is received and all sends are complete, on GPUs too.

        Raises:
            CollectiveTimeoutError: for one of them it took too long.
            FerroError: the generation's first cause. What GPUs have received is undefined then.
        """
        for transfer, work in self._arrivals:
            self._wait_to_receive(transfer, work, host=True)
        for transfer, work in self._sends:
            target = self._placement[transfer.target]
            self._wait(work, f"rank {self._group.world_ranks[target]} to take {transfer}", target, host=True)

    def abandon(self) -> None:
        """Gives up the messages that are still expected, after the step has failed."""
        for expected in self._expected.values():
            expected.forget()

    def _expect_next(self) -> None:
        while self._later and len(self._expected) < RECEIVES_AHEAD:
            self._expect(self._later.popleft())

    def _expect(self, transfer: Transfer) -> None:
        source, tag = self._placement[transfer.source], transfer.tag(len(self._placement))
        self._expected[transfer] = self._group.expect(source, tag, awaited=transfer)

    def _wait_to_receive(self, transfer: Transfer, work: Work[Any], host: bool = False) -> Any:
        source = self._placement[transfer.source]
        return self._wait(work, f"{transfer} of rank {self._group.world_ranks[source]}", source, host)

    def _wait(self, work: Work[Any], what: str, peer: int, host: bool) -> Any:
        """Waits for a Work; with `host` until it is complete on GPUs, too."""
        try:
            return work.wait(self._seconds, host)
        except CollectiveTimeoutError as error:
            if work.has_ended:
                raise
            queued = ", or for what the GPUs of both had to do before" if work.is_on_device else ""
            raise self._timed_out(what + queued, peer) from error

    def _envelope(self, transfer: Transfer) -> Envelope:
        return Envelope(self._pipeline, self._step, str(transfer))

    def _timed_out(self, what: str, peer: int) -> BaseException:
        """What to raise after too long a wait for a rank: the first cause, which is the timeout of one rank of the pipeline.
        Ranks often wait in a chain, and any of them is the first: so it says what each was last seen in."""
        world_ranks = self._group.world_ranks
        known = "" if self._session is None else self._session.described(world_ranks)
        message = f"this rank of the pipeline waited {self._seconds:g} s for {what}"
        return self._group.fail(CollectiveTimeoutError([world_ranks[peer]], "; ".join(filter(None, (message, known)))))


def _drop_complete(works: deque[tuple[Transfer, Work[Any]]]) -> None:
    """Drops the first ones that have succeeded: a Work keeps its arrays."""
    while works and works[0][1].has_ended and not works[0][1].failure:
        works.popleft()


def _observed(work: Work[Any]) -> Work[Any]:
    """Looks at its error when it ends, so that it is not logged: if the step fails, all that is in flight fails with it."""

    def look() -> None:
        work.exception()

    work.on_done(look)
    return work


def _describe(envelope: Envelope) -> str:
    return f"{envelope.transfer} in step {envelope.step} of pipeline {envelope.pipeline}"
