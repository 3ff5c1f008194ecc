"""Frames, grants and probe answers find their operation, and nothing strange does harm."""

import heapq
from functools import partial
from types import SimpleNamespace

import pytest

from ferrorpc.errors import CodecError, CollectiveMismatchError, FerroError, LimitExceededError
from ferrorpc.transports import closed_groups, point_to_point
from ferrorpc.transports.closed_groups import Begun
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_BYTES, EAGER_CHUNKS, FRAME_COST_BYTES
from ferrorpc.transports.mailbox import (
    ABSENT,
    DIFFERENT,
    FINISHED,
    GRANTS_MAX,
    HISTORY,
    SAME,
    Box,
    CallRecord,
    Mailbox,
    Standing,
)
from ferrorpc.transports.point_to_point import ANY_NUMBER, Ending, PostedReceive
from ferrorpc.types import DType
from ferrorpc.wire.frames import BARRIER_STREAM, BESIDE, POINT_TO_POINT, Frame, Header, Key


def frame(
    key: Key, source: int, *, slot: int = 0, signature: str = "a()", total: int = 4, offset: int = 0, size: int = 4
) -> Frame:
    header = Header(slot, signature, DType.UINT8, (total,), total)
    return Frame(key, source, header, offset, memoryview(bytes(size)))


def mailbox() -> tuple[Mailbox, list[FerroError]]:
    reported: list[FerroError] = []
    return Mailbox(1, reported.append), reported


def recv(group: int, source: int, tag: int) -> PostedReceive:
    return PostedReceive((group, source, tag), lambda: None)


def begun_to(*last: int) -> list[Begun]:
    return [Begun(number) for number in last]


def test_a_frame_that_comes_before_the_call_waits_for_it() -> None:
    box_of, reported = mailbox()
    box_of.deliver(frame(Key(0, 0, 1), 0))
    box = box_of.enter(Key(0, 0, 1), "a()", lambda: None)
    assert [f.source for f in box.frames[0, 0]] == [0]
    assert reported == []


def test_a_frame_wakes_the_driver_of_its_operation_only() -> None:
    box_of, _ = mailbox()
    woken: list[int] = []
    box_of.enter(Key(0, 0, 1), "a()", lambda: woken.append(1))
    box_of.enter(Key(0, 0, 2), "a()", lambda: woken.append(2))
    box_of.deliver(frame(Key(0, 0, 2), 0))
    assert woken == [2]


def test_a_different_signature_is_reported_with_both_texts_before_during_and_after_the_call() -> None:
    for order in ("before", "during", "after"):
        box_of, reported = mailbox()
        key = Key(0, 0, 7)
        if order == "before":
            box_of.deliver(frame(key, 0, signature="b()"))
        box_of.enter(key, "a()", lambda: None)
        if order == "during":
            box_of.deliver(frame(key, 0, signature="b()"))
        box_of.leave(key)
        if order == "after":
            box_of.deliver(frame(key, 0, signature="b()"))
        (error,) = reported
        assert isinstance(error, CollectiveMismatchError)
        assert error.signatures == {0: "b()", 1: "a()"}, order


def test_no_call_takes_a_frame_of_a_different_one() -> None:
    for early in (True, False):
        box_of, reported = mailbox()
        key = Key(0, 0, 7)
        if early:
            box_of.deliver(frame(key, 0, signature="b()"))
        box = box_of.enter(key, "a()", lambda: None)
        if not early:
            assert box.refused is None
            box_of.deliver(frame(key, 0, signature="b()"))
        assert [box.refused] == reported
        assert box.frames == {}


def test_a_late_frame_of_a_finished_call_is_dropped_when_it_agrees() -> None:
    box_of, reported = mailbox()
    key = Key(0, 0, 1)
    box_of.enter(key, "a()", lambda: None)
    box_of.leave(key)
    box_of.deliver(frame(key, 0))
    assert reported == []
    assert box_of.standing(1, key, "a()").standing == FINISHED


