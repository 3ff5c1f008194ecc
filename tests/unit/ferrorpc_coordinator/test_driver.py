"""The driver with a scripted state machine: order, durability, timers, and what happens when something fails."""

import asyncio
import logging.handlers
import sys
from unittest import mock

import pytest
from ferrorpc_coordinator.driver import Driver
from ferrorpc_coordinator.metrics import Counters
from ferrorpc_coordinator.send_queue import SEND_QUEUE_BYTES_MAX, SendQueue
from ferrorpc_coordinator.state.effects import Close, Note, Persist, Reply, Send
from ferrorpc_coordinator.state.events import Called, Cancelled, Connected, Disconnected, Received, Tick

from ferrorpc.errors import CoordinatorUnavailableError
from ferrorpc.v1 import session_pb2

MILLISECOND = 1_000_000
SECOND = 1_000 * MILLISECOND


class ScriptedStateMachine:
    """Returns the effects that `script` gives for each event, and records the events."""

    def __init__(self, script):
        self.script = script
        self.events = []
        self.deadline = None

    def step(self, event, now_ns):
        self.events.append((event, now_ns))
        return list(self.script(event) or ())

    def next_deadline(self):
        return self.deadline


class ManualJournal:
    """A journal whose groups become durable when the test says so."""

    full = removed = False

    def __init__(self):
        self.groups = []

    def start(self, failed):
        self.failed = failed

    def write(self, group, done):
        self.groups.append((list(group), done))


def frame(text):
    result = session_pb2.ServerFrame()
    result.event.fenced.message = text
    return result


def send(stream, sent):
    return Send(sent, ((stream, b""),))


def texts(queue):
    return [session_pb2.ServerFrame.FromString(shared + overlay).event.fenced.message for shared, overlay in queue._frames]


def driven(test):
    """Runs a coroutine function with `make(script, journal=None) -> (driver, state_machine)`."""

    def run():
        async def main():
            drivers = []

            def make(script=lambda event: (), journal=None):
                state_machine = ScriptedStateMachine(script)
                drivers.append(Driver(state_machine, journal, Counters()))
                return drivers[-1], state_machine

            try:
                await asyncio.wait_for(test(make), 30)
            finally:
                for driver in drivers:
                    driver.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


@driven
async def test_without_a_journal_nothing_waits(make):
    effects = [Persist("t", "k", b"v"), send(1, frame("done"))]
    driver, _ = make(lambda event: effects if isinstance(event, Received) else [])
    queue = driver.connect(session_pb2.Hello())
    driver.receive(queue.stream, session_pb2.ClientFrame())
    assert texts(queue) == ["done"]


@driven
async def test_a_frame_waits_for_every_row_decided_before_it(make):
    answers = iter(
        [
            [send(1, frame("before any row"))],
            [Persist("t", "a", b"1"), send(1, frame("with a"))],
            [send(1, frame("after a, decides no row"))],
            [Persist("t", "b", b"2"), send(1, frame("with b"))],
        ]
    )
    journal = ManualJournal()
    driver, _ = make(lambda event: next(answers) if isinstance(event, Received) else [], journal)
    queue = driver.connect(session_pb2.Hello())
    for _ in range(3):
        driver.receive(1, session_pb2.ClientFrame())
    await turns()
    assert texts(queue) == ["before any row"]
    assert [rows for rows, _ in journal.groups] == [[("t", "a", b"1")]]
    driver.receive(1, session_pb2.ClientFrame())  # decided while the first group is being written
    await turns()
    assert len(journal.groups) == 1
    journal.groups[0][1]()
    await turns()
    assert texts(queue) == ["before any row", "with a", "after a, decides no row"]
    assert [rows for rows, _ in journal.groups[1:]] == [[("t", "b", b"2")]]
    journal.groups[1][1]()
    await turns()
    assert texts(queue)[-1] == "with b"


@driven
async def test_events_of_one_turn_share_a_group_and_the_last_write_of_a_key_counts(make):
    counter = iter(range(100))
    journal = ManualJournal()
    driver, _ = make(lambda event: [Persist("t", "k", b"%d" % next(counter))] if isinstance(event, Received) else [], journal)
    driver.connect(session_pb2.Hello())
    for _ in range(10):
        driver.receive(1, session_pb2.ClientFrame())
    await turns()
    assert [rows for rows, _ in journal.groups] == [[("t", "k", b"9")]]


