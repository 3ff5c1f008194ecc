"""Communication hooks: results, residues, bytes sent, and equal bits on all ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import ferrorpc
from ferrorpc.ddp.hooks import Compress, ErrorFeedback, Hook, PowerSGD, TopK
from ferrorpc.errors import CollectiveMismatchError, FerroError, UsageError
from ferrorpc.testing import FaultPlan, run_world

LIKE = {"w": np.zeros((40, 30), np.float32), "b": np.zeros(30, np.float32), "v": np.zeros((24, 5, 6), np.float32)}


def grads(rank: int, step: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(leaf.shape).astype(np.float32) for name, leaf in LIKE.items()}


def mean(size: int, step: int = 0) -> dict[str, np.ndarray]:
    return {name: sum(grads(rank, step)[name] for rank in range(size)) / np.float32(size) for name in LIKE}


def synchroniser(group, hook: Hook | None, **more) -> ferrorpc.GradientSynchronizer:
    return ferrorpc.GradientSynchronizer(LIKE, group, hook=hook, **more)


HOOKS = {
    "bf16": lambda: Compress("bf16"),
    "f16": lambda: Compress("f16"),
    "int8": lambda: Compress("int8"),
    "int8 with feedback": lambda: ErrorFeedback(Compress("int8")),
    "top tenth with feedback": lambda: ErrorFeedback(TopK(0.1)),
    "power": lambda: PowerSGD(1.0),
    "power with feedback": lambda: ErrorFeedback(PowerSGD(4)),
    "power, factors in bf16": lambda: ErrorFeedback(PowerSGD(2, Compress("bf16"))),
}
NESTED = {
    "feedback twice": lambda: ErrorFeedback(ErrorFeedback(TopK(0.1))),
    "bf16 with feedback twice": lambda: ErrorFeedback(ErrorFeedback(Compress("bf16"))),
    "feedback of factors": lambda: ErrorFeedback(PowerSGD(2, ErrorFeedback(Compress("int8")))),
}
hooks = pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)


@hooks
@pytest.mark.parametrize("cap_mb", [25, 1e-3])
def test_all_ranks_have_the_same_bits_in_any_order_of_arrival(make, cap_mb):
    def body(group):
        sync = synchroniser(group, make(), bucket_cap_mb=cap_mb)
        found = []
        for step in range(3):
            mine = grads(group.rank, step)
            with sync.step() as current:
                for name in np.random.default_rng(group.rank + step).permutation(list(LIKE)):
                    current.ready(str(name), mine[name])
            found.append(b"".join(leaf.tobytes() for leaf in current.grads.values()))
        return found

    results = run_world(3, body, faults=FaultPlan(delay_seconds=(0.0, 0.05)))
    assert all(found == results[0] for found in results)


class Twice(Hook):
    """Two collectives for each bucket, one after the other."""

    operations = 2
    text = "twice"

    def __init__(self) -> None:
        self.followed: list[str] = []

    def exchange(self, part, collectives):
        yield collectives.all_reduce(np.ones(1, np.float32))
        self.followed.append(part.key)
        yield collectives.all_reduce(part.values)


def test_what_follows_an_operation_begins_while_others_still_compute():
    def body(group):
        hook, mine = Twice(), grads(group.rank)
        sync = synchroniser(group, hook, bucket_cap_mb=1e-3)
        with sync.step() as current:
            current.ready("v", mine["v"])
            for _ in range(3):  # the first operation of its bucket is over
                group.barrier()
            current.ready("b", mine["b"])
            followed = list(hook.followed)
            current.ready("w", mine["w"])
        return len(followed), len(hook.followed), current.grads

    for followed, in_all, found in run_world(2, body):
        assert (followed, in_all) == (1, 3)
        assert all(np.array_equal(found[name], wanted) for name, wanted in mean(2).items())


def test_a_hook_with_more_operations_than_it_said_is_told_before_they_pass_for_the_next_buckets():
    def body(group):
        hook = Twice()
        hook.operations = 1
        with pytest.raises(FerroError, match=r"more collectives .*`operations`"):
            synchroniser(group, hook)(grads(group.rank))

    run_world(2, body)


@pytest.mark.parametrize(("wire", "last_place"), [("bf16", 2.0**-8), ("f16", 2.0**-11)])
def test_narrow_floats_round_once_there_and_once_back(wire, last_place):
    def body(group):
        return synchroniser(group, Compress(wire))(grads(group.rank))

    for found in run_world(2, body):
        for name, wanted in mean(2).items():
            largest = sum(np.abs(grads(rank)[name]) for rank in range(2)) / 2
            assert np.all(np.abs(found[name] - wanted) <= 2 * last_place * largest)


def test_int8_is_as_far_off_as_its_codec_says():
    def body(group):
        return synchroniser(group, Compress("int8"))(grads(group.rank))

    for found in run_world(2, body):
        for name, wanted in mean(2).items():
            assert np.abs(found[name] - wanted).max() <= 3 * np.abs(wanted).max() * 2 / 127


@pytest.mark.parametrize(
    "make", [*(HOOKS[name] for name in HOOKS if "feedback" in name or "factors" in name), *NESTED.values()]
)
def test_with_feedback_everything_arrives_in_the_end(make):
    """Constant gradients: the error of the mean over many steps is bounded, because the residue is."""
    rounds = 150

    def body(group):
        sync = synchroniser(group, make())
        total = {name: np.zeros(leaf.shape) for name, leaf in LIKE.items()}
        for _ in range(rounds):
            for name, leaf in sync(grads(group.rank)).items():
                total[name] += leaf / rounds
        return total

    for total in run_world(2, body):
        for name, wanted in mean(2).items():
            assert np.linalg.norm(total[name] - wanted) < 0.15 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("make", [HOOKS[name] for name in HOOKS if "feedback" in name])
def test_a_round_that_is_broken_off_leaves_all_of_its_values_to_the_next(make):
    """Rank 1 leaves after the first step; rank 0's second step still completes."""

    def body(group):
        hook = make()
        sync = synchroniser(group, hook)
        sync(grads(group.rank))
        if group.rank == 1:
            return None
        before = hook.state()
        with pytest.raises(FerroError):
            sync(grads(0, 1))
        after, gained = hook.state(), np.concatenate([grads(0, 1)[name].reshape(-1) for name in LIKE])
        residues = [name for name in before if name.startswith("residue/")]
        rest = np.concatenate([after[name] - before[name] for name in residues])
        room = np.zeros(rest.size - gained.size, np.float32)  # between the parameters of a bucket
        return np.sort(np.concatenate([gained, room])), np.sort(rest)

    (gained, rest), _ = run_world(2, body)
    np.testing.assert_allclose(rest, gained, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [HOOKS[name] for name in HOOKS if "feedback" in name])