@pytest.mark.parametrize("number", [3, 10])
def test_frames_older_than_the_history_leave_nothing_behind(number: int) -> None:
    reported: list[FerroError] = []
    box_of = Mailbox(1, reported.append, unexpected_bytes_max=0)
    for passed in range(1, HISTORY + 11):
        box_of.enter(Key(0, 0, passed), "a()", lambda: None)
        box_of.leave(Key(0, 0, passed))
    box_of.deliver(frame(Key(0, 0, number), 0, signature="b()"))
    assert reported == []
    assert box_of.standing(1, Key(0, 0, number), "a()").standing == FINISHED


def test_where_operations_come_in_any_order_a_later_one_says_nothing_of_an_earlier_one() -> None:
    box_of, _ = mailbox()
    box_of.enter(Key(0, 2, 7), "a()", lambda: None)
    assert box_of.standing(1, Key(0, 2, 3), "a()") == (ABSENT, "", 7, "a()")


def test_the_last_operation_of_a_group_is_over_although_others_have_filled_the_history_since() -> None:
    box_of, _ = mailbox()
    for key in (Key(0, 0, 1), *(Key(7, 0, number) for number in range(1, HISTORY + 2))):
        box_of.enter(key, "a()", lambda: None)
        box_of.leave(key)
    assert box_of.standing(1, Key(0, 0, 1), "a()").standing == FINISHED


def test_a_probe_is_answered_with_where_this_rank_stands() -> None:
    box_of, _ = mailbox()
    box_of.enter(Key(0, 0, 1), "a()", lambda: None)
    assert box_of.standing(1, Key(0, 0, 1), "a()").standing == SAME
    different = box_of.standing(1, Key(0, 0, 1), "c()")
    assert (different.standing, different.signature) == (DIFFERENT, "a()")
    absent = box_of.standing(1, Key(0, 0, 2), "a()")
    assert (absent.standing, absent.last_number, absent.last_signature) == (ABSENT, 1, "a()")


@pytest.mark.parametrize(("elsewhere", "last"), [(7, (7, "there()")), (2, (3, "here()"))])
def test_a_probe_is_answered_with_the_last_operation_whether_it_sent_messages_or_not(elsewhere: int, last) -> None:
    class Arena:
        def entered(self, key: Key) -> CallRecord:
            return CallRecord(None, elsewhere, "there()")

    box_of, _ = mailbox()
    arena = Arena()
    box_of.register_lookup(0, arena.entered)
    box_of.enter(Key(0, 0, 3), "here()", lambda: None)
    box_of.leave(Key(0, 0, 3))
    assert box_of.standing(1, Key(0, 0, 9), "a()") == (ABSENT, "", *last)


def test_nothing_is_kept_of_the_lookups_of_groups_that_are_gone() -> None:
    class Arena:
        def entered(self, key: Key) -> CallRecord:
            return CallRecord(None, 0, "")

    box_of, _ = mailbox()
    world = Arena()
    box_of.register_lookup(0, world.entered)
    for group in range(1, 9):
        box_of.register_lookup(group, Arena().entered)
        assert set(box_of._lookups) == {0}


def test_of_a_call_that_awaits_no_message_only_its_signature_stays() -> None:
    box_of, reported = mailbox()
    for number in range(1, HISTORY + 3):
        box_of.record(Key(0, 0, number), f"a({number})")
    assert (len(box_of._boxes), len(box_of._history)) == (0, HISTORY)
    assert box_of.standing(1, Key(0, 0, 9), "a(9)") == (FINISHED, "a(9)", HISTORY + 2, f"a({HISTORY + 2})")
    assert box_of.standing(1, Key(0, 0, 9), "b()")[:2] == (DIFFERENT, "a(9)")
    assert reported == []


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_message_for_a_call_that_awaits_none_is_a_difference(order: str) -> None:
    box_of, reported = mailbox()
    key = Key(0, 0, 7)
    if order == "before":
        box_of.deliver(frame(key, 0, signature="b()"))
    box_of.record(key, "a()")
    if order == "after":
        box_of.deliver(frame(key, 0, signature="b()"))
    (error,) = reported
    assert isinstance(error, CollectiveMismatchError)
    assert error.signatures == {0: "b()", 1: "a()"}


