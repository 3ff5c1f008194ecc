"""One suite of tests for every backend: what `ProcessGroup` promises, whoever performs the operations.

Expected values come from closed forms or from NumPy in one process, never from another backend; so two backends that pass
give the same bits. Needs pytest.
"""

from __future__ import annotations

from ferrorpc.testing.contract_groups import EndContract, FlightContract, PairContract, SubgroupContract
from ferrorpc.testing.contract_moves import MoveContract
from ferrorpc.testing.contract_reductions import ReductionContract


class BasicBackendContract(ReductionContract, MoveContract, PairContract, EndContract):
    """As `BackendContract`, of a backend that has only send, recv and barrier: one operation at a time, and no subgroups."""


class BackendContract(BasicBackendContract, FlightContract, SubgroupContract):
    """Tests of all that `ProcessGroup` promises, over a backend of one's own.

        class TestMyBackend(ferrorpc.testing.BackendContract):
            def world(self, size, fn):
                return run_groups([ferrorpc.ProcessGroup(backend) for backend in my_backends(size)], fn)

    pytest collects and runs them like any class of tests.
    """
