"""Who shares memory with whom, concluded from what every rank said."""

from collections.abc import Iterable

from ferrorpc.transports.shared_memory.host_identity import HostIdentity
from ferrorpc.transports.shared_memory.hosts import candidate_hosts, confirmed_hosts, separation_reason
from ferrorpc.v1.shared_memory_pb2 import SharedMemoryOffer, SharedMemoryVerdict

A, B = HostIdentity("boot-a", 1, 1000), HostIdentity("boot-b", 1, 1000)


def offer(place: HostIdentity = A, transport: str = "auto", refusal: str = "") -> SharedMemoryOffer:
    return SharedMemoryOffer(transport=transport, refusal=refusal, **place._asdict())


def all_proven(ranks: Iterable[int], but: Iterable[tuple[int, int]] = ()) -> list[SharedMemoryVerdict]:
    """Verdicts in which every pair is proven, but these (from, of)."""
    ranks, missing = list(ranks), set(but)
    proven = [[two for two in ranks if two != one and (one, two) not in missing] for one in ranks]
    return [SharedMemoryVerdict(proven=each) for each in proven]


def test_ranks_of_one_place_try_each_other() -> None:
    assert candidate_hosts([offer(A), offer(B), offer(A), offer(B), offer(A)]) == ((0, 2, 4), (1, 3))


def test_any_difference_of_place_keeps_ranks_apart() -> None:
    for other in (A._replace(boot_id="x"), A._replace(network_namespace=2), A._replace(user=0)):
        assert candidate_hosts([offer(A), offer(other)]) == ((0,), (1,))


def test_the_unwilling_stay_alone() -> None:
    offers = [offer(), offer(transport="grpc"), offer(refusal="no Linux"), offer()]
    assert candidate_hosts(offers) == ((0, 3), (1,), (2,))
    reason = separation_reason(offers, candidate_hosts(offers), [])
    assert "rank 1: it was told to use transport='grpc'" in reason
    assert "rank 2: no Linux" in reason


def test_the_unwilling_of_one_place_do_not_meet_in_it() -> None:
    nowhere = HostIdentity("", 0, 0)
    assert candidate_hosts([offer(nowhere, refusal="a"), offer(nowhere, refusal="b")]) == ((0,), (1,))


def test_a_host_needs_every_proof_from_both_sides() -> None:
    tried = ((0, 1, 2, 3), (4,))
    assert confirmed_hosts(tried, all_proven(range(5))) == tried
    assert confirmed_hosts(tried, all_proven(range(5), [(3, 1), (0, 3), (2, 3)])) == ((0, 1, 2), (3,), (4,))
    assert confirmed_hosts(tried, all_proven(range(5), [(0, 3)])) == ((0, 1, 2), (3,), (4,))
    assert confirmed_hosts(((0, 1),), all_proven(range(2), [(1, 0)])) == ((0,), (1,))


def test_whoever_lacks_most_leaves() -> None:
    missing = [(1, other) for other in (0, 2, 3)]
    assert confirmed_hosts(((0, 1, 2, 3),), all_proven(range(4), missing)) == ((0, 2, 3), (1,))


def test_the_reason_names_what_failed() -> None:
    offers = [offer(A), offer(A), offer(B)]
    verdicts = all_proven(range(3), [(0, 1), (1, 0)])
    verdicts[0].reason = "rank 1: it hung up"
    assert separation_reason(offers, ((0,), (1,), (2,)), verdicts) == (
        "the ranks are in 2 places (hosts, network namespaces or users); rank 0: rank 1: it hung up"
    )
    assert separation_reason(offers[:2], ((0, 1),), all_proven(range(2))) == ""
