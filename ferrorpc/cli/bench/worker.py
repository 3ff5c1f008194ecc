"""One rank process of a measurement: executes the driver's commands. Between commands it is blocked in a read, using no CPU.

    python -m ferrorpc.cli.bench.worker MODULE:CLASS SOCKET SETTINGS

It exchanges JSON lines over the driver's Unix socket, which works across network namespaces. Its first line states its rank;
each command gets one reply. When the socket closes the process exits at once, without shutting down the measured system.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib import import_module
from typing import Any

from ferrorpc.cli.bench import memory_usage, task
from ferrorpc.cli.bench.case import Case
from ferrorpc.cli.bench.runners.base import Runner
from ferrorpc.errors import FerroError


class Worker:
    """The commands. Each method takes a command's fields and returns its reply."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._idle_bytes = memory_usage.resident_bytes()
        self._task: task.Task | None = None

    def prepare(self, case: dict[str, Any], memory: str, wire: str | None) -> dict[str, Any]:
        """Allocates a case's arrays."""
        self._task = task.make(self._runner, Case(**case), memory, wire)
        return {"repeats_min": self._task.repeats_min, "repeats_max": self._task.repeats_max}

    def turn(self, warm_ups: int, blocks: int, count: int) -> dict[str, Any]:
        """Times blocks of `count` repetitions, after `warm_ups` blocks that are not counted.

        Returns:
            This rank's seconds per operation in each block, its CPU seconds per operation and in the whole turn, and its peak
            memory beyond the case's arrays and what it used once all ranks were connected.
        """
        assert self._task is not None
        memory_usage.reset_peak()
        began = time.process_time()
        for _ in range(warm_ups):
            self._block(count)
        timed = [self._block(count) for _ in range(blocks)]
        beyond = memory_usage.peak_bytes() - self._idle_bytes - self._task.arrays_bytes
        return {
            "seconds": [seconds / count for seconds, _ in timed],
            "cpu_seconds": sum(cpu for _, cpu in timed) / (count * blocks),
            "turn_cpu_seconds": time.process_time() - began,
            "peak_bytes": max(0, beyond),
        }

    def verify(self) -> dict[str, Any]:
        """Runs the case once with values that differ by element and rank, and checks all of them."""
        assert self._task is not None
        self._task.verify()
        return {}

    def finish(self) -> dict[str, Any]:
        """Releases the case's arrays."""
        self._task = None
        return {}

    def settle(self) -> dict[str, Any]:
        """Takes the present memory use as the idle level."""
        self._idle_bytes = memory_usage.resident_bytes()
        return {}

    def usage(self) -> dict[str, Any]:
        """Memory in use, and CPU seconds since the start."""
        return {"resident_bytes": memory_usage.resident_bytes(), "cpu_seconds": time.process_time()}

    def _block(self, count: int) -> tuple[float, float]:
        assert self._task is not None
        self._task.refill()
        self._runner.barrier()()
        cpu = time.process_time()
        began = time.perf_counter()
        self._task.run(count)
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        self._task.check(count)
        return seconds, cpu


def describe(error: Exception) -> str:
    """The error without its hint: the driver adds its own."""
    return error.message if isinstance(error, FerroError) else f"{type(error).__name__}: {error}"


def pin() -> None:
    """Pins this process, with its later threads, to the CPU of its rank."""
    rank = int(os.environ.get("RANK") or os.environ.get("PMI_RANK") or 0)
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[rank % len(allowed)]})


def _runner(path: str, settings: dict[str, str]) -> Runner:
    module, _, name = path.partition(":")
    made = getattr(import_module(module), name)(settings)
    assert isinstance(made, Runner)
    return made


def main(path: str, address: str, settings: str) -> None:
    """Executes the driver's commands until it closes the socket."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    stream = sock.makefile("rw", encoding="utf-8")

    def reply(**fields: Any) -> None:
        stream.write(json.dumps(fields) + "\n")
        stream.flush()

    given = json.loads(settings)
    if given.pop("pin", False):
        pin()
    try:
        runner = _runner(path, given)
    except Exception as error:  # noqa: BLE001 - the system may raise anything; the driver shows it as the reason
        reply(error=describe(error))
        return
    reply(rank=runner.rank, version=runner.version, pid=os.getpid())
    worker = Worker(runner)
    for text in stream:
        command = json.loads(text)
        name = command.pop("do")
        if name == "close":
            runner.close()
            reply()
            return
        try:
            answer = getattr(worker, name)(**command)
        except Exception as error:  # noqa: BLE001 - the driver handles it
            answer = {"error": describe(error)}
        reply(**answer)
    os._exit(1)  # the driver is gone: a clean shutdown might wait for ranks that have ended too


if __name__ == "__main__":
    main(*sys.argv[1:])
