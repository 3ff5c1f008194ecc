"""ZeroOptimizer, compared with one process that keeps the whole state: the same bits, a fraction of the memory."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce

import numpy as np
import pytest

from ferrorpc.ddp.rules import SGD, Adam
from ferrorpc.ddp.zero import ZeroOptimizer
from ferrorpc.errors import CollectiveMismatchError, FerroError, GroupAbortedError, TensorMismatchError, UsageError
from ferrorpc.testing import FaultPlan, Kill, World
from tests.unit.ddp.world import run_world

RULES = [SGD(0.1), SGD(0.05, momentum=0.8, decay=0.01), Adam(0.01), Adam(0.02, decay=0.1)]
STEPS = 5


def tree(seed: int, dtype=np.float32):
    """Sizes that no number of ranks divides, a scalar, an empty one, and two dtypes."""
    random = np.random.default_rng(seed)
    shapes = {"a": (7, 13), "b": (5,), "c": (), "d": (0, 3), "e": (11, 3)}
    made = {name: np.asarray(random.standard_normal(shape), dtype) for name, shape in shapes.items()}
    return made | {"f": random.standard_normal(17)}


def grads(rank: int, step: int):
    return tree(1000 * step + rank + 1)


def unsharded(size: int, rule, steps: int = STEPS):
    """Means in rank order, and the rule on whole arrays."""
    weights = tree(0)
    memory = {name: [np.zeros_like(leaf) for _ in range(rule.slots)] for name, leaf in weights.items()}
    for step in range(1, steps + 1):
        for name, leaf in weights.items():
            mean = reduce(np.add, [grads(rank, step)[name] for rank in range(size)]) / leaf.dtype.type(size)
            flat = leaf.reshape(-1)
            rule(flat, np.asarray(mean).reshape(-1), [slot.reshape(-1) for slot in memory[name]], step)
    return weights


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("cap", [25, 1e-4])
def test_weights_have_the_bits_of_an_optimizer_that_is_not_sharded(size, rule, cap):
    def body(group):
        weights = tree(0)
        optimizer = ZeroOptimizer(weights, group, rule, bucket_cap_mb=cap)
        for step in range(1, STEPS + 1):
            optimizer.step(grads(group.rank, step))
        return weights

    expected = unsharded(size, rule)
    for weights in run_world(size, body):
        for name, leaf in expected.items():
            assert weights[name].tobytes() == leaf.tobytes(), name


@pytest.mark.parametrize(("size", "rule"), [(2, Adam()), (3, Adam()), (4, SGD(0.1)), (8, Adam())])
def test_a_rank_remembers_its_share_and_no_more(size, rule):
    shapes = {"layer1": (257, 129), "layer2": (129,), "layer3": (129, 77)}
    whole = rule.slots * sum(4 * int(np.prod(shape)) for shape in shapes.values())

    def body(group):
        weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return ZeroOptimizer(weights, group, rule).memory_bytes

    for held in run_world(size, body):
        assert abs(held - whole / size) <= 0.05 * whole / size


def test_a_rule_that_divides_by_zero_without_gradients_leaves_nothing_of_it_between_parameters():
    """Shards hold elements that belong to no weights, whose gradient is always 0."""

    def body(group):
        weights = {"a": np.ones(3, np.float32), "b": np.ones(21, np.float32)}
        optimizer = ZeroOptimizer(weights, group, Adam(1e-3, epsilon=0.0, decay=0.1))
        for _ in range(3):
            optimizer.step({name: np.full_like(leaf, 0.5) for name, leaf in weights.items()})
        return [bool(np.isfinite(array).all()) for array in (*weights.values(), *optimizer.state().values())]

    for found in run_world(3, body):
        assert all(found)


def test_training_goes_on_from_a_saved_state_with_the_same_bits():
    def body(group):
        weights = tree(0)
        before = ZeroOptimizer(weights, group, Adam(0.01))
        for step in (1, 2):
            before.step(grads(group.rank, step))
        after = ZeroOptimizer(weights, group, Adam(0.01))
        after.load_state(before.state())
        for step in (3, 4, 5):
            after.step(grads(group.rank, step))
        return weights

    expected = unsharded(3, Adam(0.01))
    for weights in run_world(3, body):
        assert all(weights[name].tobytes() == leaf.tobytes() for name, leaf in expected.items())


def test_a_saved_state_stays_as_it_was_while_steps_go_on():
    def body(group):
        optimizer = ZeroOptimizer(tree(0), group, Adam())
        optimizer.step(tree(1))
        state = optimizer.state()
        before = {name: array.copy() for name, array in state.items()}
        optimizer.step(tree(2))
        return all(np.array_equal(array, before[name]) for name, array in state.items())

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_gathered_state_goes_on_in_groups_of_any_size_with_the_same_bits(rule):
    """All ranks have the same gradients, so that means of 1, 2 or 4 of them have the same bits."""
    weights, state = tree(0), None

    def body(group, weights, saved, steps, cap):
        weights = {name: leaf.copy() for name, leaf in weights.items()}
        optimizer = ZeroOptimizer(weights, group, rule, bucket_cap_mb=cap)
        if saved is not None:
            optimizer.load_state(saved)
        for step in steps:
            optimizer.step(grads(0, step))
        return weights, optimizer.gather_state(root=group.size - 1)

    for size, steps, cap in [(4, (1, 2), 25), (2, (3, 4), 1e-4), (1, (5,), 25)]:
        before = weights, state, steps, cap
        *others, (weights, state) = run_world(size, lambda group, before=before: body(group, *before))
        assert [each for _, each in others] == [None] * (size - 1)
        assert state is not None
        assert all(array.flags.owndata and array.flags.writeable for array in state.values())
        slots = {f"slot{slot}/{name}": leaf.shape for slot in range(rule.slots) for name, leaf in weights.items() if leaf.size}
        assert {name: array.shape for name, array in state.items()} == {"step": (), **slots}
    assert all(weights[name].tobytes() == leaf.tobytes() for name, leaf in unsharded(1, rule).items())


def test_a_state_of_another_optimizer_is_refused():
    def body(group):
        other = ZeroOptimizer(tree(0), group, SGD(0.1))
        adam = ZeroOptimizer(tree(0), group, Adam())
        for state in (
            other.state(),
            {"step": np.asarray(1)},
            ZeroOptimizer(grads(0, 0) | {"a": np.ones(3)}, group, Adam()).state(),
        ):
            with pytest.raises(UsageError, match="not this optimizer's"):
                adam.load_state(state)
        others = adam.state() | {"rank": np.asarray([1 - group.rank, 2])}
        with pytest.raises(UsageError, match=rf"that of rank {1 - group.rank} of 2, and .*{group.rank} of 2\n.*gather_state"):
            adam.load_state(others)

    run_world(2, body)


def test_a_ranks_own_state_is_refused_by_an_optimizer_of_other_weights_or_of_another_order():
    """Shards of the same length were taken for each other."""
    weights = {"a": np.ones((3, 2), np.float32), "b": np.ones(9, np.float32)}
    others = [
        ({"b": weights["b"], "a": weights["a"]}, "a: float32"),
        ({"a": weights["a"], "c": weights["b"]}, "c: float32"),
        ({"a": weights["b"], "b": weights["a"]}, r"b: float32\[3,2\]"),
        ({"b": weights["b"]}, "nothing"),
    ]

    def body(group):
        state = ZeroOptimizer(weights, group, Adam()).state()
        for other, message in others:
            with pytest.raises(UsageError, match=f"not this optimizer's: .*where this one has .*{message}(.|\n)*same order"):
                ZeroOptimizer(other, group, Adam()).load_state(state)
        with pytest.raises(UsageError, match="not this optimizer's"):
            ZeroOptimizer(weights, group, Adam()).load_state(state | {"layout": np.zeros(2)})
        ZeroOptimizer(weights, group, Adam(), bucket_cap_mb=1).load_state(state)
        return len(state)

    assert run_world(2, body) == [5, 5]


def test_a_ranks_own_state_may_be_one_saved_without_a_layout():
    """As it was before layouts were saved."""

    def body(group):
        before = ZeroOptimizer(tree(0), group, Adam())
        before.step(tree(1))
        state = before.state()
        after = ZeroOptimizer(tree(0), group, Adam())
        after.load_state({name: array for name, array in state.items() if name != "layout"})
        return all(np.array_equal(array, state[name]) for name, array in after.state().items())

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", np.complex64, "U4"])
def test_a_state_of_a_dtype_that_is_not_converted_is_refused_and_nothing_of_it_is_loaded(dtype, is_whole):
    """The bits of bfloat16 were taken for integers."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype

    def body(group):
        optimizer = ZeroOptimizer({"a": np.ones(6, np.float32)}, group, Adam())
        optimizer.step({"a": np.ones(6, np.float32)})
        before = optimizer.state()
        state = optimizer.gather_state() if is_whole else before
        last = "slot1/a" if is_whole else "shard0/slot1"
        doubled = {name: 2 * array if "slot" in name else array for name, array in state.items()}
        with pytest.raises(TensorMismatchError, match=f"{last}' in the state(.|\n)*float32"):
            optimizer.load_state(doubled | {last: state[last].astype(dtype)})
        return all(np.array_equal(array, before[name]) for name, array in optimizer.state().items())

    assert run_world(1, body) == [True]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_state_in_halves_or_in_tensors_is_converted_by_value(is_whole):
    torch = pytest.importorskip("torch")

    def body(group):
        optimizer = ZeroOptimizer({"a": np.ones(6, np.float32)}, group, Adam())
        optimizer.step({"a": np.ones(6, np.float32)})
        before = optimizer.state()
        state = optimizer.gather_state() if is_whole else before
        halves = {name: array.astype(np.float16) if "slot" in name else array for name, array in state.items()}
        optimizer.load_state({name: torch.from_numpy(array) for name, array in halves.items()})
        return all(np.allclose(array, before[name], rtol=1e-3) for name, array in optimizer.state().items())

    assert run_world(1, body) == [True]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("step", [float("nan"), float("inf"), 0.5, -1, 1j, "x"])
