"""DistributedDataParallel for modules of any framework: `sync_gradients` averages gradients after the backward pass.

A module has `parameters()`, `named_parameters()`, `forward()`, `train()` and `eval()`; a parameter has `.data` and `.grad`.
torch modules have these, and a NumPy model gets them in a few lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, Self

from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.replica import Replica
from ferrorpc.ddp.type_variables import TypeVar
from ferrorpc.ddp.wrapper import Wrapper, check_unwrapped
from ferrorpc.errors import UsageError
from ferrorpc.failure import interrupts_told
from ferrorpc.group import ProcessGroup, group_given

PASSES_UNTIL_WARNED: Final = 100
"""After so many forward passes in training without `sync_gradients` the call was probably forgotten. Some are usual before the
first call, where users accumulate the gradients of several batches, also without no_sync, or try the module first."""
_log = logging.getLogger("ferrorpc.ddp")


class Trainable(Protocol):
    """What a module needs. torch modules have it."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward pass."""

    def parameters(self) -> Iterable[Any]:
        """The parameters, in an order that is the same on every rank."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """The same, with their names."""

    def train(self) -> Any:
        """Training mode from now on."""

    def eval(self) -> Any:
        """Evaluation mode from now on."""


Module = TypeVar("Module", bound=Trainable, covariant=True, default=Any)


class DistributedDataParallel(Wrapper, Generic[Module]):
    """A module whose gradients are averaged over a group.

        ddp = DistributedDataParallel(module, group)      # all ranks begin with rank 0's weights
        loss = criterion(ddp(x), target); backward(loss)  # leaves gradients in parameter.grad
        ddp.sync_gradients()                              # now the mean over all ranks, the same bits on each
        optimizer.step()

    A parameter whose `.grad` is None on some ranks counts as zeros there and gets the mean on all ranks; if it is None on all
    ranks it stays None. Frozen parameters (`requires_grad` is False) are not averaged.

    With this class `backward()` averages nothing, also for torch modules. `ferrorpc.torch.DistributedDataParallel` averages
    while the backward pass still runs.

    If all parameters are on one GPU (CuPy or torch arrays) the buckets are there, and gradients must be there too.

    Args:
        module: kept as `.module`; its parameters are updated in place, never replaced, so optimizers may hold them.
        group: every rank constructs its wrapper at the same point of its program.
        bucket_cap_mb: how many MiB of gradients a bucket may hold; the first one holds at most 1 MiB.
        init_sync: whether to begin with the weights (and buffers) of rank 0. Buffers that cannot be sent stay as they are with
            buffers="local", and are refused otherwise.
        buffers: what `sync_gradients` does with buffers, where the module names them: "broadcast" gives all ranks rank 0's,
            "mean" averages floating ones (others are rank 0's), "local" leaves them.
        hook: how buckets are reduced, see `ferrorpc.hooks`. With `PowerSGD` or `TopK` buckets are on the host.
        check_every: calls `check_weights` after every so many steps; 0 for never.
        gradient_as_bucket_view: `.grad` becomes a view of its bucket, without a copy. The next `sync_gradients` overwrites it.

    Raises:
        UsageError: the module has no parameters() or named_parameters(), is wrapped already, or has a bare array or a lazy
            parameter among them.
        TensorMismatchError: a parameter's dtype has no mean; or parameters are on several devices, or on another GPU than the
            group's, unless a hook has the buckets on the host.
        CollectiveMismatchError: ranks hold different parameters; the message says where they differ.
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
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.module: Module = module
        self._passes = 0
        self._trains = True
        """Its mode as far as this wrapper has set it, for modules that do not tell."""
        group = group_given(group)
        check_unwrapped(module)
        self._replica = Replica(module, group, bucket_cap_mb, init_sync, buffers, gradient_as_bucket_view, hook, check_every)

    def __repr__(self) -> str:
        return f"<DistributedDataParallel of {type(self.module).__name__}, {self._replica.text}>"

    if not TYPE_CHECKING:  # a checker would let any name pass

        def __getattr__(self, name: str) -> NoReturn:
            """Says where to look for what the wrapper does not have, such as `state_dict`."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(vars(self).get("module"), name):
                hint = (
                    f"ddp.module.{name}; or wrap a torch module in ferrorpc.torch.DistributedDataParallel, which is one itself"
                )
                text = f"{text}: its module has it\ntry: {hint}"
            raise AttributeError(text, name=name, obj=self)

    def __getstate__(self) -> NoReturn:
        """Refuses: what it holds belongs to this process and its group."""
        raise UsageError("a DistributedDataParallel cannot be copied or pickled", hint="copy or save ddp.module")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, on this rank's share of the batch."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the object. It calls the module itself if it is callable, so that the module's hooks run."""
        if self._replica.syncs and getattr(self.module, "training", self._trains):
            self._passes += 1
            if self._passes == PASSES_UNTIL_WARNED:
                self._warn_if_never_averaged()
        run: Callable[..., Any] = self.module if callable(self.module) else self.module.forward
        return run(*args, **kwargs)

    def _warn_if_never_averaged(self) -> None:
        """Warns if nothing was averaged yet: with torch's own wrapper `backward()` does that."""
        if self._replica.reducer.begun == 0 and self._replica.group.size > 1:
            _log.warning(
                "%d forward passes in training mode and no sync_gradients() yet: unless there was no step of the optimizer "
                "either, every rank trains alone. Call it before each step, or use ferrorpc.torch.DistributedDataParallel, "
                "which averages during backward()",
                self._passes,
            )

    def train(self, mode: bool = True) -> Self:
        """Puts the module into training mode."""
        self._trains = mode
        if mode:
            self.module.train()
        else:
            self.module.eval()
        return self

    def eval(self) -> Self:
        """Puts the module into evaluation mode."""
        self._trains = False
        self.module.eval()
        return self

    def parameters(self) -> Iterator[Any]:
        """The module's parameters."""
        return iter(self.module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """The module's parameters with their names."""
        return iter(self.module.named_parameters())

    def sync_gradients(self, weight: float | None = None) -> None:
        """Replaces every parameter's gradient by its mean over all ranks. Collective. Within `no_sync` it does nothing.

        Gradients are written in place if possible. Their accumulated values, also of batches under `no_sync`, are averaged.

        Args:
            weight: of this rank, such as its number of samples: the mean is sum(weight * grad) / sum(weight). On all ranks
                or on none.

        Raises:
            UsageError: parameters were added to the module since it was wrapped, or a weight is given within `no_sync`. Nothing
                was sent then. Or the weights of all ranks sum to zero, or to no finite number (on every rank): gradients that
                are views of buckets are lost then, and are to be computed again.
            TensorMismatchError: a gradient's dtype, shape or GPU is not its parameter's. Nothing was sent then.
        """
        self._replica.check_weight(weight, how="with the last one")
        if not self._replica.syncs:
            return
        self._replica.check_parameters()
        for name, parameter in self._replica.parameters.items():
            if parameter.grad is not None:
                self._replica.gradient(name)
        with interrupts_told(self._replica.group):
            reduction = self._replica.begin(weight)
            self._replica.contribute_rest(reduction, used=self._replica.parameters)
            self._replica.finish(reduction)
