"""How the ranks of an NCCL communicator agree on its unique ids. This module does not import NCCL.

An id that one leader creates serves 128 ranks; a larger communicator has one leader for every 128 of its ranks. Each attempt
creates new ids: an id that was used in a failed initialisation is never used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from ferrorpc.coordination.base import Session
from ferrorpc.errors import FerroError, NcclError
from ferrorpc.wire.limits import NCCL_ID_BYTES, RANKS_PER_NCCL_ID


def leaders(ranks: Sequence[int]) -> list[int]:
    """The ranks that create ids, one for every 128."""
    return sorted(ranks)[::RANKS_PER_NCCL_ID]


def agree_on_ids(
    session: Session, communicator: str, ranks: Sequence[int], create_id: Callable[[], bytes], *, attempt: int, timeout: float
) -> list[bytes]:
    """The ids of a communicator, in the order of their leaders. Every rank of it gets the same ones.

    Args:
        communicator: its name within the generation, such as "world".
        ranks: the world ranks of its members, this one included.
        create_id: makes one id of 128 bytes; called on leaders only.
        attempt: counts from 1; the same on every rank.

    Raises:
        NcclError: a leader could not create its id; every rank gets the reason.
        CollectiveTimeoutError: a leader did not come within `timeout` seconds.
        FerroError: the cause that ended the generation.
    """
    if session.membership.assignment.rank not in leaders(ranks):
        return session.exchange_nccl_id(communicator, attempt, ranks, None, timeout)
    try:
        unique_id = create_id()
    except FerroError as error:
        with contextlib.suppress(FerroError):
            session.exchange_nccl_id(communicator, attempt, ranks, error, timeout)
        raise
    if len(unique_id) != NCCL_ID_BYTES:
        raise NcclError(f"an NCCL id has {NCCL_ID_BYTES} bytes, this one {len(unique_id)}")
    return session.exchange_nccl_id(communicator, attempt, ranks, [unique_id], timeout)
