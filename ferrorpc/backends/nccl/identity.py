"""Checks before NCCL is called that each rank has a GPU of its own and that versions match: NCCL's errors name no rank."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from ferrorpc.coordination.base import Session
from ferrorpc.errors import BackendUnavailableError

BARRIER: Final = "ferrorpc/nccl/identity"


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank's GPU and NCCL."""

    uuid: str
    version: int
    binding: str
    host: str


def introduce(session: Session, uuid: str, version: int, binding: str, timeout: float) -> None:
    """Makes sure that all ranks can use NCCL together. Each of them calls it, with its GPU and its NCCL.

    Raises:
        BarrierTimeoutError: naming every rank that did not come.
        BackendUnavailableError: two ranks have one GPU, or the versions differ; every rank raises the same.
    """
    own = Identity(uuid, version, binding, socket.gethostname())
    texts = session.barrier(BARRIER, json.dumps(asdict(own)).encode(), timeout=timeout)
    judge([Identity(**json.loads(text)) for text in texts])


def judge(ranks: Sequence[Identity]) -> None:
    """Raises BackendUnavailableError where NCCL would refuse these ranks, with their numbers."""
    by_gpu: dict[str, list[int]] = defaultdict(list)
    for rank, identity in enumerate(ranks):
        by_gpu[identity.uuid].append(rank)
    for uuid, sharing in by_gpu.items():
        if len(sharing) > 1:
            raise BackendUnavailableError(
                f"ranks {_and(sharing)} are on one GPU, {uuid} of {ranks[sharing[0]].host}, and NCCL needs one for each rank",
                "give each process its own GPU by CUDA_VISIBLE_DEVICES or FERRORPC_DEVICE, or use backend='auto', which shares",
                ranks=sharing,
            )
    versions = {identity.version for identity in ranks}
    if len(versions) > 1:
        said = "; ".join(f"rank {rank} has {_version(each.version)} through {each.binding}" for rank, each in enumerate(ranks))
        raise BackendUnavailableError(
            f"the ranks have different versions of NCCL: {said}", "install the same nvidia-nccl package everywhere"
        )


def _and(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"{', '.join(first)} and {last}"


def _version(number: int) -> str:
    """22809 as 2.28.9."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
