"""Autograd hooks that reduce each gradient as soon as autograd has accumulated it.

A post-accumulate hook on every parameter reports that its gradient is complete. A callback that autograd runs at the end of a
backward pass contributes what is left, and another one, behind those of all modules, waits for the reduction: ranks may have
the modules in different orders, but for those with `check_every` or a hook of several collectives, each of which waits for the
one before. A reduction begins with the pass in which an output of `forward` gets its gradient, if
that pass accumulates into the parameters' `.grad`; one that only asks for the gradient of the input, or `torch.autograd.grad`,
does not, and is not synchronised. Nested passes (re-entrant checkpoints run one for each segment) may accumulate a parameter's
gradient in several parts, so these gradients are reduced only at the end of the outer pass. The first step reduces everything
at its end, and learns which they are.
"""

from __future__ import annotations

import gc
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ferrorpc.ddp.reduction import Reduction
from ferrorpc.ddp.replica import Replica
from ferrorpc.errors import FerroError, UsageError

_NODES: Final = 256
"""How many nodes of a graph are looked at for a parameter where another leaf is nearer."""
_STEP_LATER: Final = "let optimizers step when backward() has returned"


class _ParameterHook:
    """The post-accumulate hook of one parameter, and its view of its bucket, which is looked up once, because the hook runs in
    each step.

    Args:
        call: what autograd calls, with this object first.
    """

    __slots__ = ("_address", "_alias", "_attributes", "_call", "_handle", "_replica", "name", "parameter", "slot")

    def __init__(self, name: str, replica: Replica, call: Callable[[_ParameterHook, Any], None]) -> None:
        self.name = name
        self.slot = replica.reducer.layout.slots[name]
        self.parameter: Any = replica.parameters[name]
        self._replica = replica
        self._call = partial(call, self)
        self._look_up()
        self._register()

    def _look_up(self) -> None:
        with torch.inference_mode(False):  # where the module may be wrapped; autograd is to add to the alias
            self._alias: torch.Tensor | None = self._replica.alias(self.name)
        self._address = 0 if self._alias is None else self._alias.data_ptr()

    def _register(self) -> None:
        self._handle = self.parameter.register_post_accumulate_grad_hook(self._call)
        # That gives autograd a first hook's dict; a tensor that was swapped in has none, until it is assigned.
        self.parameter._post_accumulate_grad_hooks = self.parameter._post_accumulate_grad_hooks
        self._attributes = self.parameter.__dict__

    def remove(self) -> None:
        self._handle.remove()
        del self._call  # a cycle: without it the buckets are freed with their wrapper

    def move_last(self) -> None:
        """Registers it again, after all others: hooks are called in the order of their registration. And where `swap_tensors`,
        which exchanges two parameters' attributes too, has given this one a tensor whose hooks autograd does not know."""
        if not self.parameter.requires_grad:  # frozen since: torch takes no hook, and none is called
            return
        is_last = next(reversed(self.parameter._post_accumulate_grad_hooks)) == self._handle.id
        if not is_last or self.parameter.__dict__ is not self._attributes:
            self._handle.remove()
            self._register()

    def adopt(self) -> bool:
        """Moves the gradient into its bucket if possible, so that autograd accumulates there. Returns whether it is there."""
        if self._alias is not None and self._alias.data_ptr() != self._address:
            self._look_up()  # the user or module.to() has set its .data
        gradient, alias = self.parameter.grad, self._alias
        if gradient is alias:
            return True
        if alias is None or gradient.requires_grad or gradient.layout != torch.strided or not gradient.is_contiguous():
            return False
        if gradient.dtype != alias.dtype or gradient.shape != alias.shape:
            return False
        alias.copy_(gradient)
        self.parameter.grad = alias
        return True