@driven
async def test_a_reply_waits_too_and_a_cancelled_call_is_reported(make):
    journal = ManualJournal()

    def script(event):
        if isinstance(event, Called):
            return [Persist("t", "k", b""), Reply(event.call, session_pb2.UnaryStoreResponse())]
        return []

    driver, state_machine = make(script, journal)
    call = asyncio.ensure_future(driver.call(session_pb2.UnaryStoreRequest()))
    abandoned = asyncio.ensure_future(driver.call(session_pb2.UnaryStoreRequest()))
    await turns()
    assert not call.done()
    abandoned.cancel()
    await turns()
    assert [type(event) for event, _ in state_machine.events] == [Called, Called, Cancelled]
    assert len(driver._held) == 1  # while the disk is stuck, callers that gave up leave nothing in memory
    journal.groups[0][1]()
    assert await call == session_pb2.UnaryStoreResponse()
    assert not driver._calls  # or memory would grow with the number of calls


@driven
async def test_a_status_is_answered_while_the_disk_is_stuck(make):
    effects = [Persist("t", "k", b""), Reply(1, session_pb2.StatusResponse(job="j"))]
    driver, _ = make(lambda event: effects, ManualJournal())
    assert (await driver.call(session_pb2.StatusRequest())).job == "j"


@driven
async def test_an_answer_for_a_call_cancelled_at_the_same_moment_is_dropped(make):
    driver, _ = make(lambda event: [Reply(1, session_pb2.StatusResponse())] if isinstance(event, Connected) else [])
    abandoned = asyncio.ensure_future(driver.call(session_pb2.StatusRequest()))
    await turns()
    abandoned.cancel()
    driver.connect(session_pb2.Hello())
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    assert not driver.failure.done()


@driven
async def test_a_request_is_not_kept_while_its_caller_waits(make):
    driver, state_machine = make()
    request = session_pb2.UnaryStoreRequest()
    before = sys.getrefcount(request)
    call = asyncio.ensure_future(driver.call(request))
    await turns()
    state_machine.events.clear()
    assert sys.getrefcount(request) == before
    call.cancel()


@driven
async def test_settled_returns_only_when_everything_is_durable(make):
    journal = ManualJournal()
    driver, _ = make(lambda event: [Persist("t", "k", b"")], journal)
    driver.tick()
    waiting = asyncio.ensure_future(driver.settled())
    await turns()
    assert not waiting.done()
    journal.groups[0][1]()
    await waiting


@driven
async def test_a_shared_frame_reaches_each_recipient_with_its_own_overlay(make):
    def script(event):
        if isinstance(event, Received):
            overlays = [(stream, session_pb2.ServerFrame(result={"sequence": stream}).SerializeToString()) for stream in (1, 2)]
            return [Send(session_pb2.ServerFrame(result={"barrier": {"spread_ms": 7}}), (*overlays, (99, b"")))]
        return []

    driver, _ = make(script)
    queues = [driver.connect(session_pb2.Hello()) for _ in range(2)]
    driver.receive(1, session_pb2.ClientFrame())
    for queue in queues:
        ((shared, overlay),) = queue._frames
        result = session_pb2.ServerFrame.FromString(shared + overlay).result
        assert (result.sequence, result.barrier.spread_ms) == (queue.stream, 7)


@driven
async def test_close_ends_the_stream_after_what_was_sent(make):
    driver, _ = make(
        lambda event: [send(event.stream, frame("bye")), Close(event.stream)] if isinstance(event, Connected) else []
    )
    queue = driver.connect(session_pb2.Hello())
    written = []

    async def write(shared, _):
        await asyncio.sleep(0)
        written.append(shared)

    await queue.drain(write)
    assert len(written) == 1