def test_a_step_in_which_all_weights_are_zero_delivers_nothing(make):
    """An `uneven` block ends with such a step."""

    def body(group):
        hook = make()
        sync = synchroniser(group, hook)
        sync(grads(group.rank))
        before = hook.state()
        with sync.uneven():
            pass
        with pytest.raises(UsageError, match="sum to zero"):
            sync(grads(group.rank), weight=0)
        after = hook.state()
        return all(np.array_equal(after[name], before[name]) for name in before)

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("make", [*HOOKS.values(), *NESTED.values()], ids=[*HOOKS, *NESTED])
def test_a_step_that_is_not_finite_spoils_no_later_one(make, bad):
    """As one that has overflowed, which mixed precision skips. Gradients lie in blocks together with the gaps between them."""

    def body(group):
        sync, before = synchroniser(group, make()), synchroniser(group, make())
        for name in LIKE:
            spoilt = grads(group.rank)
            spoilt[name].reshape(-1)[-1] = bad
            assert not np.isfinite(sync(spoilt)[name]).all()
        found, wanted = sync(grads(group.rank, 1)), before(grads(group.rank, 1))
        if not make().state() and "power" not in make().text:
            assert all(found[name].tobytes() == wanted[name].tobytes() for name in LIKE)
        return max(np.abs(leaf).max() for leaf in found.values())

    assert all(found < 100 for found in run_world(2, body))


