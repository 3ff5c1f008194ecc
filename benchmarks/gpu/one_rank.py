"""Tests NCCL with one rank on one GPU: correct values, the overhead of a call, and an initialisation whose peer never comes.

    python -m benchmarks.gpu.one_rank [--only overhead values absent_peer torch] [--seconds 5] [--json FILE]

Needs a GPU and ferrorpc[gpu]. With one rank every collective of every dtype that NCCL has must return its input, bit for bit:
on an H100 with NCCL 2.28.9 all 237 results did. The host time of a call is compared with that of a bare NCCL call on the same
memory, and with torch.distributed's where torch is installed; medians of one run. A single rank has nothing to exchange, so
only the host's part is measured, and the GPU is never far behind. Exit code 1 if a target is missed. CuPy's binding of NCCL
cannot abort an initialisation, so with it only the rest is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.timing import exit_code, note
from benchmarks.options import amount
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import open_device
from ferrorpc.backends.device.communicator import DataType, Op, State, reduction
from ferrorpc.backends.nccl.api import NcclApi
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.backends.nccl.choose import open_nccl
from ferrorpc.backends.nccl.connect import NcclConnector
from ferrorpc.backends.simulated import Networks, SimulatedBackend
from ferrorpc.cli.table import table
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import NcclError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing.reference import every_dtype, operators, values

OVERHEAD_SECONDS_MAX = 15e-6
ABORT_SECONDS_MAX = 5.0
CALLS = 3000
TURN_CALLS = 300
BARE = "bare NCCL call"
PARTS = ("overhead", "values", "absent_peer", "torch")
INIT_MARGIN_SECONDS = 10.0
"""What an initialisation may take beyond its attempts: to tell who did not come, and to abort."""


def backend_of_one(device: Device, api: NcclApi) -> NcclBackend:
    """A world of one rank whose operations are NCCL's."""
    session = LocalWorld(1, clock=SYSTEM_CLOCK).session(0)
    return NcclBackend(SimulatedBackend(session, Networks(SYSTEM_CLOCK, None, 0), 60.0), device, api)


def check_values(cupy: Any, group: ProcessGroup, backend: NcclBackend) -> int:
    """Checks all combinations of operation, operator and dtype; returns how many. Raises AssertionError at the first error."""
    checked = 0
    for dtype in every_dtype():
        x = values(dtype, (33, 3), 0)
        near = cupy.asarray(x)
        for operator in operators(dtype):
            if reduction(operator, dtype) is None:
                continue
            for found in (
                group.all_reduce(near, op=operator, async_op=True).wait(),
                group.reduce(near, op=operator, async_op=True).wait(),
                group.reduce_scatter([near], op=operator, async_op=True).wait(),
            ):
                np.testing.assert_array_equal(cupy.asnumpy(found), x, err_msg=f"{operator} of {dtype.label}")
                checked += 1
        moves = (
            group.broadcast(near, async_op=True).wait(),
            group.scatter([near], async_op=True).wait(),
            group.gather(near, async_op=True).wait()[0],
            group.all_gather(near, async_op=True).wait()[0],
            group.all_to_all([near], async_op=True).wait()[0],
        )
        for found in moves:
            np.testing.assert_array_equal(cupy.asnumpy(found), x, err_msg=dtype.label)
            checked += 1
    return checked


def host_seconds(cases: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], calls: int) -> dict[str, float]:
    """The median host time of each call; they take turns of TURN_CALLS, the first of which is left out.

    Args:
        cases: name -> the call, and what waits for the GPU. It is waited for now and then, so that it is never far behind.
        calls: how many there are of each.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    in_turn = min(calls, TURN_CALLS)
    for turn in range(calls // in_turn + 1):
        for name, (call, settle) in cases.items():
            for number in range(in_turn):
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
                if turn:
                    times[name].append(seconds)
                if number % 16 == 0:
                    settle()
            settle()
    return {name: statistics.median(each) for name, each in times.items()}


def as_if_larger(group: ProcessGroup) -> ProcessGroup:
    """The group, whose blocking calls take the way that they take in larger groups. With one rank they return a copy."""
    if group._device_fast_path is not None:
        group._device_fast_path.is_alone = False
    return group


def overhead(cupy: Any, backend: NcclBackend, calls: int) -> dict[str, float]:
    """Host time of a bare NCCL all_reduce, of the raw form, and of a blocking and an asynchronous all_reduce of the group."""
    group = as_if_larger(ProcessGroup(backend))
    x = cupy.asarray(np.ones(1024, np.float32))
    launch_queue, pointer = backend.context.launch_queue(0), x.data.ptr

    def bare() -> None:
        launch_queue.communicator.all_reduce(pointer, pointer, 1024, DataType.FLOAT32, Op.SUM, launch_queue.stream.pointer)
        while launch_queue.communicator.state() is State.IN_PROGRESS:
            pass

    settle = group.synchronize
    bare()
    cases = {
        BARE: (bare, settle),
        "all_reduce_raw": (lambda: backend.all_reduce_raw(pointer, pointer, 1024, "float32"), settle),
        "all_reduce": (lambda: group.all_reduce(x, out=x), settle),
        "all_reduce, asynchronous": (lambda: group.all_reduce(x, out=x, async_op=True), settle),
    }
    return host_seconds(cases, calls)


def torch_sees_gpus() -> bool:
    """Whether torch is installed with CUDA, and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def of_torch(group: ProcessGroup, calls: int, device: str = "cuda", backend: str = "nccl") -> dict[str, float]:
    """Host time of the same call with a torch tensor, by ferrorpc and by torch.distributed, in a world of one."""
    import torch
    import torch.distributed as dist

    x = torch.ones(1024, device=device)
    settle = torch.cuda.synchronize if device == "cuda" else group.synchronize
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(x)
        cases = {
            "all_reduce of a tensor": (lambda: group.all_reduce(x, out=x), group.synchronize),
            "all_reduce of a tensor, asynchronous": (lambda: group.all_reduce(x, out=x, async_op=True), group.synchronize),
            "torch.distributed": (lambda: dist.all_reduce(x), settle),
            "torch.distributed, asynchronous": (lambda: dist.all_reduce(x, async_op=True), settle),
        }
        return host_seconds(cases, calls)
    finally:
        dist.destroy_process_group()


