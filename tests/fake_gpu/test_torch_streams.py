"""A torch module with a branch in a stream of its own: its gradients are averaged once that stream has written them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.machine import FakeStream
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.torch_gpu import TorchGpus, torch, torch_on
from tests.fake_gpu.worlds import host_lanes

DistributedDataParallel = pytest.importorskip("ferrorpc.torch").DistributedDataParallel

STEPS = 2
TASKS = 100
"""So much has the branch's stream to do before it comes to the gradient."""


class InStream(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """What comes before it runs its backward pass in this stream; what comes after it does so in the default one."""

    @staticmethod
    def forward(context: Any, x: Any, gpus: TorchGpus, stream: FakeStream) -> Any:
        context.given = gpus, stream
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        gpus, stream = context.given
        context.kept = gradient  # whose memory is the default stream's
        gpus.follow(stream.gpu.default, stream)
        if stream is not stream.gpu.default:
            for _ in range(TASKS):
                stream.enqueue(lambda: True)
        return gradient, None, None


class Branches(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Two factors, each in the stream of its branch; without streams on the host."""

    def __init__(self, gpus: TorchGpus, streams: list[FakeStream]) -> None:
        super().__init__()
        make = gpus.from_numpy if streams else torch.from_numpy
        self.factors = torch.nn.ParameterList([torch.nn.Parameter(make(np.ones(4, np.float32))) for _ in range(2)])
        self.streams = streams
        self.gpus = gpus

    def forward(self, x: Any) -> Any:
        if not self.streams:
            return x * self.factors[0] + x * self.factors[1]
        pairs = zip(self.factors, self.streams, strict=True)
        first, second = (InStream.apply(x * factor, self.gpus, stream) for factor, stream in pairs)
        return first + second


@pytest.mark.parametrize("views", [True, False])
def test_gradients_of_several_streams_are_averaged_when_all_are_written(cupy: StandIn, views: bool) -> None:
    """One rank is on the host: torch's autograd has one thread for a GPU of the process, in which two ranks would wait for each
    other."""
    with torch_on(cupy) as gpus:
        gpu = cupy.machine.gpus[0]

        def body(group: ProcessGroup) -> list[list[float]]:
            streams = [] if group.rank else [gpu.default, gpu.new_stream()]  # autograd begins with the last
            module, found = Branches(gpus, streams), []
            ddp = DistributedDataParallel(module, group, gradient_as_bucket_view=views)
            for step in range(STEPS):
                host = np.full(4, 10.0**step * (group.rank + 1), np.float32)
                x = gpus.from_numpy(host) if streams else torch.from_numpy(host)
                ddp.zero_grad()
                loss = ddp(x).sum()
                for stream in streams[1:]:  # as the engine does before what it calls at the end
                    at_end = partial(gpus.follow, stream, gpu.default)
                    loss.register_hook(lambda _, call=at_end: torch.autograd.Variable._execution_engine.queue_callback(call))
                loss.backward()
                found.append([float(each.grad.cpu()[0]) for each in module.factors])
            return found

        means = [[1.5 * 10**step] * 2 for step in range(STEPS)]
        assert run_groups([ProcessGroup(backend) for backend in host_lanes(2)], body) == [means, means]
    assert not cupy.machine.faults
