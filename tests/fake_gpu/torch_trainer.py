"""One rank of a job whose torch module is on a fake GPU: `python -m tests.fake_gpu.torch_trainer FILE` under the launcher.

Ranks are processes, as torch's autograd has one thread for each GPU of a process, and each has a machine with one GPU.
"""

from __future__ import annotations

import sys

import numpy as np

import ferrorpc
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import stand_in
from tests.fake_gpu.torch_gpu import DEVICE, torch_on
from tests.fake_gpu.trained_model import train, wrapped


def main() -> None:
    """Writes weights and buffers at the end, by name, and how often the host has waited for values meanwhile."""
    device = f"{DEVICE}:0"
    with stand_in(Machine(1)) as cupy, torch_on(cupy) as gpus, ferrorpc.init_process_group(backend="grpc") as group:
        ddp = wrapped(group, device)
        gpus.waits.clear()
        train(ddp, group.rank, device)
        waits = np.array(len(gpus.waits))
        found = {name: each.cpu().numpy() for name, each in ddp.module.state_dict().items()}
        np.savez(f"{sys.argv[1]}.{group.rank}.npz", waits=waits, **found)


if __name__ == "__main__":
    main()
