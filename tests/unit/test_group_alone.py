"""What a group does without others: a world of one, a backend without a coordinator, local calls."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ferrorpc import (
    Backend,
    BackendUnavailableError,
    DType,
    GroupAbortedError,
    GroupClosedError,
    ProcessGroup,
    ReduceOp,
    SimulatedBackend,
    TensorMismatchError,
    UsageError,
)
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.execution import Prepared
from tests.contract.queues import QueueBackend, Wires, queue_backends


@pytest.fixture
def alone() -> ProcessGroup:
    return ProcessGroup(SimulatedBackend.create_group(1)[0], timeout=5.0)


def test_a_world_of_one_gives_back_what_it_was_given_in_memory_of_its_own(alone: ProcessGroup) -> None:
    x = np.arange(6.0).reshape(2, 3)
    for found in (
        alone.all_reduce(x, op=ReduceOp.MEAN),
        alone.reduce(x),
        alone.reduce_scatter([x]),
        alone.broadcast(x),
        alone.scatter([x]),
        alone.gather(x)[0],
        alone.all_gather(x)[0],
        alone.all_to_all([x])[0],
        alone.all_reduce(x, async_op=True).wait(),
    ):
        assert np.array_equal(found, x)
        assert found.dtype == x.dtype
        assert found.flags.writeable
        assert not np.shares_memory(found, x)
    assert alone.all_reduce(x, out=x) is x
    assert alone.barrier() is None


WRONG = {
    "rows in place of pieces": (lambda group: group.all_gather(np.ones(3), out=np.empty((1, 3))), r"pass out=list\(rows\)"),
    "mean of integers": (lambda group: group.all_reduce(np.arange(3), "mean"), "convert to a float first, or use op='sum'"),
    "bits of floats": (lambda group: group.all_reduce(np.ones(3), "band"), "convert to integers or bool first"),
    "order of complex": (lambda group: group.all_reduce(np.ones(3, complex), "max"), r"such as np\.abs\(x\)"),
    "a dict": (lambda group: group.broadcast({"lr": 0.1}), r"bytes go into group\.store"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_call_that_is_wrong_is_told_what_to_do_in_its_place(alone: ProcessGroup, case: str) -> None:
    call, hint = WRONG[case]
    with pytest.raises(UsageError, match=rf"\ntry: .*{hint}"):
        call(alone)
    rows = np.empty((1, 3))
    alone.all_gather(np.ones(3), out=list(rows))
    assert rows.tolist() == [[1.0, 1.0, 1.0]]


def test_a_world_of_one_still_refuses_what_means_nothing(alone: ProcessGroup) -> None:
    with pytest.raises(TensorMismatchError, match="mean"):
        alone.all_reduce(np.arange(3), op="mean")
    with pytest.raises(UsageError, match="ranks"):
        alone.subgroup(0)


def test_a_bfloat16_array_comes_back_as_one(alone: ProcessGroup) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(4).astype(ml_dtypes.bfloat16)
    found = alone.all_reduce(x)
    assert (found.dtype, found.flags.writeable) == (ml_dtypes.bfloat16, True)
    assert not np.shares_memory(found, x)
    out = np.zeros(4, ml_dtypes.bfloat16)
    assert alone.all_reduce(x, out=out) is out
    assert np.array_equal(out, x)


@pytest.mark.parametrize("dtype", ["float32", np.float16, DType.INT8, np.dtype("complex64"), int])
def test_empty_gives_memory_of_the_shape_and_dtype_asked_for(alone: ProcessGroup, dtype: object) -> None:
    found = alone.empty((2, 3), dtype)
    assert found.shape == (2, 3)
    assert found.flags.owndata
    assert found.dtype == (dtype.storage if isinstance(dtype, DType) else np.dtype(dtype))
    assert alone.empty(4).shape == (4,)


def test_explain_names_the_algorithm_for_every_operation(alone: ProcessGroup) -> None:
    for operation in ("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all"):
        assert alone.explain(operation, 1 << 20).startswith(f"{operation}(")


def test_a_backend_without_a_coordinator_has_no_store_and_no_next_generation() -> None:
    with ProcessGroup(queue_backends(1)[0]) as group:
        assert (group.backend, group.generation, group.world_ranks) == ("queues", 1, (0,))
        for ask in (lambda: group.store, lambda: group.session, lambda: group.pending_members, lambda: group.reform(1.0)):
            with pytest.raises(BackendUnavailableError):
                ask()
        assert int(group.all_reduce(3)) == 3


def test_a_group_has_its_backends_timeout_unless_it_is_given_one() -> None:
    (backend,) = SimulatedBackend.create_group(1, timeout=1.5)
    assert [ProcessGroup(backend).timeout, ProcessGroup(backend, timeout=5).timeout] == [1.5, 5.0]
    assert ProcessGroup(queue_backends(1)[0]).timeout == 60.0


def test_abort_without_a_coordinator_ends_this_ranks_group() -> None:
    group = ProcessGroup(queue_backends(1)[0])
    group.abort("enough")
    with pytest.raises(GroupAbortedError, match="enough"):
        group.all_reduce(1)
    group.close()
    with pytest.raises(GroupClosedError):
        group.all_reduce(1)


def test_the_cause_of_an_exception_is_not_reported_twice(alone: ProcessGroup) -> None:
    alone.abort("first")
    with pytest.raises(KeyError), alone:
        raise KeyError("second")
    with pytest.raises(GroupClosedError):
        alone.barrier()


def test_an_error_nobody_looked_at_is_logged_once(alone: ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    alone.abort("over")
    with caplog.at_level(logging.ERROR, "ferrorpc.work"), pytest.raises(GroupAbortedError):
        alone.all_reduce(1.0, async_op=True)
    assert caplog.records == []


def test_a_backend_needs_nothing_but_rank_and_size_to_be_described() -> None:
    class Bare(Backend):
        def __init__(self) -> None:
            self.rank, self.size = 1, 3

        def send(self, data: np.ndarray, dst: int, tag: int = 0) -> None:
            raise AssertionError

        def recv(self, src: int, tag: int = 0, out: object = None, timeout: float | None = None) -> np.ndarray:
            raise AssertionError

        def barrier(self, timeout: float | None = None) -> None:
            raise AssertionError

        def close(self) -> None:
            """Nothing is held."""

    backend = Bare()
    assert (backend.world_size, backend.world_ranks, backend.group_id, backend.session) == (3, (0, 1, 2), 0, None)
    assert backend.capabilities.device_arrays is False
    assert backend.latch is backend.latch
    assert repr(ProcessGroup(backend)) == "<ProcessGroup custom rank 1 of 3, generation 1: open>"


def test_a_call_is_prepared_once_for_each_signature() -> None:
    prepared: list[str] = []

    class Counting(QueueBackend):
        def prepare(self, call: Call) -> Prepared:
            prepared.append(call.signature)
            return super().prepare(call)

    group = ProcessGroup(Counting(0, 1, Wires(1)))
    for _ in range(3):
        group.all_reduce(np.ones(2))
        group.all_reduce(np.ones(2), op=ReduceOp.SUM, async_op=True).wait()
        group.all_reduce(np.ones(3))
        group.stream().all_reduce(np.ones(2), 0).wait()
    assert prepared == ["all_reduce(op=sum, float64[2])", "all_reduce(op=sum, float64[3])"]