def test_a_state_of_no_number_of_steps_is_refused_and_nothing_of_it_is_loaded(step, is_whole):
    def body(group):
        optimizer = ZeroOptimizer({"a": np.ones(6, np.float32)}, group, Adam())
        optimizer.step({"a": np.ones(6, np.float32)})
        before = optimizer.state()
        state = optimizer.gather_state() if is_whole else before
        doubled = {name: 2 * array if "slot" in name else array for name, array in state.items()}
        with pytest.raises(UsageError, match=r"step=.* in the state is no number of steps\n"):
            optimizer.load_state(doubled | {"step": np.asarray(step)})
        return all(np.array_equal(array, before[name]) for name, array in optimizer.state().items())

    assert run_world(1, body) == [True]


def test_a_gradient_that_is_missing_counts_as_zeros_and_one_that_is_unknown_is_refused():
    def body(group):
        weights = {"a": np.ones(4, np.float32), "b": np.ones(3, np.float32)}
        optimizer = ZeroOptimizer(weights, group, SGD(1.0, momentum=0.0))
        optimizer.step({"a": np.ones(4, np.float32) if group.rank else None, "b": None})
        optimizer.step({"a": None, "b": None})  # where the buffer holds what the step before has gathered
        with pytest.raises(UsageError, match="see c"):
            optimizer.step({"a": None, "b": None, "c": np.ones(1)})
        with pytest.raises(UsageError, match="see b"):
            optimizer.step({"a": None})
        with pytest.raises(TensorMismatchError, match="gradient of 'b'"):
            optimizer.step({"a": None, "b": np.ones(2, np.float32)})
        return weights

    for weights in run_world(2, body):
        assert weights["a"].tolist() == [0.5] * 4
        assert weights["b"].tolist() == [1.0] * 3


