"""One rank's copy of a module: its parameters, their gradients in buckets, its buffers. What all module wrappers share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrorpc.arrays.base import Out, View
from ferrorpc.arrays.kinds import kind_of, spec_of, view_out
from ferrorpc.ddp.bucket import Slot
from ferrorpc.ddp.buffers import Buffers, named_buffers
from ferrorpc.ddp.drift import compare
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.naming import Named
from ferrorpc.ddp.parameter import HasGradient
from ferrorpc.ddp.placement import bucket_kind
from ferrorpc.ddp.reducer import Reducer
from ferrorpc.ddp.round import Round, unless_interrupted
from ferrorpc.ddp.share import share
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import TensorSpec

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup


class Replica:
    """The parameters of a module that train, and how their gradients become means.

    Args:
        module: its parameters are updated in place, never replaced.
        group: every rank constructs its replica at the same point of its program.
        bucket_cap_mb: how many MiB of gradients a bucket may hold.
        init_sync: begin with the weights and buffers of rank 0.
        buffers: a mode of `Buffers`.
        hook: what buckets travel as.
        check_every: compare weights between ranks after every so many steps; 0 for never.
        views: after a step `.grad` is the mean as it lies in its bucket, where the kind of array permits.

    Raises:
        UsageError: the module has no named_parameters(), or one of them is a bare array.
        TensorMismatchError: parameters lie on several devices, and no hook has all buckets on the host.
        CollectiveMismatchError: ranks hold different parameters; the message says where they differ.
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
        self.syncs = True
        """Whether gradients are averaged now; not under `no_sync`."""
        self._views = views
        self._check_every = _steps_given(check_every)
        self._known = named_parameters(module)
        self.parameters = {name: parameter for name, parameter in self._known.items() if _trains(parameter)}
        specs = [(name, _spec(name, parameter.data)) for name, parameter in self.parameters.items()]
        kind = bucket_kind({name: parameter.data for name, parameter in self.parameters.items()}, hook)
        self.reducer = Reducer(specs, group, bucket_cap_mb, "parameters", hook=hook, kind=kind)
        self._buffers = Buffers(module, group, buffers)
        self._aliases: dict[str, tuple[Any | None, int]] = {}
        self._is_uneven = False
        self._weights_differ = False
        """Whether a rank may have stopped following, so that there is nothing to compare."""
        self.rounds = 0
        """How many means were begun."""
        if init_sync:
            self.share(0)

    @property
    def text(self) -> str:
        """How much there is, and where."""
        return f"{len(self.parameters)} parameters that train, rank {self.group.rank} of {self.group.size}"

    def share(self, root: int) -> None:
        """Gives every rank the weights and buffers of rank `root`, in place. Collective."""
        arrays = {name: parameter.data for name, parameter in named_parameters(self.module).items()}
        arrays.update({f"buffer {name}": array for name, array in named_buffers(self.module).items()})
        share(arrays, self.group, root)

    def compare(self, when: str) -> None:
        """Raises CollectiveMismatchError when ranks hold different weights. Collective."""
        arrays = {name: parameter.data for name, parameter in self._known.items()}
        compare(arrays, self.group, self.reducer.number, when)

    def _compare_in_turn(self, current: Round) -> None:
        if self._check_every and (current.number + 1) % self._check_every == 0:
            self.compare(f"in step {current.number + 1}")

    def check(self) -> None:
        """Raises UsageError when the module has other parameters than it was wrapped with, or thawed one since."""
        now = named_parameters(self.module)
        for name in (*now, *self._known):
            if now.get(name) is not self._known.get(name):
                what = "was added" if name not in self._known else "was taken away" if name not in now else "was replaced"
                raise UsageError(
                    f"parameter {name!r} {what} after the module was wrapped", hint="wrap the module when it is complete"
                )
            if name not in self.parameters and _trains(now[name]):
                raise UsageError(
                    f"parameter {name!r} was frozen when the module was wrapped, but requires a gradient now",
                    hint="wrap the module again, or leave it frozen",
                )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients add up on each rank and none is averaged. All ranks alike."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def accumulate(self, count: Any) -> Iterator[int]:
        """0 to count - 1; gradients of all but the last only add up."""
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"accumulate({count!r}) has no last part", hint="pass 1 or more")
        for index in range(count - 1):
            with self.no_sync():
                yield index
        yield count - 1

    # One step: begin, contribute what is there, finish.

    def begin(self, weight: float | None) -> Round:
        """The next mean of all gradients. Raises TensorMismatchError, before it has begun, as `Buffers.pack`."""
        buffers = None if self._is_uneven else self._buffers.pack()
        current = self.reducer.begin(weight)
        self.rounds += 1
        if buffers is not None:
            self._buffers.begin(buffers)
        return current

    def contribute(self, current: Round, name: str) -> None:
        """Puts a parameter's gradient into the round; it must have one. Raises as `gradient`."""
        current.put(name, self.gradient(name))
        self._give_alias(name)

    def gradient(self, name: str) -> View:
        """Reads a parameter's gradient. Raises TensorMismatchError when its dtype, shape or place is not the parameter's."""
        got = self.reducer.view(self.parameters[name].grad, f"the gradient of {name!r}")
        wanted = self.reducer.layout.slots[name].spec
        if got.spec != wanted:
            raise TensorMismatchError(
                f"the gradient of {name!r} is {got.spec}, but the parameter was {wanted}",
                hint="convert a module before it is wrapped, or wrap it again",
            )
        return got

    def finish(self, current: Round, used: Collection[str]) -> None:
        """Contributes the other parameters; returns when every gradient is the mean. One that nobody used stays as it was.

        Args:
            used: those of the others that this rank has used. A gradient of one that it has not used, left from before, counts
                with the mean where some rank has used it.
        """
        with unless_interrupted(current, self.group):
            kept = {} if current.is_complete else self._contribute_others(current, used)
            current.finish()
            self._store(current)
            for name, before in kept.items():
                if not current.used(name):
                    memory, slot = self.reducer.at(name)
                    memory.restore(slot, before)
            self._buffers.finish()
        if not self._weights_differ:
            self._compare_in_turn(current)

    def _contribute_others(self, current: Round, used: Collection[str]) -> dict[str, Any]:
        """Those that were not contributed. What was there before of each that is not used and lies in its bucket."""
        kept: dict[str, Any] = {}
        for name, parameter in reversed(self.parameters.items()):
            if parameter.grad is None or current.has(name):
                continue
            if name not in used and parameter.grad is self.alias(name):
                memory, slot = self.reducer.at(name)
                kept[name] = memory.keep(slot)
            current.put(name, self.gradient(name), name in used, stays=True)
        return kept

    def _store(self, current: Round) -> None:
        for memory in self.reducer.memory:
            used = [slot for slot in memory.bucket.slots if current.used(slot.name) and not self._give_alias(slot.name)]
            targets = [self._target(slot) for slot in used]
            memory.read(used, [target.data for target in targets])
            for target in targets:
                target.commit()

    def _target(self, slot: Slot) -> Out:
        """Where a parameter's mean goes: its gradient; a new one where there is none, or it cannot be written."""
        parameter, near = self.parameters[slot.name], self.reducer.kind is not None
        if parameter.grad is not None:
            # Read-only, broadcast, or a number: its dtype and shape were checked before.
            with suppress(TensorMismatchError, UsageError):
                return view_out(parameter.grad, slot.spec, near)
        parameter.grad = kind_of(parameter.data).empty_beside(parameter.data, slot.spec)
        return view_out(parameter.grad, slot.spec, near)

    def alias(self, name: str) -> Any | None:
        """The bucket's memory as a gradient of a parameter. None where its kind of array is elsewhere or has to lie in another
        order, or there are to be no such views."""
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
        """Makes a parameter's gradient the bucket's memory. False where that cannot be."""
        alias = self.alias(name)
        if alias is not None and self.parameters[name].grad is not alias:
            self.parameters[name].grad = alias
        return alias is not None

    @contextmanager
    def uneven(self, follow: Callable[[], Any] | None) -> Iterator[None]:
        """Within it ranks may have different numbers of steps; see `DistributedDataParallel.uneven`."""

        def followed(current: Round) -> None:
            if follow is not None:
                self._store(current)
                self._compare_in_turn(current)
                follow()

        check_follow(follow)
        first = self.rounds
        self._is_uneven, self._weights_differ = True, follow is None
        try:
            with self.reducer.uneven(followed):
                yield
        finally:
            self._is_uneven = self._weights_differ = False
        counts = self.group.all_gather(np.int64(self.rounds - first))
        root = int(np.argmax([int(count) for count in counts]))
        if follow is None:
            self.share(root)
        else:
            share(named_buffers(self.module), self.group, root)


def _steps_given(check_every: Any) -> int:
    if not isinstance(check_every, int | np.integer) or check_every < 0:
        raise UsageError(f"check_every={check_every!r} is no number of steps", hint="pass 0 for never, or such as 100")
    return int(check_every)


def _trains(parameter: Any) -> bool:
    return bool(getattr(parameter, "requires_grad", True))


def check_follow(follow: Any) -> None:
    """Raises UsageError: it cannot be called."""
    if follow is not None and not callable(follow):
        raise UsageError(f"follow={follow!r} is no function", hint="pass what the loop does with means, such as optimizer.step")


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
        if not isinstance(parameter, HasGradient):
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


def _spec(name: str, data: Any) -> TensorSpec:
    with Named(f"parameter {name!r}"):
        return spec_of(data)
