"""How communicators end: aborted with their generation, finalized and destroyed with their group, divided into others."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ferrorpc.backends.device import ending as ending_module
from ferrorpc.backends.device.communicator import DataType, Op, State
from ferrorpc.backends.device.ending import CLOSE_SECONDS, FROZEN_SECONDS, Ending, on_own_thread
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, LimitExceededError, PeerLostError
from ferrorpc.exit_codes import EXIT_RETRY
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Latch, SystemClock
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.virtual_clock import VirtualClock
from tests.fake_gpu.groups import SECONDS, Ranks, end_of
from tests.waiting import eventually


def never(seconds: float, code: int) -> Callable[[], None]:
    """As `exit_after`, for tests that are to go on."""
    return lambda: None


def test_an_abort_that_hangs_ends_the_process_with_the_code_for_a_new_start() -> None:
    latch, codes, gone = Latch(), [], threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        gone.set()

    class Stuck:
        def abort(self) -> None:
            gone.wait(SECONDS)

    ending = Ending(SYSTEM_CLOCK, latch, nullcontext, abort_seconds=0.1, leave=leave, exit_later=never)
    ending.add(Stuck())  # type: ignore[arg-type]
    latch.trip(PeerLostError(1, "killed by signal 9 (SIGKILL)"))
    assert gone.wait(SECONDS)
    assert codes == [EXIT_RETRY] == [75]


def test_the_system_ends_the_process_where_python_cannot_and_not_if_the_abort_was_in_time() -> None:
    latch, told = Latch(), []

    def later(seconds: float, code: int) -> Callable[[], None]:
        told.append((seconds, code))
        return lambda: told.append("stays")

    class Prompt:
        def abort(self) -> None:
            told.append("aborts")

    ending = Ending(SYSTEM_CLOCK, latch, nullcontext, abort_seconds=5.0, exit_later=later)
    ending.add(Prompt())  # type: ignore[arg-type]
    latch.trip(PeerLostError(1, "killed by signal 9 (SIGKILL)"))
    eventually(lambda: told == [(5.0 + FROZEN_SECONDS, EXIT_RETRY), "aborts", "stays"])


def test_without_a_thread_for_the_abort_the_process_ends_later_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The host refuses threads (a pids limit) as the generation ends. Who else watches it must hear of that."""

    class Refusing(SystemClock):
        def start(self, body: Callable[[], None], name: str) -> None:
            raise LimitExceededError(f"the system refuses a thread ({name})")

        def call_at(self, when: float, action: Callable[[], None]) -> None:
            raise LimitExceededError("the system refuses a thread (a timer)")

    class Never:
        def abort(self) -> None:
            told.append("aborts")

    latch, told = Latch(), []

    def later(seconds: float, code: int) -> Callable[[], None]:
        told.append((seconds, code))
        return lambda: told.append("stays")

    ending = Ending(Refusing(), latch, nullcontext, abort_seconds=5.0, exit_later=later)
    ending.add(Never())  # type: ignore[arg-type]
    latch.watch(lambda: told.append("another watcher"))
    latch.trip(PeerLostError(1, "killed by signal 9 (SIGKILL)"))
    assert told == [(5.0 + FROZEN_SECONDS, EXIT_RETRY), "another watcher"]
    assert "refuses a thread (ferrorpc-device-abort)" in caplog.text
    assert "ends with code 75" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="its timers are Linux's")
@pytest.mark.parametrize(("cancelled", "code"), [(False, EXIT_RETRY), (True, 0)])
def test_a_process_whose_threads_do_not_run_is_ended_by_the_system(cancelled: bool, code: int) -> None:
    frozen = (
        "import ctypes\nfrom ferrorpc.backends.device.exit_timer import exit_after\n"
        f"stay = exit_after(0.5, {EXIT_RETRY})\n"
        f"if {cancelled}: stay()\n"
        "ctypes.PyDLL(None).sleep(3)"  # with the interpreter's lock
    )
    assert subprocess.run([sys.executable, "-c", frozen], timeout=SECONDS, check=False).returncode == code


def test_an_abort_in_time_ends_nothing_else(cupy: StandIn) -> None:
    latch, codes, clock = Latch(), [], VirtualClock()
    end: Any = FakeNccl(cupy.machine).api(0).init(1, 0, [bytes(128)])

    def body() -> None:
        ending = Ending(clock, latch, lambda: cupy.cuda.Device(0), abort_seconds=0.05, leave=codes.append, exit_later=never)
        ending.add(end)
        latch.trip(GroupAbortedError(0, "enough"))
        clock.parker().park(0.2)

    clock.run([("rank 0", body)])
    assert (end.aborted, codes) == (True, [])


