"""What the selection of an algorithm depends on besides call and group size. Equal on all ranks of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Final

from ferrorpc.collectives.algorithms.algorithm import Algorithm
from ferrorpc.collectives.algorithms.catalogue import algorithms_of
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError, ConfigError
from ferrorpc.wire.cost_table import Costs, CostTable, parse

_DIRECT: Final = "direct"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What all ranks agree on.

    Attributes:
        published: the cost table of this generation; None for the packaged one.
        algorithms: requested by the setting `algorithm`, for calls that request none themselves. Ranks whose settings differ
            get a signature mismatch.
        hosts: the number of each group rank's host; () where that is not known.
    """

    published: CostTable | None = None
    algorithms: tuple[tuple[Operation, str], ...] = ()
    hosts: tuple[int, ...] = ()

    @property
    def table(self) -> CostTable:
        """The current cost table."""
        return packaged_table() if self.published is None else self.published

    def costs(self, size: int) -> Costs:
        """The costs in a group of `size` ranks."""
        return self.table.costs(size)

    def algorithms_of(self, operation: Operation) -> tuple[Algorithm, ...]:
        """The algorithms that can run among these hosts."""
        return algorithms_of(operation, self.hosts)

    def applied(self, call: Call) -> Call:
        """The call with the algorithm of the setting, unless it names one itself, compresses, or that algorithm cannot run
        among this group's hosts."""
        name = dict(self.algorithms).get(call.operation)
        if name is None or call.algorithm is not None or call.wire is not None:
            return call
        can_run = name == _DIRECT or name in [entry.name for entry in self.algorithms_of(call.operation)]
        return replace(call, algorithm=name) if can_run else call

    def among(self, ranks: Sequence[int]) -> Tuning:
        """The tuning of a subgroup."""
        return replace(self, hosts=tuple(self.hosts[rank] for rank in ranks) if self.hosts else ())


@cache
def packaged_table() -> CostTable:
    """The cost table that comes with ferrorpc."""
    return parse((files(__package__) / "costs.json").read_text(encoding="utf-8"))


def published(text: str) -> CostTable | None:
    """The cost table of an assignment; None where there is none.

    Raises:
        CodecError: it is invalid.
    """
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise CodecError(f"the coordinator published a cost table that is none: {error}") from None


def parse_algorithms(choices: Sequence[tuple[str, str]], source: str) -> tuple[tuple[Operation, str], ...]:
    """The setting `algorithm`, as (operation, algorithm) pairs.

    Args:
        source: where the setting was given, as `Config.source` has it.

    Raises:
        ConfigError: an operation or an algorithm that does not exist.
    """
    found = []
    for operation, name in choices:
        given = f"algorithm={f'{operation}={name}'!r} (from {source})"
        if operation not in {each.value for each in Operation}:
            names = ", ".join(each.value for each in Operation)
            raise ConfigError(f"{given}: there is no operation {operation!r}", hint=f"use one of: {names}")
        known = algorithm_names(Operation(operation))
        if name not in known:
            raise ConfigError(f"{given}: {operation} has no algorithm {name!r}", hint=f"use one of: {', '.join(known)}")
        found.append((Operation(operation), name))
    return tuple(found)


def algorithm_names(operation: Operation) -> list[str]:
    """The values of `algorithm=`, whatever the hosts."""
    names = [entry.name for entry in algorithms_of(operation, (0, 0, 1))]
    return names + [_DIRECT] * (operation is Operation.ALL_REDUCE)