def test_an_answer_that_differs_is_a_mismatch_although_no_frame_came() -> None:
    box_of, reported = mailbox()
    box_of.enter(Key(0, 0, 1), "a()", lambda: None)
    box_of.probe_answered(0, Key(0, 0, 1), Standing(DIFFERENT, "a()", 1, "a()"))
    assert reported == []
    box_of.probe_answered(0, Key(0, 0, 1), Standing(DIFFERENT, "b()", 1, "b()"))
    assert [type(error) for error in reported] == [CollectiveMismatchError]


@pytest.mark.parametrize("stream", [0, POINT_TO_POINT])
def test_a_chunk_that_describes_another_message_than_the_first_ends_the_generation(stream: int) -> None:
    box_of, reported = mailbox()
    key = Key(0, stream, 1)
    box_of.enter(key, "a()", lambda: None)
    assert box_of.deliver(frame(key, 0, total=8))
    assert not box_of.deliver(frame(key, 0, total=12, offset=4, size=8))
    assert [type(error) for error in reported] == [CodecError]


def test_a_long_message_asks_for_a_grant_once() -> None:
    box_of, _ = mailbox()
    key, total = Key(0, 0, 1), (EAGER_CHUNKS + 2) * CHUNK_BYTES
    box_of.deliver(frame(key, 0, total=total, size=CHUNK_BYTES))
    box_of.deliver(frame(key, 0, total=total, offset=CHUNK_BYTES, size=CHUNK_BYTES))
    assert list(box_of.enter(key, "a()", lambda: None).ungranted) == [(0, 0)]


def test_messages_between_two_ranks_are_matched_as_their_first_chunks_come() -> None:
    """A later chunk may overtake them on another lane."""
    box_of, _ = mailbox()
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 7), 0, slot=5, total=8, offset=4))
    first, second = recv(0, 0, 5), recv(0, 0, 5)
    box_of.post(first)
    box_of.post(second)
    assert first.message is None
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 3), 0, slot=5))
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 7), 0, slot=5, total=8))
    assert (first.number, second.number) == (3, 7)
    assert second.message is not None
    assert [chunk.offset for chunk in second.message.frames] == [0, 4]


def test_a_recv_that_gives_up_leaves_its_message_to_the_next_one() -> None:
    box_of, _ = mailbox()
    first, second = recv(0, 0, 5), recv(0, 0, 5)
    box_of.post(first)
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 1), 0, slot=5, total=8))
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 2), 0, slot=5))
    box_of.unpost(first)
    box_of.post(second)
    assert second.number == 1
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 1), 0, slot=5, total=8, offset=4))
    assert second.message is not None
    assert [chunk.offset for chunk in second.message.frames] == [0, 4]


def test_a_recv_that_gives_up_after_it_has_taken_all_gives_nothing_back() -> None:
    """An interrupt can end it before it knows that it was complete."""
    box_of, _ = mailbox()
    post = recv(0, 0, 5)
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 1), 0, slot=5))
    box_of.post(post)
    box_of.take(post)
    box_of.unpost(post)
    assert not box_of._inbound


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_message_that_was_being_matched_when_its_recv_was_interrupted_is_for_the_next(monkeypatch, after: bool) -> None:
    box_of, _ = mailbox()
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 1), 1))

    def pop(heap: list[int]) -> int:
        found = heapq.heappop(heap) if after else 0
        raise KeyboardInterrupt(found)

    interrupted, following = recv(0, 1, 0), recv(0, 1, 0)
    monkeypatch.setattr(point_to_point, "heapq", SimpleNamespace(heappop=pop))
    with pytest.raises(KeyboardInterrupt):
        box_of.post(interrupted)
    monkeypatch.undo()
    box_of.unpost(interrupted)
    box_of.post(following)
    assert following.message is not None
    box_of.take(following)
    assert not box_of._inbound


