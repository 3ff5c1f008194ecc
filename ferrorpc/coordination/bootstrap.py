"""How the ranks of an NCCL communicator come to the same unique ids. NCCL itself is not imported here.

One id, minted by one leader, serves 128 ranks; a larger communicator has a leader for every 128 of them. Each attempt mints
anew: an id that a failed initialisation has used is never used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from ferrorpc.coordination.base import Session
from ferrorpc.coordination.limits import RANKS_PER_ID
from ferrorpc.errors import FerroError, NcclError

ID_BYTES: Final = 128


def leaders(ranks: Sequence[int]) -> list[int]:
    """The ranks that mint, one for every 128."""
    return sorted(ranks)[::RANKS_PER_ID]


def agree_on_ids(
    session: Session, communicator: str, ranks: Sequence[int], mint: Callable[[], bytes], *, attempt: int, timeout: float
) -> list[bytes]:
    """The ids of a communicator, the same on every one of its ranks, in the order of their leaders.

    Args:
        communicator: its name within the generation, such as "world".
        ranks: the world ranks of its members, this one included.
        mint: makes one id of 128 bytes; called on leaders only.
        attempt: counts from 1; the same on every rank.

    Raises:
        NcclError: a leader could not mint; every rank gets its reason.
        CollectiveTimeoutError: a leader did not come within `timeout` seconds.
        FerroError: the cause that ended the generation.
    """
    if session.membership.assignment.rank not in leaders(ranks):
        return session.exchange_nccl_id(communicator, attempt, ranks, None, timeout)
    try:
        unique_id = mint()
    except FerroError as error:
        with contextlib.suppress(FerroError):
            session.exchange_nccl_id(communicator, attempt, ranks, error, timeout)
        raise
    if len(unique_id) != ID_BYTES:
        raise NcclError(f"an NCCL id has {ID_BYTES} bytes, this one {len(unique_id)}")
    return session.exchange_nccl_id(communicator, attempt, ranks, [unique_id], timeout)