@pytest.mark.parametrize("weights", [(1e-60, 1e-60), (1e-60, 0.0)], ids=["all too small", "too small and zero"])
@pytest.mark.parametrize("make", [HOOKS[name] for name in HOOKS if "feedback" in name or name == "int8"])
def test_weights_that_are_zero_in_float32_are_refused_alike_and_deliver_nothing(make, weights):
    def body(group):
        hook = make()
        sync = synchroniser(group, hook)
        sync(grads(group.rank))
        before = hook.state()
        with pytest.raises(UsageError, match="sum to zero"):
            sync(grads(group.rank), weight=weights[group.rank])
        assert group.all_reduce(1.0) == 2, "the group goes on"
        after = hook.state()
        return all(np.array_equal(after[name], before[name]) for name in before)

    assert run_world(2, body, timeout=3.0) == [True, True]


@pytest.mark.parametrize("weights", [(2e38, 2e38), (3e38, 1.0, 3e38)], ids=["all too large", "two of three"])
@pytest.mark.parametrize("make", [*HOOKS.values(), *NESTED.values()], ids=[*HOOKS, *NESTED])
def test_weights_without_a_finite_sum_leave_no_residue_of_their_scale(make, weights):
    """The step is refused, and a caller may go on."""

    def body(group):
        hook = make()
        sync = synchroniser(group, hook)
        sync(grads(group.rank))
        with pytest.raises(UsageError, match="sum to inf"):
            sync(grads(group.rank), weight=weights[group.rank])
        found = [np.abs(leaf).max() for leaf in sync(grads(group.rank)).values()]
        kept = [np.abs(leaf).max() for leaf in hook.state().values() if leaf.size]
        return max([*found, *kept])

    assert all(found < 100 for found in run_world(len(weights), body))


def test_without_feedback_a_low_rank_leaves_the_rest_out_for_ever():
    def body(group):
        sync = synchroniser(group, PowerSGD(1))
        return [sync(grads(group.rank))["w"] for _ in range(50)][-1]

    found = run_world(2, body)[0]
    wanted = mean(2)["w"]
    left, values, right = np.linalg.svd(wanted)
    best = values[0] * np.outer(left[:, 0], right[0])
    assert np.linalg.matrix_rank(found, tol=1e-4) == 1
    assert np.linalg.norm(found - best) < 0.05 * np.linalg.norm(best), "the warm start has found the largest singular pair"


@pytest.mark.parametrize("scale", [1.0, 1e34, 1e-20], ids=["usual", "large", "small"])
def test_a_matrix_of_low_rank_comes_whole_after_one_warm_step(scale: float):
    left, right = np.random.default_rng(1).standard_normal((2, 40, 2)).astype(np.float32)
    product = left @ right[:30].T * np.float32(scale)

    def body(group):
        sync = ferrorpc.GradientSynchronizer({"w": product}, group, hook=PowerSGD(2))
        return [sync({"w": product * (group.rank + 1)})["w"] for _ in range(2)][-1]

    for found in run_world(3, body):
        np.testing.assert_allclose(found, 2 * product, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("rows", [[3], [3, 17], range(40)])
def test_a_matrix_of_a_lower_rank_than_the_factors_is_exact_as_well(rank: int, rows):
    """As the gradient of an embedding for one token, or of a layer for one sample."""
    gradient = np.zeros((40, 30), np.float32)
    gradient[rows] = np.outer(np.random.default_rng(1).standard_normal(len(rows)), np.arange(30) - 7)

    def body(group):
        sync = ferrorpc.GradientSynchronizer({"w": gradient}, group, hook=PowerSGD(rank))
        return [sync({"w": gradient})["w"] for _ in range(3)]

    for found in run_world(2, body)[0]:
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-4)