def test_a_recv_that_waits_in_vain_is_taken_out_of_the_queue() -> None:
    box_of, _ = mailbox()
    first, second = recv(0, 0, 0), recv(0, 0, 0)
    box_of.post(first)
    box_of.post(second)
    box_of.unpost(first)
    box_of.deliver(frame(Key(0, POINT_TO_POINT, 1), 0))
    assert first.message is None
    assert second.message is not None


@pytest.mark.parametrize("stream", [0, POINT_TO_POINT])
def test_what_nobody_has_asked_for_waits_up_to_a_limit_and_then_ends_the_generation(stream: int) -> None:
    reported: list[FerroError] = []
    limited = Mailbox(1, reported.append, unexpected_bytes_max=10 * FRAME_COST_BYTES)
    for number in range(1, 1000):
        limited.deliver(frame(Key(0, stream, number), 0))
    assert {type(error) for error in reported} == {LimitExceededError}
    assert "rank 0" in reported[0].message
    assert len(reported) == 999 - 9


def test_messages_that_an_operation_does_not_have_count_as_long_as_it_lasts() -> None:
    """Its next part may have them: a broadcast is announced under the same key."""
    reported: list[FerroError] = []
    limited = Mailbox(1, reported.append, unexpected_bytes_max=10 * FRAME_COST_BYTES)
    key = Key(0, 0, 1)
    limited.enter(key, "a()", lambda: None, {(0, 7)})
    for slot in range(9):
        limited.deliver(frame(key, 0, slot=slot))
    box = limited.enter(key, "a()", lambda: None, {(0, slot) for slot in range(9)})
    assert len(box.frames) == 9
    for slot in range(10, 19):
        limited.deliver(frame(key, 0, slot=slot))
    assert reported == []
    limited.deliver(frame(key, 0, slot=99))
    assert [type(error) for error in reported] == [LimitExceededError]
    limited.leave(key)
    limited.deliver(frame(Key(0, 0, 2), 0))
    assert len(reported) == 1


def test_what_was_asked_for_makes_room_for_more() -> None:
    reported: list[FerroError] = []
    limited = Mailbox(1, reported.append, unexpected_bytes_max=4 * FRAME_COST_BYTES)
    for number in range(1, 100):
        key = Key(0, 0, number)
        for source in (0, 2, 3):
            limited.deliver(frame(key, source))
        limited.enter(key, "a()", lambda: None)
        limited.leave(key)
        limited.deliver(frame(Key(0, POINT_TO_POINT, number), 0, slot=5))
        post = recv(0, 0, 5)
        limited.post(post)
        assert post.message is not None
        limited.take(post)
    assert reported == []


def test_what_nobody_received_in_a_closed_group_is_dropped_and_what_comes_later_too() -> None:
    reported: list[FerroError] = []
    limited = Mailbox(1, reported.append, unexpected_bytes_max=8 * FRAME_COST_BYTES)
    begun, never = Key(7, 0, 3), Key(7, 0, 4)
    for closed in (7, 8):
        for number in range(1, 20):  # beyond the limit together
            limited.deliver(frame(Key(closed, POINT_TO_POINT, number), 0, slot=5, total=8))
            if number == 2:
                limited.deliver(frame(never._replace(group=closed), 0))
                limited.deliver(frame(begun._replace(group=closed), 0))
                limited.retire(closed, begun_to(3))
        limited.deliver(frame(never._replace(group=closed), 2))
    assert (reported, limited._inbound, set(limited._boxes)) == ([], {}, {begun, begun._replace(group=8)})
    assert len(limited.enter(begun, "a()", lambda: None).frames) == 1, "its operation is in flight"
    assert reported == []


