"""Ranks along named dimensions."""

from __future__ import annotations

import numpy as np
import pytest

import ferrorpc
from ferrorpc.errors import CollectiveMismatchError, UsageError
from ferrorpc.testing import run_world


def test_the_last_dimension_runs_fastest():
    def body(group):
        mesh = ferrorpc.Mesh({"dp": 2, "pp": 3}, group)
        return mesh.coordinates, mesh["dp"].world_ranks, mesh["pp"].world_ranks, (mesh["dp"].rank, mesh["pp"].rank)

    found = run_world(6, body)
    assert [coordinates for coordinates, *_ in found] == [{"dp": d, "pp": p} for d in range(2) for p in range(3)]
    assert found[4] == ({"dp": 1, "pp": 1}, (1, 4), (3, 4, 5), (1, 1))


def test_a_mesh_is_asked_for_its_dimensions():
    def body(group):
        mesh = ferrorpc.Mesh({"dp": 2, "pp": 1}, group)
        return list(mesh), "dp" in mesh, "tp" in mesh

    assert run_world(2, body) == [(["dp", "pp"], True, False)] * 2


def test_groups_of_a_dimension_are_those_of_numpy_along_that_axis():
    grid = np.arange(8).reshape(2, 2, 2)

    def body(group):
        mesh = ferrorpc.Mesh({"a": 2, "b": 2, "c": 2}, group)
        place = tuple(mesh.coordinates.values())
        for axis, name in enumerate("abc"):
            index = tuple(slice(None) if other == axis else place[other] for other in range(3))
            assert list(mesh[name].world_ranks) == grid[index].tolist()
            assert mesh[name].all_reduce(np.array([group.rank])).item() == grid[index].sum()
        assert mesh.coordinates_of(5) == {"a": 1, "b": 0, "c": 1}

    run_world(8, body)


def test_a_dimension_of_one_is_a_group_of_one():
    def body(group):
        mesh = ferrorpc.Mesh({"dp": np.int64(1), "pp": np.int64(2)}, group)
        mesh.sizes["dp"] = 7  # a copy
        assert mesh.sizes == {"dp": 1, "pp": 2}
        assert repr(mesh) == f"<Mesh dp 1 x pp 2, rank {group.rank} at {{'dp': 0, 'pp': {group.rank}}}>"
        return mesh["dp"].size, mesh["pp"].size

    assert run_world(2, body) == [(1, 2)] * 2


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ({"dp": 2, "pp": 2}, r"has 4 ranks, but the group has 2"),
        ({"dp": 0}, "integers of at least 1"),
        ({"dp": 2.0}, "integers of at least 1"),
        ({"dp": 2, "pp": True}, "integers of at least 1"),
        ({2: 2}, "names are text"),
        ({}, "has 1 ranks, but the group has 2"),
        ([("dp", 2)], r"is no dict\ntry: give names and sizes"),
    ],
)
def test_a_mesh_that_is_no_grid_of_the_ranks_is_refused(dimensions, message: str):
    def body(group):
        with pytest.raises(UsageError, match=message):
            ferrorpc.Mesh(dimensions, group)
        group.barrier()

    run_world(2, body)


def test_a_dimension_that_is_not_there_is_answered_with_those_that_are():
    def body(group):
        mesh = ferrorpc.Mesh({"dp": 2}, group)
        with pytest.raises(UsageError, match=r"no dimension 'pp'(.|\n)*use one of: dp"):
            mesh["pp"]
        for rank in (2, -1, 1.5, "a", None, True):
            with pytest.raises(UsageError, match=f"no rank {rank!r}"):
                mesh.coordinates_of(rank)

    run_world(2, body)


@pytest.mark.parametrize("other", [{"dp": 4}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_with_different_meshes_are_told_both(other):
    def body(group):
        with pytest.raises(CollectiveMismatchError, match="ranks hold different dimensions of the mesh: rank 1 has "):
            ferrorpc.Mesh({"dp": 2, "pp": 2} if group.rank else other, group)
        group.barrier()

    run_world(4, body)