def test_the_largest_values_are_added_in_rank_order_and_the_others_wait():
    gradient = np.array([0.1, -5.0, 0.2, 3.0], np.float32)

    def body(group):
        hook = ErrorFeedback(TopK(0.2))
        sync = ferrorpc.GradientSynchronizer({"w": gradient}, group, hook=hook)
        mine = gradient[::-1] if group.rank else gradient
        found = [sync({"w": mine.copy()})["w"].tolist() for _ in range(2)]
        ((_, residue),) = hook.state().items()
        return found, residue.tolist()

    first, second = run_world(2, body)
    assert first[0] == [[0.0, -2.5, -2.5, 0.0], [3.0, 0.0, 0.0, 3.0]]
    assert first[0] == second[0]
    sent = np.array(first[0]).sum(axis=0) * 2
    owed = np.array(first[1]) + np.array(second[1])
    np.testing.assert_allclose(sent + owed, 2 * (gradient + gradient[::-1]), rtol=1e-6)


@hooks
def test_hooks_take_weights_unused_gradients_and_uneven_steps(make):
    """Weights exceed what a narrow header could hold; the header is exact."""

    def body(group):
        sync = synchroniser(group, make())
        heavy = 3 if make is HOOKS["f16"] else 60_001
        found = sync({name: grads(0)[name] if name != "b" else None for name in LIKE}, weight=heavy + group.rank)
        assert found["b"] is None
        steps = []
        with sync.uneven(follow=steps.append):
            for _ in range(1 + group.rank):
                steps.append(sync(grads(0)))
        assert len(steps) == 2
        return found["w"]

    for found in run_world(2, body):
        assert np.vdot(found, grads(0)["w"]) > 0.1 * np.linalg.norm(grads(0)["w"]) * np.linalg.norm(found)


def test_half_types_go_through_float32_and_wider_ones_as_they_are():
    def body(group):
        like = {"half": np.zeros(300, np.float16), "double": np.zeros(300)}
        sync = ferrorpc.GradientSynchronizer(like, group, hook=Compress("int8"))
        return sync({"half": np.full(300, 1 + group.rank, np.float16), "double": np.full(300, 1e-300 * (1 + group.rank))})

    for found in run_world(2, body):
        assert found["half"].dtype == np.float16
        np.testing.assert_allclose(found["half"], 1.5, rtol=1e-2)
        assert set(found["double"].tolist()) == {1.5e-300}


@pytest.mark.parametrize("name", ["int8 with feedback", "power, factors in bf16", "top tenth with feedback", *NESTED])
def test_a_restored_hook_goes_on_with_the_same_bits(name):
    make = (HOOKS | NESTED)[name]

    def body(group):
        hook = make()
        sync = synchroniser(group, hook)
        sync(grads(group.rank, 0))
        saved = hook.state()
        wanted = sync(grads(group.rank, 1))
        again = make()
        again.load_state(saved)
        found = synchroniser(group, again)(grads(group.rank, 1))
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in LIKE)
        fresh = synchroniser(group, make())(grads(group.rank, 1))
        assert any(fresh[name].tobytes() != wanted[name].tobytes() for name in LIKE)

    run_world(2, body)


def test_a_state_of_another_hook_is_refused():
    with pytest.raises(UsageError, match="remembers nothing"):
        Compress("bf16").load_state({"residue/bucket0": np.zeros(3)})
    with pytest.raises(UsageError, match="remembers nothing"):
        ErrorFeedback(Compress("bf16")).load_state({"q/bucket0/0": np.zeros((3, 1))})
    for hook in (Compress("bf16"), ErrorFeedback(Compress("bf16")), PowerSGD(1)):
        with pytest.raises(UsageError, match="str is no state of a hook"):
            hook.load_state("state.npz")

    def body(group, before, hook):
        synchroniser(group, before)(grads(0))
        hook.load_state(before.state())
        synchroniser(group, hook)(grads(0))

    for before, hook in [
        (PowerSGD(1), PowerSGD(2)),
        (PowerSGD(1, ErrorFeedback(TopK(0.5))), PowerSGD(2, ErrorFeedback(TopK(0.5)))),
    ]:
        with pytest.raises(UsageError, match="another hook's"):
            run_world(1, partial(body, before=before, hook=hook))