def test_what_waits_in_open_groups_is_received_although_another_closes() -> None:
    box_of, _ = mailbox()
    for group in (0, 6, 7):
        box_of.deliver(frame(Key(group, POINT_TO_POINT, 1), 0, slot=5))
        box_of.deliver(frame(Key(group, 0, 9), 0))
        box_of.deliver(frame(Key(group, 2, 9), 0))
        box_of.deliver(frame(Key(group, 2, 10), 0))
    box_of.retire(7, begun_to(3, -1, 9))
    for group in (0, 6):
        post = recv(group, 0, 5)
        box_of.post(post)
        assert post.message is not None
        assert len(box_of.enter(Key(group, 0, 9), "a()", lambda: None).frames) == 1
    assert len(box_of.enter(Key(7, 2, 9), "a()", lambda: None).frames) == 1, "it is in flight"
    assert {key for key in box_of._boxes if key.group == 7} == {Key(7, 2, 9)}


@pytest.mark.parametrize("never", [Key(7, 0, 4), Key(7, BESIDE, 4), Key(7, 1, 0), Key(7, 2, 10), Key(7, 3, 0)])
def test_who_waits_for_what_begins_no_more_in_a_closed_group_is_told(never: Key) -> None:
    box_of, reported = mailbox()
    box_of.retire(7, begun_to(3, -1, 9))
    for begun in (Key(7, 0, 3), Key(7, BESIDE, 3), Key(7, 2, 9), Key(7, BARRIER_STREAM, 5), Key(8, 3, 0)):
        box_of.standing(1, begun, "a()")
    assert reported == []
    box_of.standing(1, never, "a()")
    (error,) = reported
    assert "it closed a subgroup in which others wait for it: a()" in error.message


def test_the_answer_from_a_closed_group_names_the_last_operation_also_for_what_comes_beside_it() -> None:
    box_of, _ = mailbox()
    box_of.retire(7, begun_to(3, -1, 9))
    keys = Key(7, 0, 2), Key(7, BESIDE, 2), Key(7, 2 | BESIDE, 8), Key(7, BARRIER_STREAM, 5)
    assert [box_of.standing(1, key, "a()").last_number for key in keys] == [3, 3, 9, 0]


def test_who_receives_from_a_closed_group_is_told_once_its_sends_have_begun_to_leave() -> None:
    box_of, _ = mailbox()
    mine, recv = Key(7, POINT_TO_POINT, 1), Key(7, POINT_TO_POINT, ANY_NUMBER)
    assert box_of.standing(1, recv, "recv()").standing == ABSENT
    box_of.start_sending(1, mine, Box())
    box_of.start_sending(1, mine._replace(group=8), Box())
    box_of.start_sending(2, mine._replace(number=2), Box())
    box_of.retire(7, begun_to(3))
    assert [box_of.standing(1, key, "").standing for key in (recv, mine)] == [ABSENT, FINISHED]
    box_of.began_sending(mine)
    assert [box_of.standing(peer, recv, "recv()").standing for peer in (1, 2)] == [FINISHED, ABSENT]
    box_of.stop_sending(mine._replace(number=2))
    assert box_of.standing(2, recv, "recv()").standing == FINISHED


