"""How ranks come to the same NCCL ids."""

import threading

import pytest

from ferrorpc.coordination.local import LocalWorld
from ferrorpc.coordination.nccl_ids import agree_on_ids, leaders
from ferrorpc.errors import CollectiveTimeoutError, FerroError, NcclError
from tests.unit.coordination.test_local_world import on_all


def mint_of(session):
    return lambda: bytes([session.rank]) * 128


def test_one_leader_for_every_128_ranks():
    assert leaders(range(4)) == [0]
    assert leaders([7, 3]) == [3]
    assert leaders(range(128)) == [0]
    assert leaders(range(300)) == [0, 128, 256]


def test_every_rank_gets_the_leaders_id_and_only_the_leader_mints():
    world = LocalWorld(3)
    minted = []

    def agree(session):
        mint = lambda: minted.append(session.rank) or mint_of(session)()  # noqa: E731
        return agree_on_ids(session, "sub", [1, 2], mint, attempt=1, timeout=20)

    assert on_all(world, agree, [1, 2]) == [[b"\x01" * 128]] * 2
    assert minted == [1]


def test_a_large_communicator_has_several_ids_in_the_order_of_their_leaders():
    ranks = list(range(130))
    world = LocalWorld(130)
    agreed = on_all(world, lambda s: agree_on_ids(s, "world", ranks, mint_of(s), attempt=1, timeout=20), [129, 0, 128])
    assert agreed == [[b"\x00" * 128, b"\x80" * 128]] * 3


def test_a_leader_that_cannot_mint_fails_all_ranks_and_the_next_attempt_is_free():
    world = LocalWorld(2)

    def fail() -> bytes:
        raise NcclError("no device on rank 0")

    failed = on_all(world, lambda s: agree_on_ids(s, "world", [0, 1], fail, attempt=1, timeout=20), [0, 1])
    assert all(isinstance(error, FerroError) and "no device on rank 0" in str(error) for error in failed)
    again = on_all(world, lambda s: agree_on_ids(s, "world", [0, 1], mint_of(s), attempt=2, timeout=20), [0, 1])
    assert again == [[bytes(128)]] * 2


def test_an_id_of_the_wrong_size_goes_to_nobody():
    world = LocalWorld(2)
    waiting = threading.Thread(target=lambda: outcome.extend(on_all(world, late, [1])))
    outcome: list = []

    def late(session):
        return agree_on_ids(session, "world", [0, 1], mint_of(session), attempt=1, timeout=0.3)

    waiting.start()
    with pytest.raises(NcclError, match="128 bytes"):
        agree_on_ids(world.session(0), "world", [0, 1], lambda: b"short", attempt=1, timeout=20)
    waiting.join(20)
    assert isinstance(outcome[0], CollectiveTimeoutError)