def test_communicators_of_a_gpu_that_has_failed_are_aborted_and_the_process_goes_on(cupy: StandIn) -> None:
    ranks, codes = Ranks(cupy, 2), list[int]()
    for backend in ranks.backends:
        backend.context.ending._leave, backend.context.ending._seconds = codes.append, 0.2
        backend.context.ending._exit_later = never

    def body(group: ProcessGroup) -> None:
        group.all_reduce(ranks.array())
        group.synchronize()

    assert ranks.run(body) == [None, None]
    cupy.machine.failure = 700
    ranks.backends[0].latch.end(PeerLostError(1, "its GPU has failed"))
    ranks.wait_for_aborts()
    eventually(lambda: not any(backend.context.ending._aborts for backend in ranks.backends), "the aborts are over", SECONDS)
    assert on_own_thread(SYSTEM_CLOCK, lambda: cupy.cuda.Device(0), never_called, SYSTEM_CLOCK.now() + SECONDS)
    cupy.machine.failure = 0
    assert not codes


def never_called() -> None:
    raise AssertionError("the GPU cannot be made current")


def test_what_a_gpu_never_comes_past_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "KEPT_SECONDS", 0.05)
    clock, event, found = VirtualClock(), SimpleNamespace(done=False), []

    def body() -> None:
        ending = Ending(clock, Latch(), nullcontext, exit_later=never)
        buffers = threading.Event()
        kept = weakref.ref(buffers)
        ending.keep(None, event, buffers)  # type: ignore[arg-type]
        del buffers
        for seconds in (0.04, 0.04):
            clock.parker().park(clock.now() + seconds)
            found.append(kept() is not None)

    clock.run([("rank 0", body)])
    assert found == [True, False]


def test_a_communicator_that_comes_about_after_the_end_is_aborted(cupy: StandIn) -> None:
    latch = Latch()
    ending = Ending(SYSTEM_CLOCK, latch, lambda: cupy.cuda.Device(0))
    latch.trip(GroupAbortedError(0, "enough"))
    end: Any = FakeNccl(cupy.machine).api(0).init(1, 0, [bytes(128)])
    ending.add(end)
    eventually(lambda: end.aborted)


