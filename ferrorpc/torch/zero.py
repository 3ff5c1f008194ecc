"""ZeroOptimizer for torch: any elementwise torch optimizer with its state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ferrorpc.arrays.kinds import kind_of, spec_of
from ferrorpc.ddp.packing import broadcast_arrays
from ferrorpc.ddp.placement import check_not_captured, common_gpu, gpus_of
from ferrorpc.ddp.shards import Shard, Shards, StepsTaken, check_state_layout, check_state_rank
from ferrorpc.errors import UsageError
from ferrorpc.failure import others_told
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.torch.compiler import hide_from_compiler
from ferrorpc.torch.zero_state import is_per_element, per_element_keys, shard_state, unshard_state
from ferrorpc.types import TensorSpec

_NOT_ELEMENTWISE: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""torch's optimizers in which the update of an element depends on others."""
_RANK: Final = "rank"
_LAYOUT: Final = "layout"
_STEP: Final = "step"
_NAME: Final = "parameter"


class ZeroOptimizer(torch.optim.Optimizer):
    """Any elementwise torch optimizer (SGD, Adam, AdamW, ...), with 1/size of its state on each rank.

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-3)
        criterion(model(x), target).backward()    # the bare module: step() averages the gradients
        optimizer.step()

    Each rank's optimizer sees flat shards of parameters, which may hold pieces of several. So an update must depend on the
    element alone, not on whole matrices or norms. torch's Adafactor, LBFGS, Muon and SparseAdam, and classes derived from
    them, are refused; that any other class is elementwise, such as your own, is for you to know.
    `param_groups` has the real parameters, so torch's schedulers work. `state_dict()` is this rank's, to be loaded on the same
    rank of a group of the same size; `gather_state_dict()` is that of torch's own optimizer, for groups of any size.

    Args:
        parameters: tensors, or torch's dicts of them. Frozen ones are not updated. Each rank's shard of tensors on a GPU is
            copied to the host, where its optimizer runs.
        optimizer: the class of the optimizer that each rank runs on its shard.
        group: every rank constructs its optimizer at the same point of its program.
        bucket_cap_mb: how many MiB a message may hold.
        init_sync: whether to begin with rank 0's parameters, frozen ones included. Without it all ranks must hold the same.
        options: the optimizer's own, such as lr.

    Raises:
        UsageError: `optimizer` is one of those refused, or no class of an optimizer; or torch's own refuses the arguments.
        TensorMismatchError: a parameter has a dtype that ferrorpc does not send; frozen ones may have any with init_sync=False.
        CollectiveMismatchError: ranks gave different parameters; the message says where they differ.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        optimizer: type[torch.optim.Optimizer],
        group: ProcessGroup,
        *,
        bucket_cap_mb: float = 25,
        init_sync: bool = True,
        **options: Any,
    ) -> None:
        _check_class(optimizer)
        _check_elementwise(optimizer)
        self._group = group = group_given(group)
        hide_from_compiler()
        self._shards: list[Shards] = []
        self._steps = StepsTaken(group, "load_state_dict")
        with _translated("parameters", "pass model.parameters(), or torch's dicts of such"):
            super().__init__(parameters, options)
        _check_parameters(self.param_groups)
        self._trainable_groups = [_trainable(members) for members in self.param_groups]
        self._gpus = gpus_of(tensor for trained in self._trainable_groups for tensor in trained.values())
        inner = []
        for number, (members, trained) in enumerate(zip(self.param_groups, self._trainable_groups, strict=True)):
            held = _detached(trained)
            specs = [(name, spec_of(tensor)) for name, tensor in held.items()]
            shards = Shards(specs, group, bucket_cap_mb, f"{optimizer.__name__}, group {number}", common_gpu(held, group))
            self._shards.append(shards)
            inner.append(_settings(members) | {"params": [_parameter(shard) for shard in shards.shards]})
        with _translated(optimizer.__name__, "pass its own options after the group, as in torch: lr=1e-3"):
            self._inner = optimizer(inner, **options)
        self.defaults = self._inner.defaults
        self._take_settings()
        if init_sync:
            everything = [parameter for members in self.param_groups for parameter in members["params"]]
            named = {f"{_NAME}{number}": parameter for number, parameter in enumerate(everything)}
            broadcast_arrays(_detached(named), group, 0)
            _count_writes(everything)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters by the mean of all ranks' gradients; one without a gradient counts as zeros, and one that was
        frozen since keeps its value. Collective. An error of the optimizer ends the generation.

        Returns:
            This rank's result of `closure`, if given. It is called once, before the step.

        Raises:
            UsageError: a parameter that was frozen when the optimizer was made has a gradient, or a gradient is sparse. Nothing
                was sent then.
            CollectiveMismatchError: ranks have loaded states of different steps, or some have loaded none; on every rank, in
                the first step.
        """
        if closure is not None and not callable(closure):
            raise UsageError(
                f"closure={closure!r} is no function", hint="step() takes no loss, and no gradients: they are in .grad"
            )
        with torch.enable_grad():  # as torch's own do
            loss = None if closure is None else closure()
        for members, trained in zip(self.param_groups, self._trainable_groups, strict=True):
            _check_frozen(members, trained)
        self._copy_settings()
        gradients = [{name: _gradient(parameter) for name, parameter in trained.items()} for trained in self._trainable_groups]
        check_not_captured(self._gpus)
        for shards, own in zip(self._shards, gradients, strict=True):
            shards.check(own)
        self._steps.agree()
        with others_told(self._group):
            for shards, trained, own in zip(self._shards, self._trainable_groups, gradients, strict=True):
                shards.reduce(_detached(trained), own)
            with self._steps.next():
                self._inner.step()
                self._take_settings()  # it may count its steps there
                for shards, trained in zip(self._shards, self._trainable_groups, strict=True):
                    updated = {name: parameter for name, parameter in trained.items() if parameter.requires_grad}
                    shards.gather(_detached(updated))
                    _count_writes(updated.values())
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Used by the constructor. Raises UsageError later, because the parameters are sharded then."""
        if self._shards:
            raise UsageError("this optimizer's parameters are cut into shards already", hint="make a new one with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: its optimizer's state of its shards.

        Raises:
            UsageError: the last step has failed, and no state was loaded since.
        """
        self._steps.check_not_ahead()
        self._copy_settings()  # a scheduler may have changed them since the last step
        state: dict[str, Any] = self._inner.state_dict()
        return state | {_RANK: [self._group.rank, self._group.size], _LAYOUT: self._layout, _STEP: self._steps.count}

    def gather_state_dict(self, root: int = 0) -> dict[str, Any] | None:
        """The whole state, in the form of torch's own optimizer, on rank `root`; None elsewhere. Collective.

        Groups of any size can load it, and so can torch's own optimizer. State of parameters without elements is left out.

        Raises:
            UsageError: the last step has failed, and no state was loaded since.
        """
        self._steps.check_not_ahead()
        whole: dict[str, Any] = super().state_dict()
        whole["state"] |= {key: value for key, value in self._inner.state.items() if not isinstance(key, torch.Tensor)}
        groups = zip(whole["param_groups"], self._shards, self._inner.param_groups, self._trainable_groups, strict=True)
        for members, shards, own, trained in groups:
            for shard, part in zip(shards.shards, own["params"], strict=True):
                for name, state in unshard_state(shard, self._inner.state.get(part, {}), root).items():
                    if state:
                        found = {key: _laid_out_like(trained[name], value) for key, value in state.items()}
                        whole["state"][members["params"][_index(name)]] = found
        return whole if self._group.rank == root else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned on the same rank of a group of the same size, or the state of torch's own optimizer,
        which `gather_state_dict` returns in any group.

        Raises:
            UsageError: it is another optimizer's, another rank's, or of a group of another size; or torch's own has taken more
                steps with some parameters than with others in the same bucket.
        """
        _check_state(state_dict)
        if _RANK in state_dict:
            self._check_own(state_dict)
            own = {key: value for key, value in state_dict.items() if key not in (_RANK, _LAYOUT, _STEP)}
        else:
            own = self._sharded(state_dict)
        with _translated("the state", "give this optimizer the same groups of parameters"):
            self._inner.load_state_dict(own)
        self._take_settings()
        self._steps.set(_steps_of(state_dict))

    def _check_own(self, state_dict: dict[str, Any]) -> None:
        check_state_rank(self._group, state_dict[_RANK], "gather_state_dict")
        if _LAYOUT in state_dict:  # states saved before there were layouts have none
            check_state_layout(str(state_dict[_LAYOUT]), self._layout)
        shards = [shard.weights.shape for shards in self._shards for shard in shards.shards]
        for number, state in _by_parameter(state_dict).items():
            shapes = {tuple(value.shape) for value in state.values() if is_per_element(value)}
            if number >= len(shards) or not shapes <= {shards[number]}:
                raise UsageError("the state is not this optimizer's", hint="give it the same parameters in the same order")

    def _sharded(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the state of torch's own optimizer."""
        own: dict[str, Any] = self._inner.state_dict()
        counts = [len(members["params"]) for members in self.param_groups]
        found = [len(members["params"]) for members in whole["param_groups"]]
        if found != counts:
            raise UsageError(
                f"the state is of groups of {found} parameters, and this optimizer has {counts}",
                hint="give it the same parameters in the same order",
            )
        states = _by_parameter(whole)
        own["state"] = {key: value for key, value in whole["state"].items() if key not in states}
        per_element = per_element_keys(states.values())
        for members, settings, shards in zip(own["param_groups"], whole["param_groups"], self._shards, strict=True):
            members.update(_settings(settings))
            for number, shard in zip(members["params"], shards.shards, strict=True):
                held = {name: states.get(settings["params"][_index(name)], {}) for name in shard.shapes}
                own["state"][number] = shard_state(shard, held, per_element)
        return own

    def __repr__(self) -> str:
        where = f"rank {self._group.rank} of {self._group.size}"
        settings: str = super().__repr__()
        return settings.replace(" (", f" of {type(self._inner).__name__}, {where} (", 1)

    def __getstate__(self) -> Any:
        """Refuses: what it holds belongs to this process and its group."""
        raise UsageError("a ZeroOptimizer cannot be copied or pickled", hint="save state_dict(), or gather_state_dict()")

    def _copy_settings(self) -> None:
        for members, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            own.update(_settings(members))

    def _take_settings(self) -> None:
        for members, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            members.update(_settings(own))

    @property
    def _layout(self) -> str:
        return "\n".join(f"group {number}\n{shards.layout}" for number, shards in enumerate(self._shards))

    @property
    def memory_bytes(self) -> int:
        """The size of this rank's optimizer state."""
        return sum(
            value.numel() * value.element_size()
            for state in self._inner.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


@contextmanager
def _translated(what: str, hint: str) -> Iterator[None]:
    """Turns torch's errors about arguments into UsageErrors."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        raise UsageError(f"{what}: {problem}", hint=hint) from None


def _check_class(optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer)
        raise UsageError(
            f"optimizer={kind.__name__}(...) is an optimizer already",
            hint=f"pass its class: ZeroOptimizer(parameters, torch.optim.{kind.__name__}, group, lr=...)",
        )
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer={optimizer!r} is no class of optimizer",
            hint="the order is ZeroOptimizer(parameters, torch.optim.AdamW, group, lr=1e-3)",
        )


def _check_elementwise(optimizer: type[torch.optim.Optimizer]) -> None:
    names = [each.__name__ for each in optimizer.__mro__ if each.__module__.startswith("torch.optim")]
    for name in _NOT_ELEMENTWISE.intersection(names):
        raise UsageError(
            f"{name} looks at whole parameters, but each rank has flat pieces of them",
            hint="use one that treats every element alike, such as AdamW",
        )


def _check_parameters(groups: Iterable[dict[str, Any]]) -> None:
    seen: dict[int, int] = {}
    for place, parameter in enumerate(each for group in groups for each in group["params"]):
        if torch.nn.parameter.is_lazy(parameter):
            hint = "run the module on a batch, then make its optimizer"
            raise UsageError(f"parameter {place} is lazy and has no shape yet", hint=hint)
        before = seen.setdefault(id(parameter), place)
        if before != place:
            raise UsageError(
                f"parameters {before} and {place} are one", hint="give each once: model.parameters() does, tied ones as well"
            )


def _check_state(state: Any) -> None:
    hint = "pass what state_dict() or gather_state_dict() gave"
    if not isinstance(state, Mapping):
        raise UsageError(f"{type(state).__name__} is no state", hint=hint)
    for key, kind in (("state", Mapping), ("param_groups", list)):
        if not isinstance(state.get(key), kind):
            raise UsageError(f"the state has no {key!r}, as torch's optimizers give it", hint=hint)


def _by_parameter(state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The state of each parameter, without what an optimizer keeps for all of them under names of its own."""
    return {key: value for key, value in state_dict["state"].items() if isinstance(key, int)}


def _steps_of(state_dict: dict[str, Any]) -> int:
    """How many steps a state has taken: what `state_dict` counted; in one of torch's own, what its optimizer counts, or 0."""
    if _STEP in state_dict:
        return int(state_dict[_STEP])
    counts = [state["step"] for state in _by_parameter(state_dict).values() if "step" in state]
    return max((int(count) for count in counts if not is_per_element(count)), default=0)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _trainable(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters of a group that are not frozen, named by their indices."""
    return {f"{_NAME}{number}": parameter for number, parameter in enumerate(group["params"]) if parameter.requires_grad}


def _detached(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _count_writes(parameters: Iterable[torch.Tensor]) -> None:
    """They were written behind autograd's back: a graph from before must not go on."""
    for parameter in parameters:
        torch.autograd.graph.increment_version(parameter)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Outside of the graph that backward(create_graph=True) makes it part of."""
    return None if parameter.grad is None else parameter.grad.detach()


def _laid_out_like(parameter: torch.Tensor, value: Any) -> Any:
    """A per-element tensor in the parameter's order in memory, which torch's fused optimizers take for granted."""
    if not is_per_element(value) or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter.detach(), dtype=value.dtype, device=value.device).copy_(value)


def _index(name: str) -> int:
    """The index in its group of the parameter that `_trainable` gave this name."""
    return int(name.removeprefix(_NAME))


def _check_frozen(group: dict[str, Any], trained: dict[str, torch.Tensor]) -> None:
    for number, parameter in enumerate(group["params"]):
        if parameter.grad is not None and f"{_NAME}{number}" not in trained:
            raise UsageError(
                f"parameter {number} was frozen when this optimizer was made, but has a gradient now",
                hint="make the optimizer again after parameters are unfrozen",
            )


def _parameter(shard: Shard) -> torch.nn.Parameter:
    """A parameter whose data and gradient are the shard's memory."""
    spec = TensorSpec(shard.bucket.dtype, shard.weights.shape)
    kind = kind_of(torch.empty(0, device="cpu"))
    with torch.inference_mode(False):  # the optimizer is to write to it elsewhere, too
        parameter = torch.nn.Parameter(kind.alias(shard.weights, spec))
        parameter.grad = kind.alias(shard.gradient, spec)
    return parameter
