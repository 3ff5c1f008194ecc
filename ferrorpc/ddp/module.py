"""Data parallelism: every rank holds the whole model and its own share of the batch; gradients are averaged.

No framework is assumed. A module has `parameters()`, `named_parameters()`, `forward()`, `train()` and `eval()`; a parameter has
`.data` and `.grad`. That is what torch modules are, and what a NumPy model can be in a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrorpc.arrays.base import View
from ferrorpc.arrays.kinds import kind_of, spec_of, view, view_out
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.parameter import HasGradient
from ferrorpc.ddp.reducer import MEBIBYTE, Reducer
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import ReduceOp, TensorSpec
from ferrorpc.work import Work

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

Array = np.ndarray[Any, Any]


class DistributedDataParallel:
    """A module whose gradients are averaged over a group.

        ddp = DistributedDataParallel(module, group)      # all ranks begin with rank 0's weights
        loss = criterion(ddp(x), target); backward(loss)  # leaves gradients in parameter.grad
        ddp.sync_gradients()                              # now the mean over all ranks, the same bits on each
        optimizer.step()

    A parameter whose `.grad` is None on some ranks counts as zeros there, and gets the mean there too; where it is None on
    all ranks it stays None. Parameters that are frozen (`requires_grad` is False) take no part in the mean.

    Args:
        module: kept as `.module`; its parameters are updated in place, never replaced, so optimizers may hold them.
        group: every rank constructs its wrapper at the same point of its program.
        bucket_cap_mb: how large a bucket of gradients may get, in MiB.
        init_sync: whether to begin with the weights (and buffers) of rank 0.

    Raises:
        UsageError: the module has no parameters() or named_parameters(), or one of them is a bare array.
        CollectiveMismatchError: ranks hold different parameters; the message says where they differ.
    """

    def __init__(self, module: Any, group: ProcessGroup, bucket_cap_mb: float = 25, init_sync: bool = True) -> None:
        self.module = module
        self._group = group
        self._cap_mb = bucket_cap_mb
        named = _named_parameters(module)
        self._parameters = {name: parameter for name, parameter in named.items() if _trains(parameter)}
        self._reducer = Reducer(
            [(name, _spec(name, parameter.data)) for name, parameter in self._parameters.items()],
            group,
            bucket_cap_mb,
            "parameters",
        )
        self._syncs = True
        if init_sync:
            self.broadcast_parameters(root=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, on this rank's share of the batch."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As calling the object. The module is called itself where it can be, so that its own hooks run."""
        run = self.module if callable(self.module) else self.module.forward
        return run(*args, **kwargs)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Puts the module into training mode."""
        if mode:
            self.module.train()
        else:
            self.module.eval()
        return self

    def eval(self) -> DistributedDataParallel:
        """Puts the module into evaluation mode."""
        self.module.eval()
        return self

    def parameters(self) -> Iterator[Any]:
        """The module's parameters."""
        return iter(self.module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """The module's parameters with their names."""
        return iter(self.module.named_parameters())

    def broadcast_parameters(self, root: int = 0) -> None:
        """Gives every rank the weights (and buffers, where the module has them) of rank `root`, in place. Collective."""
        arrays = {name: parameter.data for name, parameter in _named_parameters(self.module).items()}
        arrays.update(_buffers(self.module))
        places = {name: view_out(array, spec_of(array)) for name, array in arrays.items()}
        layout = lay_out([(name, place.spec) for name, place in places.items()], int(self._cap_mb * MEBIBYTE))
        works: list[tuple[Work[Any], Any]] = []
        for bucket in layout.buckets:
            packed = np.empty(bucket.count, bucket.dtype.storage)
            if self._group.rank == root:
                for slot in bucket.slots:
                    packed[slot.start : slot.stop] = view(arrays[slot.name]).data.reshape(-1)
            works.append((self._group.broadcast(packed, root=root, out=packed, async_op=True), packed))
        for bucket, (work, packed) in zip(layout.buckets, works, strict=True):
            work.wait()
            for slot in bucket.slots:
                places[slot.name].data.reshape(-1)[...] = packed[slot.start : slot.stop]
                places[slot.name].commit()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it `sync_gradients` does nothing: gradients add up over several batches. All ranks alike."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def sync_gradients(self) -> None:
        """Replaces every parameter's gradient by its mean over all ranks. Collective.

        Gradients are written in place where they can be. Whatever they had added up to, also over batches under `no_sync`, is
        averaged.

        Raises:
            TensorMismatchError: a gradient's dtype or shape is not its parameter's. Nothing was sent then.
        """
        if not self._syncs:
            return
        views = {name: self._gradient(name, parameter) for name, parameter in self._parameters.items()}
        used = np.array([got is not None for got in views.values()], np.uint8)
        current = self._reducer.begin()
        current.side(used, ReduceOp.MAX)
        for name in reversed(self._parameters):
            current.put(name, views[name])
        current.wait()
        for (name, parameter), anywhere in zip(self._parameters.items(), used.tolist(), strict=True):
            if anywhere:
                _store(parameter, self._reducer.layout.slots[name].spec, current.mean(name))
        current.close()

    def _gradient(self, name: str, parameter: HasGradient) -> View | None:
        if parameter.grad is None:
            return None
        got = view(parameter.grad)
        wanted = self._reducer.layout.slots[name].spec
        if got.spec != wanted:
            raise TensorMismatchError(f"the gradient of {name!r} is {got.spec}, but the parameter was {wanted}")
        return got


def _store(parameter: HasGradient, spec: TensorSpec, mean: Array) -> None:
    """Into the gradient that is there; a new one where there is none, or it cannot be written."""
    if parameter.grad is not None:
        try:
            place = view_out(parameter.grad, spec)
        except (TensorMismatchError, UsageError):
            pass  # read-only, broadcast, or a number: its dtype and shape were checked before
        else:
            place.data[...] = mean
            place.commit()
            return
    parameter.grad = kind_of(parameter.data).wrap(mean, spec)


def _trains(parameter: Any) -> bool:
    return bool(getattr(parameter, "requires_grad", True))


def _named_parameters(module: Any) -> dict[str, HasGradient]:
    """The module's parameters by name, each object once, in the module's order."""
    if not hasattr(module, "named_parameters"):
        raise UsageError(
            f"{type(module).__name__} has no named_parameters()",
            hint="give it parameters(), named_parameters(), forward(), train() and eval()",
        )
    found: dict[str, HasGradient] = {}
    seen: set[int] = set()
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, HasGradient):
            raise UsageError(
                f"parameter {name!r} is a bare {type(parameter).__name__}, without .data and .grad",
                hint="wrap it: ferrorpc.Parameter(array)",
            )
        if id(parameter) in seen:
            continue
        if name in found:
            raise UsageError(f"two parameters are named {name!r}")
        seen.add(id(parameter))
        found[name] = parameter
    return found


def _buffers(module: Any) -> dict[str, Any]:
    """State that is no parameter, such as running statistics, where the module names it."""
    named = getattr(module, "named_buffers", None)
    return {f"buffer {name}": array for name, array in named()} if callable(named) else {}


def _spec(name: str, data: Any) -> TensorSpec:
    try:
        return spec_of(data)
    except UsageError as problem:
        raise type(problem)(f"parameter {name!r}: {problem.message}", hint=problem.hint) from None
