"""The queue of a stream: frames are bounded, control messages where nobody reads, and whoever waits for room is told once."""

from ferrorpc.transports.control import CONTROL_MAX
from ferrorpc.transports.grpc.send_queue import FRAME_BYTES_MAX, FRAMES_MAX, SendQueue

SHARE = FRAME_BYTES_MAX // FRAMES_MAX


def never() -> None:
    raise AssertionError("there was room all along")


def test_messages_come_out_in_the_order_they_were_put() -> None:
    queue = SendQueue()
    assert queue.reserve(3, never)
    queue.put_frame(b"one", 3)
    queue.put(b"two")
    assert queue.reserve(5, never)
    queue.put_frame(b"three", 5)
    queue.finish(b"last")
    assert list(queue.messages()) == [b"one", b"two", b"three", b"last"]


def test_frames_are_bounded_by_number_and_by_bytes() -> None:
    small, large = SendQueue(), SendQueue()
    assert [small.reserve(1, bool) for _ in range(FRAMES_MAX + 1)] == [True] * FRAMES_MAX + [False]
    half = FRAME_BYTES_MAX // 2
    assert [large.reserve(half, bool) for _ in range(3)] == [True, True, False]


def test_a_frame_larger_than_the_limit_still_goes_when_it_is_alone() -> None:
    queue = SendQueue()
    assert queue.reserve(FRAME_BYTES_MAX + 1, never)
    assert not queue.reserve(1, bool)


def test_control_messages_need_no_room_but_do_not_pile_up_before_one_that_reads_nothing() -> None:
    queue = SendQueue()
    while queue.reserve(1, bool):
        pass
    assert all(queue.put(b"%d" % number) for number in range(CONTROL_MAX))
    assert not queue.put(b"one too many")
    queue.finish()
    assert len(list(queue.messages())) == CONTROL_MAX


def full_of_frames() -> SendQueue:
    queue = SendQueue()
    for _ in range(FRAMES_MAX):
        assert queue.reserve(SHARE, never)
        queue.put_frame(b"x", SHARE)
    return queue


def test_the_waiting_are_woken_one_by_one_from_half_of_the_room_on() -> None:
    queue, woken = full_of_frames(), []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    for room in (first, second, first):
        assert not queue.reserve(SHARE, room)
    messages = queue.messages()
    seen = []
    for _ in range(FRAMES_MAX // 2 + 2):
        next(messages)
        seen.append(list(woken))
    assert seen == [*[[]] * (FRAMES_MAX // 2), ["first"], ["first", "second"]]
    assert queue.reserve(SHARE, never)


def test_one_who_is_refused_again_waits_behind_the_others() -> None:
    queue, woken = full_of_frames(), []

    def greedy() -> None:
        woken.append("greedy")
        while queue.reserve(SHARE, greedy):
            queue.put_frame(b"y", SHARE)

    assert not queue.reserve(SHARE, greedy)
    assert not queue.reserve(SHARE, lambda: woken.append("other"))
    messages = queue.messages()
    for _ in range(2 * FRAMES_MAX):
        next(messages)
    assert woken[:2] == ["greedy", "other"]


def test_nobody_waits_for_an_empty_lane() -> None:
    """Those who were told of room before them did not use it."""
    queue, woken = full_of_frames(), []
    for number in range(FRAMES_MAX):
        assert not queue.reserve(SHARE, lambda number=number: woken.append(number))
    messages = queue.messages()
    for _ in range(FRAMES_MAX):
        next(messages)
    queue.finish()
    assert list(messages) == []
    assert woken == list(range(FRAMES_MAX))


def test_the_end_wakes_the_waiting_and_drops_what_comes_later() -> None:
    queue = SendQueue()
    woken: list[int] = []
    while queue.reserve(1, lambda: woken.append(1)):
        queue.put_frame(b"frame", 1)
    queue.finish(b"goodbye", discard=True)
    assert woken == [1]
    assert queue.reserve(1, never)
    queue.put_frame(b"late", 1)
    queue.put(b"late")
    assert list(queue.messages()) == [b"goodbye"]