def test_ranks_with_other_rules_or_weights_are_told_where_they_differ():
    def body(group):
        with pytest.raises(CollectiveMismatchError, match=r"rate=0\.2"):
            ZeroOptimizer(tree(0), group, SGD(0.1 * (1 + group.rank)))

    run_world(2, body)


def test_a_rule_may_be_a_function_of_which_each_process_has_its_own():
    """The address in its repr is no difference between ranks."""

    def body(group):
        def rule(weights, gradient, memory, step):
            weights -= gradient

        rule.slots = 0
        weights = {"a": np.zeros(2)}
        optimizer = ZeroOptimizer(weights, group, rule)
        optimizer.step({"a": np.full(2, 1.0 + group.rank)})
        return weights["a"].tolist(), " at 0x" in repr(rule)

    assert run_world(2, body) == [([-1.5, -1.5], True)] * 2


def test_a_rule_that_fails_on_one_rank_is_what_the_others_hear_of():
    """They wait for its weights."""

    def body(group):
        def rule(weights, gradient, memory, step):
            if group.rank == 1:
                raise ZeroDivisionError

        rule.slots = 0
        optimizer = ZeroOptimizer({"a": np.zeros(2)}, group, rule)
        with pytest.raises(ZeroDivisionError if group.rank == 1 else GroupAbortedError):
            optimizer.step({"a": np.ones(2)})
        with pytest.raises(GroupAbortedError) as caught:
            group.barrier()
        return caught.value.rank, caught.value.cause

    assert run_world(2, body) == [(1, "ZeroDivisionError")] * 2


