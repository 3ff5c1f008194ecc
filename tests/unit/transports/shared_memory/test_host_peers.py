"""Ranks of one host find each other, see each other's memory, and notice each other's end."""

import contextlib
import errno
import gc
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import BackendUnavailableError, GroupAbortedError, GroupClosedError, PeerLostError, UsageError
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.guard import Latch, SystemClock
from ferrorpc.testing import ManualClock
from ferrorpc.transports.shared_memory import discovery, handshake, host_identity
from ferrorpc.transports.shared_memory.segment import NONCE_BYTES, SIZE_BYTES_MIN, Segment
from ferrorpc.v1 import shared_memory_pb2
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION
from tests.unit.transports.shared_memory.host_worlds import SECONDS, HostWorld, in_a_forked_child
from tests.waiting import eventually


def open_descriptors() -> set[str]:
    """What each descriptor of this process is; sockets, pipes and memory have numbers that no other one ever has."""
    gc.collect()
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the directory, and what a thread has just closed
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_one_host_see_each_others_memory(size: int) -> None:
    with HostWorld(size) as ranks:
        everybody = tuple(range(size))
        blocks = [ranks[rank].own.allocate(8) for rank in everybody]
        for rank in everybody:
            blocks[rank].array[:] = rank + 1
        for rank in everybody:
            assert ranks[rank].ranks == everybody
            assert ranks[rank].hosts == (everybody,)
            assert ranks[rank].separation_reason == ""
            for other in everybody:
                memory = ranks[rank].memory(other)
                assert memory.flags.writeable == (rank == other)
                offset = blocks[other].offset
                assert (memory[offset : offset + 8] == other + 1).all()


def test_whoever_was_told_to_use_grpc_stays_alone() -> None:
    with HostWorld(4, ["auto", "grpc", "auto", "auto"]) as ranks:
        for rank in range(4):
            assert ranks[rank].hosts == ((0, 2, 3), (1,))
            assert ranks[rank].separation_reason == "rank 1: it was told to use transport='grpc'"
        assert ranks[1].ranks == (1,)
        with pytest.raises(UsageError, match="rank 1 shares no memory"):
            _ = ranks[1].own


def test_a_rank_that_may_open_no_more_files_stays_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(segment: Segment) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Segment, "read_only_descriptor", full)
    with HostWorld(2) as ranks:
        for rank in range(2):
            assert ranks[rank].hosts == ((0,), (1,))
            assert "rank 1: it cannot greet its peers: Too many open files" in ranks[rank].separation_reason


def test_a_rank_that_may_open_no_socket_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets: list[socket.socket] = []

    class TwoOnly(socket.socket):
        def __init__(self, *given: Any, fileno: int | None = None) -> None:
            if len(sockets) == 2 and fileno is None:  # both ranks listen
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*given, fileno=fileno)
            sockets.append(self)

    monkeypatch.setattr(handshake.Handshaker.run, "__defaults__", (0.2,))
    monkeypatch.setattr(handshake.socket, "socket", TwoOnly)
    with HostWorld(2) as ranks:
        for rank in range(2):
            assert "rank 0 cannot be dialled: Too many open files" in ranks[rank].separation_reason


def test_a_world_that_uses_grpc_needs_one_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostWorld(2, ["grpc", "grpc"]) as ranks:
        assert ranks[0].hosts == ((0,), (1,))
        ordinals = ranks.world.session(0).membership.ordinals
        assert ordinals._last == {(0, 1): {"ferrorpc/shared_memory/offers": 1}}


def test_a_demand_that_cannot_be_met_is_an_error_on_every_rank() -> None:
    with HostWorld(3, ["auto", "shared_memory", "grpc"]) as ranks:
        for rank in range(3):
            with pytest.raises(BackendUnavailableError, match=r"\(rank 1\) needs all ranks .* rank 2: it was told"):
                _ = ranks[rank]
    with HostWorld(2, ["shared_memory", "auto"]) as ranks:
        assert ranks[0].ranks == (0, 1)


def test_a_platform_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_identity.platform, "machine", lambda: "aarch64")
    with HostWorld(2) as ranks:
        assert ranks[0].ranks == (0,)
        assert "not that of aarch64" in ranks[0].separation_reason
    monkeypatch.undo()
    monkeypatch.setattr(host_identity.sys, "version_info", (3, 11, 0, "final", 0))
    assert (
        "needs Python 3.11.1, whose os.sched_yield lets other threads run; this is 3.11.0" in host_identity.unsupported_reason()
    )


