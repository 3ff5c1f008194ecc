"""What a beat tells: operations, time in them, and links in small portions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ferrorpc.coordination.activity import LINKS_MAX, Activity
from ferrorpc.testing import ManualClock


def links_of(activity: Activity) -> dict[int, tuple[str, int]]:
    """The links of the next beat that tells of any."""
    for _ in range(2):
        found = activity.beat(1, 0.0).links
        if found:
            return {link.peer_rank: (link.kind, link.sent_bytes) for link in found}
    return {}


def test_a_beat_tells_the_last_operation_how_many_there_were_and_the_time_in_them() -> None:
    activity = Activity()
    for number in range(3):
        activity.note(f"all_reduce #{number}")
        activity.operated(0.25)
    beat = activity.beat(7, 0.0)
    assert (beat.step, beat.activity, beat.operation_ms, beat.generation) == (3, "all_reduce #2", 750, 7)


def test_an_operation_that_is_not_over_counts_and_is_not_counted_twice() -> None:
    activity = Activity()
    told = []
    activity.operating(10.0)
    told.append(activity.beat(1, 10.5).operation_ms)
    told.append(activity.beat(1, 11.0).operation_ms)
    activity.operated(1.25)
    told.append(activity.beat(1, 20.0).operation_ms)
    assert told == [500, 1000, 1250]


def test_a_wait_beside_the_main_thread_does_not_make_the_rank_wait() -> None:
    """It may wait all the time, as for a message that ends the job, while the rank computes, or hangs."""
    activity, clock = Activity(), ManualClock()

    def listen() -> None:
        with activity.waiting(clock):
            clock.advance(5.0)
            told.append(activity.beat(1, clock.now()).operation_ms)

    told = list[int]()
    with ThreadPoolExecutor(1) as pool:
        with activity.waiting(clock):
            clock.advance(1.0)
            pool.submit(listen).result(20.0)
            told.append(activity.beat(1, clock.now()).operation_ms)
        clock.advance(1.0)
        pool.submit(listen).result(20.0)
    assert told == [6000, 6000, 6000]


def test_time_in_operations_never_goes_back() -> None:
    activity = Activity()
    activity.operating(0.0)
    assert activity.beat(1, 1.0).operation_ms == 1000
    activity.operated(0.5)
    assert activity.beat(1, 2.0).operation_ms == 1000


def test_links_are_told_once_until_something_is_sent_again() -> None:
    activity, traffic = Activity(), {1: ("grpc", 100), 2: ("shared_memory", 5), 3: ("grpc", 0)}
    activity.set_traffic_source(lambda: traffic)
    assert links_of(activity) == {1: ("grpc", 100), 2: ("shared_memory", 5)}
    assert links_of(activity) == {}
    traffic[2] = ("shared_memory", 9)
    assert links_of(activity) == {2: ("shared_memory", 9)}


def test_every_other_beat_is_without_links() -> None:
    activity = Activity()
    sent = {1: ("grpc", 0)}
    activity.set_traffic_source(lambda: {peer: (kind, sent_bytes + 1) for peer, (kind, sent_bytes) in sent.items()})
    told = []
    for number in range(6):
        sent[1] = ("grpc", number)
        told.append(len(activity.beat(1, 0.0).links))
    assert told == [0, 1, 0, 1, 0, 1]


def test_many_busy_links_take_turns() -> None:
    activity, size = Activity(), 3 * LINKS_MAX
    clock = [0]
    activity.set_traffic_source(lambda: {peer: ("grpc", clock[0] + peer + 1) for peer in range(size)})
    seen = []
    for _ in range(3):
        clock[0] += 1000
        told = links_of(activity)
        assert len(told) == LINKS_MAX
        seen += list(told)
    assert sorted(seen) == list(range(size))


def test_training_steps_are_summed() -> None:
    activity = Activity()
    assert not activity.beat(1, 0.0).HasField("training")
    for _ in range(2):
        activity.stepped(0.5, 0.25, 0.125)
    told = activity.beat(1, 0.0).training
    assert (told.steps, told.compute_ms, told.exposed_ms, told.hidden_ms) == (2, 1000, 500, 250)