def test_the_state_after_a_step_that_failed_is_refused_until_one_is_loaded():
    """It was a step ahead of the weights: the step was applied twice when it was taken again."""

    class Failing:
        slots = 1
        is_broken = False

        def __repr__(self):
            return "Failing()"

        def __call__(self, weights, gradient, memory, step):
            memory[0] += gradient
            if self.is_broken:
                raise OSError

    def body(group):
        weights, rule = {"a": np.zeros(64)}, Failing()
        optimizer = ZeroOptimizer(weights, group, rule)
        optimizer.step({"a": np.ones(64)})
        before = optimizer.state()
        rule.is_broken = group.rank == 1
        with pytest.raises((OSError, GroupAbortedError)):
            optimizer.step({"a": np.ones(64)})
        for save in (optimizer.state, optimizer.gather_state) if group.rank == 1 else ():
            with pytest.raises(UsageError, match=r"a step ahead of the weights(.|\n)*load_state"):
                save()
        optimizer.load_state(before)
        with pytest.raises(GroupAbortedError):
            optimizer.step({"a": np.ones(64)})  # nothing is updated
        return all(np.array_equal(array, before[name]) for name, array in optimizer.state().items())

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("operation", range(10, 22))
def test_an_interrupted_step_leaves_all_weights_of_a_survivor_in_the_same_step(operation):
    """Survivors go on from their own weights."""

    def body(group):
        weights = {name: np.zeros(2000, np.float32) for name in "abcd"}
        optimizer = ZeroOptimizer(weights, group, SGD(1.0), bucket_cap_mb=0.008, init_sync=False)
        with suppress(FerroError):
            for _ in range(3):
                optimizer.step({name: np.full(2000, -1, np.float32) for name in weights})
        return {float(value) for leaf in weights.values() for value in leaf}

    faults = FaultPlan(kill={1: Kill(at_operation=operation)}, delay_seconds=(0, 0.01))
    world = World(3, faults=faults, min_size=2, seed=operation)
    reached = [each for each in world.run(body, return_exceptions=True) if isinstance(each, set)]
    assert reached
    assert [len(steps) for steps in reached] == [1] * len(reached)


@pytest.mark.parametrize("init_sync", [True, False])
def test_ranks_begin_with_the_weights_of_the_first(init_sync):
    """They became a patchwork of those that each rank had drawn for itself."""

    def body(group):
        weights = {name: np.full(3, 10.0 + group.rank) for name in "ab"}
        ZeroOptimizer(weights, group, SGD(1.0), init_sync=init_sync)
        return [float(leaf[0]) for leaf in weights.values()]

    assert run_world(2, body) == [[10.0, 10.0], [10.0, 10.0] if init_sync else [11.0, 11.0]]


def test_halves_are_refused_with_what_to_do():
    def body(group):
        with pytest.raises(TensorMismatchError, match="float32 and float64") as caught:
            ZeroOptimizer([np.zeros(3, np.float16)], group, Adam())
        assert "keep the weights" in str(caught.value)

    run_world(1, body)


def read_only(count: int) -> np.ndarray:
    array = np.zeros(count)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("weights", "rule", "message"),
    [
        ({"a": [1.0, 2.0]}, SGD(0.1), "weights 'a/0' cannot be updated in place: out is a float"),
        ({"a": read_only(3)}, SGD(0.1), "weights 'a' cannot be updated in place: out is read-only"),
        (dict.fromkeys(("a", "b"), np.zeros(3)), SGD(0.1), "'a' and 'b' share memory"),
        ({"a": np.zeros(3)}, "adam", "rule='adam' is no update rule"),
        ({"a": np.zeros(3)}, SGD, r"is no update rule(.|\n)*ferrorpc\.rules"),
    ],
)
def test_what_could_not_be_updated_is_refused_before_anything_is_sent(weights, rule, message: str):
    with pytest.raises(UsageError, match=message):
        run_world(2, lambda group: ZeroOptimizer(weights, group, rule))


@pytest.mark.parametrize("steps", [(3, 2), (3, 0)], ids=["older", "none"])
def test_states_of_different_steps_are_refused_by_the_first_step(steps: tuple[int, int]) -> None:
    """As those of a job that was killed while its ranks saved. All ranks would train on with the same, wrong weights."""

    def body(group):
        weights, states = tree(0), []
        optimizer = ZeroOptimizer(weights, group, Adam(0.01))
        for step in range(3):
            states.append(optimizer.state())
            optimizer.step(grads(group.rank, step))
        states.append(optimizer.state())
        resumed = ZeroOptimizer(weights, group, Adam(0.01))
        if steps[group.rank]:
            resumed.load_state(states[steps[group.rank]])
        with pytest.raises(CollectiveMismatchError, match=f"rank 1 has 'that of step {steps[1]}'.* 'that of step 3'"):
            resumed.step(grads(group.rank, 3))
        resumed.load_state(states[3])  # the group is open
        resumed.step(grads(group.rank, 3))
        return repr(resumed).endswith("step 4>")

    assert run_world(2, body) == [True, True]
