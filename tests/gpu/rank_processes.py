"""Ranks of one job as processes that share one GPU, each with its own output, on a coordinator of their own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu.scenarios import FAKE
from tests.integration.coordinator_process import coordinator
from tests.integration.launching import environment

SECONDS = 50.0
"""How long a test's processes may take altogether."""
LOOK_SECONDS = 0.01
SHOWN_CHARACTERS = 6000
"""How much of each process's output is shown where something is wrong."""


class RankProcess:
    """A process that runs a scenario.

    Args:
        folder: for its output.
        command: the program in this folder, the scenario, and its options.
    """

    def __init__(self, folder: Path, name: str, command: list[str], variables: dict[str, str]) -> None:
        self.name = name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"tests.gpu.{command[0]}", *command[1:]],
                stdout=out,
                stderr=err,
                env={**environment(), **variables},
            )

    def heard(self, word: str) -> list[str] | None:
        """What it said after this word; None if it has not said it."""
        lines = self._out.read_text().splitlines(keepends=True)
        said = (line.split() for line in lines if line.endswith("\n"))
        return next((words[1:] for words in said if words[:1] == [word]), None)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def output(self) -> str:
        """What it has said, and what went wrong."""
        out, err = (path.read_text(errors="replace")[-SHOWN_CHARACTERS:] for path in (self._out, self._err))
        return f"-- {self.name}, exit code {self.code}, stdout:\n{out}\n-- {self.name}, stderr:\n{err}\n"


class Ranks:
    """The ranks of a job.

    Args:
        address: the coordinator's.
        program: what they run, a module of this folder.
        variables: further ones of every rank's environment.
    """

    def __init__(self, address: str, folder: Path, size: int, program: str, variables: dict[str, str]) -> None:
        self.size = size
        self._program = program
        self._folder = folder
        self._variables = {"FERRORPC_COORDINATOR": address, "FERRORPC_WORLD_SIZE": str(size), **variables}
        self._until = time.monotonic() + SECONDS
        self._all: list[RankProcess] = []
        self.now: dict[int, RankProcess] = {}
        """The newest process of each rank."""

    def start(self, rank: int, scenario: str, **options: Any) -> RankProcess:
        """Starts a rank, or its replacement."""
        own = {"FERRORPC_NAME": f"rank-{rank}", "FERRORPC_RANK_HINT": str(rank), "LOCAL_RANK": str(rank)}
        name = f"process-{len(self._all)}-of-rank-{rank}"
        command = [self._program, scenario, json.dumps(options)]
        found = RankProcess(self._folder, name, command, {**self._variables, **own})
        self._all.append(found)
        self.now[rank] = found
        return found

    def start_all(self, scenario: str, **options: Any) -> None:
        """Starts every rank."""
        for rank in range(self.size):
            self.start(rank, scenario, **options)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        """What `condition` returns as soon as it is true. Fails with everybody's output and stacks after so many seconds."""
        until = min(self._until, time.monotonic() + seconds)
        while not (found := condition()):
            if time.monotonic() > until:
                self.fail(f"not in time: {what}")
            time.sleep(LOOK_SECONDS)
        return found

    def hear(self, rank: int, word: str, seconds: float = SECONDS) -> list[str]:
        """What a rank says after this word, which it must say before it ends."""
        process = self.now[rank]

        def said() -> list[list[str]] | None:
            code = process.code  # before its output is read
            if (found := process.heard(word)) is not None:
                return [found]
            if code is not None:
                self.fail(f"rank {rank} ended before it said {word!r}")
            return None

        found: list[list[str]] = self.wait(said, f"rank {rank} says {word!r}", seconds)
        return found[0]

    def hear_all(self, word: str) -> None:
        """Waits until every rank has said this word."""
        for rank in range(self.size):
            self.hear(rank, word)

    def end_all(self, seconds: float = SECONDS) -> None:
        """Waits until every rank has ended, with exit code 0."""
        for rank, process in self.now.items():
            self.wait(lambda process=process: process.code is not None, f"rank {rank} ends", seconds)
            if process.code != 0:
                self.fail(f"rank {rank} ended with {process.code}")

    def fail(self, what: str) -> None:
        """Raises AssertionError with all that processes have said; those that still run show where they are."""
        for each in self._all:
            if each.code is None:
                each.process.send_signal(signal.SIGCONT)
                each.process.send_signal(signal.SIGABRT)
        for each in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(5)
        raise AssertionError(what + "\n" + "".join(each.output() for each in self._all))

    def kill(self) -> None:
        """Ends whatever still runs."""
        for each in self._all:
            each.process.kill()
        for each in self._all:
            each.process.wait()


@contextmanager
def ranks_of(
    folder: Path, size: int, backend: str, transport: str = "auto", program: str = "shared_gpu_program", **variables: str
) -> Iterator[Ranks]:
    """A job without ranks as yet; fake GPUs, which processes cannot share, go by the host."""
    given = {
        "FERRORPC_BACKEND": "grpc" if FAKE and backend == "cuda_ipc" else backend,
        "FERRORPC_TRANSPORT": transport,
        **variables,
    }
    with coordinator() as service:
        found = Ranks(service.address, folder, size, program, given)
        try:
            yield found
        finally:
            found.kill()
