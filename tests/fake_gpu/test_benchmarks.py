"""The scripts that are to measure a device do what they say on fake ones; their figures there mean nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import (
    __main__ as everything,
    buckets,
    copies,
    one_rank,
    pipeline_messages,
    shared_gpu,
    staged_all_reduce,
    timing,
    with_mps,
)
from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.nccl.api import Features
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import run_groups, run_world
from ferrorpc.testing.gpu.nccl import FakeApi, FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.host_kernels import HostKernels
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.test_launcher import RawModule


def test_a_missed_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert (timing.exit_code({"fast": True}), capsys.readouterr().out) == (0, "met: fast\n")
    assert (timing.exit_code({"fast": True, "small": False}), capsys.readouterr().out) == (1, "met: fast\nmissed: small\n")


def test_one_rank(cupy: StandIn) -> None:
    device, api = device_of(cupy, 0), FakeNccl(cupy.machine).api(0)
    backend = one_rank.backend_of_one(device, api)
    with ProcessGroup(backend) as group:
        assert one_rank.check_values(cupy, group, backend) > 200
        assert min(one_rank.overhead(cupy, backend, 5).values()) > 0
    api = FakeNccl(cupy.machine).api(0)
    assert one_rank.absent_peer(device, api, 0.05) < 1
    assert 2 * 0.1 < one_rank.missed_init(device, api, 0.1) < one_rank.INIT_MARGIN_SECONDS


def test_what_a_binding_cannot_do_is_no_missed_target(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    api = FakeApi(FakeNccl(cupy.machine), cupy.machine.gpus[0], 22809, Features.of(22809, non_blocking=False))
    monkeypatch.setattr(one_rank, "open_nccl", lambda: api)
    monkeypatch.setattr(one_rank, "CALLS", 2)
    monkeypatch.setattr(one_rank, "OVERHEAD_SECONDS_MAX", 1.0)
    monkeypatch.setattr(one_rank, "torch_sees_gpus", lambda: False)
    monkeypatch.setattr(sys, "argv", ["one_rank", "--json", str(tmp_path / "figures")])
    with pytest.raises(SystemExit) as ended:
        one_rank.main()
    assert ended.value.code == 0, capsys.readouterr().out
    noted = [json.loads(line)["what"] for line in (tmp_path / "figures").read_text().splitlines()]
    assert noted == ["one_rank, seconds", "one_rank, values"]


def test_copies(cupy: StandIn, kernels: HostKernels) -> None:
    cupy.RawModule = type("RawModule", (RawModule,), {"kernels": kernels, "cupy": cupy})
    speeds, by_events = copies.measure(cupy, device_of(cupy, 0), 4096, 1)
    assert len(speeds) == 12
    assert all(np.isfinite(speed) for speed in speeds.values())
    assert tuple(by_events) == copies.ON_DEVICE
    assert min(by_events.values()) > 0


@pytest.mark.parametrize("wire", staged_all_reduce.WIRES)
def test_a_staged_all_reduce(cupy: StandIn, wire: str | None) -> None:
    def body(group: Any) -> tuple[float, float]:
        return staged_all_reduce.compare(cupy, group, 1 << 16, 2, wire)

    assert all(min(times) > 0 for times in run_world(2, body, clock=SYSTEM_CLOCK))


def test_one_rank_beside_torch() -> None:
    pytest.importorskip("torch")
    (found,) = run_world(1, lambda group: one_rank.of_torch(group, 5, "cpu", "gloo"), clock=SYSTEM_CLOCK)
    assert len(found) == 4
    assert min(found.values()) > 0


@pytest.mark.shared_memory
def test_ranks_that_share_a_gpu(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> dict[str, float]:
        assert shared_gpu.copy_speed(cupy, group, 1 << 14, 1) > 0
        return shared_gpu.measure(cupy, group, 1 << 14, 1)

    with ipc_backends(cupy, 2) as backends:
        for seconds in run_groups([ProcessGroup(backend) for backend in backends], body):
            assert len(seconds) == 6
            assert min(seconds.values()) > 0
    assert shared_gpu.floor_bytes(2, 100) == 500


def test_buckets(cupy: StandIn) -> None:
    backend = one_rank.backend_of_one(device_of(cupy, 0), FakeNccl(cupy.machine).api(0))
    with ProcessGroup(backend) as group:
        assert all(np.isfinite(seconds) for seconds in buckets.measure(cupy, group, 1 << 14, 1).values())


@pytest.mark.shared_memory
@pytest.mark.parametrize("apart", [True, False], ids=["cuda_ipc", "host lanes"])
def test_pipeline_messages(cupy: StandIn, apart: bool) -> None:
    def body(group: ProcessGroup) -> float:
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            return pipeline_messages.measure(cupy, group, 1 << 12, 3, 1)

    if not apart:
        assert min(run_world(2, body, clock=SYSTEM_CLOCK)) > 0
        return
    with ipc_backends(cupy, 2) as backends:
        assert min(run_groups([ProcessGroup(backend) for backend in backends], body)) > 0


def test_a_killed_peer() -> None:
    """With arrays of the host: the processes, the kill and the verdict are real."""
    command = [sys.executable, "-m", "benchmarks.gpu.killed_peer", "--host", "--backends", "grpc", "--mib", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"grpc +PeerLostError +\d+\.\d", done.stdout)


def test_all_that_wants_a_gpu_runs_to_its_end_whatever_becomes_of_the_others(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures"
    runs = {
        "hangs": (3, ("timeit", "-n1", "import time; time.sleep(60)")),
        "fails": (60, ("no_such_module",)),
        "works": (60, ("this",)),
    }
    monkeypatch.setattr(everything, "RUNS", runs)
    assert everything.main(["--json", str(figures)]) == 1
    assert re.findall(r"^(\w+) +(timed out|exit code 1|passed) ", capfd.readouterr().out, re.MULTILINE) == [
        ("hangs", "timed out"),
        ("fails", "exit code 1"),
        ("works", "passed"),
    ]
    noted = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [(each["what"], each["figures"]["verdict"]) for each in noted] == [
        ("hangs", "timed out"),
        ("fails", "exit code 1"),
        ("works", "passed"),
    ]
    assert everything.main(["--only", "works", "--json", str(figures)]) == 0
    assert everything.main(["--only", "works", "fails", "--json", str(figures), "--seconds", "0.001"]) == 1
    assert "python -m benchmarks.gpu --only works fails\n" in capfd.readouterr().out
    assert len(figures.read_text().splitlines()) == 4


def test_what_is_run_of_all_that_wants_a_gpu_is_there() -> None:
    for seconds, arguments in everything.RUNS.values():
        assert everything.LEAST_SECONDS < seconds < 600
        assert ("--json" in everything.command_of(arguments, Path("x"))) == any("benchmarks." in each for each in arguments)
        for each in arguments:
            if each.startswith("benchmarks."):
                assert find_spec(each), each
            if each.startswith(("examples/", "tests/")):
                assert (Path(everything.__file__).parents[2] / each).exists(), each


@pytest.mark.parametrize("script", [buckets, copies, one_rank, pipeline_messages, shared_gpu, staged_all_reduce])
def test_a_script_without_cupy_says_how_to_install_it(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", [script.__name__])
    with pytest.raises(BackendUnavailableError, match="try: pip install 'ferrorpc"):
        script.main()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match=r"needs a GPU: .*CuPy.*; try: pip install"):
        everything.main([])


def test_a_module_runs_between_the_start_and_the_end_of_the_mps_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    control = tmp_path / with_mps.CONTROL
    control.write_text(f'#!/bin/sh\necho "$@" "$([ -n "$1" ] || cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {told}\n')
    control.chmod(0o755)
    (tmp_path / "module_with_a_code.py").write_text(
        "import os, sys\nprint(os.environ['CUDA_MPS_PIPE_DIRECTORY'], sys.argv[1:])\nsys.exit(3)"
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["with_mps", "module_with_a_code", "-n", "2"])
    assert with_mps.main() == 3
    folder, arguments = capfd.readouterr().out.split(maxsplit=1)
    assert arguments.strip() == "['-n', '2']"
    assert [line.split() for line in told.read_text().splitlines()] == [["-d", folder], ["quit", folder]]


def test_without_the_mps_daemon_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["with_mps", "this"])
    with pytest.raises(SystemExit, match=f"needs {with_mps.CONTROL}"):
        with_mps.main()