def absent_peer(device: Device, api: NcclApi, seconds: float) -> float:
    """How many seconds it takes to abort an initialisation whose peer has not come for `seconds`."""
    parker = SYSTEM_CLOCK.parker()
    with device.here():
        communicator = api.init(2, 0, [api.unique_id()])
        until = SYSTEM_CLOCK.now() + seconds
        while SYSTEM_CLOCK.now() < until:
            if communicator.state() is not State.IN_PROGRESS:
                raise AssertionError("a communicator of two was complete with one")
            parker.park(SYSTEM_CLOCK.now() + 0.01)
        begin = SYSTEM_CLOCK.now()
        communicator.abort()
        return SYSTEM_CLOCK.now() - begin


def missed_init(device: Device, api: NcclApi, seconds: float) -> float:
    """How many seconds it takes to give up an initialisation whose peer never comes, in attempts of `seconds` each."""
    session = LocalWorld(2, clock=SYSTEM_CLOCK).session(0)
    connector = NcclConnector(api, session, device.here, init_seconds=seconds, verdict_seconds=1.0)
    begin = SYSTEM_CLOCK.now()
    try:
        connector.connect("absent", [0, 1])
    except NcclError:
        return SYSTEM_CLOCK.now() - begin
    raise AssertionError("a communicator of two was complete with one")


def main() -> None:
    parser = argparse.ArgumentParser(description="NCCL with one rank on one GPU.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to run")
    parser.add_argument("--seconds", type=amount, default=5.0, help="how long to wait for the absent peer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    arguments = parser.parse_args()
    only, path = arguments.only, arguments.json
    device, api = open_device(), open_nccl()
    device.make_current()
    print(f"NCCL {api.version} through {api.name} on {device.uuid}")
    targets, shown = {}, dict[str, float]()
    backend = backend_of_one(device, api)
    with ProcessGroup(backend) as group:
        if {"overhead", "torch"} & set(only):
            shown = overhead(device.cupy, backend, CALLS)
            bare = shown[BARE]
            words = f"takes at most {OVERHEAD_SECONDS_MAX * 1e6:g} us more than bare"
            if "overhead" in only:
                ours = {name: each for name, each in shown.items() if name != BARE}
                targets |= {f"{name} {words}": each - bare <= OVERHEAD_SECONDS_MAX for name, each in ours.items()}
            if "torch" in only and torch_sees_gpus():
                shown |= of_torch(as_if_larger(group), CALLS)
            note(path, "one_rank, seconds", shown)
            rows = [[name, f"{each * 1e6:.1f}", f"{(each - bare) * 1e6:.1f}"] for name, each in shown.items()]
            print(table(["host time of a call", "us", "more than bare"], rows, right=frozenset(("us", "more than bare"))))
        if "values" in only:
            checked = check_values(device.cupy, group, backend)
            note(path, "one_rank, values", {"NCCL": api.version, "through": api.name, "right": checked})
            print(f"{checked} results are right")
    if "absent_peer" in only:
        targets |= judge_absent_peer(device, api, arguments.seconds, path)
    sys.exit(exit_code(targets))


def judge_absent_peer(device: Device, api: NcclApi, seconds: float, path: Path | None) -> dict[str, bool]:
    """The targets of an initialisation whose peer does not come; none where the binding cannot abort one."""
    if not api.features.non_blocking:
        print("an initialisation cannot be aborted by this binding")
        return {}
    abort = absent_peer(device, api, seconds)
    note(path, "one_rank, abort, seconds", abort)
    took, most = missed_init(device, api, seconds), 2 * seconds + INIT_MARGIN_SECONDS
    note(path, "one_rank, init without a peer, seconds", took)
    print(f"without its peer: aborted in {abort:.3f} s, two attempts of {seconds:g} s given up after {took:.1f} s")
    return {
        f"an abort takes less than {ABORT_SECONDS_MAX:g} s": abort < ABORT_SECONDS_MAX,
        f"an init whose peer never comes ends within {most:g} s": took < most,
    }


if __name__ == "__main__":
    main()
