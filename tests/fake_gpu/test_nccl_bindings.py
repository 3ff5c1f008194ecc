"""The bindings: each call with the arguments of the real one, errors translated, versions probed.

Against stand-ins with the functions of nccl4py 0.6 and CuPy 14. What needs no GPU is tried against the real packages where they
are installed.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ferrorpc.backends.device.communicator import DataType, Op, State, reduction
from ferrorpc.backends.nccl import choose
from ferrorpc.backends.nccl.api import Features
from ferrorpc.backends.nccl.cupy_nccl import CupyCommunicator, CupyNcclApi, open_cupy_nccl
from ferrorpc.backends.nccl.nccl4py import Nccl4pyApi, open_nccl4py
from ferrorpc.errors import BackendUnavailableError, NcclError
from ferrorpc.types import DType, ReduceOp
from tests.waiting import eventually

ID = bytes(range(128))
FLOAT, SUM = DataType.FLOAT32, Op.SUM


class Recorder:
    """Takes any call and keeps it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.raises: dict[str, BaseException] = {}
        self.written: list[weakref.ref[Comm]] = []
        """Where NCCL writes what comes of a split, after the call."""

    def call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.raises:
            raise self.raises[name]


class Comm(str):
    """`nccl.bindings.nccl.Comm`."""


class Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


def nccl4py(version: int, record: Recorder) -> Any:
    """`nccl.bindings.nccl`, with the parameters of its functions."""

    class Config:
        ptr = 77
        alive = 0

        def __init__(self) -> None:
            Config.alive += 1

        def __del__(self) -> None:
            Config.alive -= 1

    def comm_init_rank_scalable(nranks: int, myrank: int, n_id: int, comm_ids: bytearray, config: int) -> str:
        record.call("comm_init_rank_scalable", nranks, myrank, n_id, bytes(comm_ids), config)
        memoryview(comm_ids)[0:0] = b""  # the real one wants writable memory
        return Comm("comm")

    def comm_init_rank_config(nranks: int, comm_id: bytearray, rank: int, config: int) -> str:
        record.call("comm_init_rank_config", nranks, bytes(comm_id), rank, config)
        return Comm("comm")

    def comm_split(comm: Any, color: int, key: int, config: int) -> str:
        record.call("comm_split", comm, color, key, config)
        assert Config.alive == 1, "what the pointer points to is there"
        written = Comm("child")
        record.written.append(weakref.ref(written))
        return written

    def comm_get_async_error(comm: Any) -> int:
        record.call("comm_get_async_error", comm)
        return 7

    def named(name: str) -> Any:
        return lambda *args: record.call(name, *args)

    plain = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv", "group_start", "group_end")
    return SimpleNamespace(
        get_version=lambda: version,
        get_unique_id=lambda: ID,
        get_last_error=lambda comm: "NCCL's own words",
        Config=Config,
        NCCLError=Refused,
        comm_init_rank_scalable=comm_init_rank_scalable,
        comm_init_rank_config=comm_init_rank_config,
        comm_split=comm_split,
        comm_get_async_error=comm_get_async_error,
        **{name: named(name) for name in (*plain, "comm_abort", "comm_finalize", "comm_destroy")},
    )


def every_call(end: Any) -> None:
    end.all_reduce(1, 2, 3, FLOAT, SUM, 9)
    end.reduce(1, 2, 3, FLOAT, SUM, 5, 9)
    end.reduce_scatter(1, 2, 3, FLOAT, SUM, 9)
    end.broadcast(1, 2, 3, FLOAT, 5, 9)
    end.all_gather(1, 2, 3, FLOAT, 9)
    end.send(1, 3, FLOAT, 5, 9)
    end.recv(2, 3, FLOAT, 5, 9)


def test_nccl4py_gets_its_arguments_in_its_order() -> None:
    record = Recorder()
    api = Nccl4pyApi(nccl4py(22809, record))
    assert (api.version, api.features, api.unique_id()) == (22809, Features(True, True, True), ID)
    end: Any = api.init(4, 2, [ID, ID])
    assert end.state() is State.IN_PROGRESS
    end.grouped(lambda: every_call(end))
    child = end.split(0, 3)
    assert (end.split(None, 0), child.state()) == (None, State.IN_PROGRESS)
    end.finalize(), end.destroy(), child.abort()
    assert record.calls == [
        ("comm_init_rank_scalable", 4, 2, 2, ID + ID, 77),
        ("comm_get_async_error", "comm"),
        ("group_start",),
        ("all_reduce", 1, 2, 3, 7, 0, "comm", 9),
        ("reduce", 1, 2, 3, 7, 0, 5, "comm", 9),
        ("reduce_scatter", 1, 2, 3, 7, 0, "comm", 9),
        ("broadcast", 1, 2, 3, 7, 5, "comm", 9),
        ("all_gather", 1, 2, 3, 7, "comm", 9),
        ("send", 1, 3, 7, 5, "comm", 9),
        ("recv", 2, 3, 7, 5, "comm", 9),
        ("group_end",),
        ("comm_split", "comm", 0, 3, 77),
        ("comm_split", "comm", -1, 0, 77),
        ("comm_get_async_error", "child"),
        ("comm_finalize", "comm"),
        ("comm_destroy", "comm"),
        ("comm_abort", "child"),
    ]
    assert all(written() is not None for written in record.written), "also where this rank is in no part of the split"