@pytest.mark.parametrize("name", ["memfd_create", "eventfd"])
def test_a_sandbox_that_refuses_a_system_call_is_a_reason_to_use_grpc(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refused(*arguments: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, name, refused)
    assert f"needs {name}, and the system refuses it: Function not implemented" in host_identity.unsupported_reason()
    with HostWorld(2) as ranks:
        assert ranks[0].ranks == (0,)


def test_a_rank_that_does_not_know_the_secret_is_no_host_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks still agree, and the honest ones share."""
    greet = handshake.Handshaker._greet

    def lie(self: handshake.Handshaker, connection: socket.socket, rank: int) -> None:
        if self._assignment.rank == 1:
            false = shared_memory_pb2.SharedMemoryGreeting(version=DATA_PROTOCOL_VERSION, source_rank=1, target_rank=rank)
            socket.send_fds(connection, [false.SerializeToString()], [self._descriptor])
        else:
            greet(self, connection, rank)

    monkeypatch.setattr(handshake.Handshaker, "_greet", lie)
    monkeypatch.setattr(handshake.Handshaker.run, "__defaults__", (0.5,))
    with HostWorld(3) as ranks:
        for rank in range(3):
            assert ranks[rank].hosts == ((0, 2), (1,))
        assert "a greeting of rank 1 belongs to another generation" in ranks[0].separation_reason


class AsAnOlderOne:
    """A socket that gives greetings an older version."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def sendmsg(self, buffers: list[bytes], *more: Any) -> int:
        greeting = shared_memory_pb2.SharedMemoryGreeting.FromString(buffers[0])
        greeting.version = 3
        return self._connection.sendmsg([greeting.SerializeToString()], *more)


@pytest.mark.parametrize("older", [0, 1], ids=["which is dialled", "which dials"])
def test_ranks_of_different_versions_share_nothing_and_both_versions_are_named(
    older: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = handshake.Handshaker._greet

    def greet_as(self: handshake.Handshaker, connection: Any, rank: int) -> None:
        greet(self, AsAnOlderOne(connection) if self._assignment.rank == older else connection, rank)

    monkeypatch.setattr(handshake.Handshaker, "_greet", greet_as)
    with HostWorld(2) as ranks:
        assert ranks[0].ranks == (0,)
        said = f"rank {older}: it speaks version 3 of the data plane's protocol, this rank {DATA_PROTOCOL_VERSION}"
        assert ranks[0].separation_reason == f"rank {1 - older}: {said}"


def test_nobody_is_waited_for_once_the_generation_has_ended() -> None:
    """The clock stands still: whoever waited would do so for ever."""
    segment = Segment("test", bytes(NONCE_BYTES), SIZE_BYTES_MIN)
    latch = Latch()
    latch.trip(PeerLostError(1, "exit code 9"))
    with handshake.listen(f"ferrorpc/test/{uuid.uuid4()}") as listener:
        assignment = LocalWorld(2).session(0).membership.assignment
        handshaker = handshake.Handshaker(assignment, (0, 1), [], listener, segment)
        handshaker.run(latch, ManualClock())
    segment.close()
    assert list(handshaker.failures) == [1]


@pytest.mark.parametrize("what", [b"", b"nonsense", b"\x08\x01"])
def test_strangers_on_the_socket_do_no_harm(monkeypatch: pytest.MonkeyPatch, what: bytes) -> None:
    listen = handshake.listen
    strangers = []

    def listen_to_a_stranger(name: str) -> socket.socket:
        listener = listen(name)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + name)
        if what:
            stranger.send(what)
        strangers.append(stranger)
        return listener

    monkeypatch.setattr(discovery, "listen", listen_to_a_stranger)
    with HostWorld(2) as ranks:
        assert ranks[0].ranks == (0, 1)
    for stranger in strangers:
        stranger.close()


def test_strangers_with_descriptors_or_in_crowds_do_no_harm_and_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, strangers = handshake.listen, contextlib.ExitStack()
    pipe, memory = os.pipe(), os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    claim = shared_memory_pb2.SharedMemoryGreeting(version=1, source_rank=1, target_rank=0, segment_bytes=1 << 40)
    greetings = [(claim.SerializeToString(), [memory]), (b"x", [pipe[0]] * 2), (b"x", [pipe[0]] * 200), (bytes(9000), [memory])]

    def listen_to_strangers(name: str) -> socket.socket:
        listener = listen(name)
        for number in range(100):
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stranger.connect("\0" + name)
            if number % 2:
                data, descriptors = greetings[number // 2 % len(greetings)]
                socket.send_fds(stranger, [data], descriptors)
        return listener

    before = open_descriptors()
    monkeypatch.setattr(discovery, "listen", listen_to_strangers)
    with HostWorld(2) as ranks:
        assert ranks[0].ranks == (0, 1)
        os.ftruncate(memory, 0)
    strangers.close()
    eventually(lambda: open_descriptors() <= before, "everything is closed")
    for descriptor in (*pipe, memory):
        os.close(descriptor)


def test_a_process_of_another_user_is_hung_up_on_before_it_can_say_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, user_of, ended = handshake.listen, handshake._user_of, []
    strangers: list[socket.socket] = []

    def listen_to_a_stranger(name: str) -> socket.socket:
        listener = listen(name)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + name)
        strangers.append(stranger)
        return listener

    def another_for_the_first(connection: socket.socket) -> int:
        is_stranger = not ended and user_of(connection) == os.geteuid()
        ended.append(connection)
        return -1 if is_stranger else user_of(connection)

    monkeypatch.setattr(discovery, "listen", listen_to_a_stranger)
    monkeypatch.setattr(handshake, "_user_of", another_for_the_first)
    with HostWorld(2) as ranks:
        assert ranks[0].ranks == (0, 1)
        assert ended[0].fileno() == -1
    for stranger in strangers:
        stranger.close()


def test_a_process_of_another_user_behind_a_ranks_name_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is first may listen under any name."""
    check, user_of, dialled = handshake.Handshaker._check, handshake._user_of, list[socket.socket]()

    def note(self: handshake.Handshaker, told: Any, connection: socket.socket, rank: int | None) -> int:
        if rank is not None:
            dialled.append(connection)
        return check(self, told, connection, rank)

    monkeypatch.setattr(handshake.Handshaker, "_check", note)
    monkeypatch.setattr(handshake, "_user_of", lambda connection: -1 if connection in dialled else user_of(connection))
    with HostWorld(2) as ranks:
        assert ranks[0].hosts == ((0,), (1,))
        assert f"a process of user -1 greeted one of user {os.geteuid()}" in ranks[0].separation_reason


@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        ("listen", OSError(98, "Address already in use"), "it cannot listen on a Unix socket: Address already in use"),
        ("Segment", BackendUnavailableError("cannot have 64 MiB of memory"), "cannot have 64 MiB of memory"),
    ],
    ids=["name", "memory"],
)
def test_a_rank_that_gets_no_name_or_no_memory_stays_alone_and_says_so(
    what: str, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(discovery, what, refused)
    with HostWorld(2) as ranks:
        assert ranks[0].hosts == ((0,), (1,))
        assert ranks[0].separation_reason == f"rank 0: {reason}; rank 1: {reason}"


def test_an_interrupt_while_ranks_meet_leaves_nothing_open() -> None:
    session = LocalWorld(2).session(0)
    membership = session.membership

    def interrupted(name: str, value: bytes) -> list[bytes]:
        raise KeyboardInterrupt

    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        discovery.discover_host_peers(membership.assignment, "auto", interrupted, membership.latch, session.clock)
    eventually(lambda: open_descriptors() <= before, "everything is closed")


def test_a_link_that_ends_without_goodbye_is_told_at_once() -> None:
    with HostWorld(3) as ranks:
        ranks[1].links[0].socket.connection.shutdown(socket.SHUT_RDWR)
        eventually(lambda: len(ranks.lost) >= 2)
        assert ranks[0].lost() == {1: "its process ended without a goodbye"}
        assert sorted(ranks.lost)[:2] == [
            (0, 1, "its process ended without a goodbye"),
            (1, 0, "its process ended without a goodbye"),
        ]
        assert not ranks[0].links[1].has_left


def test_a_goodbye_is_no_loss_until_the_peer_is_needed() -> None:
    with HostWorld(2) as ranks:
        ranks[1].close(1.0)
        eventually(lambda: ranks[0].links[1].has_left)
        assert ranks.lost == []
        ranks[0].report_lost(1, PEER_LEFT)
        ranks[0].report_lost(1, PEER_LEFT)
        assert ranks.lost == [(0, 1, PEER_LEFT)]
        ranks[1].report_lost(0, "it is over here")
        assert len(ranks.lost) == 1


def test_the_end_of_a_link_is_no_news_once_the_generation_has_ended() -> None:
    with HostWorld(2) as ranks:
        ranks.sessions[0].membership.latch.trip(PeerLostError(1, "exit code 9"))
        ranks[0].report_lost(1, "its process ended without a goodbye")
        assert ranks.lost == []


def test_messages_arrive_whole_and_in_order_although_nobody_waits_for_room() -> None:
    with HostWorld(2) as ranks:
        sent = [bytes([1, number % 256]) * (1 + number % 3000) for number in range(3000)]
        for message in sent:
            ranks[0].links[1].socket.send(message)
        eventually(lambda: len(ranks.messages) == len(sent))
        assert [message for _, _, message in ranks.messages] == sent


def test_an_interrupt_within_close_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    with HostWorld(2) as ranks:
        reader, latch = ranks[0].reader, ranks.sessions[0].membership.latch
        stop = reader.stop

        def strike(timeout: float) -> None:
            monkeypatch.setattr(reader, "stop", stop)
            raise KeyboardInterrupt

        monkeypatch.setattr(reader, "stop", strike)
        with pytest.raises(KeyboardInterrupt):
            ranks[0].close(SECONDS)
        assert not latch._watchers
    eventually(lambda: open_descriptors() <= before, "everything is closed")


def test_what_was_sent_before_close_arrives() -> None:
    with HostWorld(2) as ranks:
        for number in range(2000):
            ranks[0].links[1].socket.send(b"\x01" + number.to_bytes(2, "little") * 200)
        ranks[0].close(SECONDS)
        eventually(lambda: ranks[1].links[0].has_left)
        assert len(ranks.messages) == 2000
        assert ranks.lost == []


def test_a_host_peer_that_says_much_does_not_keep_the_others_from_being_heard() -> None:
    heard: list[int] = []
    with HostWorld(3, listening=False) as ranks:
        for peer in (0, 1):
            for _ in range(100):
                ranks[peer].links[2].socket.send(b"\x01")
        ranks[2].start(lambda peer, reason: None, lambda peer, message: heard.append(peer))
        eventually(lambda: len(heard) == 200)
    assert set(heard[:60]) == {0, 1}


def test_memory_is_given_back_although_somebody_remembers_the_host_peers() -> None:
    with HostWorld(2) as ranks:
        mapped = [weakref.ref(ranks[rank].memory(1 - rank)) for rank in range(2)]
        for rank in range(2):
            ranks[rank].close(1.0)
    gc.collect()
    assert [memory() for memory in mapped] == [None, None]
    for rank in range(2):
        with pytest.raises(GroupClosedError, match="has closed its links"):
            ranks[0].memory(rank)


def test_nothing_is_left_open() -> None:
    with HostWorld(2):
        pass
    before = open_descriptors()
    for _ in range(5):
        with HostWorld(3, ["auto", "auto", "grpc"]):
            pass
        with HostWorld(2, ["shared_memory", "grpc"]):
            pass
    eventually(lambda: open_descriptors() <= before)


@pytest.mark.parametrize(
    ("go", "reason"),
    [
        (lambda ranks: ranks.world.kill(2, "exit code 9"), "exit code 9"),
        (lambda ranks: ranks.sessions[2].leave(), "it left the job"),
        (lambda ranks: ranks.sessions[2].membership.latch.end(GroupAbortedError(2, "Ctrl-C")), "Ctrl-C"),
    ],
    ids=["dies", "leaves", "aborts"],
)
def test_a_rank_that_goes_meanwhile_leaves_the_others_without_host_peers(
    go: Callable[[HostWorld], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first operation tells the cause, as everywhere; making the group does not fail."""
    prove_peers, meet = discovery._LocalOffer.prove_peers, HostWorld._meet
    worlds: list[HostWorld] = []

    def note(self: HostWorld, *arguments: Any) -> Any:
        worlds.append(self)
        return meet(self, *arguments)

    def go_meanwhile(self: Any, *arguments: Any) -> Any:
        if self._assignment.rank == 2:
            go(worlds[0])
        return prove_peers(self, *arguments)

    monkeypatch.setattr(HostWorld, "_meet", note)
    monkeypatch.setattr(discovery._LocalOffer, "prove_peers", go_meanwhile)
    with HostWorld(3) as ranks:
        for rank in range(2):
            assert ranks[rank].ranks == (rank,)
            assert reason in ranks[rank].separation_reason


def test_a_forked_child_gives_its_copies_of_the_sockets_back() -> None:
    """So that the end of its parent is seen although the child lives on."""
    with HostWorld(2) as ranks:
        descriptors = [ranks[rank].links[1 - rank].socket.connection.fileno() for rank in range(2)]

        def child() -> bool:
            return not any(os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in descriptors)

        assert in_a_forked_child(child) == 0
        ranks[0].links[1].socket.send(b"\1 still here")
        eventually(lambda: ranks.messages == [(1, 0, b"\1 still here")])


@pytest.mark.parametrize("begins", ["before the interrupt", "after close", "never"])
def test_an_interrupt_as_the_reading_thread_starts_leaves_no_thread_behind(begins: str) -> None:
    threads: list[threading.Thread] = []

    class Struck(SystemClock):
        def start(self, body: Callable[[], None], name: str) -> None:
            threads.append(threading.Thread(target=body, name=name, daemon=True))
            if begins == "before the interrupt":
                threads[0].start()
            raise KeyboardInterrupt

    before = open_descriptors()
    with HostWorld(2, listening=False) as ranks:
        ranks[0]._clock = Struck()
        with pytest.raises(KeyboardInterrupt):
            ranks[0].start(*[lambda *_: None] * 2)
        ranks[0].close(SECONDS)
        if begins == "after close":
            threads[0].run()
        elif begins == "before the interrupt":
            threads[0].join(SECONDS)
            assert not threads[0].is_alive()
    eventually(lambda: open_descriptors() <= before, "everything is closed")
