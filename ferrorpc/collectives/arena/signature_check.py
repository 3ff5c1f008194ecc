"""Deferred signature checks, for peers whose calls no reader compares with this rank's.

Idea. A rank that reads what a peer brought compares their calls. But the root of a broadcast or scatter reads nobody, and a
rank that only sends to the root of a gather or reduce does not read the root. If the peer reads nothing either (one broadcasts
to the other, which reduces to it), both continue, and each has lost what the other sent. So such a rank notes its call in its
control block, and later compares its peers' notes with its own: at the end of the operation, at the beginning of the stream's
next ones and the end of those that wait for everybody, or when it enters the channel again.

A peer without a note reads this rank, and finds the difference itself. A channel needs only two notes: a peer cannot be further
than the operation after the one that this rank has left last on it.

Cost: three words for an operation that only sends, and nothing for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ferrorpc.collectives.arena.control_blocks import CHUNK_BITS, NOTES, STAGED, Channel, Signature
from ferrorpc.errors import CollectiveMismatchError

_TICKET: Final = 0
_DIGEST: Final = 1
_TEXT: Final = 2


class SignatureCheck:
    """The check of one call with the peers whose calls are not compared with it otherwise.

    Args:
        peers: their places among the others of a channel.
        signed: the call's signature, in this rank's segment.
    """

    def __init__(self, peers: Sequence[int], signed: Signature) -> None:
        self._peers = peers
        self._signed = signed

    def note(self, channel: Channel, base: int) -> None:
        """Notes the call in the control block of its channel, and leaves the check pending.

        Args:
            base: of the operation's progress words.
        """
        block, note, signed = channel.block, NOTES[channel.noted % len(NOTES)], self._signed
        channel.noted += 1
        block[note + _DIGEST], block[note + _TEXT] = signed.digest, signed.offset
        channel.signatures[note] = signed
        block[note + _TICKET] = base >> CHUNK_BITS
        channel.bank.pending_checks[base] = lambda: self.settle(channel, base)

    def settle(self, channel: Channel, base: int) -> bool:
        """Compares with the peers that have come so far. Returns whether all of them have.

        Raises:
            CollectiveMismatchError: of this operation, which may have ended here long ago.
        """
        ticket, digest, differing, have_come = base >> CHUNK_BITS, self._signed.digest, {}, True
        for peer in self._peers:
            block = channel.others[peer]
            if block[STAGED] <= base:
                have_come = False
                continue
            for note in NOTES:
                if block[note + _TICKET] == ticket and block[note + _DIGEST] != digest:
                    rank = channel.bank.peers[peer]
                    differing[rank] = channel.bank.control.read_text(rank, block[note + _TEXT])
        if differing:
            raise mismatch({channel.bank.control.rank: self._signed.text} | differing, ticket - 1)
        return have_come


def mismatch(signatures: dict[int, str], number: int) -> CollectiveMismatchError:
    """The error for operation `number`, with the signature of each world rank."""
    calls = ", ".join(f"rank {rank} called {text}" for rank, text in sorted(signatures.items()))
    text = f"ranks {sorted(signatures)} disagree about operation {number}: {calls}"
    return CollectiveMismatchError(signatures, text, number=number)
