"""What is measured and on which systems, as values that the driver and the rank processes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

BARRIER: Final = "barrier"
ALL_REDUCE: Final = "all_reduce"
BROADCAST: Final = "broadcast"
ALL_GATHER: Final = "all_gather"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_TO_ALL: Final = "all_to_all"
EXCHANGES: Final = (BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
SEND: Final = "send"
ROUND_TRIP: Final = "round_trip"
ORDINARY: Final = "ordinary"
REGISTERED: Final = "registered"
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: an operation, the number of ranks, and the size of the array on each.

    Attributes:
        operation: "barrier"; "all_reduce" (a sum, in place); "broadcast" (from rank 0, in place); "all_gather" (of equal
            pieces); "reduce_scatter" (a sum, of which each rank gets an equal piece); "all_to_all"; "send" (rank 0 to rank 1,
            until rank 1 confirms all arrays); "round_trip" (rank 0 to rank 1, with a reply to each array).
        size_bytes: bytes of a rank's array, of the larger one if there are two; 0 for a barrier.
        dtype: float32, float16 or bfloat16.
    """

    operation: str
    ranks: int = 2
    size_bytes: int = 0
    dtype: str = "float32"

    @property
    def count(self) -> int:
        """Elements of a rank's array, at least one."""
        return max(1, self.size_bytes // ITEM_BYTES[self.dtype])

    @property
    def title(self) -> str:
        """Its name in tables: "all_reduce 16 MiB float32, 2 ranks"."""
        what = f" {size_text(self.size_bytes)} {self.dtype}" if self.size_bytes else ""
        return f"{self.operation}{what}, {self.ranks} ranks"

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the rank processes and for result files."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class System:
    """How the ranks of one system are started.

    Attributes:
        name: its name in tables.
        runner: "module:Class" of the `runners.base.Runner` that runs in the rank processes.
        settings: arguments of that class.
        through_mpiexec: whether MPI's launcher starts its ranks.
        needs: modules that must be installed.
    """

    name: str
    runner: str
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    through_mpiexec: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """A system in one configuration: with ordinary or registered arrays, with or without compressed messages."""

    system: System
    memory: str = ORDINARY
    wire: str | None = None

    @property
    def label(self) -> str:
        """Its name in tables: "shared_memory registered", "grpc int8", "gloo"."""
        memory = [] if self.memory == ORDINARY else [self.memory]
        return " ".join((self.system.name, *memory, *([self.wire] if self.wire else [])))


def size_text(size_bytes: int) -> str:
    """A size in the format of `config.size_bytes`, with a space: "64 B", "16 KiB", "1 MiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"


def ferrorpc_system(transport: str) -> System:
    """ferrorpc with this transport, named after it."""
    return System(transport, "ferrorpc.cli.bench.runners.ferrorpc:FerrorpcRunner", {"transport": transport})


GLOO: Final = System("gloo", "ferrorpc.cli.bench.runners.gloo:GlooRunner", needs=("torch",))
MPICH: Final = System("mpich", "ferrorpc.cli.bench.runners.mpich:MpichRunner", through_mpiexec=True, needs=("mpi4py",))