def test_older_libraries_get_one_id_and_communicators_still_never_block() -> None:
    record = Recorder()
    api = Nccl4pyApi(nccl4py(21805, record))
    api.init(2, 1, [ID])
    assert record.calls == [("comm_init_rank_config", 2, ID, 1, 77)]
    assert vars(api.config()) == {"blocking": 0}, "nothing is shared with those that are split from it"


def test_errors_carry_the_call_the_status_and_nccls_words() -> None:
    record = Recorder()
    api = Nccl4pyApi(nccl4py(22809, record))
    end: Any = api.init(1, 0, [ID])
    record.raises = {"all_reduce": Refused(5), "comm_abort": Refused(7)}
    with pytest.raises(NcclError, match=r"ncclAllReduce: invalid usage \(NCCL's own words\)") as raised:
        end.all_reduce(1, 2, 3, FLOAT, SUM, 9)
    assert raised.value.fields["status"] == 5
    end.abort()  # in progress is no error of a communicator that does not block


def test_an_abort_frees_nothing_that_another_thread_looks_at_and_lets_in_no_more() -> None:
    record = Recorder()
    bindings = nccl4py(22809, record)
    looking, looked = threading.Event(), threading.Event()

    def slow(comm: Any) -> int:
        looking.set()
        looked.wait(10)
        record.call("looked")
        return 0

    bindings.comm_get_async_error = slow
    end: Any = Nccl4pyApi(bindings).init(1, 0, [ID])
    threads = [threading.Thread(target=each) for each in (end.state, end.abort)]
    threads[0].start()
    looking.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert ("comm_abort", "comm") not in record.calls
    looked.set()
    for each in threads:
        each.join()
    assert record.calls[1:] == [("looked",), ("comm_abort", "comm")]
    for ask in (end.state, end.finalize, lambda: end.all_reduce(1, 2, 3, FLOAT, SUM, 9), lambda: end.grouped(list)):
        with pytest.raises(NcclError, match="aborted"):
            ask()
    end.abort(), end.destroy()
    assert end.last_error() == ""
    assert len(record.calls) == 3


class CupyComm:
    """`cupy.cuda.nccl.NcclCommunicator`."""

    split_waits: threading.Event | None = None

    def __init__(self, record: Recorder, *args: Any) -> None:
        self.record = record
        record.call("NcclCommunicator", *args)

    def commSplit(self, color: int, key: int, config: Any = None) -> CupyComm | None:
        self.record.call("commSplit", color, key)
        if self.split_waits is not None:
            self.split_waits.wait(10)
        return self if color >= 0 else None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.record.call(name, *args)


def cupy_nccl(record: Recorder) -> CupyNcclApi:
    class Device:
        id = 3

        def __init__(self, device: int | None = None) -> None:
            record.call("Device", device)

        def use(self) -> None:
            record.call("use")

    bindings = SimpleNamespace(
        get_version=lambda: 23203,
        get_unique_id=lambda: ID,
        NcclError=Refused,
        NcclCommunicator=lambda *args: CupyComm(record, *args),
        groupStart=lambda: record.call("groupStart"),
        groupEnd=lambda: record.call("groupEnd"),
    )
    return CupyNcclApi(SimpleNamespace(cuda=SimpleNamespace(Device=Device)), bindings)


def complete(end: Any) -> Any:
    eventually(lambda: end.state() is not State.IN_PROGRESS, "the end of its initialisation")
    return end


def test_cupys_binding_gets_its_arguments_in_its_order_on_the_right_gpu() -> None:
    record = Recorder()
    api = cupy_nccl(record)
    assert api.features == Features(False, True, True)
    end = complete(api.init(4, 2, [ID]))
    end.grouped(lambda: every_call(end))
    complete(complete(end).split(1, 3))
    end.abort()
    calls = [call for call in record.calls if call != ("check_async_error",)]
    assert calls == [
        ("Device", None),
        ("Device", 3),
        ("use",),
        ("NcclCommunicator", 4, ID, 2),
        ("Device", 3),
        ("use",),
        ("groupStart",),
        ("allReduce", 1, 2, 3, 7, 0, 9),
        ("reduce", 1, 2, 3, 7, 0, 5, 9),
        ("reduceScatter", 1, 2, 3, 7, 0, 9),
        ("broadcast", 1, 2, 3, 7, 5, 9),
        ("allGather", 1, 2, 3, 7, 9),
        ("send", 1, 3, 7, 5, 9),
        ("recv", 2, 3, 7, 5, 9),
        ("groupEnd",),
        ("Device", 3),
        ("use",),
        ("commSplit", 1, 3),
        ("abort",),
    ]


