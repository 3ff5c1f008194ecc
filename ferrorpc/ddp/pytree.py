"""Nested containers of arrays, named by their paths: {"a": {"b": x}} holds one leaf, "a/b".

Dicts, lists, tuples and named tuples are containers; None is an empty one; everything else is a leaf. Leaves keep the order of
their containers; dicts are not sorted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from ferrorpc.errors import UsageError
from ferrorpc.types import TensorSpec

SEPARATOR = "/"


def flatten(tree: Any, *, with_none: bool = False) -> dict[str, Any]:
    """Path -> leaf. A tree that is one leaf has the path "".

    Args:
        with_none: None counts as a leaf too.

    Raises:
        UsageError: two leaves have the same path, or a dict's key is neither text nor a whole number.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in _walk(tree, ""):
        if leaf is None and not with_none:
            continue
        if path in leaves:
            raise UsageError(
                f"two leaves of the tree are named {path!r}", hint=f"avoid {SEPARATOR!r} in keys, and both 1 and '1'"
            )
        leaves[path] = leaf
    return leaves


def rebuild(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same containers with each leaf replaced by that of its path. A None without a leaf stays None."""
    return _map(tree, "", leaves)


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children:
        yield from _walk(child, _join(path, key))


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
    if tree is None or isinstance(tree, TensorSpec):
        return None
    if isinstance(tree, dict):
        return [(_key(key), child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple):
        return [(str(index), child) for index, child in enumerate(tree)]
    return None


def _key(key: Any) -> str:
    if not isinstance(key, str | int):
        raise UsageError(f"a dict of the tree has the key {key!r}", hint="keys are text or whole numbers, for paths like a/b")
    return str(key)


def _join(path: str, key: str) -> str:
    return f"{path}{SEPARATOR}{key}" if path else key