@driven
async def test_a_client_that_does_not_read_is_disconnected(make):
    large = frame("x" * (1 << 20))
    driver, state_machine = make(lambda event: [send(event.stream, large)] if isinstance(event, Received) else [])
    queue = driver.connect(session_pb2.Hello())
    for _ in range(SEND_QUEUE_BYTES_MAX // (1 << 20) + 1):
        driver.receive(1, session_pb2.ClientFrame())
    await turns()
    assert queue.problem
    assert not queue._frames
    assert isinstance(state_machine.events[-1][0], Disconnected)
    assert driver.sessions == 0
    driver.receive(1, session_pb2.ClientFrame())  # its later frames are dropped
    assert not queue._frames


@driven
@mock.patch("ferrorpc_coordinator.send_queue.ROOM_WAIT_SECONDS", 600.0)  # so that only writing makes room
async def test_requests_of_a_client_are_not_read_while_much_is_queued_for_it(make):
    journal = ManualJournal()
    answer = [Persist("t", "a", b"1"), send(1, frame("x" * (1 << 20)))]
    driver, _ = make(lambda event: answer if isinstance(event, Received) else [], journal)
    queue = driver.connect(session_pb2.Hello())
    for _ in range(3):
        driver.receive(1, session_pb2.ClientFrame())
    room = asyncio.ensure_future(queue.wait_for_room())
    await turns()
    assert not room.done()  # although all of it still waits for the journal
    journal.groups[0][1]()
    await turns()
    assert not room.done()

    async def write(*_):
        await asyncio.sleep(0)

    draining = asyncio.ensure_future(queue.drain(write))
    await asyncio.wait_for(room, 10)
    queue.finish()
    await draining


@driven
async def test_a_client_is_read_now_and_then_while_a_stuck_disk_holds_its_answers(make):
    journal = ManualJournal()
    answer = [Persist("t", "a", b"1"), send(1, frame("x" * (3 << 20)))]
    driver, _ = make(lambda event: answer if isinstance(event, Received) else [], journal)
    queue = driver.connect(session_pb2.Hello())
    driver.receive(1, session_pb2.ClientFrame())
    await asyncio.wait_for(queue.wait_for_room(), 10)


@driven
@mock.patch("ferrorpc_coordinator.send_queue.ROOM_WAIT_SECONDS", 600.0)
async def test_answers_held_by_a_disk_neither_disconnect_a_client_nor_keep_its_queue(make):
    queue = SendQueue(1)
    queue.reserve(SEND_QUEUE_BYTES_MAX)
    assert queue.push(b"x")
    room = asyncio.ensure_future(queue.wait_for_room())
    await turns()
    assert not room.done()
    queue.finish()
    await asyncio.wait_for(room, 10)
    queue.reserve(1)
    await asyncio.wait_for(queue.wait_for_room(), 10)


@driven
async def test_a_loss_is_logged_at_a_higher_level_than_routine_events(make):
    told, story = logging.handlers.BufferingHandler(100), logging.getLogger("ferrorpc.coordinator.job")
    kinds = ("generation", "left", "stalled", "back", "dead", "broken")
    driver, _ = make(lambda event: [Note("j", kind, kind, rank=1, generation=2) for kind in kinds])
    before = story.level
    story.addHandler(told)
    story.setLevel(logging.INFO)
    try:
        driver.tick()
    finally:
        story.removeHandler(told)
        story.setLevel(before)
    assert [(record.event, record.levelname) for record in told.buffer] == [
        *((kind, "INFO") for kind in ("generation", "left")),
        *((kind, "WARNING") for kind in ("stalled", "back", "dead", "broken")),  # the return is told as the stall is
    ]


@driven
async def test_a_stream_is_disconnected_once(make):
    driver, state_machine = make()
    queue = driver.connect(session_pb2.Hello())
    driver.disconnect(queue.stream)
    driver.disconnect(queue.stream)
    assert [type(event) for event, _ in state_machine.events] == [Connected, Disconnected]


@driven
async def test_the_timer_ticks_at_the_deadline_and_not_before(make):
    driver, state_machine = make()
    origin = driver._now_ns()
    ticked = asyncio.Event()

    def script(event):
        if isinstance(event, Tick) and state_machine.events[-1][1] >= state_machine.deadline:
            state_machine.deadline = None
            ticked.set()
        return []

    state_machine.script = script
    state_machine.deadline = origin + 60_000 * MILLISECOND
    driver.tick()
    await turns()
    state_machine.deadline = origin + 50 * MILLISECOND  # earlier than the timer
    driver.connect(session_pb2.Hello())
    await ticked.wait()
    ticks = [now for event, now in state_machine.events if isinstance(event, Tick)]
    assert len(ticks) == 2  # the start, and the deadline
    assert ticks[1] >= origin + 50 * MILLISECOND


@driven
async def test_a_deadline_that_moved_away_causes_no_early_tick(make):
    driver, state_machine = make()
    origin = driver._now_ns()
    state_machine.deadline = origin + 20 * MILLISECOND
    driver.tick()
    # In the turn of the loop that arms the timer, after that: no timer can fire before it, however slow this machine is.
    asyncio.get_running_loop().call_soon(setattr, state_machine, "deadline", origin + 60 * SECOND)
    await asyncio.sleep(0.1)
    assert sum(isinstance(event, Tick) for event, _ in state_machine.events) == 1


@driven
async def test_an_exception_in_the_state_stops_everything(make):
    def script(event):
        if isinstance(event, Received):
            raise AssertionError("a bug")
        return []

    driver, state_machine = make(script)
    queue = driver.connect(session_pb2.Hello())
    waiting = asyncio.ensure_future(driver.call(session_pb2.StatusRequest()))
    await turns()
    with pytest.raises(AssertionError):
        driver.receive(1, session_pb2.ClientFrame())
    with pytest.raises(AssertionError, match="a bug"):
        await driver.failure
    with pytest.raises(CoordinatorUnavailableError):
        await waiting
    await queue.drain(None)  # ended
    seen = len(state_machine.events)
    await driver.connect(session_pb2.Hello()).drain(None)  # ended at once
    with pytest.raises(CoordinatorUnavailableError):
        await driver.call(session_pb2.StatusRequest())
    assert len(state_machine.events) == seen


@driven
async def test_an_exception_while_sending_stops_everything_too_but_what_was_sent_before(make):
    unwritable = mock.Mock(**{"ByteSize.return_value": 1, "HasField.return_value": False})
    unwritable.SerializeToString.side_effect = ValueError("a bug")
    answer = session_pb2.UnaryStoreResponse()
    effects = [Persist("t", "a", b"1"), Reply(2, answer), send(1, unwritable), send(1, frame("never"))]
    journal, raised = ManualJournal(), []
    driver, _ = make(lambda event: effects if isinstance(event, Called) else [], journal)
    queue = driver.connect(session_pb2.Hello())
    answered = asyncio.ensure_future(driver.call(session_pb2.UnaryStoreRequest()))
    await turns()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    journal.groups[0][1]()
    journal.failed(OSError("the disk is gone, too"))
    with pytest.raises(ValueError, match="a bug"):
        await driver.failure
    assert (await answered, texts(queue), [type(error) for error in raised]) == (answer, [], [ValueError])


@driven
async def test_a_cause_of_a_later_version_is_sent_and_counted(make):
    broken = session_pb2.ServerFrame()
    broken.event.broken.cause.code = 9999
    note = Note("job", "broken", "generation 1 broken", -1, 1, code=9999)
    driver, _ = make(lambda event: [note, send(1, broken)] if isinstance(event, Received) else [])
    queue = driver.connect(session_pb2.Hello())
    driver.receive(1, session_pb2.ClientFrame())
    assert len(queue._frames) == 1
    assert +driver._counters.first_causes == {"unknown": 1}


async def logged_while_a_group_is_written(make, timers):
    """The log lines about a group that never becomes durable.

    The driver's timer is armed for the first of each pair of times in `timers`, and fires at the second.
    """
    journal, told = ManualJournal(), logging.handlers.BufferingHandler(100)
    driver, _ = make(lambda event: [Persist("t", "a", b"1")] if isinstance(event, Received) else [], journal)
    driver.connect(session_pb2.Hello())
    driver.receive(1, session_pb2.ClientFrame())
    await turns()
    start, log = driver._flushed_ns, logging.getLogger("ferrorpc.coordinator.driver")
    log.addHandler(told)
    try:
        for armed, fired in timers:
            driver._armed_ns, driver._now_ns = start + armed * SECOND, lambda fired=fired: start + fired * SECOND
            driver._on_timer()
        journal.groups[0][1]()
        await turns()
        driver._armed_ns = driver._now_ns()
        driver._on_timer()
    finally:
        log.removeHandler(told)
    return [record.getMessage() for record in told.buffer]


@driven
async def test_a_stuck_disk_is_logged_once(make):
    assert await logged_while_a_group_is_written(make, [(0, 0)]) == []
    (line,) = await logged_while_a_group_is_written(make, [(1, 1), (7, 7), (8, 8)])
    assert "disk has been stuck for 7 s" in line


@driven
async def test_a_pause_of_the_process_is_not_logged_as_a_stuck_disk(make):
    """As after SIGSTOP, or in a virtual machine that was suspended."""
    (line,) = await logged_while_a_group_is_written(make, [(1, 9), (10, 10)])
    assert "stood still for 8.0 s" in line


@driven
async def test_a_journal_that_fails_stops_everything_and_releases_nothing(make):
    journal = ManualJournal()
    driver, _ = make(
        lambda event: [Persist("t", "k", b""), send(1, frame("promised"))] if isinstance(event, Connected) else [], journal
    )
    queue = driver.connect(session_pb2.Hello())
    await turns()
    journal.failed(OSError("the disk is gone"))
    await turns()
    with pytest.raises(OSError, match="the disk is gone"):
        await driver.failure
    assert texts(queue) == []


@driven
async def test_requests_carry_whether_the_disk_is_full(make):
    journal = ManualJournal()
    driver, state_machine = make(
        lambda event: [Reply(event.call, session_pb2.UnaryStoreResponse())] if isinstance(event, Called) else [], journal
    )
    queue = driver.connect(session_pb2.Hello())
    for journal.full in (False, True):
        driver.receive(queue.stream, session_pb2.ClientFrame())
        await driver.call(session_pb2.UnaryStoreRequest())
    full = [event.full for event, _ in state_machine.events if isinstance(event, Received | Called)]
    assert full == [False, False, True, True]
