"""One rank's replica of a module: its parameters, their gradients in buckets, its buffers. All module wrappers use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ferrorpc.arrays.base import Out, View
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import copy_into, kind_of, spec_of, view_out
from ferrorpc.ddp.bucket import Slot
from ferrorpc.ddp.buffers import Buffers, named_buffers
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.packing import broadcast_arrays, can_be_packed
from ferrorpc.ddp.parameter import HasGradient, is_parameter
from ferrorpc.ddp.placement import bucket_kind, check_not_captured, gpus_of
from ferrorpc.ddp.reducer import Reducer
from ferrorpc.ddp.reduction import Reduction, followed, given_up_on_failure
from ferrorpc.ddp.weight_check import check_weights
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.types import TensorSpec


class Replica:
    """The trainable parameters of a module, and the reduction of their gradients.

    Arguments and errors are those of `DistributedDataParallel`, where `views` is `gradient_as_bucket_view`.
    """

    def __init__(
        self,
        module: Any,
        group: ProcessGroup,
        bucket_cap_mb: float,
        init_sync: bool,
        buffers: str,
        views: bool,
        hook: Hook | None,
        check_every: int,
    ) -> None:
        self.module = module
        self.group = group
        self.may_sync = True
        """Whether gradients are averaged where no `accumulate` holds that back: false under `no_sync`."""
        self._accumulation: object | None = None
        """Stands for the newest `accumulate`, until its last part."""
        self._views = views
        self._check_every = _checked_interval(check_every)
        self._all_parameters = named_parameters(module)
        _check_initialised("parameter", self._all_parameters)
        _check_initialised("buffer", named_buffers(module))
        for name, parameter in self._all_parameters.items() if check_every else ():
            _spec(name, parameter.data)
        self.parameters = {name: parameter for name, parameter in self._all_parameters.items() if _is_trainable(parameter)}
        specs = [(name, _spec(name, parameter.data)) for name, parameter in self.parameters.items()]
        kind = bucket_kind({name: parameter.data for name, parameter in self.parameters.items()}, group, hook)
        self.reducer = Reducer(specs, group, bucket_cap_mb, "parameters", hook=hook, kind=kind)
        self._buffers = Buffers(module, group, buffers)
        trained = (parameter.data for parameter in self.parameters.values())
        self._gpus = gpus_of([*trained, *named_buffers(module).values()])
        self._aliases: dict[str, tuple[Any | None, int]] = {}
        self._weights_differ = False
        """Whether weights may differ now: a rank may have left an `uneven` block without `follow`."""
        if init_sync:
            self.broadcast(0)

    @property
    def text(self) -> str:
        """For the reprs of wrappers."""
        return f"{len(self.parameters)} parameters that train, rank {self.group.rank} of {self.group.size}"

    def broadcast(self, root: int) -> None:
        """Gives every rank the weights and buffers of rank `root`, in place. Collective. Buffers that are each rank's own may
        be such as cannot be sent: those stay."""
        buffers = self._buffers_now()
        if self._buffers.mode == "local":
            buffers = {name: array for name, array in buffers.items() if can_be_packed(array)}
        self._share(named_parameters(self.module), buffers, root)

    def _share(self, parameters: dict[str, HasGradient], buffers: dict[str, Any], root: int) -> None:
        """Gives every rank these weights and buffers of rank `root`, in place. Collective."""
        weights = {name: parameter.data for name, parameter in parameters.items()}
        broadcast_arrays(weights | buffers, self.group, root)
        for parameter in parameters.values():  # torch takes `data`, which was written, for another tensor
            kind_of(parameter).will_write(parameter)

    def _buffers_now(self) -> dict[str, Any]:
        return {f"buffer {name}": array for name, array in named_buffers(self.module).items()}

    def check_weights(self, when: str) -> None:
        """Raises CollectiveMismatchError if ranks hold different weights. Collective."""
        arrays = {name: parameter.data for name, parameter in self._all_parameters.items()}
        check_weights(arrays, self.group, self.reducer.stream.name, when, "broadcast_parameters()")

    def _check_weights_if_due(self, step: int) -> None:
        if self._check_every and (step + 1) % self._check_every == 0:
            self.check_weights(f"in step {step + 1}")

    def check_parameters(self) -> None:
        """Raises UsageError if parameters of the module were added, removed, replaced or unfrozen after it was wrapped."""
        now = named_parameters(self.module)
        for name in (*now, *self._all_parameters):
            if now.get(name) is not self._all_parameters.get(name):
                what, hint = "was replaced", "wrap the module again; for one call alone, as by functional_call, use ddp.module"
                if name not in self._all_parameters or name not in now:
                    what, hint = "was added" if name in now else "was taken away", "wrap the module again"
                raise UsageError(f"parameter {name!r} {what} after the module was wrapped", hint=hint)
            if name not in self.parameters and _is_trainable(now[name]):
                raise UsageError(
                    f"parameter {name!r} was frozen when the module was wrapped, but requires a gradient now",
                    hint="wrap the module again, or leave it frozen",
                )

    @property
    def exchanges_buffers(self) -> bool:
        """Whether a step exchanges buffers that a forward pass may have changed."""
        return self._buffers.are_exchanged and bool(getattr(self.module, "training", True))

    @property
    def syncs(self) -> bool:
        """Whether gradients are averaged now."""
        return self.may_sync and self._accumulation is None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients accumulate on each rank and none is averaged. All ranks alike."""
        before, self.may_sync = self.may_sync, False
        try:
            yield
        finally:
            self.may_sync = before

    def accumulate(self, count: Any) -> Iterator[int]:
        """Yields 0 to count - 1. Gradients are averaged in the last iteration only. One that was left half-way, and that
        something still refers to, ends where the next one begins, so there is none within another."""
        if not isinstance(count, int | np.integer) or count < 1:
            raise UsageError(f"accumulate({count!r}) has no last part", hint="pass 1 or more")
        own = self._accumulation = object()
        try:
            for index in range(count - 1):
                yield index
                if self._accumulation is not own:
                    raise UsageError(
                        "an accumulate() began within another one of this module",
                        hint="use one with as many parts as both have, or no_sync()",
                    )
        finally:
            if self._accumulation is own:
                self._accumulation = None
        yield count - 1

    def check_weight(self, weight: float | None, how: str) -> None:
        """Raises UsageError if it is that of a part that is not averaged: parts are added, and only their sum has a weight.

        Args:
            how: for the error: the caller's way to give that one.
        """
        if weight is not None and not self.syncs:
            raise UsageError(
                f"weight {weight} would have no effect: this part of a step is not averaged",
                hint=f"give the weight of all parts together, {how}, and scale each part's loss by its share",
            )

    # One step: begin, contribute each gradient that is ready, finish.

    def begin(self, weight: float | None) -> Reduction:
        """Begins the next reduction.

        Raises:
            UsageError: a graph is being captured from the current stream of a GPU that has parameters or buffers. Nothing was
                sent.
            TensorMismatchError: as `Buffers.check` and `gradient`. Nothing was sent.
        """
        check_not_captured(self._gpus)
        self._take_out_gradients()
        if not self.reducer.is_uneven:
            self._buffers.check()
        return Reduction(self.reducer, weight)

    def _take_out_gradients(self) -> None:
        """Copies each gradient that lies in another one's slot, as after the user has exchanged two. This step writes there."""
        for name, parameter in self.parameters.items() if self._views else ():
            gradient = parameter.grad
            memory = None if gradient is None else self.reducer.elsewhere(name, gradient)
            if memory is not None:
                copy = memory.copied(self.gradient(name).data)
                parameter.grad = None
                target = self._target(self.reducer.layout.slots[name])
                copy_into(target.data, copy)
                target.commit()

    def contribute(self, reduction: Reduction, name: str) -> None:
        """Puts a parameter's gradient, which must exist. Raises as `gradient`."""
        reduction.put(name, self.gradient(name))
        self._give_alias(name)

    def gradient(self, name: str) -> View:
        """A view of a parameter's gradient.

        Raises:
            TensorMismatchError: its dtype, shape or device is not the parameter's.
            UsageError: it is part of a graph.
        """
        given = self.parameters[name].grad
        if getattr(given, "requires_grad", False):
            raise UsageError(
                f"the gradient of {name!r} requires a gradient itself, but its mean over the ranks is not differentiable",
                hint="call backward() without create_graph=True; for gradients of gradients compute what they are of by "
                "torch.autograd.grad(..., create_graph=True), which is not averaged",
            )
        got = self.reducer.view(given, f"the gradient of {name!r}")
        wanted = self.reducer.layout.slots[name].spec
        if got.spec != wanted:
            raise TensorMismatchError(
                f"the gradient of {name!r} is {got.spec}, but the parameter was {wanted}",
                hint="convert a module before it is wrapped, or wrap it again",
            )
        return got

    def contribute_rest(self, reduction: Reduction, used: Collection[str]) -> None:
        """Contributes the remaining gradients and the buffers. Waits for nothing, so that ranks may do so for several modules
        in different orders.

        Args:
            used: which of the remaining parameters this rank has used. The gradient of one that it has not used, left from an
                earlier step, counts in the mean if another rank has used it.
        """
        with given_up_on_failure(reduction):
            if not self.reducer.is_uneven:
                self._buffers.begin()
            for name, parameter in () if reduction.is_complete else reversed(self.parameters.items()):
                if parameter.grad is None or reduction.has(name):
                    continue
                if name not in used and self.reducer.in_place(name, parameter.grad):
                    reduction.keep(name)
                reduction.put(name, self.gradient(name), name in used, deferrable=True)

    def finish(self, reduction: Reduction) -> None:
        """Returns when every gradient is the mean. The gradient of a parameter that no rank has used stays as it was."""
        with given_up_on_failure(reduction):
            reduction.finish()
            self._store(reduction)
            if not self.reducer.is_uneven:
                self._buffers.finish()
        if not self._weights_differ:
            self._check_weights_if_due(reduction.number)

    def _store(self, reduction: Reduction) -> None:
        for memory in self.reducer.memory:
            used = [slot for slot in memory.bucket.slots if reduction.used(slot.name) and not self._give_alias(slot.name)]
            targets = [self._target(slot) for slot in used]
            memory.read(used, [target.data for target in targets])
            for target in targets:
                target.commit()

    def _target(self, slot: Slot) -> Out:
        """Where a parameter's mean is written: its gradient, or a new one if there is none or it cannot be written."""
        parameter, on_device = self.parameters[slot.name], self.reducer.kind is not None
        if parameter.grad is not None:
            # Raised for a read-only array, a broadcast one, or a number; dtype and shape were checked before.
            with suppress(TensorMismatchError, UsageError):
                return view_out(parameter.grad, slot.spec, on_device)
        parameter.grad = kind_of(parameter.data).empty_beside(parameter.data, slot.spec)
        return view_out(parameter.grad, slot.spec, on_device)

    def alias(self, name: str) -> Any | None:
        """The bucket's memory as a parameter's gradient. None without such views, for kinds of arrays that cannot use that
        memory, and for parameters whose elements are in another order than C's."""
        data = self.parameters[name].data
        kind = kind_of(data)
        if not self._views or not kind.takes_any_order(data):
            return None
        alias, place = self._aliases.get(name, (None, 0))
        if alias is None or kind.pointer_of(alias) != place:
            memory, slot = self.reducer.at(name)
            alias = memory.alias(slot, kind)
            self._aliases[name] = alias, 0 if alias is None else kind.pointer_of(alias)
        return alias

    def _give_alias(self, name: str) -> bool:
        """Makes a parameter's gradient a view of its bucket. False if that is not possible."""
        alias = self.alias(name)
        if alias is not None and self.parameters[name].grad is not alias:
            self.parameters[name].grad = alias
        return alias is not None

    @contextmanager
    def uneven(self, follow: Callable[[], Any] | None) -> Iterator[None]:
        """Within it ranks may take different numbers of steps; see `DistributedDataParallel.uneven`."""
        first = self.reducer.begun
        with self.reducer.uneven(follow):
            self._weights_differ = follow is None
            try:
                yield
            finally:
                self._weights_differ = False
            own = self.reducer.begun - first
            for reduction in followed(self.reducer):
                if follow is not None:
                    self._take_step(reduction)
                    follow()
        counts = self.group.all_gather(np.int64(own))
        root = int(np.argmax([int(count) for count in counts]))
        parameters = named_parameters(self.module) if follow is None else {}
        self._share(parameters, {} if self._buffers.mode == "local" else self._buffers_now(), root)

    def _take_step(self, reduction: Reduction) -> None:
        """Leaves gradients as on the ranks that took this step, and compares weights where they do."""
        self._store(reduction)
        for name, parameter in self.parameters.items():
            if not reduction.used(name):
                parameter.grad = None  # and not as in this rank's last step
        self._check_weights_if_due(reduction.number)


