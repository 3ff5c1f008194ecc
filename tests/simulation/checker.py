"""Invariants that must hold in every run. The checker receives what processes see, and raises at the first violation.

1  one membership per generation: all who are told of a generation are told the same peers
2  at most one owner of a rank in a generation
3  a barrier is released only when every participant has arrived, to all with the same payloads, in rank order
4  a barrier that was released for one has not timed out for another
5  an acknowledged write is durable, and stays
6  counters are linearizable: results are distinct, in the order of real time; a client's own counter counts by ones
7  nothing of a dead or departed process is applied, and what was bound to it is deleted; nothing of a stale generation is
   accepted
8  no process is declared dead without a reason
9  generation, and (epoch, revision), never go backwards for an observer
10 a link that is lost with one of its ends is not blamed for the end of the generation
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ferrorpc.v1 import barrier_pb2, identity_pb2, journal_pb2, rendezvous_pb2

GONE = (identity_pb2.MEMBER_STATE_DEAD, identity_pb2.MEMBER_STATE_LEFT)


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Addition:
    """One add on the shared counter, from when it was first sent until it was answered."""

    sent: int
    answered: int
    number: int


@dataclass(slots=True)
class Checker:
    """The observations so far."""

    peers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    arrivals: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)
    released: dict[tuple[int, int], tuple[bytes, ...]] = field(default_factory=dict)
    timed_out: set[tuple[int, int]] = field(default_factory=set)
    positions: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    additions: list[Addition] = field(default_factory=list)
    additions_sent: int = 0
    own_counts: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    excused: set[str] = field(default_factory=set)
    """Instances that may be declared dead."""
    lost_with_peer: set[tuple[int, int, int]] = field(default_factory=set)
    """Links that were lost because the peer ended: (generation, reporter, peer)."""

    # -- membership ----------------------------------------------------------------------------------------------------

    def joined(self, who: str, response: rendezvous_pb2.JoinResponse) -> None:
        """A process was told its place."""
        generation = response.generation
        peers = tuple(f"{peer.name}#{peer.incarnation}" for peer in response.peers)
        known = self.peers.setdefault(generation, peers)
        self._check(known == peers, f"generation {generation} is {known} to some and {peers} to {who}")
        self._check(peers[response.rank] == who, f"{who} has rank {response.rank} in {peers}")
        owner = self.owners.setdefault((generation, response.rank), who)
        self._check(owner == who, f"rank {response.rank} of generation {generation} belongs to {owner} and to {who}")

    def position(self, observer: str, position: identity_pb2.Position) -> None:
        """A frame arrived at a process."""
        now = (position.epoch, position.revision, position.generation)
        before = self.positions.get(observer, (0, 0, 0))
        forward = now[:2] >= before[:2] and now[2] >= before[2]
        self._check(forward, f"{observer} saw (epoch, revision, generation) {now} after {before}")
        self.positions[observer] = now

    # -- barriers ------------------------------------------------------------------------------------------------------

    def arrived(self, generation: int, ordinal: int, rank: int, payload: bytes) -> None:
        """A process sends its arrival for the first time."""
        self.arrivals.setdefault((generation, ordinal), {})[rank] = payload

    def barrier_released(self, who: str, generation: int, ordinal: int, response: barrier_pb2.BarrierResponse) -> None:
        """A process was told that everybody met."""
        key, payloads = (generation, ordinal), tuple(response.payloads)
        here = self.arrivals.get(key, {})
        missing = [rank for rank in range(len(self.peers[generation])) if rank not in here]
        self._check(not missing, f"{who} was released from barrier {key} without ranks {missing}")
        expected = tuple(here[rank] for rank in sorted(here))
        self._check(payloads == expected, f"barrier {key} gave {who} {payloads}, but {expected} were brought")
        self._check(key not in self.timed_out, f"barrier {key} was released for {who}, after a timeout for another")
        self.released[key] = payloads

    def barrier_timed_out(self, who: str, generation: int, ordinal: int) -> None:
        """A process was told that not everybody came."""
        self._check((generation, ordinal) not in self.released, f"barrier {(generation, ordinal)} timed out for {who} alone")
        self.timed_out.add((generation, ordinal))

    # -- store ---------------------------------------------------------------------------------------------------------

    def version_acknowledged(self, key: str, version: int, durable: bytes | None) -> None:
        """A process was told that its write is done."""
        self.acknowledged[key] = version
        self.still_durable(key, durable)

    def still_durable(self, key: str, durable: bytes | None) -> None:
        """What the journal holds for a key that was written."""
        value = 0 if durable is None else int(journal_pb2.EntryRow.FromString(durable).value)
        least = self.acknowledged[key]
        self._check(value >= least, f"{key} was acknowledged with {least}, but only {value} is durable")

    def own_count(self, who: str, number: int) -> None:
        """A process was told the sum on a counter that only it adds one to."""
        expected = self.own_counts.get(who, 0) + 1
        self._check(number == expected, f"{who} added its {expected}. one and was told {number}")
        self.own_counts[who] = number

    def added(self, sent: int, answered: int, number: int) -> None:
        """A process was told the sum on the shared counter."""
        for other in self.additions:
            self._check(other.number != number, f"two additions were both told {number}")
            before, after = other.answered < sent, answered < other.sent
            self._check(not before or other.number < number, f"{number} was told after {other.number} had been")
            self._check(not after or number < other.number, f"{other.number} was told after {number} had been")
        self.additions.append(Addition(sent, answered, number))
        self._check(number <= self.additions_sent, f"{self.additions_sent} additions were sent, but the sum is {number}")

    # -- fencing -------------------------------------------------------------------------------------------------------

    def row_written(self, table: str, key: str, value: bytes | None) -> None:
        """The coordinator changed a row."""
        name = key.partition("/")[2]
        if table == "member" and value is not None:
            row = journal_pb2.MemberRow.FromString(value)
            if row.state in GONE:
                dead = row.state == identity_pb2.MEMBER_STATE_DEAD
                innocent = dead and row.instance_id not in self.excused
                self._check(not innocent, f"{name}#{row.incarnation} did nothing wrong, yet it is dead: {row.reason}")
        if table == "generation" and value is not None:
            self._ended(int(name), journal_pb2.GenerationRow.FromString(value).end_reason)
        if table == "store" and value is not None and name.startswith(("own/", "seat/")):
            writer = name.split("/")[1]
            self._check(writer not in self.gone, f"{writer} is gone, yet {name} was written by it")

    def _ended(self, generation: int, reason: str) -> None:
        for number, reporter, peer in self.lost_with_peer:
            blamed = number == generation and f"between rank {reporter} and rank {peer} broke" in reason
            self._check(not blamed, f"rank {peer} of generation {generation} had ended, but {reason}")

    def row_durable(self, table: str, key: str, value: bytes | None) -> None:
        """The row is on disk, so what depends on it is told from now on. (A death that a crash undid was told to nobody.)"""
        if table == "member" and value is not None:
            row = journal_pb2.MemberRow.FromString(value)
            if row.state in GONE:
                self.gone.add(f"{key.partition('/')[2]}#{row.incarnation}")

    def finished(self, rows: dict[tuple[str, str], bytes]) -> None:
        """The run is over; what is durable is this."""
        for key in self.acknowledged:
            self.still_durable(key, rows.get(("store", f"job/{key}")))
        for table, key in rows:
            if table == "store" and key.startswith("job/seat/"):
                owner = key.split("/")[2]
                self._check(owner not in self.gone, f"{key} is bound to the session of {owner}, which is over")

    def stale_request_answered(self, who: str, generation: int, outcome: str) -> None:
        """A process spoke of a generation that is over."""
        self._check(outcome == "error", f"{who} spoke of generation {generation}, which is over, and was answered {outcome}")

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(otherwise)
