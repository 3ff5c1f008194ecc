"""Operations in which a rank has not looked at the call of a peer that nobody else compares with its own.

Idea. Whoever reads what a peer brought compares their calls. The root of a broadcast or scatter reads nobody, and a rank that
brings something to the root of a gather or reduce does not read the root. If the other one reads nothing either, as where one
broadcasts to the other and that one reduces to it, both go on, and each has lost what the other sent. So such a rank notes its
call in its line, and compares its peers' notes with its own when they have come so far: at the end of the operation, at the
beginning of the stream's next ones and the end of those that wait for everybody, or when it enters the channel again.

A peer that has made no note reads this rank, and finds the difference itself. Two notes are enough for a channel: a peer cannot
be further than in the operation after the one that this rank has left there last.

Cost: three words for an operation that only sends, and nothing for any other.
"""

from __future__ import annotations

from typing import Final

from ferrorpc.collectives.arena.board import CHUNK_BITS, NOTES, STAGED, Channel
from ferrorpc.errors import CollectiveMismatchError

_TICKET: Final = 0
_DIGEST: Final = 1
_TEXT: Final = 2


class UnreadCalls:
    """One operation, and the peers whose calls have not been compared with this rank's.

    Args:
        channel: where it runs; its line has no newer note yet.
        peers: their places among the others of the channel.
        base: of the operation's progress words.
        signed: the call's hash, and where it is spelled out (`Board.sign`).
        signature: the call in words.
    """

    def __init__(self, channel: Channel, peers: frozenset[int], base: int, signed: tuple[int, int], signature: str) -> None:
        self._channel = channel
        self._peers = set(peers)
        self._base = base
        self._digest = signed[0]
        self._signature = signature
        line, note = channel.line, NOTES[channel.noted % len(NOTES)]
        channel.noted += 1
        line[note + _DIGEST], line[note + _TEXT] = signed
        line[note + _TICKET] = base >> CHUNK_BITS

    @property
    def is_over(self) -> bool:
        """Whether everybody has been compared with."""
        return not self._peers

    def settle(self) -> None:
        """Compares with those that have come so far. Two threads may be at it at once, each with an operation of the stream.

        Raises:
            CollectiveMismatchError: of this operation, which may be long over here.
        """
        channel, ticket = self._channel, self._base >> CHUNK_BITS
        board, differing = channel.bank.board, {}
        for peer in tuple(self._peers):
            line = channel.others[peer]
            if line[STAGED] <= self._base:
                continue
            self._peers.discard(peer)
            note = next((note for note in NOTES if line[note + _TICKET] == ticket), None)
            if note is not None and line[note + _DIGEST] != self._digest:
                rank = channel.bank.peers[peer]
                differing[rank] = board.read_text(rank, line[note + _TEXT])
        if differing:
            raise mismatch({board.rank: self._signature} | differing, ticket - 1)


def mismatch(signatures: dict[int, str], number: int) -> CollectiveMismatchError:
    """The error that says who, by world rank, called what as operation `number`."""
    calls = ", ".join(f"rank {rank} called {text}" for rank, text in sorted(signatures.items()))
    text = f"ranks {sorted(signatures)} disagree about operation {number}: {calls}"
    return CollectiveMismatchError(signatures, text, number=number)