@pytest.mark.parametrize("make", [lambda: ErrorFeedback(TopK(0.5)), PowerSGD, Twice])
def test_a_hook_that_remembers_serves_one_model_at_a_time(make):
    def body(group):
        hook = make()
        first = synchroniser(group, hook)
        with pytest.raises(UsageError, match="one hook for each model"):
            synchroniser(group, hook)
        with pytest.raises(UsageError, match="one hook for each model"):
            synchroniser(group, ErrorFeedback(hook))
        first(grads(group.rank))
        del first  # the next one continues with its state
        again = synchroniser(group, hook)
        other = group.reform()
        found = synchroniser(other, hook)(grads(group.rank))
        del again
        return found["w"].shape

    assert run_world(2, body) == [grads(0)["w"].shape] * 2


@pytest.mark.parametrize("hook", [Compress("bf16"), TopK(0.5)])
def test_a_hook_that_remembers_nothing_serves_several(hook):
    def body(group):
        one, other = synchroniser(group, hook), synchroniser(group, hook)
        one(grads(group.rank))
        return other(grads(group.rank))["w"].shape

    assert run_world(2, body) == [grads(0)["w"].shape] * 2


@pytest.mark.filterwarnings("error")
@hooks
def test_an_overflow_shows_in_the_mean_and_is_over_with_the_next_step(make):
    def body(group):
        sync = synchroniser(group, make())
        sync(grads(group.rank))
        spoilt = grads(group.rank)
        spoilt["w"][3, 4] = np.inf if group.rank else 1.0
        assert not np.isfinite(sync(spoilt)["w"]).all()
        return bool(all(np.isfinite(leaf).all() for leaf in sync(grads(group.rank)).values()))

    assert run_world(2, body) == [True, True]


def test_bytes_on_the_wire_are_counted_as_they_are_sent():
    """Compared with what the transport was given, on the rank that sends most."""

    def body(group):
        sent = 0
        transport = group._backend.transport
        send = transport.send

        def counted(peer, key, header, offset, payload, wake):
            nonlocal sent
            gone = send(peer, key, header, offset, payload, wake)
            if gone and payload is not None and key.stream:
                sent += payload.nbytes
            return gone

        transport.send = counted
        found = []
        for make in [lambda: None, *HOOKS.values()]:
            sync = synchroniser(group, make())
            sent = 0
            sync(grads(group.rank))
            group.barrier()
            found.append((sync.sent_bytes, sent))
        return found

    for size in (2, 4):
        results = run_world(size, body)
        for place, (counted, _) in enumerate(results[0]):
            busiest = max(found[place][1] for found in results)
            assert abs(counted - busiest) <= 0.02 * busiest + 64 * size, (place, counted, busiest)


def test_the_bytes_that_were_promised():
    def body(group):
        like = {f"w{index}": np.zeros((256, 256), np.float32) for index in range(4)}
        sent = {}
        for name, hook in {"plain": None, "int8": Compress("int8"), "power": PowerSGD(2), "top": TopK(0.02)}.items():
            sync = ferrorpc.GradientSynchronizer(like, group, hook=hook)
            sync({leaf: np.ones((256, 256), np.float32) for leaf in like})
            sent[name] = sync.sent_bytes
        return {name: count / sent["plain"] for name, count in sent.items()}

    for shares in run_world(2, body):
        assert shares["int8"] <= 0.27
        assert shares["power"] <= 0.1
        assert shares["top"] <= 0.1


def test_ranks_with_different_hooks_learn_it_at_once():
    def body(group):
        with pytest.raises(CollectiveMismatchError, match=r"hook: power sgd\(rank 2, plain\)"):
            synchroniser(group, PowerSGD(1 + group.rank))

    run_world(2, body)


def test_what_makes_no_hook_is_refused():
    for wrong in (
        lambda: PowerSGD(5),
        lambda: PowerSGD(0),
        lambda: TopK(0),
        lambda: TopK(1.5),
        lambda: TopK("all"),
        lambda: Compress("zip"),
    ):
        with pytest.raises(UsageError):
            wrong()
    for other in ("bf16", Compress, 3):
        for use in (ErrorFeedback, lambda hook: PowerSGD(1, hook), lambda hook: run_world(1, partial(synchroniser, hook=hook))):
            with pytest.raises(UsageError, match=r"is no hook(.|\n)*Compress\('bf16'\)"):
                use(other)
