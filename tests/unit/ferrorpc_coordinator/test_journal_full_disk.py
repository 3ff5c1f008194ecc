"""The journal on a disk that is full, or that reserves no room."""

import contextlib
import errno
import os
import resource
import sqlite3
import subprocess
import threading
import time

import pytest
from ferrorpc_coordinator.journal import RESERVE_BYTES, Journal

from ferrorpc.errors import ConfigError
from tests.unit.ferrorpc_coordinator.test_journal import opened
from tests.waiting import eventually


def leave_two_pages(journal):
    """As on a disk with no room for more."""
    journal._limit_size = lambda _: True
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 2}")


def test_a_full_disk_is_waited_out(tmp_path):
    journal = opened(tmp_path)
    failures = []
    journal.start(failed=failures.append)
    leave_two_pages(journal)
    done = threading.Event()
    journal.write([("t", str(number), b"x" * 2000) for number in range(100)], done.set)
    eventually(lambda: journal.full)
    assert not done.wait(0.6)
    journal._connection.execute("PRAGMA max_page_count = 100000")
    assert done.wait(60)
    eventually(lambda: not journal.full)
    journal.close()
    assert not failures
    again = opened(tmp_path)
    assert len(again.rows()) == 100
    again.close()


@pytest.mark.parametrize("exceeded", [True, False])
def test_an_exceeded_quota_is_waited_out_and_a_broken_disk_is_not(tmp_path, monkeypatch, exceeded):
    """SQLite has one error for both."""
    broken = sqlite3.OperationalError("disk I/O error")
    broken.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    journal, commit, errors = opened(tmp_path), Journal.commit, [broken, broken]

    def fallocate(*_):
        if exceeded:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def fail_twice(group):
        if errors:
            raise errors.pop()
        commit(journal, group)

    monkeypatch.setattr(os, "posix_fallocate", fallocate, raising=False)
    monkeypatch.setattr(journal, "commit", fail_twice)
    failures, done = [], threading.Event()
    journal.start(failed=lambda error: (failures.append(error), done.set()))
    journal.write([("t", "k", b"v")], done.set)
    assert done.wait(60)
    journal.close()
    assert failures == ([] if exceeded else [broken])


@pytest.mark.parametrize("reason", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL, None])
def test_a_disk_that_reserves_no_room_gets_a_reserve_of_zeros(tmp_path, monkeypatch, reason):
    """NFS with musl, a sandbox, macOS: no room is reserved, but that does not mean that there is none."""

    def fallocate(*_):
        raise OSError(reason, os.strerror(reason))

    if reason is None:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fallocate", fallocate, raising=False)
    journal = opened(tmp_path, reserve_bytes=RESERVE_BYTES)
    assert not journal.full
    reserve = (tmp_path / "data" / "reserve").stat()
    assert reserve.st_size == RESERVE_BYTES
    assert reserve.st_blocks * 512 >= RESERVE_BYTES
    journal.close()


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_reserve_of_zeros_for_which_there_is_no_room_leaves_an_empty_file(tmp_path, monkeypatch, reason):
    def fsync(_):
        raise OSError(reason, os.strerror(reason))  # NFS tells it only now

    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        journal = opened(tmp_path, reserve_bytes=RESERVE_BYTES)
        assert journal.full
        assert (tmp_path / "data" / "reserve").stat().st_size == 0
    journal.start(failed=lambda error: None)
    eventually(lambda: not journal.full)
    journal.close()


def test_room_is_noticed_though_groups_come_all_the_time(tmp_path, monkeypatch):
    """As of a job with a named barrier in each step."""
    monkeypatch.setattr("ferrorpc_coordinator.journal._RETRY_SECONDS", 0.05)
    journal = opened(tmp_path)
    journal._mark_full()
    journal.start(failed=lambda error: None)
    until = time.monotonic() + 60.0
    while journal.full and time.monotonic() < until:
        journal.write([("t", "k", b"v")], lambda: None)
        time.sleep(0.002)
    assert not journal.full
    journal.close()


def test_what_was_decided_is_written_however_long_the_disk_is_full(tmp_path, monkeypatch):
    journal, looks = opened(tmp_path), []
    monkeypatch.setattr(journal, "_take_reserve", lambda: looks.append("no room yet"))
    journal._mark_full()
    journal.start(failed=lambda error: None)
    eventually(lambda: looks)
    written(journal, [("t", "k", b"v")])
    assert journal.full
    journal.close()


def test_closing_does_not_wait_for_a_full_disk_for_ever(tmp_path):
    journal = opened(tmp_path)
    journal.start(failed=lambda error: None)
    leave_two_pages(journal)
    called = []
    journal.write([("t", str(number), b"x" * 2000) for number in range(100)], lambda: called.append(1))
    journal.close(seconds=0.1)
    assert not called


