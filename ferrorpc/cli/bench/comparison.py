"""Compares contenders: they take turns, round by round, so that disturbances on the machine affect all of them equally.

Only one system's ranks run at a time, because on few CPUs the busy waiting of one system would slow the others down. The
others are blocked in a read. A turn is several blocks of repetitions. A block begins at a barrier, and its time is that of
the slowest rank; it is long enough for an uneven start not to matter. Medians are taken over the blocks of all turns.

The CPU time of other processes is measured too. A turn in which they used much of a CPU is repeated, up to `patience` times,
whatever its result was; the least disturbed one counts.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from ferrorpc.cli.bench import machine
from ferrorpc.cli.bench.case import Case, Contender, System
from ferrorpc.cli.bench.rank_processes import Host, RankProcesses
from ferrorpc.errors import FerroError

WARM_UPS: Final = 3
CALIBRATIONS: Final = 7
BLOCK_SECONDS: Final = 0.01
DISTURBED_CPUS: Final = 0.1
"""CPUs that other processes may use on average before a turn is repeated."""
BLOCKS_MIN: Final = 3
BLOCKS_MAX: Final = 500

Note = Callable[[str], None]


@dataclass(slots=True)
class Samples:
    """The measurements of one contender at one case.

    Attributes:
        count: repetitions in a block.
        seconds: per operation, of each block's slowest rank.
        cpu_seconds: of all ranks together, per operation, of each turn.
        peak_bytes: the most memory that any rank used beyond its idle memory and its arrays.
        others_cpus: CPUs that all other processes used on average, of each turn.
        skipped: why nothing was measured; empty otherwise.
    """

    count: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    others_cpus: list[float] = field(default_factory=list)
    skipped: str = ""

    def summary(self) -> dict[str, Any]:
        """The figures of a result file."""
        if self.skipped or not self.seconds:
            return {"skipped": self.skipped or "no turn was completed"}
        return {
            "median_seconds": statistics.median(self.seconds),
            "min_seconds": min(self.seconds),
            "p90_seconds": statistics.quantiles(self.seconds, n=10, method="inclusive")[-1],
            "cpu_seconds": statistics.median(self.cpu_seconds),
            "peak_bytes": self.peak_bytes,
            "others_cpus": statistics.mean(self.others_cpus),
            "blocks": len(self.seconds),
            "repetitions": self.count,
        }


class Comparison:
    """Measures cases on contenders.

    Args:
        seconds: about how long one turn takes.
        rounds: turns of each contender at each case and with each set of processes.
        restarts: how often all processes are started anew.
        patience: how often a disturbed turn may be repeated.
        hosts: as for `RankProcesses`; none: this machine.
        note: is called with progress messages.
    """

    def __init__(
        self,
        *,
        seconds: float,
        rounds: int,
        restarts: int = 1,
        patience: int = 0,
        pin: bool = False,
        hosts: Sequence[Host] = (),
        note: Note = lambda text: None,
    ) -> None:
        self._seconds = seconds
        self._rounds = rounds
        self._restarts = restarts
        self._patience = patience
        self._pin = pin
        self._hosts = hosts
        self._note = note
        self.versions: dict[str, str] = {}
        self.loads: list[float] = []

    def run(self, cases: Sequence[Case], contenders: Sequence[Contender]) -> list[dict[str, Any]]:
        """Measures every case on every contender.

        Returns:
            One row per case: {"case": {...}, "results": {label: figures, or {"skipped": why}}}.
        """
        samples = {(case, contender.label): Samples() for case in cases for contender in contenders}
        for ranks in sorted({case.ranks for case in cases}):
            for _ in range(self._restarts):
                with contextlib.ExitStack() as stack:
                    start = partial(RankProcesses, ranks=ranks, hosts=self._hosts, pin=self._pin)
                    systems = _Systems(stack, start)
                    for case in (case for case in cases if case.ranks == ranks):
                        self._note(case.title)
                        self._case(case, contenders, systems, samples)
        return [
            {
                "case": case.to_json(),
                "results": {contender.label: samples[case, contender.label].summary() for contender in contenders},
            }
            for case in cases
        ]

    def _case(
        self, case: Case, contenders: Sequence[Contender], systems: _Systems, samples: dict[tuple[Case, str], Samples]
    ) -> None:
        for number in range(self._rounds):
            self.loads.append(os.getloadavg()[0])
            turn = number % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                found = samples[case, contender.label]
                if found.skipped:
                    continue
                try:
                    ranks = systems.running(contender.system)
                    self.versions[contender.system.name] = ranks.version
                    self._turn(case, contender, ranks, found, verify=number == 0)
                except FerroError as error:
                    found.skipped = error.message
                    systems.stop(contender.system)
                    self._note(f"  {contender.label}: {error.message}")

    def _turn(self, case: Case, contender: Contender, ranks: RankProcesses, found: Samples, *, verify: bool) -> None:
        repeats_min, repeats_max = ranks.prepare(case, contender)
        if verify:
            ranks.ask("verify")
        if not found.count:
            found.count, one = self._repetitions(ranks, repeats_min, repeats_max)
        else:
            one = statistics.median(found.seconds)
        blocks = max(BLOCKS_MIN, min(BLOCKS_MAX, int(self._seconds / (one * found.count))))
        others, replies = self._undisturbed(ranks, blocks, found.count)
        found.seconds += _slowest(replies)
        found.cpu_seconds.append(sum(reply["cpu_seconds"] for reply in replies))
        found.peak_bytes = max(found.peak_bytes, *(reply["peak_bytes"] for reply in replies))
        found.others_cpus.append(others)
        ranks.ask("finish")

    def _repetitions(self, ranks: RankProcesses, low: int, high: int) -> tuple[int, float]:
        """How many operations fill a block of BLOCK_SECONDS, and the seconds of one."""
        count, tries = low, 1
        while True:
            one = statistics.median(_slowest(ranks.ask("turn", warm_ups=WARM_UPS, blocks=tries, count=count)))
            enough = max(low, min(high, int(BLOCK_SECONDS / one)))
            if enough <= count:
                return count, one
            count, tries = enough, CALIBRATIONS

    def _undisturbed(self, ranks: RankProcesses, blocks: int, count: int) -> tuple[float, list[dict[str, Any]]]:
        """One turn, or the least disturbed of several: the CPUs that others used, and the ranks' replies."""
        tries = []
        for _ in range(1 + self._patience):
            busy, began = machine.busy_seconds(), time.monotonic()
            replies = ranks.ask("turn", warm_ups=WARM_UPS, blocks=blocks, count=count)
            ours = sum(reply["turn_cpu_seconds"] for reply in replies)
            others = max(0.0, machine.busy_seconds() - busy - ours) / (time.monotonic() - began)
            tries.append((others, replies))
            if others <= DISTURBED_CPUS:
                break
        return min(tries, key=lambda each: each[0])


class _Systems:
    """The running systems of one restart. Each is started when first used."""

    def __init__(self, stack: contextlib.ExitStack, start: Callable[[System], RankProcesses]) -> None:
        self._stack = stack
        self._start = start
        self._running: dict[str, RankProcesses] = {}
        self._failed: dict[str, FerroError] = {}

    def running(self, system: System) -> RankProcesses:
        """The system's running ranks. A system that failed to start is not tried again: its error is raised each time."""
        if system.name in self._failed:
            raise self._failed[system.name].again()
        if system.name not in self._running:
            try:
                self._running[system.name] = self._stack.enter_context(self._start(system))
            except FerroError as error:
                self._failed[system.name] = error
                raise
        return self._running[system.name]

    def stop(self, system: System) -> None:
        """Stops a system's ranks after an error; they are started anew for the next case."""
        running = self._running.pop(system.name, None)
        if running is not None:
            running.close()


def _slowest(replies: Sequence[dict[str, Any]]) -> list[float]:
    return [max(times) for times in zip(*(reply["seconds"] for reply in replies), strict=True)]
