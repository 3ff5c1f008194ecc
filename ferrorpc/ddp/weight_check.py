"""Checks that all ranks hold the same weights: their hashes are compared through the coordinator.

Idea. Replicas whose weights have diverged go on training unnoticed: after a rank missed an update, with faulty memory, or
after an operation that is not deterministic. Each rank hashes its weights; the hashes are exchanged at a named barrier of the
coordinator, not on the data plane. If they differ, hashes of ever smaller groups of parameters are compared; two or three
barriers find the first parameter that differs.

Cost: one pass over the weights (about 1 GB/s) and one barrier with 32 bytes a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import spec_of, view_on_host
from ferrorpc.consistency import require_same
from ferrorpc.errors import CollectiveMismatchError
from ferrorpc.group import ProcessGroup
from ferrorpc.wire.limits import BARRIER_BYTES_MAX

HASH_BYTES: Final = 16
GROUPS_MAX: Final = 128
"""How many hashes a rank brings to one barrier: 2 KiB of the 4 KiB that its payload may have. In worlds beyond 512 ranks they
are fewer, as there the payloads of all ranks together are limited."""


def check_weights(arrays: Mapping[str, Any], group: ProcessGroup, owner: str, when: str, remedy: str) -> None:
    """Compares arrays between all ranks, bit for bit, with their names, dtypes and shapes. Collective.

    Args:
        owner: distinguishes the callers, also those on other groups of the same ranks; the same on all ranks.
        when: for the error, such as "in step 200".
        remedy: for the error: the caller's way to make them equal.

    Raises:
        CollectiveMismatchError: they differ. It names the ranks that differ from the majority, and the first array that
            differs; or how names, dtypes and shapes differ. The group stays open.
    """
    names = list(arrays)
    facts = "\n".join(_fact(name, array) for name, array in arrays.items())
    hashes = [_hash(_bytes_of(array, group)) for array in arrays.values()]
    barrier = f"ferrorpc/weights/{owner}"
    found = _exchange(group, barrier, [_hash(facts.encode()), _hash(*hashes)])
    if all(each == found[0] for each in found):
        return
    if len({each[0] for each in found}) > 1:
        require_same(group, "weights", facts)
    first, last = 0, len(names)
    groups = min(GROUPS_MAX, BARRIER_BYTES_MAX // (HASH_BYTES * group.size))
    while True:
        step = -(-(last - first) // groups)
        starts = range(first, last, step)
        found = _exchange(group, barrier, [_hash(*hashes[start : min(start + step, last)]) for start in starts])
        place = next(index for index in range(len(starts)) if len({each[index] for each in found}) > 1)
        first, last = starts[place], min(starts[place] + step, last)
        if step == 1:
            raise _error(group, names[first], [each[place] for each in found], when, remedy)


def _fact(name: str, array: Any) -> str:
    with ErrorPrefix(f"parameter {name!r}"):
        return f"{name}: {spec_of(array)}"


def _error(group: ProcessGroup, name: str, hashes: Sequence[bytes], when: str, remedy: str) -> CollectiveMismatchError:
    """The hash that most ranks have counts as the right one; in a tie, that of the lower rank."""
    right = max(hashes, key=lambda each: (hashes.count(each), -hashes.index(each)))
    odd = [rank for rank, each in enumerate(hashes) if each != right]
    who = ", ".join(f"rank {group.world_ranks[rank]}" for rank in odd)
    like = group.world_ranks[hashes.index(right)]
    signatures = {group.world_ranks[rank]: f"{name}: hash {each.hex()}" for rank, each in enumerate(hashes)}
    return CollectiveMismatchError(
        signatures,
        f"ranks hold different weights {when}: {who} differ{'s' * (len(odd) == 1)} from rank {like}, first in {name!r}",
        hint=f"was an update skipped there, or random numbers drawn apart? {remedy} makes them equal again",
    )


def _exchange(group: ProcessGroup, barrier: str, hashes: list[bytes]) -> list[list[bytes]]:
    """Every rank's hashes, in rank order."""
    payloads = group.session.barrier(barrier, b"".join(hashes), ranks=group.world_ranks, timeout=group.timeout)
    return [[payload[start : start + HASH_BYTES] for start in range(0, len(payload), HASH_BYTES)] for payload in payloads]


def _bytes_of(array: Any, group: ProcessGroup) -> memoryview:
    return view_on_host(array, group.guard()).data.reshape(-1).view("u1").data


def _hash(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