def test_a_reserve_that_cannot_be_given_up_is_a_failure_and_not_the_silent_end_of_the_writer(tmp_path):
    journal = opened(tmp_path, reserve_bytes=4096)
    (tmp_path / "data" / "reserve").unlink()
    (tmp_path / "data" / "reserve").mkdir()  # as on a disk that turned read-only: it cannot be unlinked
    leave_two_pages(journal)
    failures = []
    told = threading.Event()
    journal.start(failed=lambda error: (failures.append(error), told.set()))
    journal.write([("t", str(number), b"x" * 2000) for number in range(100)], lambda: None)
    assert told.wait(60)
    assert [type(failure) for failure in failures] == [IsADirectoryError]
    journal.close()


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts an empty disk of this many KiB."""
    mount = tmp_path / "small"
    mount.mkdir()

    def make(kib):
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(mount)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a tmpfs needs root")
        return mount

    yield make
    if os.path.ismount(mount):
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def written(journal, rows):
    """Writes a group and waits for it."""
    done = threading.Event()
    journal.write(rows, done.set)
    assert done.wait(60)


@pytest.mark.root
def test_the_reserve_keeps_a_really_full_disk_working(small_disk):
    mount = small_disk(1024)
    journal = Journal.open(mount, reserve_bytes=256 << 10)
    journal.start(failed=lambda error: None)
    filler = mount / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    written(journal, [("t", str(number), b"x" * 1000) for number in range(40)])  # into the room of the reserve
    assert journal.full
    filler.unlink()
    eventually(lambda: not journal.full)
    written(journal, [("t", "more", b"x")])
    journal.close()


@pytest.mark.root
def test_a_start_on_a_disk_that_is_nearly_full_refuses_what_could_fill_it(small_disk):
    """Without a reserve, the write that fills the disk would wait, and all others behind it."""
    mount = small_disk(1024)
    filler = mount / "filler"
    filler.write_bytes(bytes(640 << 10))
    journal = Journal.open(mount, reserve_bytes=512 << 10)
    journal.start(failed=lambda error: None)
    assert journal.full
    written(journal, [("t", "member", b"x")])
    filler.unlink()
    eventually(lambda: not journal.full)
    journal.close()


@pytest.mark.root
def test_a_start_on_a_disk_that_became_full_meanwhile_uses_the_reserve(small_disk):
    mount = small_disk(1024)
    journal = Journal.open(mount, reserve_bytes=256 << 10)
    journal.commit([("t", "k", b"kept")])
    journal.close()
    with (mount / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    again = Journal.open(mount, reserve_bytes=256 << 10)
    again.start(failed=lambda error: None)
    assert again.full
    written(again, [("t", "member", b"x")])
    again.close()
    (mount / "journal.sqlite").unlink()
    with pytest.raises(ConfigError, match="nothing is left"):
        Journal.open(mount, reserve_bytes=256 << 10)


def test_a_journal_without_auto_vacuum_is_not_shrunk(tmp_path):
    """Rewriting the file would need as much room as it occupies."""
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as earlier:
        earlier.execute("CREATE TABLE rows (tab, key, value, checksum, PRIMARY KEY (tab, key)) WITHOUT ROWID")
        earlier.execute("PRAGMA user_version = 2")
    journal = Journal.open(tmp_path, reserve_bytes=0)
    journal.commit([("t", "k", bytes(100_000))])
    journal.commit([("t", "k", None)])
    free = journal._connection.execute("PRAGMA freelist_count").fetchone()
    journal._shrink()
    assert journal._connection.execute("PRAGMA freelist_count").fetchone() == free != (0,)
    journal.close()


@pytest.mark.root
def test_removed_rows_make_room_on_a_full_volume(small_disk):
    """As on a volume of its own, where no other file can be removed."""
    mount = small_disk(16 << 10)
    journal = Journal.open(mount)
    journal.start(failed=lambda error: None)
    for key in fill(journal):
        written(journal, [("t", key, None)])
    eventually(lambda: not journal.full)
    assert (mount / "reserve").stat().st_size == RESERVE_BYTES
    journal.close()


@pytest.fixture
def files_of_16_mebibytes():
    """Files of this process may become no larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill(journal: Journal) -> list[str]:
    """Writes until there is no more room. Returns the keys."""
    keys = []
    while not journal.full:
        keys.append(str(len(keys)))
        written(journal, [("t", keys[-1], os.urandom(200_000))])
    assert len(keys) > 20
    return keys


@pytest.mark.usefixtures("files_of_16_mebibytes")
@pytest.mark.parametrize("limit_bytes", [40 << 20, resource.RLIM_INFINITY])
def test_a_journal_goes_on_once_files_may_be_larger(tmp_path, limit_bytes):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if hard != resource.RLIM_INFINITY:
        pytest.skip("files of this process have a limit that cannot be raised")
    journal = Journal.open(tmp_path)
    journal.start(failed=lambda error: None)
    fill(journal)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    eventually(lambda: not journal.full)
    for number in range(60):
        written(journal, [("more", str(number), os.urandom(200_000))])
    assert not journal.full
    journal.close()


@pytest.mark.usefixtures("files_of_16_mebibytes")
def test_a_journal_that_is_as_large_as_a_file_may_be_is_full(tmp_path):
    """SQLite calls that an I/O error, after which no later try would succeed either."""
    journal = Journal.open(tmp_path)
    journal.start(failed=lambda error: None)
    keys = fill(journal)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.full
    again.start(failed=lambda error: None)
    written(again, [("t", "member", os.urandom(200_000))])  # into the reserve
    for key in keys:
        written(again, [("t", key, None)])
    eventually(lambda: not again.full)
    again.close()
