"""The queue of a stream: frames are bounded, control messages are not, and whoever waits for room is told once."""

from ferrorpc.transports.grpc_outbox import FRAME_BYTES_MAX, FRAMES_MAX, Outbox

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


def test_control_messages_are_never_refused() -> None:
    outbox = Outbox()
    while outbox.reserve(1, bool):
        pass
    for number in range(1000):
        outbox.put(b"%d" % number)
    outbox.finish()
    assert len(list(outbox.messages())) == 1000


def test_the_waiting_are_woken_once_when_half_of_the_room_is_free() -> None:
    outbox = Outbox()
    woken: list[str] = []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    for _ in range(FRAMES_MAX):
        assert outbox.reserve(SHARE, never)
        outbox.put_frame(b"x", SHARE)
    for room in (first, second, first):
        assert not outbox.reserve(SHARE, room)
    messages = outbox.messages()
    taken = 0
    while not woken:
        next(messages)
        taken += 1
    assert taken == FRAMES_MAX // 2 + 1
    assert woken == ["first", "second"]
    assert outbox.reserve(SHARE, never)


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
