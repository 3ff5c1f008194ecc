"""Contenders take turns, round by round, so that what the machine does meanwhile hits all of them alike.

Only one system's ranks work at a time: on few processors, ranks that wait busily would slow every other system down. The
others are blocked in a read. A turn is some blocks of repetitions; a block begins at a common barrier, and its time is that
of its slowest rank; it is long enough for the ranks' uneven start not to matter. Medians are over the blocks of all turns.

What the rest of the machine did meanwhile is measured as well. A turn in which other processes took much of a processor is
taken again, as often as patience allows, whatever its result was; the least disturbed one counts.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ferrorpc.cli.bench import machine
from ferrorpc.cli.bench.case import Case, Contender, System
from ferrorpc.cli.bench.world import Host, World
from ferrorpc.errors import FerroError

WARM_UPS: Final = 3
CALIBRATIONS: Final = 7
BLOCK_SECONDS: Final = 0.01
DISTURBED_CPUS: Final = 0.1
"""Processors that others may take on average before a turn is taken again."""
BLOCKS_MIN: Final = 3
BLOCKS_MAX: Final = 500

Note = Callable[[str], None]


@dataclass(slots=True)
class Samples:
    """What one contender's turns at one case gave.

    Attributes:
        count: repetitions in a block.
        seconds: per operation, of each block's slowest rank.
        cpu_seconds: of all ranks together per operation, of each turn.
        peak_bytes: the most that any rank held beyond its idle memory and its arrays.
        others_cpus: processors that everything else on the machine took on average, of each turn.
        skipped: why there is nothing; empty when there is.
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
    """Runs cases on contenders and gathers the samples.

    Args:
        seconds: about how long one turn takes.
        rounds: turns of each contender at each case and with each set of processes.
        restarts: sets of fresh processes.
        patience: how often a disturbed turn may be taken again.
        hosts: as for `World`; none: this machine.
        note: is told what goes on.
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
            A row a case: {"case": {...}, "results": {label: figures, or {"skipped": why}}}.
        """
        samples = {(case, contender.label): Samples() for case in cases for contender in contenders}
        for ranks in sorted({case.ranks for case in cases}):
            for _ in range(self._restarts):
                with contextlib.ExitStack() as stack:
                    seats = _Seats(stack, ranks, self._hosts, self._pin)
                    for case in (case for case in cases if case.ranks == ranks):
                        self._note(case.title)
                        self._case(case, contenders, seats, samples)
                    self.versions |= seats.versions
        return [
            {
                "case": case.to_json(),
                "results": {contender.label: samples[case, contender.label].summary() for contender in contenders},
            }
            for case in cases
        ]

    def _case(
        self, case: Case, contenders: Sequence[Contender], seats: _Seats, samples: dict[tuple[Case, str], Samples]
    ) -> None:
        for number in range(self._rounds):
            self.loads.append(os.getloadavg()[0])
            turn = number % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                found = samples[case, contender.label]
                if found.skipped:
                    continue
                try:
                    self._turn(case, contender, seats.world(contender.system), found, verify=number == 0)
                except FerroError as error:
                    found.skipped = error.message
                    seats.vacate(contender.system)
                    self._note(f"  {contender.label}: {error.message}")

    def _turn(self, case: Case, contender: Contender, world: World, found: Samples, *, verify: bool) -> None:
        repeats_min, repeats_max = world.prepare(case, contender)
        if verify:
            world.ask("verify")
        if not found.count:
            found.count, one = self._repetitions(world, repeats_min, repeats_max)
        else:
            one = statistics.median(found.seconds)
        blocks = max(BLOCKS_MIN, min(BLOCKS_MAX, int(self._seconds / (one * found.count))))
        others, replies = self._undisturbed(world, blocks, found.count)
        found.seconds += _slowest(replies)
        found.cpu_seconds.append(sum(reply["cpu_seconds"] for reply in replies))
        found.peak_bytes = max(found.peak_bytes, *(reply["peak_bytes"] for reply in replies))
        found.others_cpus.append(others)
        world.ask("finish")

    def _repetitions(self, world: World, low: int, high: int) -> tuple[int, float]:
        """How many operations make a block of BLOCK_SECONDS, and the seconds of one. An uneven start blurs short blocks."""
        count, tries = low, 1
        while True:
            one = statistics.median(_slowest(world.ask("turn", warm_ups=WARM_UPS, blocks=tries, count=count)))
            enough = max(low, min(high, int(BLOCK_SECONDS / one)))
            if enough <= count:
                return count, one
            count, tries = enough, CALIBRATIONS

    def _undisturbed(self, world: World, blocks: int, count: int) -> tuple[float, list[dict[str, Any]]]:
        """One turn, or the least disturbed of several: what others took, and the ranks' replies."""
        tries = []
        for _ in range(1 + self._patience):
            busy, began = machine.busy_seconds(), time.monotonic()
            replies = world.ask("turn", warm_ups=WARM_UPS, blocks=blocks, count=count)
            ours = sum(reply["turn_cpu_seconds"] for reply in replies)
            others = max(0.0, machine.busy_seconds() - busy - ours) / (time.monotonic() - began)
            tries.append((others, replies))
            if others <= DISTURBED_CPUS:
                break
        return min(tries, key=lambda each: each[0])


class _Seats:
    """The worlds of one set of processes, each started when it is first asked for."""

    def __init__(self, stack: contextlib.ExitStack, ranks: int, hosts: Sequence[Host], pin: bool) -> None:
        self._stack = stack
        self._ranks = ranks
        self._hosts = hosts
        self._pin = pin
        self._worlds: dict[str, World] = {}
        self._absent: dict[str, FerroError] = {}
        self.versions: dict[str, str] = {}

    def world(self, system: System) -> World:
        """The system's ranks. One that did not start is not tried again: its error is raised each time."""
        if system.name in self._absent:
            raise self._absent[system.name].again()
        if system.name not in self._worlds:
            try:
                world = World(system, self._ranks, hosts=self._hosts, pin=self._pin)
            except FerroError as error:
                self._absent[system.name] = error
                raise
            self._worlds[system.name] = self._stack.enter_context(world)
            self.versions[system.name] = world.version
        return self._worlds[system.name]

    def vacate(self, system: System) -> None:
        """Ends a system's ranks after an error; the next case gets fresh ones."""
        world = self._worlds.pop(system.name, None)
        if world is not None:
            world.close()


def _slowest(replies: Sequence[dict[str, Any]]) -> list[float]:
    return [max(times) for times in zip(*(reply["seconds"] for reply in replies), strict=True)]
