"""Communication hooks over GPU arrays, on the fakes: on the GPU where they can be, with the bits of the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.ddp.bucket_memory import HostBucketMemory
from ferrorpc.ddp.device_bucket_memory import DeviceBucketMemory
from ferrorpc.ddp.hooks.base import PlainAllReduce
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.wire import codecs
from ferrorpc.wire.codecs import CODEC_NAMES
from tests.fake_gpu.added_codec import Scaled
from tests.fake_gpu.ddp_worlds import Array, world
from tests.fake_gpu.worlds import host_lanes


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that has no kernels."""
    monkeypatch.setitem(codecs._CODECS, Scaled.name, Scaled())


def feedback(wire: str) -> ferrorpc.hooks.ErrorFeedback:
    return ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.Compress(wire))


HOOKS = {
    **{wire: partial(ferrorpc.hooks.Compress, wire) for wire in [*CODEC_NAMES, Scaled.name]},
    **{f"{wire} with feedback": partial(feedback, wire) for wire in [*CODEC_NAMES, Scaled.name]},
    "feedback alone": lambda: ferrorpc.hooks.ErrorFeedback(PlainAllReduce()),
}


@pytest.mark.parametrize("weights", [[None] * 4, [3.0, 0.1, 7.0, 0.5]], ids=["even", "weighted"])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(("lanes", "size"), [("simulated", 1), ("simulated", 3), ("hybrid", 2)])
def test_hooks_that_compress_do_so_on_the_gpu_if_it_has_kernels_with_the_bits_of_the_host(
    cupy: StandIn, lanes: str, size: int, name: str, weights: list[float | None]
) -> None:
    """Four rounds, each in a stream of its own, the last from a saved state; the second has values that are not finite."""

    def rounds(group: ProcessGroup, place: Callable[[Any], Any], home: Callable[[Any], Array]) -> list[bytes]:
        hook = HOOKS[name]()
        like = {"a": place(np.zeros(700, np.float32)), "b": place(np.zeros((3, 5), np.float16)), "c": place(np.zeros(2))}
        sync, found = ferrorpc.GradientSynchronizer(like, group, hook=hook), []
        kind = DeviceBucketMemory if place is not np.asarray and hook.on_device else HostBucketMemory
        assert {type(memory) for memory in sync._reducer.memory} == {kind}
        for number in range(4):
            chance = np.random.default_rng([group.rank, number])
            mine = {each: chance.standard_normal(like[each].shape) * 10.0 ** chance.choice([0, -37, -41]) for each in like}
            mine["a"][600:] *= np.inf if number == 1 else 1
            with nullcontext() if place is np.asarray else cupy.cuda.Stream(non_blocking=True):
                with np.errstate(all="ignore"):
                    means = sync({each: place(mine[each].astype(like[each].dtype)) for each in like}, weights[number])
                found += [home(means[each]).tobytes() for each in like]
                assert number == 1 or np.isfinite(home(means["a"])).all()
            state = hook.state()
            found += [key.encode() + array.tobytes() for key, array in state.items()]
            if number == 2:
                hook.load_state(state)
        return found

    wanted = run_groups([ProcessGroup(each) for each in host_lanes(size)], lambda group: rounds(group, np.asarray, np.asarray))
    assert world(cupy, lanes, size, lambda group: rounds(group, cupy.asarray, cupy.asnumpy)) == wanted


def test_with_a_hook_that_works_there_buckets_lie_on_the_host_and_means_still_come_back_to_the_gpu(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> Any:
        like, hook = {"a": cupy.asarray(np.zeros(300, np.float32))}, ferrorpc.hooks.TopK(1.0)
        sync = ferrorpc.GradientSynchronizer(like, group, hook=hook)
        assert {type(memory) for memory in sync._reducer.memory} == {HostBucketMemory}
        plain = ferrorpc.GradientSynchronizer(like, group)
        assert {type(memory) for memory in plain._reducer.memory} == {DeviceBucketMemory}
        found, _ = (sync({"a": cupy.asarray(np.full(300, scale * group.rank, np.float32))})["a"] for scale in (2.0, 6.0))
        assert type(found) is cupy.ndarray
        return float(found[299])

    assert world(cupy, "hybrid", 2, body) == [1.0] * 2


@pytest.mark.parametrize("name", ["bf16", "int8 with feedback"])
def test_a_hook_that_compresses_is_refused_over_nccl_when_it_is_given_and_the_group_stays_open(
    cupy: StandIn, name: str
) -> None:
    def body(group: ProcessGroup) -> Any:
        like, hook = {"a": cupy.asarray(np.ones(300, np.float32))}, HOOKS[name]()
        for _ in range(2):
            with pytest.raises(UsageError, match="NCCL chooses its own algorithm and compresses nothing") as refused:
                ferrorpc.GradientSynchronizer(like, group, hook=hook)
            assert "backend='hybrid'" in str(refused.value)
        return float(ferrorpc.GradientSynchronizer(like, group, hook=HOOKS["feedback alone"]())(like)["a"][299])

    assert world(cupy, "nccl", 2, body) == [1.0] * 2
