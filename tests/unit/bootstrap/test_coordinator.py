"""The coordinator of rank 0: where it listens, and how long rank 0 waits for what it says."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import profile
import resource
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from ferrorpc_coordinator import server

from ferrorpc.bootstrap import coordinator
from ferrorpc.config import Config
from ferrorpc.errors import ConfigError


class Asked(Exception):
    """It would be started now."""


def asked(arguments: list[str], environment: object) -> None:
    raise Asked(*arguments[:2])


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_the_first_line_is_read_and_no_more(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"listening 127.0.0.1:1\nmore")
    assert coordinator._first_line(reader) == b"listening 127.0.0.1:1\n"
    assert os.read(reader, 100) == b"more"


def test_the_first_line_is_read_where_many_files_are_open(pipe: tuple[int, int]) -> None:
    """A data set may be thousands of them."""
    reader, writer = pipe
    os.write(writer, b"listening 127.0.0.1:1\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard <= 1100:
        pytest.skip(f"no more than {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 1100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert coordinator._first_line(high) == b"listening 127.0.0.1:1\n"
    finally:
        os.close(high)


def test_one_that_never_ends_its_line_is_waited_for_no_longer_than_starting_takes(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "START_SECONDS", 0.1)
    reader, writer = pipe
    os.write(writer, b"listen")
    assert coordinator._first_line(reader) is None


@pytest.mark.parametrize(
    ("address", "bind", "listens"),
    [
        ("127.0.0.1:4711", "127.0.0.1", "127.0.0.1:4711"),
        ("127.0.0.1:4711", "0.0.0.0", "127.0.0.1:4711"),  # a job of one node is nobody else's business
        ("10.0.0.1:4711", "0.0.0.0", "0.0.0.0:4711"),
        ("[fd00::1]:4711", "::", "[::]:4711"),
    ],
)
def test_it_listens_beyond_loopback_only_where_other_nodes_need_it(
    address: str, bind: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_spawn", asked)
    with pytest.raises(Asked) as found:
        coordinator.start_coordinator(address, Config({"bind": bind, "insecure": True}, {}), {})
    assert found.value.args == ("--listen", listens)


def test_the_port_of_a_run_that_has_just_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator lingers, and listens meanwhile."""
    lingering = socket.create_server(("127.0.0.1", 0))
    port = lingering.getsockname()[1]
    ends = threading.Timer(0.3, lingering.close)

    def free(arguments: list[str], environment: object) -> None:
        socket.create_server(("127.0.0.1", port)).close()
        raise Asked

    monkeypatch.setattr(coordinator, "_spawn", free)
    ends.start()
    with pytest.raises(Asked):
        coordinator.start_coordinator(f"127.0.0.1:{port}", Config({}, {}), {})


def test_a_port_that_stays_taken_is_waited_for_no_longer_than_a_coordinator_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PORT_SECONDS", 0.1)
    monkeypatch.setattr(coordinator, "_spawn", asked)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Asked):
        coordinator.start_coordinator(f"127.0.0.1:{other.getsockname()[1]}", Config({}, {}), {})


def test_a_port_is_waited_for_longer_than_a_coordinator_lingers_and_drains() -> None:
    assert coordinator.PORT_SECONDS > server.LINGER_SECONDS + server.DRAIN_SECONDS + server.HANDLERS_SECONDS


def test_one_that_was_started_before_is_kept_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_spawn", asked)
    watched, kept = os.pipe()
    monkeypatch.setattr(coordinator, "_pipes", {"127.0.0.1:4711": kept})
    coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), {})
    os.close(watched)  # it has ended
    with pytest.raises(Asked):
        coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), {})
    assert coordinator._pipes == {}


def test_one_that_has_ended_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may have SIGPIPE end it, as other programs do."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(coordinator, "_pipes", {"127.0.0.1:1": writer})
    signals: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, frame: signals.append(number))
    try:
        coordinator._announce_exit()
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert signals == []
    assert coordinator._pipes == {}


