"""The queue of a stream: frames are bounded, control messages where nobody reads, and whoever waits for room is told once."""

from ferrorpc.transports.control import CONTROL_MAX
from ferrorpc.transports.grpc.outbox import FRAME_BYTES_MAX, FRAMES_MAX, Outbox

SHARE = FRAME_BYTES_MAX // FRAMES_MAX


def never() -> None:
    raise AssertionError("there was room all along")


def test_messages_come_out_in_the_order_they_were_put() -> None:
    outbox = Outbox()
    assert outbox.reserve(3, never)
    outbox.put_frame(b"one", 3)
    outbox.put(b"two")
    assert outbox.reserve(5, never)
    outbox.put_frame(b"three", 5)
    outbox.finish(b"last")
    assert list(outbox.messages()) == [b"one", b"two", b"three", b"last"]


def test_frames_are_bounded_by_number_and_by_bytes() -> None:
    small, large = Outbox(), Outbox()
    assert [small.reserve(1, bool) for _ in range(FRAMES_MAX + 1)] == [True] * FRAMES_MAX + [False]
    half = FRAME_BYTES_MAX // 2
    assert [large.reserve(half, bool) for _ in range(3)] == [True, True, False]


def test_a_frame_larger_than_the_limit_still_goes_when_it_is_alone() -> None:
    outbox = Outbox()
    assert outbox.reserve(FRAME_BYTES_MAX + 1, never)
    assert not outbox.reserve(1, bool)


def test_control_messages_need_no_room_but_do_not_pile_up_before_one_that_reads_nothing() -> None:
    outbox = Outbox()
    while outbox.reserve(1, bool):
        pass
    assert all(outbox.put(b"%d" % number) for number in range(CONTROL_MAX))
    assert not outbox.put(b"one too many")
    outbox.finish()
    assert len(list(outbox.messages())) == CONTROL_MAX


def full_of_frames() -> Outbox:
    outbox = Outbox()
    for _ in range(FRAMES_MAX):
        assert outbox.reserve(SHARE, never)
        outbox.put_frame(b"x", SHARE)
    return outbox


def test_the_waiting_are_woken_one_by_one_from_half_of_the_room_on() -> None:
    outbox, woken = full_of_frames(), []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    for room in (first, second, first):
        assert not outbox.reserve(SHARE, room)
    messages = outbox.messages()
    seen = []
    for _ in range(FRAMES_MAX // 2 + 2):
        next(messages)
        seen.append(list(woken))
    assert seen == [*[[]] * (FRAMES_MAX // 2), ["first"], ["first", "second"]]
    assert outbox.reserve(SHARE, never)


def test_one_who_is_refused_again_waits_behind_the_others() -> None:
    outbox, woken = full_of_frames(), []

    def greedy() -> None:
        woken.append("greedy")
        while outbox.reserve(SHARE, greedy):
            outbox.put_frame(b"y", SHARE)

    assert not outbox.reserve(SHARE, greedy)
    assert not outbox.reserve(SHARE, lambda: woken.append("other"))
    messages = outbox.messages()
    for _ in range(2 * FRAMES_MAX):
        next(messages)
    assert woken[:2] == ["greedy", "other"]


def test_nobody_waits_for_an_empty_lane() -> None:
    """Those who were told of room before them did not use it."""
    outbox, woken = full_of_frames(), []
    for number in range(FRAMES_MAX):
        assert not outbox.reserve(SHARE, lambda number=number: woken.append(number))
    messages = outbox.messages()
    for _ in range(FRAMES_MAX):
        next(messages)
    outbox.finish()
    assert list(messages) == []
    assert woken == list(range(FRAMES_MAX))


def test_the_end_wakes_the_waiting_and_drops_what_comes_later() -> None:
    outbox = Outbox()
    woken: list[int] = []
    while outbox.reserve(1, lambda: woken.append(1)):
        outbox.put_frame(b"frame", 1)
    outbox.finish(b"goodbye", discard=True)
    assert woken == [1]
    assert outbox.reserve(1, never)
    outbox.put_frame(b"late", 1)
    outbox.put(b"late")
    assert list(outbox.messages()) == [b"goodbye"]