def test_a_query_of_cupys_communicator_by_another_thread_is_no_part_of_a_group() -> None:
    record = Recorder()
    end = complete(cupy_nccl(record).init(2, 0, [ID]))

    def calls() -> None:
        end.send(1, 3, FLOAT, 1, 9)
        record.raises = {"check_async_error": Refused(6)}
        with pytest.raises(NcclError, match="ncclCommGetAsyncError: remote error"):
            end.state()
        record.raises = {}

    end.grouped(calls)
    complete(end)
    assert record.calls[record.calls.index(("groupStart",)) :][1:3] == [("send", 1, 3, 7, 1, 9), ("groupEnd",)]


def test_cupys_communicator_is_in_progress_while_it_is_split_and_nothing_once_it_is_aborted() -> None:
    record = Recorder()
    end = complete(cupy_nccl(record).init(2, 0, [ID]))
    come = threading.Event()
    CupyComm.split_waits = come
    try:
        assert end.split(None, 0) is None
        assert end.state() is State.IN_PROGRESS, "NCCL takes one call at a time"
    finally:
        CupyComm.split_waits = None
        come.set()
    complete(end).abort()
    record.calls.clear()
    for ask in (end.state, lambda: end.all_reduce(1, 2, 3, FLOAT, SUM, 9)):
        with pytest.raises(NcclError, match="aborted"):
            ask()
    end.abort()
    assert record.calls == []


def test_an_abort_waits_for_the_call_that_it_would_free_the_communicator_under() -> None:
    record, within, come = Recorder(), threading.Event(), threading.Event()
    end = complete(cupy_nccl(record).init(2, 0, [ID]))

    def waits_for_its_peers(*args: Any) -> None:
        within.set()
        come.wait(10)

    end._made.allReduce = waits_for_its_peers
    calling = threading.Thread(target=lambda: end.all_reduce(1, 2, 3, FLOAT, SUM, 9))
    aborting = threading.Thread(target=end.abort)
    try:
        calling.start()
        assert within.wait(10)
        assert end.state() is State.IN_PROGRESS, "who looks does not wait"
        aborting.start()
        aborting.join(0.05)
        assert aborting.is_alive()
        assert ("abort",) not in record.calls
    finally:
        come.set()
    calling.join(10), aborting.join(10)
    assert record.calls[-1] == ("abort",)


def failing_group() -> tuple[Any, threading.Event]:
    """A communicator that launches a group, which waits for the event and fails."""
    record, come = Recorder(), threading.Event()
    end = complete((api := cupy_nccl(record)).init(2, 0, [ID]))
    api.bindings.groupEnd = lambda: come.wait(10) and record.call("groupEnd")
    record.raises = {"groupEnd": Refused(6)}
    end.grouped(lambda: end.send(1, 3, FLOAT, 1, 9))
    return end, come


def test_a_group_whose_sends_wait_to_be_connected_holds_nobody_up_and_what_it_meets_is_told() -> None:
    end, come = failing_group()
    assert end.state() is State.IN_PROGRESS
    come.set()
    with pytest.raises(NcclError, match="ncclGroupEnd: remote error"):
        complete(end)


def test_a_group_that_fails_while_its_state_is_asked_for_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    end, come = failing_group()

    def look(end: CupyCommunicator) -> bool:
        come.set()
        eventually(lambda: not vars(end)["_is_launching"], "the end of the launch", 10)
        return False

    looked = property(look, lambda end, value: vars(end).update(_is_launching=value))
    monkeypatch.setattr(type(end), "_is_launching", looked, raising=False)
    with pytest.raises(NcclError, match="ncclGroupEnd: remote error"):
        end.state()


@pytest.mark.parametrize("call", ["NcclCommunicator", "send"])
def test_a_failure_that_is_not_nccls_ends_a_thread_of_cupys_binding_too(call: str) -> None:
    """Otherwise its communicator would stay in progress for ever, or would count as launched."""
    record = Recorder()
    record.raises = {call: ValueError("not 128 bytes")}

    def begin() -> None:
        end = complete(cupy_nccl(record).init(2, 0, [ID]))
        end.grouped(lambda: end.send(1, 3, FLOAT, 1, 9))
        complete(end)

    with pytest.raises(NcclError, match="not 128 bytes"):
        begin()


