"""GradientSynchronizer: averages trees of gradients, for code without modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, overload

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import NUMPY, kind_of, spec_of
from ferrorpc.ddp.bucket import Slot
from ferrorpc.ddp.bucket_memory import BucketMemory
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.placement import bucket_kind, check_not_captured, gpus_of
from ferrorpc.ddp.pytree import flatten, rebuild
from ferrorpc.ddp.reducer import Reducer
from ferrorpc.ddp.reduction import Reduction, followed, given_up_on_failure
from ferrorpc.ddp.steps import Steps
from ferrorpc.ddp.type_variables import TypeVar
from ferrorpc.ddp.weight_check import check_weights
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.failure import interrupts_told
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.operations.arguments import shape_of
from ferrorpc.types import TensorSpec, as_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Specs: TypeAlias = TensorSpec | Mapping[Any, "Specs"] | Sequence["Specs"]
    """A tree that has no type to say for its gradients, unless it is a flat dict."""
Tree = TypeVar("Tree", default=Any)
Grads = TypeVar("Grads")

_IN_PLACE: Final = object()
"""The default of `ready`: the gradient already lies in its slot."""


class GradientSynchronizer(Generic[Tree]):
    """Averages trees of gradients over a group, in buckets that are reduced while later gradients are still computed.

    A gradient that a rank does not have (None in its tree, or never ready in a step) counts as zeros; one that no rank has is
    None in the result.

    Args:
        like: a tree (dicts, lists, tuples, named tuples) of arrays or `TensorSpec`s, like the gradients; the weights
            themselves will do. Leaves are named by their paths: "layer3/weight". If all are on one GPU (CuPy or torch arrays)
            the buckets are there too, else on the host.
        group: every rank constructs its synchroniser at the same point of its program, with the same tree.
        bucket_cap_mb: how many MiB of gradients a bucket may hold; the first one holds at most 1 MiB.
        order: paths in the order in which gradients become ready; None for the reverse of the tree's.
        gradient_as_bucket_view: the means are views of the buckets, without a copy. The next step overwrites them.
        hook: how buckets are reduced, see `ferrorpc.hooks`. With a hook, steps without a weight have the weight 1; with
            `PowerSGD` or `TopK` buckets are on the host.

    Raises:
        UsageError: two leaves of one name.
        TensorMismatchError: a dtype that has no mean; or leaves on several devices, or on another GPU than the group's, unless
            a hook has the buckets on the host.
        CollectiveMismatchError: ranks gave different trees; the message says where they differ.
    """

    @overload
    def __init__(
        self: GradientSynchronizer[dict[str, NDArray[Any]]],
        like: dict[str, TensorSpec],
        group: ProcessGroup,
        bucket_cap_mb: float = ...,
        *,
        order: Sequence[str] | None = ...,
        gradient_as_bucket_view: bool = ...,
        hook: Hook | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: GradientSynchronizer[Any],
        like: Specs,
        group: ProcessGroup,
        bucket_cap_mb: float = ...,
        *,
        order: Sequence[str] | None = ...,
        gradient_as_bucket_view: bool = ...,
        hook: Hook | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        like: Tree,
        group: ProcessGroup,
        bucket_cap_mb: float = ...,
        *,
        order: Sequence[str] | None = ...,
        gradient_as_bucket_view: bool = ...,
        hook: Hook | None = ...,
    ) -> None: ...
    def __init__(
        self,
        like: Any,
        group: ProcessGroup,
        bucket_cap_mb: float = 25,
        *,
        order: Sequence[str] | None = None,
        gradient_as_bucket_view: bool = False,
        hook: Hook | None = None,
    ) -> None:
        group = group_given(group)
        self._like = like
        self._views = gradient_as_bucket_view
        leaves = {name: _without_elements(name, leaf) for name, leaf in flatten(like).items()}
        self._specs = {name: leaf if isinstance(leaf, TensorSpec) else _spec(name, leaf) for name, leaf in leaves.items()}
        self._kinds = {name: NUMPY if isinstance(leaf, TensorSpec) else kind_of(leaf) for name, leaf in leaves.items()}
        self._ordered = {name: leaf for name, leaf in leaves.items() if not kind_of(leaf).takes_any_order(leaf)}
        self._gpus = gpus_of(leaves.values())
        kind = bucket_kind(leaves, group, hook)
        self._reducer = Reducer(list(self._specs.items()), group, bucket_cap_mb, "gradients", order, hook, kind)
        self._group = group
        self._open: SynchronizerStep[Tree] | None = None

    def __repr__(self) -> str:
        return f"<GradientSynchronizer of {len(self._specs)} gradients, rank {self._group.rank} of {self._group.size}>"

    def __call__(self, grads: Grads, weight: float | None = None) -> Grads:
        """The mean of the ranks' gradients: a tree like `grads`, of new arrays of the same kinds.

        Args:
            grads: a tree with the leaves of `like`, arrays of the same dtypes and shapes, or None.
            weight: of this rank, such as its number of tokens or samples: the mean is sum(weight * grad) / sum(weight). On
                all ranks or on none.

        Raises:
            UsageError: leaves are missing or unknown, or a weight is negative. Nothing was sent then.
            TensorMismatchError: a leaf's dtype, shape or GPU is not that of `like`. Nothing was sent then.
        """
        with interrupts_told(self._group):
            leaves = flatten(grads, nones=self._specs)
            self._check_names(leaves)
            views = {name: self._read_apart(name, leaf) for name, leaf in leaves.items() if leaf is not None}
            with self.step(weight) as step:
                for name in reversed(self._specs):
                    if name in views:
                        step._put(name, views[name], deferrable=True)
        means: Grads = rebuild(grads, step._leaves)
        return means

    def step(self, weight: float | None = None) -> SynchronizerStep[Tree]:
        """A step of a hand-written backward pass, as a context manager.

            with sync.step(weight=tokens) as step:
                step.ready("layer3/weight", grad)     # each name once, in any order, as soon as it is computed
            step.grads                                # the means, a tree like `like`

        An exception that leaves the block ends the generation: the other ranks, which wait for this one's gradients, get the
        error.

        Raises:
            UsageError: as the block begins: another step is still open, this one was used before, or the weight is negative or
                not finite. As it ends: the place of a gradient was asked for, but that was never ready.
        """
        return SynchronizerStep(self, weight)

    @contextmanager
    def uneven(self, follow: Callable[[Tree], Any] | None = None) -> Iterator[None]:
        """Within it ranks may take different numbers of steps; a rank that leaves counts with weight 0 until all have left.

        Steps without a weight have the weight 1, so the mean is over the ranks that still take steps. An exception that leaves
        the block ends the generation, because the others wait for this rank. A thread has one such block open at a time: a loop
        that averages two trees gives both to one synchroniser.

        Args:
            follow: called on a rank that has left, with the means of each later step. It does what the loop does with them,
                such as the optimizer's step, so that weights stay the same on all ranks. Without it they differ: broadcast
                them afterwards.

        Raises:
            UsageError: as the block begins: another one, with some of the same other ranks, is open in this thread.
        """
        with self._reducer.uneven(follow):
            yield
            for reduction in followed(self._reducer):
                if follow is not None:
                    follow(rebuild(self._like, self._means(reduction, self._kinds)))

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest rank has sent for gradients so far."""
        return self._reducer.traffic.sent_bytes

    @property
    def steps(self) -> Steps:
        """Where the time of this rank's last steps went: computation, exposed and hidden communication."""
        return self._reducer.steps

    def check_weights(self, weights: Any) -> None:
        """Compares the weights of all ranks, as hashes, through the coordinator. Collective.

        Args:
            weights: a tree of arrays, the same on all ranks.

        Raises:
            CollectiveMismatchError: they differ. It names the ranks that differ from the majority, and the first leaf that
                differs.
        """
        owner, remedy = self._reducer.stream.name, "group.broadcast(weight, out=weight) of each"
        check_weights(flatten(weights), self._group, owner, "now", remedy)

    def _means(self, reduction: Reduction, kinds: Mapping[str, Kind]) -> dict[str, Any]:
        """The means of a finished reduction by name, in the memory order of the leaves in `like`."""
        found = reduction.means(kinds, self._views)
        for name, leaf in self._ordered.items():
            if found[name] is not None and (kind := kind_of(leaf)) is kinds[name]:
                laid_out = kind.empty_beside(leaf, self._specs[name])
                laid_out[...] = found[name]
                found[name] = laid_out
        return found

    def _check_names(self, names: Mapping[str, Any]) -> None:
        missing = [name for name in self._specs if name not in names]
        unknown = [name for name in names if name not in self._specs]
        if missing or unknown:
            parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
            raise UsageError(f"the gradients are not those of `like`; {'; '.join(parts)}", hint="pass each leaf, or None")

    def _read_apart(self, name: str, grad: Any) -> View:
        """As `_read`; a copy of a mean that lies in another gradient's slot, which this step writes to."""
        got = self._read(name, grad)
        memory = self._reducer.elsewhere(name, grad) if self._views else None
        return got if memory is None else got._replace(data=memory.copied(got.data))

    def _read(self, name: str, grad: Any) -> View:
        got = self._reducer.view(grad, f"gradient {name!r}")
        if got.spec != self._specs[name]:
            raise TensorMismatchError(
                f"gradient {name!r} is {got.spec}, but `like` has {self._specs[name]}",
                hint="make the synchroniser with arrays like the gradients, or convert them",
            )
        return got


