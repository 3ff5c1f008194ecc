"""Splits a backward pass in two: first the gradients of the inputs, later those of the weights, each computed once.

The autograd graph is traversed once after the forward pass. A node is on an input path if inputs can be reached from it. If
such a node also leads to weights off these paths, the gradient that arrives at it is kept while the inputs' gradients are
computed, and later propagated to these weights alone (the idea of Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241). The same holds for the node of an output that does not depend on the inputs; its gradient is known from the
beginning. A weight that several such nodes lead to would get several separate gradients, so its gradient is computed with the
inputs'. The traversal costs O(nodes) in Python.

Autograd runs the hooks of such a node's tensors in both parts: in the second on zeros, so that `retain_grad()` counts once. But
a hook behind one that changes the gradient would get there what that makes of zeros. Tensors and nodes do not tell whether they
have hooks; `hooks_registered` tells whether a forward pass has registered any, and then its backward pass is not to be split.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ferrorpc.errors import UsageError

_FIRST_EDGE: Final = threading.Lock()
_REGISTERING: Final = threading.Lock()
_registered_here = 0


def hooks_registered() -> int:
    """How many hooks of tensors, nodes and modules this process has registered so far, without those of this file."""
    with _REGISTERING:
        count: int = RemovableHandle.next_id - _registered_here
    return count


def _registered(node: Any, hook: Any) -> Any:
    """The handle of a hook that runs before a node, and after the hooks of its tensors."""
    global _registered_here
    with _REGISTERING:
        _registered_here += 1
        return node.register_prehook(hook)


class SplitBackward:
    """The backward pass of one forward pass.

    Args:
        inputs: leaves that require gradients.
        outputs: those outputs of the forward pass that require gradients.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        with _FIRST_EDGE:
            _continue_from_an_edge()
        self._inputs = list(inputs)
        self._outputs = list(outputs)
        self._edges = [get_gradient_edge(each) for each in self._outputs]
        self._arrived: dict[Any, tuple[tuple[torch.Tensor | None, ...], list[int]]] = {}
        """The gradients of each node, with their versions, which show whether something was written there later."""
        self._zeros: dict[Any, torch.Tensor] = {}
        self._given: list[torch.Tensor | None] = []
        ends = {get_gradient_edge(each).node for each in self._inputs}
        starts = {edge.node for edge in self._edges}
        self._input_paths = _reaching(starts, ends) if ends else set()
        branches = {node: self._leaves_beside(node) for node in self._input_paths - ends}
        branches |= {node: _leaves([node]) for node in starts - self._input_paths}
        count = Counter(leaf for leaves in branches.values() for leaf in leaves)
        self._shared = [leaf.variable for leaf, times in count.items() if times > 1]
        self._later = {
            node: weights
            for node, leaves in branches.items()
            if (weights := [leaf.variable for leaf in leaves if count[leaf] == 1])
        }

    def input(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Computes the inputs' gradients into their .grad, and adds those of shared weights.

        Args:
            grads: of the outputs.
        """
        self._given = list(grads)
        if not self._input_paths:
            return
        nodes = self._input_paths.intersection(self._later)
        hooks = [_registered(node, partial(self._keep, node)) for node in nodes]
        try:
            wanted = [*self._inputs, *self._shared]
            torch.autograd.backward(self._outputs, self._given, retain_graph=True, inputs=wanted)
        finally:
            for hook in hooks:
                hook.remove()

    def weight(self) -> None:
        """Adds the gradients of all weights that `input` left out.

        Raises:
            UsageError: a gradient that was kept has been changed in place.
        """
        if not self._input_paths:
            torch.autograd.backward(self._outputs, self._given)
            return
        for node, weights in self._later.items():
            if node in self._input_paths:
                self._continue_from(node, weights)
            else:
                roots = [(edge, grad) for edge, grad in zip(self._edges, self._given, strict=True) if edge.node == node]
                torch.autograd.backward(*zip(*roots, strict=True), inputs=weights)
        self._zeros.clear()

    def _keep(self, node: Any, arrived: tuple[torch.Tensor | None, ...]) -> None:
        self._arrived[node] = arrived, _versions(arrived)

    def _continue_from(self, node: Any, weights: Sequence[torch.Tensor]) -> None:
        """Propagates the gradient that arrived at a node to these weights. Raises as `weight`."""
        arrived, versions = self._arrived.get(node, ((), []))
        roots = [(GradientEdge(node, place), self._zeros_like(grad)) for place, grad in enumerate(arrived) if grad is not None]
        if not roots:
            return
        if _versions(arrived) != versions:
            raise UsageError(
                f"the gradient that {node.name()} got was changed in place before the second part of a split backward pass",
                hint="let hooks and functions return a new gradient, or pass split=False to ferrorpc.torch.Stage",
            )
        hook = _registered(node, lambda _: arrived)
        try:
            torch.autograd.backward(*zip(*roots, strict=True), inputs=weights)
        finally:
            hook.remove()

    def _zeros_like(self, grad: torch.Tensor) -> torch.Tensor:
        """Zeros, which several nodes may be given one after the other unless a hook writes to them."""
        key = (grad.shape, grad.dtype, grad.device, grad.layout)
        if key not in self._zeros or any(_versions([self._zeros[key]])):
            self._zeros[key] = torch.zeros_like(grad)
        return self._zeros[key]

    def _leaves_beside(self, node: Any) -> list[Any]:
        """The leaves that a node on an input path leads to by edges off these paths."""
        return _leaves([after for after, _ in node.next_functions if after is not None and after not in self._input_paths])


@cache
def _continue_from_an_edge() -> None:
    """A backward pass from an edge, before there are several at a time.

    In the first one PyTorch makes a type, behind a lock of C++. If garbage is collected meanwhile, the interpreter may go to
    another thread that needs the type too: it then waits for the lock and keeps the interpreter, for ever.
    """
    with torch.inference_mode(False):  # in which gradients are on, too
        start = torch.zeros((), requires_grad=True, device="cpu")
        edge = get_gradient_edge(start * 1)
    torch.autograd.backward((edge,), (torch.zeros((), device="cpu"),), inputs=[start])


def _leaves(nodes: Iterable[Any]) -> list[Any]:
    """The leaves among the nodes and all nodes that can be reached from them."""
    return [each for each in _all_after(nodes) if isinstance(each, torch._C._functions.AccumulateGrad)]


def _versions(grads: Iterable[torch.Tensor | None]) -> list[int]:
    """How often each was written to."""
    return [0 if grad is None or grad.is_inference() else grad._version for grad in grads]


def _all_after(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes and all nodes that can be reached from them, each once."""
    seen = set(nodes)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


def _reaching(roots: Iterable[Any], ends: set[Any]) -> set[Any]:
    """The nodes on a path from a root to an end."""
    reachable = list(_all_after(roots))
    before: dict[Any, list[Any]] = {}
    for node in reachable:
        for after, _ in node.next_functions:
            if after is not None:
                before.setdefault(after, []).append(node)
    found: set[Any] = set()
    waiting = list(ends.intersection(reachable))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += before.get(node, [])
    return found