def test_a_group_that_is_given_up_before_its_end_launches_nothing() -> None:
    record = Recorder()
    end = complete(cupy_nccl(record).init(2, 0, [ID]))

    def broken() -> None:
        end.send(1, 3, FLOAT, 1, 9)
        raise LookupError

    with pytest.raises(LookupError):
        end.grouped(broken)
    assert complete(end).state() is State.SUCCESS
    assert ("groupStart",) not in record.calls


def test_a_rank_outside_a_subgroup_hears_that_the_split_failed() -> None:
    record = Recorder()
    end = complete(cupy_nccl(record).init(2, 0, [ID]))
    record.raises = {"commSplit": Refused(6)}
    assert end.split(None, 0) is None
    with pytest.raises(NcclError, match="ncclCommSplit: remote error"):
        complete(end)


def test_with_cupys_binding_collectives_are_connected_before_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings: Any = ModuleType("cupy.cuda.nccl")
    bindings.available, bindings.get_version = True, lambda: 22809
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", bindings)
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    open_cupy_nccl()
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "1", "as it was given"
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    open_cupy_nccl()
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"


def test_what_cupys_table_of_errors_lacks_is_still_an_error_of_nccl() -> None:
    record = Recorder()
    api = cupy_nccl(record)
    end = complete(api.init(1, 0, [ID]))
    record.raises = {"check_async_error": KeyError(8), "allReduce": Refused(4)}
    with pytest.raises(NcclError, match="timeout"):
        end.state()
    with pytest.raises(NcclError, match="invalid argument"):
        end.all_reduce(1, 2, 3, FLOAT, SUM, 9)
    record.raises = {"NcclCommunicator": Refused(1)}
    with pytest.raises(NcclError, match="unhandled cuda error"):
        complete(api.init(2, 0, [ID]))


@pytest.mark.parametrize(
    ("op", "dtype", "found"),
    [
        (ReduceOp.SUM, DType.FLOAT32, (Op.SUM, DataType.FLOAT32, 1)),
        (ReduceOp.MEAN, DType.BFLOAT16, (Op.MEAN, DataType.BFLOAT16, 1)),
        (ReduceOp.SUM, DType.BOOL, (Op.MAX, DataType.UINT8, 1)),
        (ReduceOp.SUM, DType.COMPLEX64, (Op.SUM, DataType.FLOAT32, 2)),
        (ReduceOp.PRODUCT, DType.COMPLEX64, None),
        (ReduceOp.SUM, DType.INT16, None),
        (ReduceOp.BXOR, DType.INT32, None),
    ],
)
def test_what_nccl_has_for_an_operator_and_a_dtype(op: ReduceOp, dtype: DType, found: Any) -> None:
    assert reduction(op, dtype) == found


def test_without_a_binding_the_error_says_what_each_lacks_and_how_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nccl", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendUnavailableError) as raised:
        choose.open_nccl()
    assert "nccl4py: " in raised.value.reason
    assert "cupy.cuda.nccl: " in raised.value.reason
    assert "pip install 'ferrorpc[gpu]'" in raised.value.hint


def test_a_library_that_is_too_old_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise BackendUnavailableError("not there")

    monkeypatch.setattr(choose, "BINDINGS", (lambda: Nccl4pyApi(nccl4py(20800, Recorder())), missing))
    with pytest.raises(BackendUnavailableError, match="its NCCL is 20800"):
        choose.open_nccl()
    good = Nccl4pyApi(nccl4py(22809, Recorder()))
    monkeypatch.setattr(choose, "BINDINGS", (missing, lambda: good))
    assert choose.open_nccl() is good


def test_what_nccl4py_says_over_several_lines_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings(ModuleType):
        def get_version(self) -> int:
            raise RuntimeError('Failure finding "libnccl.so.2": No such file\n  looked in:\n    /usr/lib')

    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", Bindings("nccl.bindings.nccl"))
    with pytest.raises(BackendUnavailableError) as caught:
        open_nccl4py()
    assert caught.value.reason.endswith('"libnccl.so.2": No such file looked in: /usr/lib')


@pytest.mark.parametrize(("module", "opened"), [("nccl.bindings.nccl", open_nccl4py), ("cupy.cuda.nccl", open_cupy_nccl)])
def test_the_real_binding_mints_and_refuses_where_it_is_installed(module: str, opened: Any) -> None:
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError:
        pytest.skip(f"{module} is not installed (ferrorpc[gpu])")
    api = opened()
    assert api.version == found.get_version()
    assert len(api.unique_id()) == 128
    try:
        importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    except Exception:
        # CuPy asks the driver for the current GPU first, and fails in its own words.
        with pytest.raises(
            NcclError if api.name == "nccl4py" else RuntimeError, match=r"unhandled cuda error|InsufficientDriver"
        ):
            complete(api.init(1, 0, [api.unique_id()]))
