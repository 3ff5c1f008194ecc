"""A backward in two: the gradient of the inputs first, those of the weights later, each computed once.

Autograd's graph is walked once after the forward. A node is on the way if inputs can be reached from it; where a node on the
way also leads off to weights, what arrives at it is kept when the inputs' gradients are computed, and later sent on to these
weights alone (the idea of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241). A weight that several such nodes
lead to cannot be told apart by them, so its gradient is computed with the inputs'. The walk costs O(nodes) in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class SplitBackward:
    """The backward of one forward.

    Args:
        inputs: leaves that require gradients.
        outputs: what was computed from them, of those that require gradients.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._inputs = list(inputs)
        self._outputs = list(outputs)
        self._arrived: dict[Any, tuple[torch.Tensor | None, ...]] = {}
        self._given: list[torch.Tensor | None] = []
        ends = {get_gradient_edge(each).node for each in self._inputs}
        self._way = _reaching([get_gradient_edge(each).node for each in self._outputs], ends) if ends else set()
        turns = {node: leaves for node in self._way if node not in ends and (leaves := self._leaves_beside(node))}
        count = Counter(leaf for leaves in turns.values() for leaf in leaves)
        self._shared = [leaf.variable for leaf, times in count.items() if times > 1]
        self._later = {
            node: weights
            for node, leaves in turns.items()
            if (weights := [leaf.variable for leaf in leaves if count[leaf] == 1])
        }

    def input(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Leaves the inputs' gradients in their .grad, and adds those of shared weights.

        Args:
            grads: of the outputs.
        """
        self._given = list(grads)
        if not self._way:
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
        if not self._way:
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
        """The leaves that a node on the way leads to by edges that leave it."""
        beside = [after for after, _ in node.next_functions if after is not None and after not in self._way]
        return [each for each in _all_after(beside) if hasattr(each, "variable")]


def _all_after(nodes: Sequence[Any]) -> Iterator[Any]:
    """The nodes and all that can be reached from them, each once."""
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
    """Of all nodes that can be reached from the roots, those from which an end can be reached."""
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
