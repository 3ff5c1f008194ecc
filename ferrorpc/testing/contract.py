"""The contract suite: tests of what `ProcessGroup` promises, for any backend.

Expected values come from closed forms or from NumPy in one process, never from another backend. So two backends that pass
give the same bits. Needs pytest.
"""

from __future__ import annotations

from ferrorpc.testing.contract_data_movement import DataMovementContract
from ferrorpc.testing.contract_groups import AsyncContract, LifecycleContract, PointToPointContract, SubgroupContract
from ferrorpc.testing.contract_reductions import ReductionContract


class BasicBackendContract(ReductionContract, DataMovementContract, PointToPointContract, LifecycleContract):
    """As `BackendContract`, without operations in flight together and subgroups: for backends with send, recv, barrier only."""


class BackendContract(BasicBackendContract, AsyncContract, SubgroupContract):
    """Tests of everything that `ProcessGroup` promises, for your own backend.

        class TestMyBackend(ferrorpc.testing.BackendContract):
            def world(self, size, fn):
                return run_groups([ferrorpc.ProcessGroup(backend) for backend in my_backends(size)], fn)

    pytest collects and runs them like any test class.
    """
