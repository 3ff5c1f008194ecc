"""Trees of arrays and the names of their leaves."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import NamedTuple

import pytest

from ferrorpc.ddp.pytree import DEPTH_MAX, flatten, rebuild
from ferrorpc.errors import UsageError
from ferrorpc.types import DType, TensorSpec


class Layer(NamedTuple):
    weight: object
    bias: object


TREE = {"layers": [Layer(1, 2), Layer(3, None)], "head": {"w": 4, 7: (5, 6)}, "none": None, "empty": {}}


def test_leaves_are_named_by_their_paths_in_order():
    assert flatten(TREE) == {
        "layers/0/weight": 1,
        "layers/0/bias": 2,
        "layers/1/weight": 3,
        "head/w": 4,
        "head/7/0": 5,
        "head/7/1": 6,
    }
    assert list(flatten({"b": 1, "a": 2})) == ["b", "a"]


def test_none_is_a_leaf_where_it_is_asked_for():
    assert flatten({"a": None, "b": [None, 1]}, nones={"b/0", "b/1", "c"}) == {"b/0": None, "b/1": 1}


def test_rebuild_keeps_every_container():
    doubled = rebuild(TREE, {path: 2 * leaf for path, leaf in flatten(TREE).items()})
    assert doubled == {"layers": [Layer(2, 4), Layer(6, None)], "head": {"w": 8, 7: (10, 12)}, "none": None, "empty": {}}
    assert isinstance(doubled["layers"][0], Layer)


@pytest.mark.parametrize("made", [OrderedDict(b=1, a=2), defaultdict(list, b=1, a=2), Counter(b=1, a=2)])
def test_rebuild_keeps_what_kind_of_dict_it_was(made):
    halved = rebuild(made, {"b": 0.5, "a": 1.0})
    assert (type(halved), list(halved.items())) == (type(made), [("b", 0.5), ("a", 1.0)])
    assert dict(made) == {"b": 1, "a": 2}


def test_a_single_leaf_is_a_tree():
    assert flatten(5) == {"": 5}
    assert rebuild(5, {"": 6}) == 6


def test_specs_are_leaves_although_they_are_tuples():
    spec = TensorSpec(DType.FLOAT32, (2,))
    assert flatten({"w": spec}) == {"w": spec}


def test_names_that_collide_are_refused():
    with pytest.raises(UsageError, match="a/b"):
        flatten({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(UsageError, match=r"\(1, 2\)"):
        flatten({(1, 2): 1})


def nested(levels: int) -> object:
    tree: object = 1
    for _ in range(levels):
        tree = [tree]
    return tree


def test_a_tree_deeper_than_python_recurses_is_refused_before_anything_is_made_of_it():
    assert len(flatten(nested(DEPTH_MAX))) == 1
    rebuild(nested(DEPTH_MAX), flatten(nested(DEPTH_MAX)))
    with pytest.raises(UsageError, match="128 containers within each other"):
        flatten(nested(DEPTH_MAX + 1))
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(UsageError, match="holds itself"):
        flatten(itself)
