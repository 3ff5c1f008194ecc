"""Checks that all ranks have the same configuration of something, before they exchange data."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import numpy as np

from ferrorpc.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

_DIFFERENCES_SHOWN: Final = 3


def require_same(group: ProcessGroup, what: str, text: str, hint: str = "") -> None:
    """Returns if all ranks call it with the same text. Collective.

    Args:
        what: what the text describes, for the error.
        text: the description, one fact a line.
        hint: what to try; by default, to give every rank the same.

    Raises:
        CollectiveMismatchError: the texts differ. Raised on every rank; for each rank that differs from the first one it has
            the lines of both. The group stays open.
    """
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = group.all_gather(digest)
    if all(np.array_equal(other, digests[0]) for other in digests):
        return
    texts = [bytes(other).decode().split("\n") for other in group.all_gather(np.frombuffer(text.encode(), np.uint8))]
    signatures = {}
    for rank, lines in enumerate(texts):
        differences = _differences(lines, texts[0], group.world_ranks[0])
        if differences:
            signatures[group.world_ranks[rank]] = differences
    message = f"ranks hold different {what}: " + "; ".join(f"rank {rank} has {text}" for rank, text in signatures.items())
    other = group.world_ranks.index(next(iter(signatures)))
    signatures[group.world_ranks[0]] = _differences(texts[0], texts[other], group.world_ranks[other])
    raise CollectiveMismatchError(
        signatures,
        message,
        hint=hint or f"give every rank the same {what}, in the same order",
    )


def _differences(lines: list[str], reference: list[str], reference_rank: int) -> str:
    pairs = [(own, other) for own, other in zip_longest(lines, reference, fillvalue="nothing") if own != other]
    shown = [f"{own!r} where rank {reference_rank} has {other!r}" for own, other in pairs[:_DIFFERENCES_SHOWN]]
    if len(pairs) > len(shown):
        shown.append(f"{len(pairs) - len(shown)} more")
    return ", ".join(shown)
