"""Gradients that lie in the buckets, but in the slots of others, because the user has exchanged them: none is overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import UsageError
from tests.unit.ddp.model import Plain
from tests.unit.ddp.world import run_world

ONE_BUCKET, ONE_EACH = 25, 1e-6


@pytest.mark.parametrize("cap_mb", [ONE_BUCKET, ONE_EACH])
@pytest.mark.parametrize("weight", [None, 3.0])
@pytest.mark.parametrize("views", [True, False])
def test_gradients_that_two_parameters_have_exchanged_are_averaged(views, weight, cap_mb):
    def body(group):
        module = Plain(a=np.zeros((2, 3)), b=np.zeros((3, 2)))
        ddp = DistributedDataParallel(module, group, cap_mb, gradient_as_bucket_view=views)
        a, b = module["a"], module["b"]
        a.grad, b.grad = np.arange(6.0).reshape(2, 3) + group.rank, np.full((3, 2), 10.0)
        ddp.sync_gradients(weight)
        a.grad, b.grad = b.grad.T, a.grad.T
        ddp.sync_gradients(weight)
        a.grad, b.grad = b.grad.reshape(2, 3), a.grad.reshape(3, 2)
        ddp.sync_gradients(weight)
        return a.grad.reshape(-1).tolist(), b.grad.tolist()

    transposed = (np.arange(6.0).reshape(2, 3) + 0.5).T.reshape(-1).tolist()
    assert run_world(2, body) == [(transposed, [[10.0, 10.0]] * 3)] * 2


@pytest.mark.parametrize("cap_mb", [ONE_BUCKET, ONE_EACH])
@pytest.mark.parametrize("weight", [None, 3.0])
@pytest.mark.parametrize("views", [True, False])
def test_means_may_be_the_gradients_of_others_in_the_next_step(views, weight, cap_mb):
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(2)}, group, cap_mb, gradient_as_bucket_view=views)
        means = sync({"a": np.full(2, 1.0), "b": np.full(2, 2.0)}, weight)
        means = sync({"a": means["b"], "b": means["a"][::-1]}, weight)
        return means["a"].tolist(), means["b"].tolist()

    assert run_world(2, body) == [([2.0, 2.0], [1.0, 1.0])] * 2


@pytest.mark.parametrize("cap_mb", [ONE_BUCKET, ONE_EACH])
@pytest.mark.parametrize("weight", [None, 3.0])
@pytest.mark.parametrize("before", ["ready", "add"])
@pytest.mark.parametrize("after", ["ready", "add"])
def test_a_mean_that_a_step_has_overwritten_is_refused(before, after, weight, cap_mb):
    """Silently it would be what the step has written."""

    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2), "b": np.zeros(2)}, group, cap_mb, gradient_as_bucket_view=True)
        means = sync({"a": np.full(2, 1.0), "b": np.full(2, 2.0)}, weight)
        with sync.step(weight) as step:
            getattr(step, before)("a", means["b"])
            with pytest.raises(UsageError, match="'b' lies in the place of 'a', which this step has overwritten"):
                getattr(step, after)("b", means["a"][::-1])
            step.ready("b", means["b"])
        return [mean.tolist() for mean in step.grads.values()]

    assert run_world(2, body) == [[[2.0, 2.0]] * 2] * 2
