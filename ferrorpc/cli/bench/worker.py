"""One rank process of a measurement: does what the driver says, and waits for it in a read that takes no processor time.

    python -m ferrorpc.cli.bench.worker MODULE:CLASS SOCKET SETTINGS

It speaks JSON lines over the driver's Unix socket, which crosses network namespaces. Its first line says which rank it is;
each command gets one reply; the end of the socket ends the process, whatever the system underneath would like to do.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib import import_module
from typing import Any

from ferrorpc.cli.bench import task, usage
from ferrorpc.cli.bench.case import Case
from ferrorpc.cli.bench.runners.base import Runner
from ferrorpc.errors import FerroError


class Worker:
    """The commands. Each method takes a command's fields and returns its reply."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._idle_bytes = usage.resident_bytes()
        self._task: task.Task | None = None

    def prepare(self, case: dict[str, Any], memory: str, wire: str | None) -> dict[str, Any]:
        """Makes a case's arrays."""
        self._task = task.make(self._runner, Case(**case), memory, wire)
        return {"repeats_min": self._task.repeats_min, "repeats_max": self._task.repeats_max}

    def turn(self, warm_ups: int, blocks: int, count: int) -> dict[str, Any]:
        """Times blocks of `count` repetitions, after `warm_ups` blocks that are not counted.

        Returns:
            This rank's seconds per operation of each block, its processor seconds per operation, those of the whole turn, and
            the most memory it held beyond what it held when its world had met and the case's arrays.
        """
        assert self._task is not None
        usage.reset_peak()
        began = time.process_time()
        for _ in range(warm_ups):
            self._block(count)
        timed = [self._block(count) for _ in range(blocks)]
        beyond = usage.peak_bytes() - self._idle_bytes - self._task.arrays_bytes
        return {
            "seconds": [seconds / count for seconds, _ in timed],
            "cpu_seconds": sum(cpu for _, cpu in timed) / (count * blocks),
            "turn_cpu_seconds": time.process_time() - began,
            "peak_bytes": max(0, beyond),
        }

    def verify(self) -> dict[str, Any]:
        """Runs the case once with values that tell elements and ranks apart, and looks at all of them."""
        assert self._task is not None
        self._task.verify()
        return {}

    def finish(self) -> dict[str, Any]:
        """Lets go of the case's arrays."""
        self._task = None
        return {}

    def settle(self) -> dict[str, Any]:
        """From now on, memory is what is held beyond this moment's."""
        self._idle_bytes = usage.resident_bytes()
        return {}

    def usage(self) -> dict[str, Any]:
        """Memory now, and processor seconds since the start."""
        return {"resident_bytes": usage.resident_bytes(), "cpu_seconds": time.process_time()}

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
    """What happened, without what to try: the driver knows that better."""
    return error.message if isinstance(error, FerroError) else f"{type(error).__name__}: {error}"


def pin() -> None:
    """Binds this process, with all its threads to come, to the processor of its rank."""
    rank = int(os.environ.get("RANK") or os.environ.get("PMI_RANK") or 0)
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[rank % len(allowed)]})


def _runner(path: str, settings: dict[str, str]) -> Runner:
    module, _, name = path.partition(":")
    made = getattr(import_module(module), name)(settings)
    assert isinstance(made, Runner)
    return made


def main(path: str, address: str, settings: str) -> None:
    """Serves one driver until it hangs up."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    stream = line.makefile("rw", encoding="utf-8")

    def reply(**fields: Any) -> None:
        stream.write(json.dumps(fields) + "\n")
        stream.flush()

    given = json.loads(settings)
    if given.pop("pin", False):
        pin()
    try:
        runner = _runner(path, given)
    except Exception as error:  # noqa: BLE001 - whatever a system raises is why it is not measured
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
        except Exception as error:  # noqa: BLE001 - the driver decides what becomes of it
            answer = {"error": describe(error)}
        reply(**answer)
    os._exit(1)  # the driver is gone: a clean end might wait for ranks that are gone too


if __name__ == "__main__":
    main(*sys.argv[1:])
