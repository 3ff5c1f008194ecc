"""DistributedDataParallel for torch modules: gradients are averaged during the backward pass."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Generic

import torch

from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.replica import Replica
from ferrorpc.ddp.type_variables import TypeVar
from ferrorpc.ddp.wrapper import Wrapper, check_unwrapped
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.torch.arguments import checked_module
from ferrorpc.torch.backward_hooks import BackwardHooks, check_not_shared
from ferrorpc.torch.compiler import hide_from_compiler, hide_methods
from ferrorpc.torch.parameter_snapshot import ParameterSnapshot

Module = TypeVar("Module", bound=torch.nn.Module, covariant=True, default=torch.nn.Module)

_PREFIX: Final = "module."
"""Of the names in checkpoints of torch's own wrapper."""

_PARTS: Final = (torch.Tensor, torch.nn.Module)


class DistributedDataParallel(Wrapper, torch.nn.Module, Generic[Module]):
    """A torch module whose gradients are averaged over a group.

        ddp = DistributedDataParallel(module, group)   # all ranks begin with rank 0's weights
        criterion(ddp(x), target).backward()           # .grad is the mean over all ranks, the same bits on each
        optimizer.step()

    Ranks may use different parameters, in different orders: a parameter that a rank has not used counts as zeros there, and
    the gradient of one that no rank has used stays as it was. Names in `state_dict()` and `named_parameters()` are the
    module's own.

    After `group.reform()` wrap the module again. Only its newest wrapper averages; calls of older ones raise.

    Args:
        module: kept as `.module`.
        group: every rank constructs its wrapper at the same point of its program.
        bucket_cap_mb: how many MiB of gradients a bucket may hold; the first one holds at most 1 MiB.
        init_sync: whether to begin with the weights and buffers of rank 0. Buffers that cannot be sent, such as sparse ones,
            stay as they are with buffers="local", and are refused otherwise.
        buffers: how each averaged step synchronises buffers: "broadcast" gives all ranks rank 0's, "mean" averages
            floating-point ones (others are rank 0's), "local" leaves them alone.
        hook: how buckets are reduced, see `ferrorpc.hooks`.
        check_every: calls `check_weights` after every so many steps; 0 for never.
        gradient_as_bucket_view: `.grad` is a view of its bucket, without a copy. The next backward pass overwrites it.

    Raises:
        CollectiveMismatchError: ranks hold different parameters; the message says where they differ.
        TensorMismatchError: a parameter's dtype has no mean.
        UsageError: the module contains a lazy parameter or buffer, or a submodule that is wrapped already; or a part of its
            parameters belongs to another module that is wrapped; or it contains a SyncBatchNorm, the group has several ranks,
            and torch.distributed is not initialised, so that it would see this rank's batches alone.
    """

    def __init__(
        self,
        module: Module,
        group: ProcessGroup,
        bucket_cap_mb: float = 25,
        init_sync: bool = True,
        *,
        buffers: str = "broadcast",
        hook: Hook | None = None,
        check_every: int = 0,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        group_given(group)
        check_unwrapped(module)
        _check_batch_norm(checked_module(module), group.size)
        check_not_shared(module)
        self.module: Module = module
        self._replica = Replica(module, group, bucket_cap_mb, init_sync, buffers, gradient_as_bucket_view, hook, check_every)
        self._hooks = BackwardHooks(self._replica)
        self._snapshot = ParameterSnapshot(module)
        weakref.finalize(self, self._hooks.remove)
        hide_from_compiler()
        hide_methods(DistributedDataParallel, "_before", "_after")
        super().register_load_state_dict_pre_hook(_add_own_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, on this rank's share of the batch.

        Raises:
            UsageError: parameters were added to the module since it was wrapped, or the previous backward pass did not end.
        """
        self._before()
        outputs = self.module(*args, **kwargs)
        self._after(outputs)
        return outputs

    def extra_repr(self) -> str:
        """For the module's repr."""
        return self._replica.text

    def _before(self) -> None:
        if torch.is_grad_enabled():
            if self._snapshot.may_differ():
                self._replica.check_parameters()
                self._snapshot.take()
            self._hooks.move_last()

    def _after(self, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._hooks.watch(outputs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """As in torch: whether backward passes average, for loops that set it instead of using `no_sync()`."""
        return self._replica.may_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._replica.may_sync = bool(value)

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        """Backward passes within it have this weight in the mean, such as this rank's number of tokens or samples:
        sum(weight * grad) / sum(weight). On all ranks or on none. Around all parts of a step, with the weight of the whole.

        Where the weights of all ranks sum to zero, or to no finite number, the backward pass raises UsageError on every rank.
        Gradients that are views of buckets are lost then, and are to be computed again.

        Raises:
            UsageError: it is begun within `no_sync`.
        """
        return self._hooks.weighted(weight)

    if not TYPE_CHECKING:  # a checker goes by torch's own

        def __getattr__(self, name: str) -> Any:
            """A part of the module: names that a module around it gives, such as "body.0.weight", lead through here."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                inner = self.__dict__.get("_modules", {}).get("module")
                for parts in (inner._modules, inner._parameters, inner._buffers) if inner is not None else ():
                    if isinstance(parts.get(name), _PARTS):
                        return parts[name]
                if name == "sync_gradients":
                    text = f"{type(self).__name__!r} object has no attribute {name!r}\ntry: leave it out: backward() averages"
                    raise AttributeError(text, name=name, obj=self) from None
                raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses a tensor or module under the name of one of the module's, which would not use it, and any parameters."""
        if isinstance(value, _PARTS) and name != "module" and isinstance(getattr(self.module, name, None), _PARTS):
            raise UsageError(
                f"{name!r} is a part of the module, but was set on its wrapper",
                hint="set it on ddp.module; and give torch.func.functional_call ddp.module in place of ddp",
            )
        if name != "module":
            _check_no_parameters(name, value)
        super().__setattr__(name, value)

    def __getstate__(self) -> Any:
        """Refuses: what it holds belongs to this process and its group."""
        raise UsageError(
            "a DistributedDataParallel cannot be copied or pickled", hint="copy or save ddp.module, or ddp.state_dict()"
        )

    # Names are the module's own, so a checkpoint does not depend on whether the module was wrapped.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        state = self.module.state_dict(*args, **kwargs)
        own, versions = kwargs.get("prefix", "").removesuffix("."), getattr(state, "_metadata", None)
        if own and versions is not None:  # of a module that contains this one: torch looks for versions below the wrapper
            mine = [name for name in versions if f"{name}.".startswith(f"{own}.")]
            versions.update({f"{own}.module{name.removeprefix(own)}": versions[name] for name in mine})
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads into the module. Names may begin with "module.", as in checkpoints of torch's own wrapper."""
        if not isinstance(state_dict, Mapping):
            raise UsageError(
                f"{type(state_dict).__name__} is no state", hint="pass what state_dict() gave, by torch.load(path)"
            )
        foreign = state_dict.keys() - self.module.state_dict().keys()
        if foreign and all(name.startswith(_PREFIX) for name in state_dict):
            state_dict = _without_prefix(state_dict)
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Refuses a parameter: only those of the module are trained and saved."""
        _check_no_parameters(name, param)
        super().register_parameter(name, param)

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        """Of the module, whose states these are. So are the other hooks of states."""
        return self.module.register_state_dict_pre_hook(hook)

    def register_state_dict_post_hook(self, hook: Any) -> Any:
        """Of the module."""
        return self.module.register_state_dict_post_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        """Of the module."""
        return self.module.register_load_state_dict_pre_hook(hook)

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """Of the module."""
        return self.module.register_load_state_dict_post_hook(hook)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The module's own, by a name that `named_parameters` gives."""
        found: torch.nn.Parameter = self._inner_or_own("get_parameter", target)
        return found

    def get_buffer(self, target: str) -> torch.Tensor:
        """The module's own, by a name that `named_buffers` gives."""
        found: torch.Tensor = self._inner_or_own("get_buffer", target)
        return found

    def get_submodule(self, target: str) -> torch.nn.Module:
        """The module's own, by a name that `named_modules` gives. "" is the wrapper."""
        found: torch.nn.Module = self._inner_or_own("get_submodule", target) if target else self
        return found

    def _inner_or_own(self, getter: str, target: str) -> Any:
        try:
            return getattr(self.module, getter)(target)
        except AttributeError:
            return getattr(super(), getter)(target)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The wrapper, then the module and its parts under the module's own names, so that a part's name and the names in its
        `named_parameters()` join to those that this one's gives. The wrapper and the module both have the name ""."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The module's own; `children()` has the module itself."""
        yield from self.module.named_children()

    def children(self) -> Iterator[torch.nn.Module]:
        """The module, for what torch does with each part, such as `train()` and `to()`."""
        yield self.module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The module's own."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own."""
        yield from self.module.named_buffers(*args, **kwargs)


def averages(module: torch.nn.Module) -> bool:
    """Whether a backward pass of this module, as things stand, averages gradients over several ranks."""
    replicas = [part._replica for part in module.modules() if isinstance(part, DistributedDataParallel)]
    return any(replica.syncs and replica.group.size > 1 for replica in replicas)


def _check_batch_norm(module: torch.nn.Module, size: int) -> None:
    """Refuses torch's SyncBatchNorm unless torch.distributed is initialised: without it, it silently is a plain BatchNorm."""
    if size == 1 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{name or 'the module'} is a SyncBatchNorm, which goes through torch.distributed, and that is not initialised",
                hint="use BatchNorm (each rank's own statistics) or GroupNorm; torch has SyncBatchNorm for GPUs only",
            )


def _without_prefix(state: Mapping[str, Any]) -> Any:
    """A state of torch's own wrapper as that of its module."""
    found: Any = OrderedDict((name.removeprefix(_PREFIX), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:  # which modules need to read a state that older ones wrote
        found._metadata = {f"{name}.".removeprefix(_PREFIX)[:-1]: each for name, each in versions.items() if name}
    return found


def _check_no_parameters(name: str, value: Any) -> None:
    """Refuses what would be set on the wrapper but is a parameter, or a module with some."""
    if isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.nn.Module) and any(True for _ in value.parameters())):
        raise UsageError(
            f"{name!r} has parameters, but was set on the wrapper, which trains and saves those of its module alone",
            hint="put it into the module before that is wrapped",
        )


def _add_own_prefix(ddp: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Adds the "module." that torch expects when it loads the wrapper as a submodule."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)
