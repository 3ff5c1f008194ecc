"""Ranks are assigned by the strength of claims, each exactly once."""

from __future__ import annotations

from ferrorpc_coordinator.state.ranks import Claim, assign
from hypothesis import given, strategies as st

CLAIMS = st.lists(
    st.builds(
        Claim,
        host=st.sampled_from("abc"),
        pinned=st.just(-1),
        current=st.integers(-1, 9),
        last=st.integers(-1, 9),
        hinted=st.integers(-1, 9),
    ),
    min_size=1,
    max_size=10,
)


def test_a_pinned_rank_beats_the_rank_another_has() -> None:
    assert assign([Claim("h", current=1), Claim("h", pinned=1)], 2) == [0, 1]


def test_the_current_rank_beats_the_last_one_and_that_a_hint() -> None:
    assert assign([Claim("h", hinted=0), Claim("h", last=0), Claim("h", current=0)], 3) == [1, 2, 0]


def test_remaining_ranks_are_assigned_by_host() -> None:
    assert assign([Claim("x"), Claim("y"), Claim("x"), Claim("y")], 4) == [0, 2, 1, 3]


def test_a_rank_outside_a_smaller_world_is_not_claimed() -> None:
    assert assign([Claim("h", current=0), Claim("h", current=3)], 2) == [0, 1]


@given(CLAIMS)
def test_every_rank_is_given_exactly_once(claims: list[Claim]) -> None:
    assert sorted(assign(claims, len(claims))) == list(range(len(claims)))


def test_rank_0_of_an_elastic_world_goes_to_a_survivor() -> None:
    """Members that wrap their modules again take the weights of rank 0. In a fixed world ranks may do different work."""
    newcomer = Claim("h", last=0, hinted=0)
    claims = [newcomer, Claim("h", current=2), Claim("h", current=1)]
    assert assign(claims, 3, elastic=True) == [1, 2, 0]
    assert assign(claims, 3) == [0, 2, 1]


def test_pinned_ranks_stay_whoever_has_rank_0() -> None:
    assert assign([Claim("h", pinned=0), Claim("h", current=1)], 2, elastic=True) == [0, 1]
    survivor = Claim("h", pinned=1, current=1)
    assert assign([Claim("h"), survivor, Claim("h", current=2)], 3, elastic=True) == [2, 1, 0]
    assert assign([Claim("h"), survivor], 2, elastic=True) == [0, 1]


@given(CLAIMS)
def test_rank_0_of_an_elastic_world_is_a_survivor_if_there_is_one(claims: list[Claim]) -> None:
    ranks = assign(claims, len(claims), elastic=True)
    assert sorted(ranks) == list(range(len(claims)))
    assert claims[ranks.index(0)].current >= 0 or all(claim.current < 0 for claim in claims)


@given(CLAIMS)
def test_a_survivor_keeps_its_rank_when_nobody_else_has_it(claims: list[Claim]) -> None:
    size = len(claims)
    ranks = assign(claims, size)
    for claim, rank in zip(claims, ranks, strict=True):
        alone = sum(other.current == claim.current for other in claims) == 1
        if 0 <= claim.current < size and alone:
            assert rank == claim.current