class BackwardHooks:
    """The hooks of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._weight: float | None = None
        self._replica = replica
        self._reduction: Reduction | None = None
        self._graph_task = -1
        self._unfinished: Callable[[], Any] = lambda: None
        """A weak reference to what ends the reduction, which autograd keeps as long as the backward pass runs."""
        self._used: set[str] = set()
        self._is_first = True
        self._in_parts: set[str] = set()
        self._versions: dict[str, int] = {}
        """Of the parameters with other hooks besides, as the reduction began: torch counts the changes of a tensor."""
        self._is_removed = False
        self._own = frozenset(map(id, replica.parameters.values()))
        """The ids of the parameters."""
        for each in replica.parameters.values():
            for older in _hooks_of(each):  # otherwise both would average its gradient
                older.remove()
        self._hooks = [_ParameterHook(name, replica, self._accumulated) for name in replica.parameters]

    def remove(self) -> None:
        """Removes the hooks: gradients are no longer averaged, or by the next wrapper."""
        self._is_removed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Within it means count this rank with this weight. Raises as `Replica.check_weight`."""
        self._replica.check_weight(weight, how="by weighted() around all parts")
        before, self._weight = self._weight, weight
        try:
            yield
        finally:
            self._weight = before

    def would_be_replaced(self, parameters: Collection[int]) -> bool:
        """Whether a new wrapper, of the parameters with these ids, leaves nothing to this one: it has all of this one's
        parameters, or this one's generation is over."""
        return not self._replica.reducer.stream.is_open or self._own.issubset(parameters)

    def move_last(self) -> None:
        """Moves the hooks behind those that users have registered since, whose changes to a gradient are part of it.

        Raises:
            UsageError: the hooks were removed.
        """
        self._check()
        for hook in self._hooks:
            hook.move_last()

    def watch(self, outputs: Any) -> None:
        """Hooks the outputs of a forward pass, tensors in dictionaries, lists, tuples, dataclasses and what torch takes for
        containers, to notice their backward pass. A leaf is none: its hook would stay with it.

        Raises:
            UsageError: the previous backward pass began and did not end. The generation ends too, because other ranks wait.
        """
        self._check_unfinished()
        parameters: Collection[Any] = self._replica.parameters.values()
        if not (self._replica.exchanges_buffers or any(each.requires_grad for each in parameters)):
            return  # it is frozen: this is no step
        for output in _tensors(outputs):
            if output.grad_fn is not None:
                output.register_hook(partial(self._output_gradient, _nearest_leaf(output.grad_fn, self._own)))

    def _check_unfinished(self) -> None:
        """Raises as `watch`."""
        if self._reduction is None or (_current_task() >= 0 and self._unfinished() is not None):
            return
        reduction, self._reduction = self._reduction, None
        error = UsageError(
            "a backward pass of this module ended before all gradients were there (by an error that was caught?)",
            hint="let the error end the process, or all ranks call group.reform() and wrap the module again",
        )
        reduction.give_up(error)
        raise error

    def _output_gradient(self, leaf: Any, gradient: torch.Tensor) -> None:
        """Called when an output gets its gradient.

        Args:
            leaf: of the output's graph, as `_nearest_leaf` finds it.
        """
        if self._replica.syncs:
            self._check_unfinished()
            if self._reduction is None and _is_added_to(leaf):
                self._begin()

    def _check(self) -> None:
        if self._is_removed:
            raise UsageError(
                "this DistributedDataParallel averages nothing any more: its module was wrapped again, or it was let go of",
                hint="call the newest wrapper of a module, and keep it",
            )

    def _begin(self) -> Reduction:
        self._check()
        self._reduction = self._replica.begin(self._weight)
        self._versions = _versions_of_hooked(self._replica.parameters)
        self._graph_task = _current_task()
        self._queue(self._finish)
        return self._reduction

    def _queue(self, ending: Callable[[], None]) -> None:
        """Has autograd call it at the end of the backward pass."""
        self._unfinished = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def _accumulated(self, hook: _ParameterHook, _: Any) -> None:
        """Called when a parameter's gradient was added to its `.grad`. What torch passes may be what another hook has returned,
        which it refuses afterwards."""
        self._used.add(hook.name)
        if not self._replica.syncs:
            return
        reduction = self._begin() if self._reduction is None else self._reduction
        try:
            self._put(reduction, hook)
        except BaseException as error:
            self._reduction = None
            reduction.give_up(error)
            raise

    def _put(self, reduction: Reduction, hook: _ParameterHook) -> None:
        name, parameter, is_nested = hook.name, hook.parameter, _current_task() != self._graph_task
        if is_nested:
            self._check_unfinished()
        if parameter.grad is None:
            raise UsageError(
                f"the gradient of {name!r} was taken away, by another hook, before it was averaged",
                hint=_STEP_LATER,
            )
        if name in self._versions and parameter._version != self._versions[name]:
            raise UsageError(
                f"parameter {name!r} was changed during the backward pass before its gradient was averaged: by another hook "
                "or by a forward pass that a checkpoint repeated",
                hint=f"{_STEP_LATER}; and let layers that bound their own weights do so outside checkpoints",
            )
        if reduction.has(name):
            raise UsageError(
                f"parameter {name!r} got a gradient again after the first one was sent: a re-entrant checkpoint uses it too",
                hint="pass use_reentrant=False to torch.utils.checkpoint",
            )
        is_in_place = hook.adopt()
        if is_nested:
            self._in_parts.add(name)
        elif not self._is_first and name not in self._in_parts:
            if is_in_place and reduction.weight is None:
                reduction.put_in_place(hook.slot)
            else:
                self._replica.contribute(reduction, name)

    def _finish(self) -> None:
        """Called at the end of the backward pass."""
        assert self._reduction is not None
        reduction, self._reduction = self._reduction, None
        used, self._used = self._used, set()
        self._is_first = False
        self._replica.contribute_rest(reduction, used)
        self._reduction = reduction
        self._queue(self._await)

    def _await(self) -> None:
        """Called behind the `_finish` of all modules. Its error, after which the group may still be open, is raised behind the
        `_await` of all: autograd calls nothing more once something has raised."""
        assert self._reduction is not None
        reduction, self._reduction = self._reduction, None
        try:
            self._replica.finish(reduction)
        except FerroError as error:
            self._queue(partial(_raise, error))