def test_a_group_that_closes_in_order_finalizes_and_destroys(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        group.all_reduce(ranks.array())
        group.close()

    assert ranks.run(body) == [None, None]
    (meeting,) = ranks.nccl.meetings.values()
    assert [(end.destroyed, end.aborted) for end in meeting.ends.values()] == [(True, False)] * 2
    assert [backend.lanes.transport._closed for backend in ranks.backends] == [True] * 2


def test_survivors_form_the_group_again_with_a_new_id(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> Any:
        group.abort("a try")
        renewed = group.reform()
        found = renewed.all_reduce(ranks.array() * (group.rank + 1))
        return renewed.generation, renewed.backend, cupy.asnumpy(found).tolist()

    assert ranks.run(body) == [(2, "nccl", [3.0] * 4)] * 2
    assert ranks.nccl.minted == 2


def test_a_group_that_is_formed_again_without_need_ends_its_communicators_in_order(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)
    (first,) = ranks.nccl.meetings.values()

    def body(group: ProcessGroup) -> Any:
        group.all_reduce(ranks.array())
        renewed = group.reform()
        ended = [(end.destroyed, end.aborted) for end in first.ends.values()]
        renewed.close()
        return ended

    assert ranks.run(body) == [[(True, False)] * 2] * 2


def test_what_was_in_flight_when_a_generation_ended_holds_no_memory(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)
    before: list[int] = []

    def body(group: ProcessGroup) -> None:
        group.barrier()
        if group.rank == 0:
            before.append(cupy.machine.gpus[0].memory.live_blocks)
            group.all_reduce(ranks.array())  # the other rank never comes to it
            group.abort("enough")
        end_of(group, GroupAbortedError)

    assert ranks.run(body) == [None, None]
    ranks.wait_for_aborts()
    memory = cupy.machine.gpus[0].memory

    def is_free() -> bool:
        cupy.machine.settle()
        return not ranks.backends[0].context.in_flight() and memory.live_blocks <= before[0]

    eventually(is_free, "it is let go of")


def test_closing_the_world_ends_the_communicators_of_its_subgroups_too(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        part = group.subgroup([1, 0])
        assert part is not None
        part.all_reduce(ranks.array())
        group.stream()
        group.close()

    assert ranks.run(body) == [None, None]
    (meeting,) = ranks.nccl.meetings.values()
    ends = [end for each in (meeting, *meeting.children.values()) for end in each.ends.values()]
    assert [end.destroyed for end in ends] == [True] * 6


@pytest.mark.parametrize("way", ["returned", "waited for", "raw", "of a subgroup"])
def test_a_close_waits_for_results_that_callers_have(cupy: StandIn, way: str) -> None:
    """Also longer than for anything else: an abort would leave them undefined, and nobody would hear of it."""
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        x, busy = ranks.array(), cupy.cuda.Stream(non_blocking=True)
        chosen = group.subgroup([1, 0]) if way == "of a subgroup" else group
        assert chosen is not None
        until = SYSTEM_CLOCK.now() + CLOSE_SECONDS + 0.6
        with busy:
            busy.fake.enqueue(lambda: SYSTEM_CLOCK.now() > until)
            if way == "raw":
                ranks.backends[group.rank].all_reduce_raw(x.data.ptr, x.data.ptr, x.size, "float32")
            else:
                work = chosen.all_reduce(x, out=x, async_op=way == "waited for")
                assert way != "waited for" or work.wait() is x
            group.close()
            assert cupy.asnumpy(x).tolist() == [2.0] * 4

    assert ranks.run(body) == [None, None]


def test_what_is_in_flight_when_a_group_closes_is_aborted_in_time(cupy: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.all_reduce(ranks.array())  # the other rank never comes to it
        group.close()

    assert ranks.run(body) == [None, None]
    (meeting,) = ranks.nccl.meetings.values()
    eventually(lambda: meeting.ends[0].aborted)
    assert (meeting.ends[0].destroyed, meeting.ends[1].destroyed) == (False, True)
    told = "all_reduce(op=sum, float32[4]) by NCCL #1 failed and nobody looked at it: rank 1 was lost"
    eventually(lambda: told in caplog.text)


@pytest.mark.parametrize("kind", ["array", "pointer"])
def test_a_look_at_an_operation_that_comes_after_the_close_ends_nothing_for_the_others(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The progress thread saw the GPU busy, and asks NCCL only when this rank's communicator is destroyed."""
    ranks = Ranks(cupy, 2)
    (meeting,) = ranks.nccl.meetings.values()
    end, state, destroy = meeting.ends[0], meeting.ends[0].state, meeting.ends[0].destroy
    looks, destroyed, looked = threading.Event(), threading.Event(), threading.Event()
    failures: list[FerroError] = []
    monkeypatch.setattr(ranks.backends[0].latch, "end", failures.append)

    def state_of_late() -> State:
        if threading.current_thread().name == "ferrorpc-progress":
            looks.set()
            destroyed.wait(SECONDS)
        try:
            return state()
        finally:
            if destroyed.is_set():
                looked.set()

    def destroy_and_wait() -> None:
        destroy()
        destroyed.set()
        looked.wait(SECONDS)
        SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 0.1)  # for what comes of the look

    def body(group: ProcessGroup) -> Any:
        x = ranks.array()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            if group.rank == 0:
                stream.fake.enqueue(looks.is_set)
                monkeypatch.setattr(end, "state", state_of_late)
                monkeypatch.setattr(end, "destroy", destroy_and_wait)
            if kind == "array":
                group.all_reduce(x, out=x)
            else:
                ranks.backends[group.rank].all_reduce_raw(x.data.ptr, x.data.ptr, x.size, "float32")
            group.close()
        return cupy.asnumpy(x).tolist()

    assert ranks.run(body) == [[2.0] * 4] * 2
    assert (looked.is_set(), failures) == (True, [])


@pytest.mark.parametrize("which", ["world", "subgroup"])
def test_a_close_that_was_interrupted_ends_the_communicators_when_it_is_called_again(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    ranks = Ranks(cupy, 2)

    def struck(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def body(group: ProcessGroup) -> None:
        part = group.subgroup([0, 1])
        assert part is not None
        chosen = group if which == "world" else part
        group.barrier()
        if group.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(chosen._backend, "_finish_joined", struck)
                with pytest.raises(KeyboardInterrupt):
                    chosen.close()
        chosen.close()

    assert ranks.run(body) == [None, None]
    (meeting,) = ranks.nccl.meetings.values()
    (part,) = meeting.children.values()
    ends = [*part.ends.values(), *(meeting.ends.values() if which == "world" else ())]
    eventually(lambda: all(end.aborted or end.destroyed for end in ends), "all of its communicators are ended", SECONDS)
    for group in ranks.groups:
        group.close()


def test_a_close_for_which_there_are_no_threads_ends_all_the_same(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, start = Ranks(cupy, 2), SystemClock.start

    def refuses(clock: SystemClock, body: Callable[[], None], name: str) -> None:
        if name == ending_module.THREAD:
            raise LimitExceededError("the system refuses a thread")
        start(clock, body, name)

    monkeypatch.setattr(SystemClock, "start", refuses)
    assert ranks.run(lambda group: group.close()) == [None, None]
    assert [backend.lanes.transport._closed for backend in ranks.backends] == [True, True]
    assert "the system refuses a thread" in caplog.text


def test_a_communicator_that_has_met_an_error_is_aborted_when_its_group_closes(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)
    (meeting,) = ranks.nccl.meetings.values()

    def body(group: ProcessGroup) -> None:
        group.all_reduce(ranks.array())
        group.barrier()
        if group.rank == 0:
            meeting.ends[0].broken = State.REMOTE_ERROR
        group.close()

    assert ranks.run(body) == [None, None]
    eventually(lambda: meeting.ends[0].aborted)
    assert meeting.ends[1].destroyed


def test_a_communicator_that_is_still_launching_is_waited_for_before_it_is_finalized(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 1)
    (meeting,) = ranks.nccl.meetings.values()
    end = meeting.ends[0]
    array, stream = ranks.array(), ranks.backends[0].context.program.stream
    end.all_reduce(array.data.ptr, array.data.ptr, array.size, DataType.FLOAT32, Op.SUM, stream.pointer)
    assert ranks.run(lambda group: group.close()) == [None]
    assert (end.destroyed, end.aborted) == (True, False)


def test_a_destruction_that_waits_for_other_ranks_does_not_hold_up_the_close(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(cupy, 1)
    (meeting,) = ranks.nccl.meetings.values()
    others = threading.Event()
    monkeypatch.setattr(meeting.ends[0], "destroy", lambda: others.wait(6 * SECONDS))
    try:
        assert ranks.run(lambda group: group.close()) == [None]
        assert not others.is_set()
    finally:
        others.set()


@pytest.mark.parametrize("into", ["a subgroup", "streams"])
def test_a_division_waits_for_what_the_gpu_is_at(cupy: StandIn, into: str) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> list[float]:
        through_at = SYSTEM_CLOCK.now() + 0.2
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.fake.enqueue(lambda: SYSTEM_CLOCK.now() > through_at)
            group.all_reduce(ranks.array())
            if into == "streams":
                found = group.stream().all_reduce(ranks.array(), 0).wait()
            else:
                part = group.subgroup([0, 1])
                assert part is not None
                found = part.all_reduce(ranks.array())
            return cupy.asnumpy(found).tolist()

    assert ranks.run(body) == [[2.0] * 4] * 2


def test_a_division_that_never_ends_ends_the_generation(cupy: StandIn) -> None:
    """NCCL takes nothing more of a communicator that is in progress for ever."""
    ranks = Ranks(cupy, 2)
    ranks.backends[0]._connector._seconds = 0.1

    def stays_away(chosen: Any, group_id: int) -> Any:
        raise InterruptedError

    ranks.backends[1].split = stays_away  # type: ignore[method-assign]

    def body(group: ProcessGroup) -> FerroError:
        late = pytest.raises(CollectiveTimeoutError, match=r"subgroup \w+ was not complete within 0\.1 s")
        with pytest.raises(InterruptedError) if group.rank else late:
            group.subgroup([0, 1])
        return end_of(group, GroupAbortedError if group.rank else CollectiveTimeoutError)

    assert [type(error) for error in ranks.run(body)] == [CollectiveTimeoutError, GroupAbortedError]
    ranks.wait_for_aborts()
    (meeting,) = ranks.nccl.meetings.values()
    parts = [end for child in meeting.children.values() for end in child.ends.values()]
    assert [part.aborted for part in parts] == [True]


def test_a_division_ends_with_its_generation(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def gives_up(chosen: Any, group_id: int) -> Any:
        ranks.groups[1].abort("enough")
        raise InterruptedError

    ranks.backends[1].split = gives_up  # type: ignore[method-assign]

    def body(group: ProcessGroup) -> float:
        began = SYSTEM_CLOCK.now()
        with pytest.raises(InterruptedError) if group.rank else pytest.raises(GroupAbortedError, match="enough"):
            group.subgroup([0, 1])
        return SYSTEM_CLOCK.now() - began

    assert max(ranks.run(body)) < SECONDS