def test_one_whose_start_is_interrupted_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it keeps the port for as long as this process lives, and the next try finds it taken."""
    announced, announcing = os.pipe()
    watched, kept = os.pipe()

    def interrupted(descriptor: int) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(coordinator, "_spawn", lambda *_: (announced, kept, 0))
    monkeypatch.setattr(coordinator, "_first_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), {})
    assert os.read(watched, 1) == b""
    assert coordinator._pipes == {}
    os.close(watched)
    os.close(announcing)


@pytest.mark.parametrize(
    ("command", "handler", "reason"),
    [
        ("exit 64", signal.SIG_DFL, r"could not start .* \(exit code 64\)"),
        ("exec sleep 60", signal.SIG_DFL, "did not listen on 127.0.0.1:4711 within 0.2 s"),
        ("exit 64", signal.SIG_IGN, r"could not start .* \(exit code unknown\)"),
        ("exec sleep 60", signal.SIG_IGN, "did not listen on 127.0.0.1:4711 within 0.2 s"),
    ],
)
def test_one_that_does_not_listen_is_ended_while_it_is_a_child_and_the_error_says_whether_it_ended_or_took_too_long(
    command: str, handler: signal.Handlers, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The children of a process that ignores SIGCHLD are forgotten as they end, and others may get their ids. On a busy host it
    may take less time when it is tried again."""
    ends, killed, kill = command == "exit 64", [], os.kill

    def spawn(*_: object) -> tuple[int, int, int]:
        (announced, announcing), (watched, pipe) = os.pipe(), os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, announcing, 1)]
        process = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ, file_actions=actions)
        os.close(announcing)
        os.close(watched)
        if ends:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        return announced, pipe, process

    def counted(process: int, number: int) -> None:
        killed.append(process)
        kill(process, number)

    monkeypatch.setattr(coordinator, "START_SECONDS", 0.2)
    monkeypatch.setattr(coordinator, "_spawn", spawn)
    monkeypatch.setattr(os, "kill", counted)
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with pytest.raises(ConfigError, match=reason) as failed:
            coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), {})
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert len(killed) == (0 if ends else 1)
    assert failed.value.retryable is not ends


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_that_cannot_be_started_leaves_no_descriptor_open(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that was started as an interrupt came: the end of its pipe ends it."""

    def refused(*_: object, **__: object) -> int:
        raise KeyboardInterrupt if interrupted else OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises((ConfigError, KeyboardInterrupt), match=r"^$|Resource temporarily unavailable"):
        coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), {})
    assert os.listdir("/proc/self/fd") == before


def test_a_second_pipe_that_is_refused_leaves_none_of_the_first_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real, pipes = os.pipe, list[tuple[int, int]]()

    def pipe() -> tuple[int, int]:
        if pipes:
            raise OSError(errno.EMFILE, "Too many open files")
        pipes.append(real())
        return pipes[0]

    monkeypatch.setattr(os, "pipe", pipe)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="Too many open files"):
        coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), {})
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], None]:
    """Puts a coordinator of this text where this process alone looks, as a folder or as a zip, and the import system at it."""

    def put(text: str, zipped: bool) -> None:
        package = tmp_path / "ferrorpc_coordinator"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(text)
        place = shutil.make_archive(str(tmp_path / "packages"), "zip", tmp_path, package.name) if zipped else tmp_path
        monkeypatch.syspath_prepend(place)
        monkeypatch.delitem(sys.modules, package.name, raising=False)

    return put


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
def test_it_is_imported_from_where_this_process_would(zipped: bool, own_folder: Callable[[str, bool], None]) -> None:
    own_folder("def main(arguments): print('listening', *arguments)", zipped)
    announced, pipe, process = coordinator._spawn(["--listen", "127.0.0.1:4711"], os.environ)
    assert coordinator._first_line(announced) == b"listening --transient --starter-fd 0 --listen 127.0.0.1:4711\n"
    os.close(announced)
    os.close(pipe)
    os.waitpid(process, 0)


def test_its_import_path_is_this_processs_in_its_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else it would meet other versions, of ferrorpc or of what that needs, which come later here."""
    own = [coordinator._folder_of("ferrorpc_coordinator"), coordinator._folder_of("ferrorpc")]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/first", own[0], "/between", *own[1:], "/last"])
    assert coordinator._import_path() == [*dict.fromkeys(["/first", own[0], "/between", own[1], "/last"])]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/first"])
    assert sorted(coordinator._import_path()) == sorted({*own, "/first"})


def test_its_import_path_has_the_folder_above_the_current_one_where_there_is_no_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with `python -c`, and in a notebook."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    assert str(tmp_path) in coordinator._import_path()


def test_its_import_path_has_pythons_own_folders_also_where_a_module_of_them_runs_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `python -m cProfile` does."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", profile.__file__, raising=False)
    assert os.path.dirname(profile.__file__) in coordinator._import_path()


def test_what_it_cannot_import_is_named(own_folder: Callable[[str, bool], None]) -> None:
    own_folder("import ferrorpc.absent", False)
    with pytest.raises(ConfigError, match=r"on 127.0.0.1:4711: No module named 'ferrorpc.absent'\ntry: .*PYTHONPATH"):
        coordinator.start_coordinator("127.0.0.1:4711", Config({}, {}), os.environ)


def test_a_bind_that_would_hide_it_from_other_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="would hide its coordinator from the other nodes"):
        coordinator.start_coordinator("10.0.0.1:4711", Config({}, {}), {})


def test_settings_that_are_given_as_arguments_are_passed_on_and_variables_are_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"http_port": 29701, "lease": "5s", "heartbeat_interval": 2, "insecure": False}
    environment = {"FERRORPC_GRACE": "9", "FERRORPC_LEASE": "8", "FERRORPC_INSECURE": "1"}
    found = []

    def spawn(arguments: list[str], environment: Mapping[str, str]) -> None:
        found.append(Config({}, environment))
        raise Asked

    monkeypatch.setattr(coordinator, "_spawn", spawn)
    with pytest.raises(Asked):
        coordinator.start_coordinator("127.0.0.1:4711", Config(settings, environment), environment)
    expected = {"http_port": 29701, "lease": 5.0, "heartbeat_interval": 2.0, "insecure": False, "grace": 9.0}
    assert {name: found[0][name] for name in expected} == expected
