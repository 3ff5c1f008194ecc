"""Chooses a rank's GPU, and the GPU backend that "auto" stands for.

A rank that may use NCCL joins with its GPU's UUID and its NCCL version as labels, which reach every member with the assignment.
So all ranks make the same choice, before NCCL is called and without further messages.

What only GPUs need is imported in the functions that need it, as most processes start sooner without.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ferrorpc.arrays.torch_cuda import chosen_in_torch, uses_gpus
from ferrorpc.backends.message import MessageBackend
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.types import Peer

if TYPE_CHECKING:
    from ferrorpc.arrays.device import Device
    from ferrorpc.backends.base import Backend
    from ferrorpc.backends.nccl.backend import OverNccl

NEEDING: Final = ("nccl", "hybrid")
"""Backends that need NCCL."""
_GPU: Final = "gpu"
_NCCL: Final = "nccl"
_log = logging.getLogger("ferrorpc.backends")


def device_for(asked: int | None, local_rank: int | None) -> Device:
    """This rank's GPU: the requested one, else the one set in torch, else the one with this rank's number on its node, else
    CuPy's current device.

    Raises:
        BackendUnavailableError: there is no CuPy or no such GPU.
    """
    from ferrorpc.arrays.devices import open_device

    chosen = chosen_in_torch() if asked is None else asked
    device = open_device(chosen)
    if chosen is None and local_rank is not None:
        device = open_device(local_rank % device.count)
    return device


def select_device(asked: int | None, local_rank: int | None) -> None:
    """Makes this rank's GPU CuPy's current device, in programs that have imported CuPy, whatever the backend.

    Raises:
        BackendUnavailableError: there is no such GPU, and it was requested.
    """
    if "cupy" not in sys.modules:
        return
    try:
        device_for(asked, local_rank).make_current()
    except BackendUnavailableError:
        if asked is not None:
            raise


def join_labels(backend: str, asked: int | None, local_rank: int | None) -> dict[str, str]:
    """The labels with which a member joins; none where it will not use a GPU.

    "auto" looks for a GPU only in programs that use GPUs. One that cannot use NCCL may still share its GPU's memory.

    Raises:
        BackendUnavailableError: the backend needs a GPU, and what is missing is named with the command that installs it.
    """
    if backend == "cuda_ipc":
        return {_GPU: device_for(asked, local_rank).uuid}
    if backend not in NEEDING and not (backend == "auto" and ("cupy" in sys.modules or uses_gpus())):
        return {}
    from ferrorpc.backends.nccl.choose import open_nccl

    found = dict[str, str]()
    try:
        found[_GPU] = device_for(asked, local_rank).uuid
        found[_NCCL] = str(open_nccl().version)
    except BackendUnavailableError as error:
        if backend in NEEDING:
            raise
        _log.warning("backend 'auto' will not use NCCL, because %s; %s", error.reason, error.hint)
    return found


def nccl_usable(peers: Sequence[Peer]) -> bool:
    """Whether "auto" uses NCCL for GPU arrays. Logs the reason where some members have GPUs and it does not."""
    labels = [dict(peer.labels) for peer in peers]
    without = [str(rank) for rank, label in enumerate(labels) if _NCCL not in label]
    if without:
        reason = f"ranks {', '.join(without)} have no GPU that CuPy and NCCL can use, or had not begun to use one"
    else:
        from ferrorpc.backends.nccl.identity import Identity, judge

        members = zip(labels, peers, strict=True)
        try:
            judge([Identity(label[_GPU], int(label[_NCCL]), "its binding", peer.host) for label, peer in members])
            return True
        except BackendUnavailableError as error:
            reason = error.reason
    if any(_GPU in label for label in labels):
        _log.warning("backend 'auto' does without NCCL: %s", reason)
    return False


def shares_gpu(peers: Sequence[Peer]) -> bool:
    """Whether "auto" shares GPU memory: all members are on one host, each has a GPU, and some have the same one."""
    gpus = [dict(peer.labels).get(_GPU) for peer in peers]
    return None not in gpus and len(set(gpus)) < len(gpus) and len({peer.host for peer in peers}) == 1


def make_cuda_ipc(lanes: MessageBackend, device: Device) -> Backend:
    """This rank's backend over its host lanes, on its GPU, whose memory it shares with the others.

    Raises:
        BackendUnavailableError: what is missing.
        NcclError: a rank could not share its GPU's memory, or open another's.
    """
    from ferrorpc.backends.cuda_ipc.backend import CudaIpcBackend

    device.make_current()
    backend = CudaIpcBackend(lanes, device)
    if device.takes_turns:
        ranks = ranks_on(device.uuid, lanes.session.membership.assignment.peers)
        if len(ranks) > 1 and ranks[0] == lanes.rank:
            _log.warning(
                "ranks %s take turns on one GPU, which costs 0.15 ms a turn and more; NVIDIA's MPS lets them use it at once: "
                "run `nvidia-cuda-mps-control -d` on the host before the job",
                ", ".join(map(str, ranks)),
            )
    return backend


def ranks_on(uuid: str, peers: Sequence[Peer]) -> list[int]:
    """The ranks whose GPU is the one with that UUID."""
    return [peer.rank for peer in peers if dict(peer.labels).get(_GPU) == uuid]


def make_nccl(lanes: MessageBackend, device: Device) -> Backend:
    """This rank's backend over its host lanes, on its GPU, which becomes CuPy's current one.

    Raises:
        BackendUnavailableError: what is missing, or which ranks cannot be together.
        NcclError: NCCL's communicator could not be made.
    """
    from ferrorpc.backends.nccl.backend import NcclBackend

    return _over_nccl(NcclBackend, lanes, device)


def make_hybrid(lanes: MessageBackend, device: Device) -> Backend:
    """As `make_nccl`, for GPU arrays alone."""
    from ferrorpc.backends.hybrid import HybridBackend

    return _over_nccl(HybridBackend, lanes, device)


def _over_nccl(kind: type[OverNccl], lanes: MessageBackend, device: Device) -> Backend:
    from ferrorpc.backends.nccl.choose import open_nccl

    api = open_nccl()
    device.make_current()
    return kind(lanes, device, api)
