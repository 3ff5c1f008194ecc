"""Ctrl-C wherever Python looks for signals in an operation on a GPU: nothing hangs, and nothing is left behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.backends.device import launch_queue
from ferrorpc.backends.device.context import GroupContext
from ferrorpc.backends.nccl.nccl4py import Nccl4pyApi
from ferrorpc.errors import FerroError, GroupAbortedError, NcclError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.testing.gpu import nccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.work import Work
from tests.fake_gpu.groups import SECONDS, Ranks, end_of
from tests.waiting import eventually

LIBRARY = f"{ferrorpc.__path__[0]}/"
STAND_INS = f"{LIBRARY}testing/"
LEAVES = ("all_gather", "reduce_scatter")


class Interrupt:
    """Raises an error on the thread that enters it, at the n-th place where Python looks for signals in the library:
    as one of its functions begins, and as a call into compiled code, for which the stand-ins are taken, returns.

    Where `with` has just entered a lock is no such place, or the lock would stay locked. Python 3.14 does look for signals
    there, by mistake (python/cpython#148874), and no library can make up for that.

    Args:
        within: the path of the files that count, or its beginning.

    Attributes:
        place: where it struck; None where the calls had fewer places.
    """

    def __init__(self, number: int, error: type[BaseException] = KeyboardInterrupt, within: str = LIBRARY) -> None:
        self.place: str | None = None
        self._within = within
        self._left = number
        self._error = error

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        at: FrameType | None = frame
        if event == "return":
            at = None if _is_in_library(frame) or frame.f_code.co_name == "__del__" else frame.f_back
        elif event == "c_call" or frame.f_code.co_name == "<genexpr>":  # Python looks for no signals where it closes one
            at = None
        enters = event == "c_return" and getattr(argument, "__name__", "") == "__enter__"
        if self.place is not None or enters or at is None or not _is_in_library(at, self._within):
            return
        self._left -= 1
        if not self._left:
            self.place = f"{at.f_code.co_qualname}, line {at.f_lineno}"
            raise self._error


def _is_in_library(frame: FrameType, within: str = LIBRARY) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(within) and not name.startswith(STAND_INS)


def calls_of(group: ProcessGroup) -> dict[str, Callable[[Any], object]]:
    """By which all ranks have the sum in x, except those that leave it."""
    backend: Any = group._backend
    stream, begun = group.stream(), list[Any]()
    return {
        "blocking": lambda x: group.all_reduce(x, out=x),
        "asynchronous": lambda x: group.all_reduce(x, out=x, async_op=True),
        "raw": lambda x: backend.all_reduce_raw(x.data.ptr, x.data.ptr, x.size, "float32"),
        "all_gather": lambda x: group.all_gather(x),
        "reduce_scatter": lambda x: group.reduce_scatter([x, x]),
        "stream": lambda x: begun.append(stream.all_reduce(x, len(begun), out=x) and None),
    }


@pytest.fixture(params=["at once", "later"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL launches within the call, as it does mostly, or after it."""
    launch = nccl.FakeCommunicator.launch

    def launched(end: nccl.FakeCommunicator, *arguments: Any) -> None:
        launch(end, *arguments)
        end._put_into_streams()

    if request.param == "at once":
        monkeypatch.setattr(nccl.FakeCommunicator, "launch", launched)
    else:  # the call that waits for it for a moment would come by the same places again and again
        monkeypatch.setattr(launch_queue, "LAUNCH_SECONDS", 0.0)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("way", ["blocking", "asynchronous", "raw"])
def test_an_interrupt_anywhere_in_a_call_comes_before_it_or_ends_the_group(cupy: StandIn, way: str) -> None:
    for number in range(1, 1000):
        if interrupted(cupy, way, number) is None:
            assert number > 40
            return


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("way", [*LEAVES, "stream"])
def test_what_an_interrupt_has_kept_from_its_driver_ends_with_the_group(cupy: StandIn, way: str) -> None:
    for number in range(1, 1000):
        if interrupted(cupy, way, number, f"{LIBRARY}operations/dispatch.py") is None:
            assert number > 10
            return


def interrupted(cupy: StandIn, way: str, number: int, within: str = LIBRARY) -> str | None:
    """Rank 0 is interrupted at a place of its call. Returns that; None where there are fewer places."""
    ranks, both, interrupt = Ranks(cupy, 2), threading.Barrier(2), Interrupt(number, within=within)
    memories, kept = list[weakref.ref[Any]](), list[Any]()

    def body(group: ProcessGroup) -> None:
        call, x = calls_of(group)[way], cupy.asarray(np.ones(4, np.float32))
        call(x)
        group.synchronize()
        both.wait(SECONDS)
        if group.rank == 0:
            memories.append(weakref.ref(x.data.mem))
            with suppress(KeyboardInterrupt), interrupt:
                call(x)
        if way == "raw":
            kept.append(x)  # nobody else does, and NCCL may still be launching it when the group has ended
        if group.rank or (group._backend.latch.cause is None and interrupt.place):
            with suppress(GroupAbortedError):
                call(x)
        with suppress(GroupAbortedError):
            group.synchronize()
            assert cupy.asnumpy(x).tolist() == [1.0 if way in LEAVES else 4.0] * 4, interrupt.place

    assert ranks.run(body) == [None, None], interrupt.place
    backend: Any = ranks.backends[0]
    dispatch = ranks.groups[0]._dispatch
    if backend.latch.cause is not None:
        ranks.wait_for_aborts()
    cupy.machine.settle()
    kept.clear()

    def is_clean() -> bool:
        cupy.machine.settle()
        left = backend.context.in_flight(), list(backend.context.program._waiting), list(dispatch._in_flight)
        if not any(left) and any(memory() for memory in memories):
            gc.collect()  # takes longer than all the rest: only where something waits for it
        return not any(left) and not any(memory() for memory in memories)

    eventually(is_clean, f"nothing is left of what was interrupted in {interrupt.place}", SECONDS)
    assert not backend.context.program.lock.locked()
    if backend.latch.cause is not None:
        assert f"KeyboardInterrupt during {way if way in LEAVES else 'all_reduce'}" in backend.latch.cause.message
    for group in ranks.groups:
        group.close()
    return interrupt.place


def test_an_error_of_a_handler_in_the_start_of_a_call_comes_before_it_or_ends_the_group(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, launches: None
) -> None:
    """Otherwise this rank's next operation would meet the others' one that it has launched before: the sums would be wrong."""
    for number in range(1, 1000):
        if struck_in_its_start(cupy, monkeypatch, number) is None:
            assert number > 20
            return


def struck_in_its_start(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, number: int) -> str | None:
    """As `interrupted`, by a RuntimeError, as CUDA's are, while the fast path starts the call."""
    ranks, both, interrupt = Ranks(cupy, 2), threading.Barrier(2), Interrupt(number, RuntimeError)

    def body(group: ProcessGroup) -> None:
        x, y, dispatch, refused = ranks.array(), ranks.array() * 10, group._dispatch, False
        group.all_reduce(x, out=x)
        group.synchronize()
        both.wait(SECONDS)
        if group.rank == 0:
            start_at = dispatch.start_at

            def struck(*arguments: Any) -> Any:
                with interrupt:
                    return start_at(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "start_at", struck)
                try:
                    group.all_reduce(x, out=x)
                except RuntimeError:
                    refused = True
        with suppress(FerroError):
            if refused or group.rank:
                group.all_reduce(x, out=x)
            group.all_reduce(y, out=y)
            group.synchronize()
            assert (cupy.asnumpy(x).tolist(), cupy.asnumpy(y).tolist()) == ([4.0] * 4, [20.0] * 4), interrupt.place

    assert ranks.run(body) == [None, None], interrupt.place
    cause = ranks.backends[0].latch.cause
    assert cause is None or "RuntimeError" in cause.message
    for group in ranks.groups:
        group.close()
    return interrupt.place


def test_an_error_of_a_handler_in_a_raw_call_ends_the_group_and_leaves_nothing_in_flight(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, watch = Ranks(cupy, 2), GroupContext.watch

    def struck(context: GroupContext, execution: Any) -> None:
        if context.rank == 0:
            raise ValueError("of a handler")
        watch(context, execution)

    monkeypatch.setattr(GroupContext, "watch", struck)

    def body(group: ProcessGroup) -> None:
        x = ranks.array()
        with pytest.raises(ValueError, match="of a handler") if group.rank == 0 else suppress(GroupAbortedError):
            ranks.backends[group.rank].all_reduce_raw(x.data.ptr, x.data.ptr, x.size, "float32")
        assert "ValueError: of a handler during all_reduce_raw" in str(end_of(group, GroupAbortedError))

    assert ranks.run(body) == [None, None]
    ranks.wait_for_aborts()
    eventually(lambda: not ranks.backends[0].context.in_flight(), "nothing is in flight", SECONDS)


def test_an_interrupt_leaves_no_group_of_nccls_open_on_its_thread() -> None:
    """What the thread asks of NCCL later would be added to that group, and never be launched."""
    depths, number, interrupt = [0], 0, Interrupt(1)
    bindings = SimpleNamespace(
        get_version=lambda: 22809,
        Config=lambda: SimpleNamespace(ptr=0),
        comm_init_rank_scalable=lambda *arguments: "comm",
        NCCLError=LookupError,
        group_start=lambda: depths.append(depths[-1] + 1),
        group_end=lambda: depths.append(depths[-1] - 1),
    )
    end = Nccl4pyApi(bindings).init(2, 0, [bytes(128)])
    while number == 0 or interrupt.place is not None:
        number, depths[:] = number + 1, [0]
        with suppress(KeyboardInterrupt), Interrupt(number) as interrupt:
            end.grouped(lambda: None)
        assert (min(depths), depths[-1]) == (0, 0), interrupt.place
    assert number > 4


def test_a_group_of_nccls_that_is_refused_is_not_ended() -> None:
    def start() -> None:
        error: Any = LookupError("the driver is gone")
        error.status = 1
        raise error

    bindings = SimpleNamespace(
        get_version=lambda: 22809,
        Config=lambda: SimpleNamespace(ptr=0),
        comm_init_rank_scalable=lambda *arguments: "comm",
        get_last_error=lambda comm: "",
        NCCLError=LookupError,
        group_start=start,
        group_end=lambda: pytest.fail("ended"),
    )
    with pytest.raises(NcclError, match="ncclGroupStart"):
        Nccl4pyApi(bindings).init(2, 0, [bytes(128)]).grouped(lambda: None)


def test_an_interrupt_leaves_no_operation_in_flight_that_ended_before_its_work_was_known() -> None:
    for number in range(1, 9):
        work, in_flight = Work[None](SYSTEM_CLOCK, "all_reduce"), dict[int, Any]()
        work.complete(None)
        with suppress(KeyboardInterrupt), Interrupt(number) as interrupt:
            work.register(in_flight)
        assert not in_flight, interrupt.place
    assert interrupt.place is None


@pytest.mark.parametrize("way", ["send", "recv"])
def test_a_message_that_an_interrupt_has_kept_from_its_driver_lets_go_of_its_array(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    ranks, memories = Ranks(cupy, 2), list[weakref.ref[Any]]()

    def struck(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Dispatch, "submit", struck)

    def body(group: ProcessGroup) -> None:
        x = ranks.array()
        if group.rank == 0:
            memories.append(weakref.ref(x.data.mem))
            call = partial(group.send, x, 1) if way == "send" else partial(group.recv, 1, out=x)
            with pytest.raises(KeyboardInterrupt):
                call(async_op=True)
        assert f"KeyboardInterrupt during {way}" in str(end_of(group, GroupAbortedError))

    assert ranks.run(body) == [None, None]

    def is_given_back() -> bool:
        cupy.machine.settle()
        gc.collect()
        return memories[0]() is None

    eventually(is_given_back, "the memory is given back", SECONDS)


def test_memory_of_what_was_being_launched_is_kept_until_the_abort(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises what struck during NCCL's call as that returns: the GPU has it then."""
    ranks, may_abort, memories = Ranks(cupy, 2), threading.Event(), list[weakref.ref[Any]]()
    launch = nccl.FakeCommunicator.launch

    def launched(end: nccl.FakeCommunicator, *arguments: Any) -> None:
        launch(end, *arguments)
        if end.stuck is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(nccl.FakeCommunicator, "launch", launched)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(np.ones(4, np.float32))
        group.all_reduce(x)
        group.synchronize()
        group.barrier()
        if group.rank == 0:
            memories.append(weakref.ref(x.data.mem))
            (meeting,) = ranks.nccl.meetings.values()
            meeting.ends[0].stuck = may_abort
            with pytest.raises(KeyboardInterrupt):
                group.all_reduce(x)

    assert ranks.run(body) == [None, None]
    gc.collect()
    assert memories[0]()
    may_abort.set()
    ranks.wait_for_aborts()

    def is_given_back() -> bool:
        gc.collect()
        return memories[0]() is None

    eventually(is_given_back, "the memory is given back", SECONDS)