class SynchronizerStep(Generic[Tree]):
    """One step of a `GradientSynchronizer`; made by its `step()`."""

    _reduction: Reduction
    """From the beginning of the block on."""

    def __init__(self, owner: GradientSynchronizer[Tree], weight: float | None) -> None:
        self._owner = owner
        self._weight = weight
        self._placed: set[str] = set()
        self._added: set[str] = set()
        self._kinds = dict(owner._kinds)
        self._means: dict[str, Any] | None = None

    def place(self, name: str) -> Any:
        """The memory of one gradient in its bucket, uninitialised. A gradient that is computed there (`out=`), followed by
        `ready(name)`, is never copied, and neither is a first part, followed by `add`. Ask for it only to fill it: what it
        holds counts. From `ready` on it is the bucket's.

        Returns:
            An array of the kind in `like`; None if the bucket is on another device.

        Raises:
            UsageError: an unknown name, one that was ready before or has parts, or a step that is over.
        """
        memory, slot = self._check(name)
        if name in self._added:
            raise UsageError(
                f"gradient {name!r} has parts already", hint="compute its first part in its place, and add() others"
            )
        found = memory.alias(slot, self._kinds[name])
        if found is not None:
            self._placed.add(name)
        return found

    def add(self, name: str, part: Any) -> None:
        """Adds a part of a gradient, such as a microbatch's, to those before (the first may be computed in its `place`, which
        counts once also if it is passed here). The gradient is complete when it is `ready`. Raises as `ready`."""
        memory, slot = self._check(name)
        got = self._read(name, part)
        self._kinds[name] = got.kind
        is_placed = name in self._placed
        if is_placed and self._is_place(name, got):
            memory.place(slot)  # what the current stream has computed there comes before what other streams do with it
        else:
            memory.add(slot, got, is_first=not is_placed and name not in self._added)
        self._added.add(name)

    def ready(self, name: str, grad: Any = _IN_PLACE) -> None:
        """Completes this rank's gradient of one leaf. It is copied: the array may change as soon as this returns (on a GPU: by
        later work in the current stream).

        Args:
            grad: the gradient, or its last part if others were added; None if this rank has none (or no last part). Leave it
                out if all parts were added. Leave it out, or pass the place, if the gradient was computed in its `place`.

        Raises:
            UsageError: an unknown name, one that was ready before, or a step that is over; or no gradient, and no part or place
                of one in this step; or None or another array, though its place was asked for and nothing was added; or an array
                in a place that this step has overwritten, such as a mean of the last step that is a view.
            TensorMismatchError: dtype, shape or GPU are not those of `like`.
        """
        self._check(name)
        if name in self._added:
            if grad is not None and grad is not _IN_PLACE:
                self.add(name, grad)
            self._put_in_place(name)
        elif name in self._placed:
            if grad is not _IN_PLACE:
                self._check_place(name, grad)
            self._put_in_place(name)
        elif grad is _IN_PLACE:
            raise UsageError(
                f"gradient {name!r} is not there: nothing was added in this step, and it was given no place",
                hint="pass it, or None; or compute it in step.place(name), which is to be called in each step, and gives None "
                "for an array that is not where its bucket is",
            )
        elif grad is None:
            self._reduction.put(name, None)
        else:
            self._put(name, self._read(name, grad))

    def _check(self, name: str) -> tuple[BucketMemory, Slot]:
        specs = self._owner._specs
        if name not in specs:
            raise UsageError(f"there is no gradient {name!r}", hint=f"names are {', '.join(list(specs)[:8])}")
        if self._owner._open is not self:
            raise UsageError("this step is not open", hint="with sync.step() as step: ..., once for each step")
        if self._reduction.has(name):
            raise UsageError(f"gradient {name!r} was ready before in this step", hint="add() its parts, then ready()")
        return self._owner._reducer.at(name)

    def _read(self, name: str, grad: Any) -> View:
        """As the owner's. Raises UsageError also for a view of a bucket that this step has overwritten."""
        got = self._owner._read(name, grad)
        may_be_place = (self._owner._views or self._placed) and got.data.size > 0
        other = self._owner._reducer.name_at(grad) if may_be_place else None
        if other is not None and (self._reduction.has(other) or other in self._added):
            copy = "copy it before the step; or average all at once by sync(grads), which does that"
            is_own = other == name and name in self._placed
            raise UsageError(
                f"gradient {name!r} lies in the place of {other!r}, which this step has overwritten",
                hint="what was added there counts: call ready(name) alone" if is_own else copy,
            )
        return got

    def _is_place(self, name: str, got: View) -> bool:
        return got.data.size == 0 or self._owner._reducer.in_place(name, got.data)

    def _check_place(self, name: str, grad: Any) -> None:
        """Raises UsageError unless what is passed for a gradient that has a place, and no parts, is this place."""
        if grad is None:
            raise _misplaced(name, "None was passed")
        got = self._read(name, grad)
        if not self._is_place(name, got):
            raise _misplaced(name, "another array was passed")
        self._kinds[name] = got.kind

    def _put(self, name: str, got: View, deferrable: bool = False) -> None:
        self._kinds[name] = got.kind
        self._reduction.put(name, got, used=self._reduction.weight != 0, deferrable=deferrable)

    def _put_in_place(self, name: str) -> None:
        """Puts a gradient that already lies in its slot."""
        memory, slot = self._owner._reducer.at(name)
        self._put(name, View(self._kinds[name], slot.spec, memory.place(slot), True, None))

    @property
    def _leaves(self) -> dict[str, Any]:
        if self._means is None:
            raise UsageError("the step is not over yet", hint="take step.grads behind the `with` block")
        return self._means

    @property
    def grads(self) -> Tree:
        """The means as a tree like `like`, once the step is over; None for a leaf that no rank had, whatever its type says.
        Raises UsageError before."""
        means: Tree = rebuild(self._owner._like, self._leaves)
        return means

    def __enter__(self) -> SynchronizerStep[Tree]:
        """Raises as `GradientSynchronizer.step`."""
        if self._owner._open is not None:
            raise UsageError("the previous step is still open", hint="leave its `with` block first")
        if hasattr(self, "_reduction"):
            raise UsageError("this step was used before", hint="begin a new one with sync.step()")
        check_not_captured(self._owner._gpus)
        self._reduction = Reduction(self._owner._reducer, self._weight)
        self._owner._open = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owner._open = None
        if error is not None:
            self._reduction.give_up(error)
            return
        with given_up_on_failure(self._reduction):
            for name in self._added:
                if not self._reduction.has(name):
                    self._put_in_place(name)
            for name in self._placed:
                if not self._reduction.has(name):
                    raise _misplaced(name, "was never ready")
            self._reduction.finish()
            self._means = self._owner._means(self._reduction, self._kinds)


def _misplaced(name: str, what: str) -> UsageError:
    """What is in a place may be the gradient, a part of it, or not written: nothing of it is lost or counts unasked."""
    return UsageError(
        f"gradient {name!r} was to be computed in its place, but {what}",
        hint="compute it, or its first part, there, add() any others, then call ready(name); or do not ask for its place",
    )


def _without_elements(name: str, leaf: Any) -> Any:
    """A TensorSpec for a leaf with a shape and a dtype but no elements, such as jax.ShapeDtypeStruct; other leaves as they are.

    A tensor that requires a gradient is detached: only its shape and dtype are used.
    """
    if getattr(leaf, "requires_grad", False) is True:
        return leaf.detach()
    is_array = kind_of(leaf) is not NUMPY or hasattr(leaf, "__dlpack__") or hasattr(leaf, "__array__")
    if is_array or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    with ErrorPrefix(f"gradient {name!r}"):
        return TensorSpec(as_dtype(leaf.dtype), shape_of(leaf.shape))


def _spec(name: str, leaf: Any) -> TensorSpec:
    with ErrorPrefix(f"gradient {name!r}"):
        return spec_of(leaf)
