"""The transport between ranks of one process: a frame is copied once and put into the peer's mailbox.

With a `Faults` object every message is delayed by a random time, drawn from a seed. The messages of one pair of ranks stay in
order, as on a TCP stream. On a virtual clock the same seed replays the same interleaving.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Container
from operator import index
from typing import Any, Protocol

from ferrorpc.errors import UsageError
from ferrorpc.generation_errors import PEER_LEFT, links_closed
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.base import Payload, Transport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.wire.frames import Frame, Header, Key


def seed_of(seed: Any) -> int:
    """A caller's seed, an integer of any kind. Raises UsageError."""
    try:
        return index(seed)
    except TypeError:
        raise UsageError(f"seed={seed!r} is no whole number", hint="a run replays from an integer, such as 0") from None


class Faults(Protocol):
    """Delays messages between ranks of one process."""

    def delay(self, random: random.Random, source: int, target: int) -> float:
        """Seconds that this message takes from `source` to `target`."""


class _Route:
    """The delayed messages from one rank to another."""

    def __init__(self) -> None:
        self.delayed: deque[Callable[[], None]] = deque()
        """In the order in which they were sent."""
        self.last = 0.0
        """Clock time at which the latest of them arrives."""
        self.due = 0
        """How many have arrived and did not run yet."""
        self.runs = False
        """Whether a thread runs one of them."""


class Network:
    """What the ranks of one in-process world share: which ranks can be reached, and how long messages take."""

    def __init__(self, clock: Clock, faults: Faults | None, seed: int) -> None:
        self._clock = clock
        self._faults = faults
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._members: dict[int, InprocTransport] = {}
        self._left: set[int] = set()
        self._early: dict[int, list[Callable[[InprocTransport], object]]] = {}
        self._routes: dict[tuple[int, int], _Route] = {}

    def join(self, transport: InprocTransport) -> None:
        """Delivers what was sent to a rank before, and makes it reachable.

        In that order: what is sent to it meanwhile, by a peer that is ahead, comes after what that peer has sent.
        """
        while True:
            with self._lock:
                early = self._early.pop(transport.rank, [])
                if not early:
                    self._members[transport.rank] = transport
                    return
            for action in early:
                action(transport)

    def leave(self, rank: int) -> bool:
        """Makes a rank unreachable. Returns False where it had left before."""
        with self._lock:
            self._left.add(rank)
            return self._members.pop(rank, None) is not None

    def arrive(self, target: int, action: Callable[[InprocTransport], object]) -> None:
        """Runs `action` at the target: now, or when the target joins; never, if it has left."""
        with self._lock:
            end = self._members.get(target)
            if end is None and target not in self._left:
                self._early.setdefault(target, []).append(action)
        if end is not None:
            action(end)

    def carry(self, source: int, target: int, action: Callable[[], None]) -> None:
        """Runs `action` at once, or after the message's delay. Order within a pair of ranks is kept."""
        if self._faults is None:
            action()
            return
        with self._lock:
            route = self._routes.setdefault((source, target), _Route())
            route.last = max(self._clock.now() + self._faults.delay(self._random, source, target), route.last)
            when = route.last
            route.delayed.append(action)
        self._clock.call_at(when, lambda: self._arrived(route))

    def _arrived(self, route: _Route) -> None:
        """Runs the oldest action of a pair of ranks, or leaves it to the thread that runs one of this pair now.

        The timers of a real clock are threads: those of nearly the same time run in any order, and at once.
        """
        with self._lock:
            route.due += 1
            if route.runs:
                return
            route.runs = True
        self._run(route)

    def _run(self, route: _Route) -> None:
        while (action := self._next(route)) is not None:
            try:
                action()
            except BaseException:
                self._run(route)  # what has arrived after it must not wait for ever
                raise

    def _next(self, route: _Route) -> Callable[[], None] | None:
        with self._lock:
            if not route.due:
                route.runs = False
                return None
            route.due -= 1
            return route.delayed.popleft()


class InprocTransport(Transport):
    """One rank's end of a `Network`.

    Args:
        on_link_lost: called with (peer, reason) once per peer, when something is sent to a rank that has left.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        network: Network,
        mailbox: Mailbox,
        latch: Latch,
        on_link_lost: Callable[[int, str], None],
    ) -> None:
        self.rank = rank
        self.size = size
        self.mailbox = mailbox
        self._network = network
        self._latch = latch
        self._on_link_lost = on_link_lost
        self._departed: set[int] = set()
        self._lost: dict[int, str] = {}
        self._closed = False
        network.join(self)

    def send(self, peer: int, key: Key, header: Header, offset: int, payload: Payload, room: Callable[[], None]) -> bool:
        self._latch.check()
        if self._closed:
            raise links_closed(self.rank)
        data = memoryview(b"" if payload is None else payload.tobytes())
        frame = Frame(key, self.rank, header, offset, data)
        self._carry(peer, lambda end: end.mailbox.deliver(frame), needed=True)
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self._carry(peer, lambda end: end.mailbox.granted(self.rank, key, slot), needed=False)

    def probe(self, peer: int, key: Key, signature: str) -> None:
        has_left = peer in self._departed
        if not has_left or self.mailbox.still_needs(peer, key):
            self._carry(peer, lambda end: end.answer(self.rank, key, signature), needed=has_left)

    def answer(self, peer: int, key: Key, signature: str) -> None:
        """Answers a probe from `peer`."""
        standing = self.mailbox.standing(peer, key, signature)
        self._carry(peer, lambda end: end.mailbox.probe_answered(self.rank, key, standing), needed=False)

    def _carry(self, peer: int, action: Callable[[InprocTransport], object], needed: bool) -> None:
        if needed and peer in self._departed:
            if peer not in self._lost:
                self._lost[peer] = PEER_LEFT
                self._on_link_lost(peer, PEER_LEFT)
            return
        self._network.carry(self.rank, peer, lambda: self._network.arrive(peer, action))

    def lost(self) -> dict[int, str]:
        return dict(self._lost)

    def peer_left(self, peer: int) -> None:
        """`peer` has left, and everything that it sent before has arrived."""
        self._departed.add(peer)

    def close(self, timeout: float, unawaited: Container[int] = ()) -> None:
        self._closed = True
        if self._network.leave(self.rank):
            for peer in range(self.size):
                self._carry(peer, lambda end: end.peer_left(self.rank), needed=False)