def _raise(error: FerroError) -> None:
    try:
        raise error
    finally:
        del error  # a frame that refers to the error it raises is a cycle that keeps the step's arrays alive


def check_not_shared(module: torch.nn.Module) -> None:
    """Raises UsageError if a wrapper in use has some of the module's parameters and others besides, which nobody would average
    any more: a parameter has the hook of one wrapper."""
    if _shared(module) is not None:
        gc.collect()  # a wrapper that was dropped is often part of a reference cycle
    name = _shared(module)
    if name is not None:
        raise UsageError(
            f"parameter {name!r} also belongs to another module that is wrapped, with parameters that this one does not have",
            hint="wrap one module that has both as parts; to wrap another module in place of that one, let go of its wrapper",
        )


def _shared(module: torch.nn.Module) -> str | None:
    """The first parameter that a wrapper in use has besides parameters that the module does not have."""
    own = {id(parameter) for parameter in module.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and any(not hooks.would_be_replaced(own) for hooks in _hooks_of(parameter)):
            return str(name)
    return None


def _hooks_of(parameter: Any) -> list[BackwardHooks]:
    """Those of older wrappers, such as one of the previous generation that is still referenced."""
    calls = (parameter._post_accumulate_grad_hooks or {}).values()
    owners = [getattr(getattr(call, "func", None), "__self__", None) for call in calls]
    return [owner for owner in owners if isinstance(owner, BackwardHooks)]


def _versions_of_hooked(parameters: Mapping[str, Any]) -> dict[str, int]:
    """The versions of the parameters that have a hook of the user's. Others may change without one: a layer that keeps its
    weights within bounds does so again where a checkpoint repeats its forward pass."""
    return {name: each._version for name, each in parameters.items() if len(each._post_accumulate_grad_hooks) > 1}


def _tensors(outputs: Any, around: tuple[Any, ...] = ()) -> Iterator[torch.Tensor]:
    """The tensors in any containers, which may contain themselves.

    Args:
        around: what the outputs are in.
    """
    for each in tree_leaves(outputs):
        if isinstance(each, torch.Tensor):
            yield each
        elif (members := _members(each)) and not any(each is outer for outer in around):
            yield from _tensors(members, (*around, each))


def _members(leaf: Any) -> list[Any]:
    """What is in a container that is a leaf to torch, which knows containers by their very class."""
    members: list[Any] = []
    if isinstance(leaf, dict | UserDict):  # no other mapping: it may compute what it is asked for
        members += leaf.values()
    elif isinstance(leaf, list | tuple):
        members += leaf
    if is_dataclass(leaf) and not isinstance(leaf, type):  # it may be one of those, too
        members += (getattr(leaf, field.name, None) for field in fields(leaf))
    return members


def _nearest_leaf(node: Any, own: Collection[int]) -> Any:
    """The nearest of the parameters with these ids to which a node of the graph leads. If it leads to none nearby, because a
    re-entrant checkpoint hides them or this rank uses none: the nearest leaf, or None."""
    waiting, seen, other = deque([node]), {node}, None
    while waiting and not (other is not None and len(seen) > _NODES):
        node = waiting.popleft()
        if isinstance(node, torch._C._functions.AccumulateGrad):
            if id(node.variable) in own:
                return node
            other = node if other is None else other
        fresh = [after for after, _ in node.next_functions if after is not None and after not in seen]
        waiting.extend(fresh)
        seen.update(fresh)
    return other


def _is_added_to(leaf: Any) -> bool:
    """Whether the running backward pass adds to this leaf's `.grad`; True if there is no leaf."""
    try:
        return leaf is None or bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad returns this leaf's gradient
        return False


def _current_task() -> int:
    """The number of the backward pass that runs on this thread; -1 for none."""
    return int(torch._C._current_graph_task_id())
