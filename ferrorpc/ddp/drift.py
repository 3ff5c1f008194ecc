"""Do all ranks still hold the same weights? Compared as hashes, through the coordinator, every so many steps.

Idea. Replicas that drift apart train on, and nobody notices: a rank that missed an update, a broken memory module, an operation
that is not deterministic. Each rank hashes its weights; the hashes meet at a named barrier of the coordinator, away from the
data plane. Where they differ, parameters are compared in ever smaller groups: two or three barriers find the first one.

Cost: one pass over the weights (about 1 GB/s) and one barrier with 16 bytes a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ferrorpc.arrays.kinds import view
from ferrorpc.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

HASH_BYTES: Final = 16
GROUPS: Final = 128
"""Groups of parameters whose hashes travel as one payload: 2 KiB of the 4 that a barrier takes."""


def compare(arrays: Mapping[str, Any], group: ProcessGroup, owner: int, when: str) -> None:
    """Returns when all ranks hold the same bits. Collective: the same names in the same order.

    Args:
        owner: a number that tells callers on one group apart; the same on all ranks.
        when: for the error, such as "in step 200".

    Raises:
        CollectiveMismatchError: they differ. It names the ranks that are not as most are, and the first array that differs.
            The group stays open.
    """
    names = list(arrays)
    hashes = [_hash(name.encode(), _bytes_of(arrays[name])) for name in names]
    barrier = f"ferrorpc/weights/{owner}/{_hash(repr(group.world_ranks).encode()).hex()}"
    found = _exchange(group, barrier, [_hash(*hashes)])
    if all(each == found[0] for each in found):
        return
    first, last = 0, len(names)
    while True:
        step = -(-(last - first) // GROUPS)
        starts = range(first, last, step)
        found = _exchange(group, barrier, [_hash(*hashes[start : min(start + step, last)]) for start in starts])
        place = next(index for index in range(len(starts)) if len({each[index] for each in found}) > 1)
        first, last = starts[place], min(starts[place] + step, last)
        if step == 1:
            raise _error(group, names[first], [each[place] for each in found], when)


def _error(group: ProcessGroup, name: str, hashes: Sequence[bytes], when: str) -> CollectiveMismatchError:
    """What most ranks have is taken for right; where two are as many, what the lower rank has."""
    right = max(hashes, key=lambda each: (hashes.count(each), -hashes.index(each)))
    odd = [rank for rank, each in enumerate(hashes) if each != right]
    who = ", ".join(f"rank {group.world_ranks[rank]}" for rank in odd)
    like = group.world_ranks[hashes.index(right)]
    signatures = {group.world_ranks[rank]: f"{name}: hash {each.hex()}" for rank, each in enumerate(hashes)}
    return CollectiveMismatchError(
        signatures,
        f"ranks hold different weights {when}: {who} differ{'s' * (len(odd) == 1)} from rank {like}, first in {name!r}",
        hint="was an update skipped there, or random numbers drawn apart? broadcast_parameters() makes them equal again",
    )


def _exchange(group: ProcessGroup, barrier: str, hashes: list[bytes]) -> list[list[bytes]]:
    """Every rank's hashes, in rank order."""
    payloads = group.session.barrier(barrier, b"".join(hashes), ranks=group.world_ranks, timeout=group.timeout)
    return [[payload[start : start + HASH_BYTES] for start in range(0, len(payload), HASH_BYTES)] for payload in payloads]


def _bytes_of(array: Any) -> memoryview:
    return view(array).data.reshape(-1).view("u1").data


def _hash(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
