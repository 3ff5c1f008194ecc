"""One suite of tests for every backend: what `ProcessGroup` promises, whoever performs the operations.

    class TestMyBackend(BackendContract):
        def world(self, size, fn):
            return run_groups([ProcessGroup(backend) for backend in my_backends(size)], fn)

Expected values come from closed forms or from NumPy in one process, never from another backend; so two backends that pass
give the same bits. Needs pytest. A backend that has only send, recv and barrier runs one operation at a time and has no
subgroups: it passes `BasicBackendContract`.
"""

from __future__ import annotations

from ferrorpc.testing.contract_groups import EndContract, FlightContract, PairContract, SubgroupContract
from ferrorpc.testing.contract_moves import MoveContract
from ferrorpc.testing.contract_reductions import ReductionContract


class BasicBackendContract(ReductionContract, MoveContract, PairContract, EndContract):
    """What send, recv and barrier are enough for."""


class BackendContract(BasicBackendContract, FlightContract, SubgroupContract):
    """The whole face."""
