"""Nested containers of arrays, named by their paths: {"a": {"b": x}} holds one leaf, "a/b".

Dicts, lists, tuples and named tuples are containers; None is an empty one; everything else is a leaf. Leaves keep the order of
their containers; dicts are not sorted.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import copy
from typing import Any

from ferrorpc.errors import UsageError
from ferrorpc.types import TensorSpec

SEPARATOR = "/"
DEPTH_MAX = 128
"""How many containers may lie within each other: Python recurses into them."""
_CONTAINERS = (dict, list, tuple)


def flatten(tree: Any, nones: Container[str] = ()) -> dict[str, Any]:
    """Path -> leaf. A tree that is one leaf has the path "".

    Args:
        nones: paths at which None counts as a leaf too.

    Raises:
        UsageError: two leaves have the same path, a dict's key is neither text nor a whole number, or containers lie more than
            DEPTH_MAX deep.
    """
    leaves: dict[str, Any] = {}
    _collect(tree, "", nones, leaves, DEPTH_MAX)
    return leaves


def rebuild(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same containers with each leaf replaced by that of its path. A None without a leaf stays None."""
    return _map(tree, "", leaves)


def _collect(tree: Any, path: str, nones: Container[str], leaves: dict[str, Any], levels: int) -> None:
    """Adds the leaves of a tree that lies at this path, of at most so many more levels of containers."""
    children = _children(tree)
    if children is not None:
        if not levels:
            what = f"the tree has more than {DEPTH_MAX} containers within each other"
            raise UsageError(what, hint="make it flatter, and look whether a container holds itself")
        for key, child in children:
            _collect(child, _join(path, key), nones, leaves, levels - 1)
    elif tree is not None or path in nones:
        if path in leaves:
            raise UsageError(
                f"two leaves of the tree are named {path!r}", hint=f"avoid {SEPARATOR!r} in keys, and both 1 and '1'"
            )
        leaves[path] = tree


def _map(tree: Any, path: str, leaves: Mapping[str, Any]) -> Any:
    children = _children(tree)
    if children is None:
        return leaves.get(path) if tree is None else leaves[path]
    mapped = [_map(child, _join(path, key), leaves) for key, child in children]
    if isinstance(tree, dict):
        made = copy(tree)  # an OrderedDict stays one
        for key, value in zip(tree, mapped, strict=True):
            made[key] = value
        return made
    if isinstance(tree, list):
        return mapped
    return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Keys and children of a container; None for a leaf, and for None."""
    if not isinstance(tree, _CONTAINERS) or isinstance(tree, TensorSpec):
        return None
    if isinstance(tree, dict):
        return [(_key(key), child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    return [(str(index), child) for index, child in enumerate(tree)]


def _key(key: Any) -> str:
    if not isinstance(key, (str, int)):
        raise UsageError(f"a dict of the tree has the key {key!r}", hint="keys are text or whole numbers, for paths like a/b")
    return str(key)


def _join(path: str, key: str) -> str:
    return f"{path}{SEPARATOR}{key}" if path else key