def _checked_interval(check_every: Any) -> int:
    if not isinstance(check_every, int | np.integer) or check_every < 0:
        raise UsageError(f"check_every={check_every!r} is no number of steps", hint="pass 0 for never, or such as 100")
    return int(check_every)


def _is_trainable(parameter: Any) -> bool:
    return bool(getattr(parameter, "requires_grad", True))


def named_parameters(module: Any) -> dict[str, HasGradient]:
    """The module's parameters by name, each object once, in the module's order.

    Raises:
        UsageError: it has no named_parameters(), two of one name, or a bare array among them.
    """
    if isinstance(module, type):
        raise UsageError(f"module={module.__name__} is a class", hint=f"pass an instance of it: {module.__name__}(...)")
    if not callable(getattr(module, "named_parameters", None)):
        raise UsageError(
            f"{type(module).__name__} has no named_parameters()",
            hint="give it parameters(), named_parameters(), forward(), train() and eval()",
        )
    found: dict[str, HasGradient] = {}
    seen: set[int] = set()
    for pair in module.named_parameters():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"named_parameters() of {type(module).__name__} gave a {type(pair).__name__}",
                hint="let it give pairs: (name, parameter)",
            )
        name, parameter = pair
        if not is_parameter(parameter):
            raise UsageError(
                f"parameter {name!r} is a bare {type(parameter).__name__}, without .data and .grad",
                hint="wrap it: ferrorpc.Parameter(array)",
            )
        if id(parameter) in seen:
            continue
        if name in found:
            raise UsageError(f"two parameters are named {name!r}", hint="give each a name of its own")
        seen.add(id(parameter))
        found[name] = parameter
    return found


def _check_initialised(what: str, found: Mapping[str, Any]) -> None:
    for name, each in found.items():
        if hasattr(each, "cls_to_become"):  # of torch's lazy modules
            raise UsageError(f"{what} {name!r} is lazy and has no shape yet", hint="run the module on a batch, then wrap it")


def _spec(name: str, data: Any) -> TensorSpec:
    with ErrorPrefix(f"parameter {name!r}"):
        return spec_of(data)