def test_only_recvs_without_a_message_of_a_rank_that_closed_their_group_are_over() -> None:
    box_of, _ = mailbox()
    woken: list[int] = []
    places = [(7, 0, 5), (7, 0, 5), (7, 0, 6), (7, 2, 5), (8, 0, 5)]
    posts = [PostedReceive(place, partial(woken.append, number)) for number, place in enumerate(places)]
    for post in posts:
        box_of.post(post)
    box_of.deliver(frame(Key(7, POINT_TO_POINT, 1), 0, slot=5))
    woken.clear()
    box_of.probe_answered(0, Key(7, POINT_TO_POINT, ANY_NUMBER), Standing(ABSENT, "", 0, ""))
    assert woken == []
    box_of.probe_answered(0, Key(7, POINT_TO_POINT, ANY_NUMBER), Standing(FINISHED, "", 0, ""))
    closed = Ending.SENDER_CLOSED
    assert (woken, [post.ending for post in posts]) == ([1, 2], [None, closed, closed, None, None])
    later = recv(7, 0, 6)
    box_of.post(later)
    assert later.ending is closed


def test_an_answer_that_no_recv_has_asked_for_is_not_kept() -> None:
    box_of, _ = mailbox()
    for group in range(3):
        box_of.probe_answered(0, Key(group, POINT_TO_POINT, ANY_NUMBER), Standing(FINISHED, "", 0, ""))
    assert box_of._silent == {}


def test_a_recv_that_ends_after_its_group_leaves_nothing_behind() -> None:
    box_of, reported = mailbox()
    matched, taken, empty = (recv(7, 0, slot) for slot in (5, 6, 7))
    for slot, post in ((5, matched), (6, taken), (7, empty)):
        if post is not empty:
            box_of.deliver(frame(Key(7, POINT_TO_POINT, slot), 0, slot=slot, total=8))
        box_of.post(post)
    box_of.retire(7, begun_to(3))
    box_of.deliver(frame(Key(7, POINT_TO_POINT, 5), 0, slot=5, total=8, offset=4))
    box_of.unpost(empty)
    box_of.put_back(matched)
    box_of.take(taken)
    assert (box_of._inbound, box_of._unexpected_bytes, reported) == ({}, 0, [])


def test_of_a_closed_group_only_the_last_numbers_are_kept() -> None:
    box_of, _ = mailbox()
    for group in (7, 8):
        in_flight = Key(group, 0, 3)
        box_of.record(Key(group, 0, 2), "a()")
        box_of.enter(Key(group, 1, 5), "a()", lambda: None)
        assert not box_of.still_needs(0, in_flight)
        box_of.retire(group, begun_to(3, 5))
        box_of.enter(in_flight, "a()", lambda: None)
        assert box_of.standing(1, Key(group, 0, 1), "a()").standing == FINISHED
        box_of.leave(in_flight)
    assert (box_of._last, box_of._missed, box_of._closed._begun) == ({}, set(), dict.fromkeys((7, 8), tuple(begun_to(3, 5))))


def test_of_groups_that_closed_long_ago_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_groups, "CLOSED_GROUPS_MAX", 10)
    box_of, _ = mailbox()
    for group in range(1, 30):
        box_of.retire(group, begun_to(3))
    assert [group for group in range(40) if group in box_of._closed] == list(range(20, 30))


@pytest.mark.parametrize("stream", [0, POINT_TO_POINT])
def test_what_has_to_be_granted_does_not_come_before(stream: int) -> None:
    box_of, reported = mailbox()
    key, total = Key(0, stream, 1), EAGER_BYTES + CHUNK_BYTES
    for offset in range(0, total, CHUNK_BYTES):
        box_of.deliver(frame(key, 0, total=total, offset=offset, size=CHUNK_BYTES))
    (error,) = reported
    assert isinstance(error, CodecError)
    assert f"rank 0 sent byte {EAGER_BYTES}" in error.message


def test_nobody_grants_more_messages_than_an_operation_has() -> None:
    box_of, _ = mailbox()
    box = box_of.enter(Key(0, 0, 1), "a()", lambda: None)
    for slot in range(GRANTS_MAX):
        box_of.granted(0, Key(0, 0, 1), slot)
    with pytest.raises(CodecError, match="rank 0 grants more than"):
        box_of.granted(0, Key(0, 0, 1), GRANTS_MAX)
    assert len(box.granted) == GRANTS_MAX
