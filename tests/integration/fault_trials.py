"""Trials of worlds that lose a rank: several at a time, on one coordinator and one process that forks all ranks."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.integration.coordinator_process import coordinator
from tests.integration.launching import environment

SIZE = 3
RUNNING_SECONDS = 1.0
"""A rank is lost so long at most after all were in their loops."""
PATIENCE_SECONDS = 60.0
TRIALS_OF_A_COORDINATOR = 100
"""A coordinator remembers at most 256 jobs."""


@dataclass(frozen=True)
class Outcome:
    """What went wrong in a trial; nothing, it is hoped."""

    trial: str
    complaints: tuple[str, ...]


class Nursery:
    """The process whose children are the ranks."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.fault_worker", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        self._said: dict[str, queue.Queue[list[str]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            trial, *words = line.decode().split(" ")
            self._said[trial].put([word.strip() for word in words])

    def start(self, trial: str, transport: str, seed: int) -> queue.Queue[list[str]]:
        """Forks the ranks; what they say comes out of the queue."""
        said = self._said[trial] = queue.Queue()
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(f"{trial} {SIZE} {transport} {seed}\n".encode())
            self.process.stdin.flush()
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Trial:
    """One world, and the end of one of its ranks at a random moment."""

    def __init__(self, nursery: Nursery, name: str, transport: str, how: signal.Signals, seed: int) -> None:
        self.name = name
        self._chance = random.Random(seed)
        self._how = how
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._complaints: list[str] = []
        self._lost: dict[int, list[str]] = {}
        self._said = nursery.start(name, transport, seed)

    def run(self) -> Outcome:
        try:
            self._hear(lambda: len(self._pids) == SIZE)
            victim = self._chance.randrange(SIZE)
            threading.Event().wait(self._chance.uniform(0, RUNNING_SECONDS))
            os.kill(self._pids[victim], self._how)
            survivors = [rank for rank in range(SIZE) if rank != victim]
            self._hear(lambda: all(rank in self._ended for rank in survivors))
            for rank in survivors:
                self._judge(rank, victim)
            if self._how != signal.SIGKILL:
                os.kill(self._pids[victim], signal.SIGKILL)
            self._hear(lambda: victim in self._ended)
        except queue.Empty:
            missing = sorted(set(range(SIZE)) - set(self._ended))
            self._complain(f"ranks {missing} hang")
        return Outcome(self.name, tuple(self._complaints))

    def _hear(self, enough) -> None:
        while not enough():
            rank, word, *rest = self._said.get(timeout=PATIENCE_SECONDS)
            if word == "running":
                self._pids[int(rank)] = int(rest[0])
            elif word == "lost":
                self._lost[int(rank)] = rest
            elif word == "exit":
                self._ended[int(rank)] = int(rest[0])
            else:
                self._complain(f"rank {rank}: {word} {' '.join(rest)}")

    def _judge(self, rank: int, victim: int) -> None:
        """A survivor has ended: as it should?"""
        if rank not in self._lost:
            self._complain(f"rank {rank} ended with {self._ended[rank]} instead of a PeerLostError")
            return
        lost, seconds, *left = self._lost[rank]
        if int(lost) != victim:
            self._complain(f"rank {rank} says that rank {lost} was lost, and not rank {victim}")
        if float(seconds) > 1.0:
            self._complain(f"rank {rank} took {seconds} s to close its group")
        if left:
            self._complain(f"rank {rank} still has {left}")

    def _complain(self, text: str) -> None:
        self._complaints.append(text)

    def stacks(self) -> None:
        """Whoever hangs writes to stderr where."""
        for rank, process in self._pids.items():
            if rank not in self._ended:
                os.kill(process, signal.SIGUSR1)


def run_trials(count: int, transport: str, how: signal.Signals, worlds: int) -> list[Outcome]:
    """So many trials, `worlds` at a time; those in which something went wrong."""
    bad: list[Outcome] = []
    for first in range(0, count, TRIALS_OF_A_COORDINATOR):
        numbers = range(first, min(first + TRIALS_OF_A_COORDINATOR, count))
        bad += _run_some(numbers, transport, how, worlds)
    return bad


def _run_some(numbers: Sequence[int], transport: str, how: signal.Signals, worlds: int) -> list[Outcome]:
    def one(number: int) -> Outcome:
        trial = Trial(nursery, f"{transport}-{how.name}-{number}", transport, how, number)
        outcome = trial.run()
        if outcome.complaints:
            trial.stacks()
        return outcome

    with coordinator() as service:
        nursery = Nursery(service.address)
        try:
            with ThreadPoolExecutor(worlds) as pool:
                return [outcome for outcome in pool.map(one, numbers) if outcome.complaints]
        finally:
            nursery.end()
