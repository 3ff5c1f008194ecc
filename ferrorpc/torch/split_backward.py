"""Splits a backward pass in two: first the gradients of the inputs, later those of the weights, each computed once.

The autograd graph is traversed once after the forward pass. A node is on an input path if inputs can be reached from it. If
such a node also leads to weights off these paths, the gradient that arrives at it is kept while the inputs' gradients are
computed, and later propagated to these weights alone (the idea of Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241). A weight that several such nodes lead to would get several separate gradients, so its gradient is computed
with the inputs'. The traversal costs O(nodes) in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class SplitBackward:
    """The backward pass of one forward pass.

    Args:
        inputs: leaves that require gradients.
        outputs: those outputs of the forward pass that require gradients.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._inputs = list(inputs)
        self._outputs = list(outputs)
        self._arrived: dict[Any, tuple[torch.Tensor | None, ...]] = {}
        self._given: list[torch.Tensor | None] = []
        ends = {get_gradient_edge(each).node for each in self._inputs}
        self._input_paths = _reaching([get_gradient_edge(each).node for each in self._outputs], ends) if ends else set()
        branches = {node: leaves for node in self._input_paths if node not in ends and (leaves := self._leaves_beside(node))}
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
        hooks = [node.register_prehook(partial(self._arrived.__setitem__, node)) for node in self._later]
        try:
            wanted = [*self._inputs, *self._shared]
            torch.autograd.backward(self._outputs, self._given, retain_graph=True, inputs=wanted)
        finally:
            for hook in hooks:
                hook.remove()

    def weight(self) -> None:
        """Adds the gradients of all weights that `input` left out."""
        if not self._input_paths:
            torch.autograd.backward(self._outputs, self._given)
            return
        for node, weights in self._later.items():
            arrived = [
                (GradientEdge(node, place), grad) for place, grad in enumerate(self._arrived.get(node, ())) if grad is not None
            ]
            if arrived:
                edges, grads = zip(*arrived, strict=True)
                torch.autograd.backward(edges, grads, inputs=weights)

    def _leaves_beside(self, node: Any) -> list[Any]:
        """The leaves that a node on an input path leads to by edges off these paths."""
        beside = [after for after, _ in node.next_functions if after is not None and after not in self._input_paths]
        return [each for each in _all_after(beside) if hasattr(each, "variable")]


def _all_after(nodes: Sequence[Any]) -> Iterator[Any]:
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


def _reaching(roots: Sequence[Any], ends: set[Any]) -> set[Any]:
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
