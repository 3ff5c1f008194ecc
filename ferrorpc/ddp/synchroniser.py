"""Means of gradient trees, for code that computes its gradients by hand and has no modules."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.kinds import spec_of, view
from ferrorpc.ddp.pytree import flatten, rebuild
from ferrorpc.ddp.reducer import Reducer, Round
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import TensorSpec

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup


class GradientSynchronizer:
    """Averages trees of gradients over a group, in buckets that travel while later gradients are still computed.

    Args:
        like: a tree (dicts, lists, tuples, named tuples) of arrays or `TensorSpec`s, as the gradients will be. Leaves are named
            by their paths: "layer3/weight".
        group: every rank constructs its synchroniser at the same point of its program, with the same tree.
        bucket_cap_mb: how large a bucket may get, in MiB.

    Raises:
        UsageError: two leaves of one name, or a dtype that has no mean.
        CollectiveMismatchError: ranks gave different trees; the message says where they differ.
    """

    def __init__(self, like: Any, group: ProcessGroup, bucket_cap_mb: float = 25) -> None:
        self._like = like
        leaves = flatten(like)
        self._specs = {name: leaf if isinstance(leaf, TensorSpec) else spec_of(leaf) for name, leaf in leaves.items()}
        self._reducer = Reducer(list(self._specs.items()), group, bucket_cap_mb, "gradients")
        self._open: SynchronizerStep | None = None

    def __call__(self, grads: Any, weight: float | None = None) -> Any:
        """The mean of the ranks' gradients: a tree like `grads`, of new arrays of the same kinds.

        Args:
            grads: a tree with the leaves of `like`, arrays of the same dtypes and shapes.
            weight: this rank's share, such as its number of tokens or samples: the mean is sum(weight * grad) / sum(weight).
                On all ranks or on none.

        Raises:
            UsageError: leaves are missing or unknown, or a weight is negative. Nothing was sent then.
            TensorMismatchError: a leaf's dtype or shape is not that of `like`. Nothing was sent then.
        """
        leaves = flatten(grads)
        self._check_names(leaves)
        views = {name: self._read(name, leaf) for name, leaf in leaves.items()}
        with self.step(weight) as step:
            for name in reversed(self._specs):
                step.put(name, views[name])
        return rebuild(grads, step.leaves)

    def step(self, weight: float | None = None) -> SynchronizerStep:
        """A step of a hand-written backward pass, as a context manager.

            with sync.step(weight=tokens) as step:
                step.ready("layer3/weight", grad)     # each name once, in any order, as soon as it is computed
            step.grads                                # the means, a tree like `like`

        Raises:
            UsageError: the previous step is still open, or the weight is negative or not finite.
        """
        if weight is not None and not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"weight={weight} is no share", hint="pass a number of samples or tokens, 0 or more")
        if self._open is not None:
            raise UsageError("the previous step is still open", hint="leave its `with` block first")
        self._open = SynchronizerStep(self, self._reducer.begin(weight))
        return self._open

    def _closed(self) -> None:
        self._open = None

    def _check_names(self, names: Any) -> None:
        missing = [name for name in self._specs if name not in names]
        unknown = [name for name in names if name not in self._specs]
        if missing or unknown:
            parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
            raise UsageError(f"the gradients are not those of `like`; {'; '.join(parts)}", hint="pass each leaf once")

    def _read(self, name: str, grad: Any) -> View:
        got = view(grad)
        if got.spec != self._specs[name]:
            raise TensorMismatchError(f"gradient {name!r} is {got.spec}, but `like` has {self._specs[name]}")
        return got


class SynchronizerStep:
    """One step of a `GradientSynchronizer`; made by its `step()`."""

    def __init__(self, owner: GradientSynchronizer, current: Round) -> None:
        self._owner = owner
        self._round = current
        self._kinds: dict[str, Kind] = {}
        self._leaves: dict[str, Any] | None = None

    def ready(self, name: str, grad: Any) -> None:
        """This rank's gradient of one leaf. It is copied: the array may be changed as soon as this returns.

        Raises:
            UsageError: an unknown name, one that was there before, or a step that is over.
            TensorMismatchError: dtype or shape are not those of `like`.
        """
        specs = self._owner._specs
        if name not in specs:
            raise UsageError(f"there is no gradient {name!r}", hint=f"names are {', '.join(list(specs)[:8])}")
        self.put(name, self._owner._read(name, grad))

    def put(self, name: str, got: View) -> None:
        """As `ready`, for a gradient that was read and checked."""
        if self._owner._open is not self:
            raise UsageError("this step is over", hint="begin a new one with sync.step()")
        if name in self._kinds:
            raise UsageError(f"gradient {name!r} was ready before in this step", hint="add up its parts first")
        self._kinds[name] = got.kind
        self._round.put(name, got)

    @property
    def leaves(self) -> dict[str, Any]:
        """Name -> mean, once the step is over. Raises UsageError before."""
        if self._leaves is None:
            raise UsageError("the step is not over yet", hint="take step.grads behind the `with` block")
        return self._leaves

    @property
    def grads(self) -> Any:
        """The means as a tree like `like`, once the step is over. Raises UsageError before."""
        return rebuild(self._owner._like, self.leaves)

    def __enter__(self) -> SynchronizerStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._owner._closed()
        if error is not None:
            return
        self._owner._check_names(self._kinds)
        self._round.wait()
        specs = self._owner._specs
        self._leaves = {name: kind.wrap(self._round.mean(name), specs[name]) for name, kind in self._kinds.items()}
        self._round.close()
