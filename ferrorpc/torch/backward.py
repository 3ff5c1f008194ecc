"""Autograd's events turned into rounds of the reducer: a gradient is sent on its way as soon as autograd has accumulated it.

A post-accumulate hook on every parameter says that its gradient is complete; a callback that autograd runs when a backward pass
is over waits for what is still under way. The pass in which an output of `forward` gets its gradient is the one that counts,
if it adds to `.grad` at all: `torch.autograd.grad` does not, and is each rank's own affair.
Passes inside it (re-entrant checkpoints run one for each segment) may bring a parameter's gradient in several portions, so
what arrives in them leaves only at the end. The first step sends everything at the end: it learns which parameters those are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ferrorpc.ddp.replica import Replica
from ferrorpc.ddp.round import Round
from ferrorpc.errors import UsageError


class _Member:
    """A parameter's place, looked up once: the hook runs for each of them in each step."""

    __slots__ = ("_address", "_alias", "_replica", "name", "slot")

    def __init__(self, name: str, replica: Replica) -> None:
        self.name = name
        self.slot = replica.reducer.layout.slots[name]
        self._replica = replica
        self._look_up()

    def _look_up(self) -> None:
        self._alias: torch.Tensor | None = self._replica.alias(self.name)
        self._address = 0 if self._alias is None else self._alias.data_ptr()

    def lay(self, parameter: torch.Tensor) -> bool:
        """Makes the gradient lie in its place, if nothing speaks against it. What more of it comes is added there."""
        if self._alias is not None and self._alias.data_ptr() != self._address:
            self._look_up()  # Its .data was set, by the user or by module.to().
        gradient, alias = parameter.grad, self._alias
        if gradient is alias or gradient is None or alias is None:
            return gradient is not None and alias is not None
        if gradient.requires_grad or gradient.layout != torch.strided or not gradient.is_contiguous():
            return False
        if gradient.dtype != alias.dtype or gradient.shape != alias.shape:
            return False
        alias.copy_(gradient)
        parameter.grad = alias
        return True


class _Hook:
    """What is called when a parameter's gradient was accumulated."""

    __slots__ = ("_call", "_handle", "_parameter")

    def __init__(self, parameter: Any, call: Callable[[torch.Tensor], None]) -> None:
        self._parameter = parameter
        self._call = call
        self._handle = parameter.register_post_accumulate_grad_hook(call)

    def remove(self) -> None:
        self._handle.remove()

    def go_last(self) -> None:
        """Hooks are called in the order in which they were registered."""
        if next(reversed(self._parameter._post_accumulate_grad_hooks)) != self._handle.id:
            self._handle.remove()
            self._handle = self._parameter.register_post_accumulate_grad_hook(self._call)


class Backward:
    """Watches the backward passes of one replica.

    Attributes:
        weight: this rank's share in the next mean; None for an even one.
    """

    def __init__(self, replica: Replica) -> None:
        self.weight: float | None = None
        self._replica = replica
        self._round: Round | None = None
        self._task = -1
        self._used: set[str] = set()
        self._is_first = True
        self._in_portions: set[str] = set()
        self._is_over = False
        for each in replica.parameters.values():
            _release(each)
        self._hooks = [_Hook(each, partial(self._arrived, _Member(name, replica))) for name, each in replica.parameters.items()]

    def end(self) -> None:
        """Lets go of the parameters: their gradients are their own again, or the next wrapper's."""
        self._is_over = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def listen_last(self) -> None:
        """Goes behind the hooks that users have given to parameters since: what those do to a gradient belongs to it.

        Raises:
            UsageError: it has let go of the parameters.
        """
        self._check()
        for hook in self._hooks:
            hook.go_last()

    def watch(self, outputs: Any) -> None:
        """Looks out for the backward pass of what a forward pass returned: tensors in any containers.

        Raises:
            UsageError: the backward pass before has begun and not ended. The generation ends too: others wait for it.
        """
        if self._round is not None and _current_task() < 0:
            self._round.abandon()
            self._round = None
            error = UsageError(
                "a backward pass of this module ended before all gradients were there (by an error that was caught?)",
                hint="let the error end the process, or all ranks call group.reform() and wrap the module again",
            )
            self._replica.group.abort(error)
            raise error
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._begun, _nearest_leaf(output.grad_fn)))

    def _begun(self, leaf: Any, gradient: torch.Tensor) -> None:
        """An output got its gradient.

        Args:
            leaf: of the output's graph.
        """
        if self._replica.syncs and self._round is None and _is_added_to(leaf):
            self._begin()

    def _check(self) -> None:
        if self._is_over:
            raise UsageError(
                "this DistributedDataParallel averages nothing any more: its module was wrapped again, or it was let go of",
                hint="call the newest wrapper of a module, and keep it",
            )

    def _begin(self) -> Round:
        self._check()
        self._round = self._replica.begin(self.weight)
        self._task = _current_task()
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        return self._round

    def _arrived(self, member: _Member, parameter: torch.Tensor) -> None:
        """A parameter's gradient was added to its `.grad`."""
        name = member.name
        self._used.add(name)
        if not self._replica.syncs:
            return
        current = self._begin() if self._round is None else self._round
        if parameter.grad is None:
            raise UsageError(
                f"the gradient of {name!r} was taken away, by another hook, before it was averaged",
                hint="let optimizers step when backward() has returned",
            )
        if current.has(name):
            raise UsageError(
                f"parameter {name!r} got a gradient again after the first one was sent: a re-entrant checkpoint uses it too",
                hint="pass use_reentrant=False to torch.utils.checkpoint",
            )
        lies_in_place = member.lay(parameter)
        if _current_task() != self._task:
            self._in_portions.add(name)
        elif not self._is_first and name not in self._in_portions:
            if lies_in_place and current.weight is None:
                current.put_place(member.slot)
            else:
                self._replica.contribute(current, name)

    def _ended(self) -> None:
        """The backward pass is over."""
        assert self._round is not None
        current, self._round = self._round, None
        used, self._used = self._used, set()
        self._is_first = False
        self._replica.finish(current, used)


def _release(parameter: Any) -> None:
    """Ends what watches a parameter for another wrapper of its module: one of the generation before that somebody still holds,
    say, or whose exception does. Two that both averaged a gradient would do so at the same time."""
    for call in list((parameter._post_accumulate_grad_hooks or {}).values()):
        owner = getattr(getattr(call, "func", None), "__self__", None)
        if isinstance(owner, Backward):
            owner.end()


def _nearest_leaf(node: Any) -> Any:
    """Of the leaves that a node of a graph leads to one of those nearest to it; None where it leads to none."""
    waiting, seen = deque([node]), {node}
    while waiting:
        node = waiting.popleft()
        if hasattr(node, "variable"):
            return node
        fresh = [after for after, _ in node.next_functions if after is not None and after not in seen]
        waiting.extend(fresh)
        seen.update(fresh)
    return None


def _is_added_to(leaf: Any) -> bool:
    """Whether the backward pass that runs adds to this leaf's `.grad`; True where there is no leaf to tell by."""
    try:
        return leaf is None or bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad takes this very gradient.
        return False


def _current_task() -> int:
    """The number of the backward pass that runs on this thread; -1 where none does."""
    return int(torch._C._current_graph_task_id())
