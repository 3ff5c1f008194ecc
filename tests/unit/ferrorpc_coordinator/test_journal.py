"""The journal alone: what is committed is there after reopening, one opener at a time, and a full disk is survived."""

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest
from ferrorpc_coordinator.journal import Journal

from ferrorpc.errors import ConfigError, LimitExceededError
from tests.waiting import eventually


def opened(path, **options):
    options.setdefault("reserve_bytes", 0)
    return Journal.open(path / "data", **options)


def test_rows_come_back_after_reopening(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("store", "a", b"1"), ("store", "b", b"\x00\xff"), ("meta", "a", b"")])
    journal.commit([("store", "a", b"2"), ("store", "b", None), ("store", "absent", None)])
    assert journal.commits == 2
    journal.close()
    again = opened(tmp_path)
    assert again.rows() == [("meta", "a", b""), ("store", "a", b"2")]
    again.close()


def test_after_large_groups_the_log_does_not_keep_their_size(tmp_path):
    """It would take as much room as the database, beside it."""
    journal = opened(tmp_path)
    journal.commit([("store", f"{number}", bytes(1 << 20)) for number in range(24)])
    for _ in range(3):
        journal.commit([("store", "last", b"1")])
    assert (tmp_path / "data" / "journal.sqlite-wal").stat().st_size <= 16 << 20
    assert len(journal.rows()) == 25
    journal.close()


def test_what_is_written_reaches_the_disk_and_not_only_the_kernel(tmp_path):
    """A test cannot cause a power failure, so it checks the system calls."""
    journal = opened(tmp_path)
    found = [journal._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    journal.close()
    assert found == ["wal", 2]


def test_a_group_that_cannot_be_written_leaves_the_rows_and_the_next_group_alone(tmp_path):
    journal = opened(tmp_path)
    with pytest.raises(sqlite3.Error):
        journal.commit([("t", "half", b"1"), ("t", object(), b"2")])
    journal.commit([("t", "next", b"3")])
    assert journal.rows() == [("t", "next", b"3")]
    assert journal.commits == 1
    journal.close()


def test_groups_are_durable_before_done_is_called(tmp_path):
    journal = opened(tmp_path)
    journal.start(failed=lambda error: None)
    seen = []
    finished = threading.Event()

    def done(number):
        # Another connection sees only what was committed.
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite")) as reader:
            seen.append((number, list(reader.execute("SELECT tab, key, value FROM rows"))))
        if number == 2:
            finished.set()

    for number in range(3):
        journal.write([("t", str(number), b"x")], lambda number=number: done(number))
    assert finished.wait(60)
    journal.close()
    assert [number for number, _ in seen] == [0, 1, 2]
    assert all(("t", str(number), b"x") in rows for number, rows in seen)


def test_close_writes_what_was_queued(tmp_path):
    journal = opened(tmp_path)
    journal.start(failed=lambda error: None)
    for number in range(50):
        journal.write([("t", f"{number:02}", b"x")], lambda: None)
    journal.close()
    again = opened(tmp_path)
    assert len(again.rows()) == 50
    again.close()


def test_a_second_coordinator_is_refused_and_told_the_process_that_has_it(tmp_path):
    code = (
        "import sys, pathlib; from ferrorpc_coordinator.journal import Journal;"
        "Journal.open(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"in use by another coordinator \(process {holder.pid}\)"):
            opened(tmp_path)
        holder.kill()
        holder.wait()
    (tmp_path / "data" / "lock").write_text("a longer word than the number of any process\n")
    again = opened(tmp_path)
    assert (tmp_path / "data" / "lock").read_text() == f"{os.getpid()}\n"
    again.close()


def test_a_second_coordinator_is_refused_where_somebody_has_removed_the_lock_file(tmp_path):
    """As programs do that tidy up what has not been touched for days."""
    journal = opened(tmp_path)
    (tmp_path / "data" / "lock").unlink()
    with pytest.raises(ConfigError, match="is locked: by a coordinator whose file 'lock' was removed, or another program"):
        opened(tmp_path)
    journal.close()
    opened(tmp_path).close()


def test_where_directories_cannot_be_locked_the_lock_file_keeps_others_out(tmp_path, monkeypatch):
    def as_on_nfs(handle, operation):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    journal = opened(tmp_path)
    with pytest.raises(ConfigError, match="in use by another coordinator"):
        opened(tmp_path)
    journal.close()


@pytest.mark.parametrize("version", [1, 99])
def test_a_journal_of_another_format_is_refused_and_left_as_it_was(tmp_path, version):
    journal = opened(tmp_path)
    journal.commit([("t", "k", b"v")])
    journal._connection.execute(f"PRAGMA user_version = {version}")
    journal.close()
    for _ in range(2):  # the refused open released the lock
        with pytest.raises(ConfigError, match=rf"has format {version}, this version reads format 2\ntry: .*another --data-dir"):
            opened(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite")) as kept:
        assert kept.execute("SELECT tab, key, value FROM rows").fetchall() == [("t", "k", b"v")]


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("application", [0, 7])
def test_a_database_of_another_program_is_refused_and_left_as_it_was(tmp_path, version, application):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (x)")
        other.execute(f"PRAGMA user_version = {version}")
        other.execute(f"PRAGMA application_id = {application}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"journal\.sqlite is not a journal of ferrorpc"):
        opened(tmp_path)
    assert path.read_bytes() == before


def test_a_journal_without_the_mark_of_ferrorpc_is_still_opened(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("t", "k", b"v")])
    journal._connection.execute("PRAGMA application_id = 0")
    journal.close()
    again = opened(tmp_path)
    assert again.rows() == [("t", "k", b"v")]
    again.close()


def test_a_journal_that_was_read_from_an_sql_dump_is_opened(tmp_path):
    """It has no marks. SQLite's own tables, such as those of ANALYZE, are nobody's."""
    journal = opened(tmp_path)
    journal.commit([("t", "k", b"v")])
    journal._connection.execute("ANALYZE")
    journal.close()
    path = tmp_path / "data" / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as source:
        dump = "\n".join(source.iterdump())
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as target:
        target.executescript(dump)
    again = opened(tmp_path)
    assert again.rows() == [("t", "k", b"v")]
    again.close()


def test_a_table_of_the_same_name_makes_no_journal(tmp_path):
    (tmp_path / "data").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "journal.sqlite")) as other:
        other.execute("CREATE TABLE rows (x, y)")
    with pytest.raises(ConfigError, match="is not a journal of ferrorpc"):
        opened(tmp_path)


def test_a_damaged_journal_is_refused(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("t", str(number), b"x" * 1000) for number in range(100)])
    journal.close()
    path = tmp_path / "data" / "journal.sqlite"
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path)


def test_a_flipped_bit_is_found_and_its_row_named(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("store", "weights", b"the value that was written"), ("store", "other", b"x")])
    journal.close()
    path = tmp_path / "data" / "journal.sqlite"
    data = path.read_bytes()
    for before, after, row in ((b"that was", b"thau was", "weights"), (b"other", b"othes", "othes")):
        assert data.count(before) == 1
        path.write_bytes(data.replace(before, after))
        again = opened(tmp_path)
        with pytest.raises(ConfigError, match=f"the row '{row}' of 'store' in journal.sqlite is not what was written"):
            again.rows()
        again.close()


def test_a_truncated_journal_is_refused_though_sqlite_can_read_it(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("t", "k", b"kept")])
    journal.close()
    path = tmp_path / "data" / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path)


@pytest.mark.parametrize("left", [b"", None], ids=["empty", "missing"])
def test_an_emptied_journal_is_not_taken_for_a_new_one(tmp_path, left):
    journal = opened(tmp_path, reserve_bytes=4096)
    journal.commit([("t", "k", b"kept")])
    journal.close()
    path = tmp_path / "data" / "journal.sqlite"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    with pytest.raises(ConfigError, match="nothing is left"):
        opened(tmp_path, reserve_bytes=4096)


@pytest.mark.parametrize(
    ("column", "other"),
    [("value", "CAST(value AS TEXT)"), ("value", "NULL"), ("value", "7"), ("key", "CAST(key AS BLOB)"), ("tab", "x'ff'")],
)
@pytest.mark.parametrize("value", [b"text", b"\xff\xfe"], ids=["text", "bytes"])
def test_a_row_whose_bytes_have_become_another_type_is_named(tmp_path, value, column, other):
    """One flipped bit is enough for it."""
    journal = opened(tmp_path)
    journal.commit([("store", "a", b"1"), ("store", "weights", value)])
    journal._connection.execute(f"UPDATE rows SET {column} = {other} WHERE key = 'weights'")
    with pytest.raises(ConfigError, match=r"the row b?'weights' of .* in journal\.sqlite is not what was written"):
        journal.rows()
    journal.close()


def test_a_row_whose_key_is_no_text_any_more_is_named(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("store", "weights", b"1")])
    journal._connection.execute("UPDATE rows SET key = CAST(x'ff776569' AS TEXT)")
    with pytest.raises(ConfigError, match=r"the row '.{1,2}xffwei' of 'store'"):
        journal.rows()
    journal.close()


def test_a_journal_that_cannot_be_used_now_is_not_called_damaged(tmp_path):
    journal = opened(tmp_path)
    journal.close()
    path = tmp_path / "data" / "journal.sqlite"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="cannot be used now") as caught:
        opened(tmp_path)
    assert "empty --data-dir" not in str(caught.value)
    holder.close()
    opened(tmp_path).close()


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "journal.sqlite").write_bytes(b"these bytes are no database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path)


def test_damage_that_is_described_in_bytes_that_are_no_text_is_refused(tmp_path):
    """Python raises such an error itself, without a code of SQLite's."""
    opened(tmp_path).close()
    path = tmp_path / "data" / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA ignore_check_constraints = ON")
        holder.execute("CREATE TABLE zzzz (a CHECK (a <> 1))")
        holder.execute("INSERT INTO zzzz VALUES (1)")
    path.write_bytes(path.read_bytes().replace(b"zzzz", b"\xff\xff\xff\xff"))
    with pytest.raises(ConfigError, match="cannot be read: Could not decode"):
        opened(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path)


def test_the_journal_is_readable_by_its_owner_alone(tmp_path):
    journal = opened(tmp_path)
    journal.commit([("t", "k", b"secret")])
    modes = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "data", *(tmp_path / "data").iterdir())}
    journal.close()
    assert "journal.sqlite" in modes
    assert set(modes.values()) == {0}


def test_a_torn_tail_loses_only_the_last_groups(tmp_path):
    journal = opened(tmp_path)
    for number in range(20):
        journal.commit([("t", f"{number:02}", b"x" * 100)])
    whole = (tmp_path / "data" / "journal.sqlite-wal").read_bytes()
    base = (tmp_path / "data" / "journal.sqlite").read_bytes()
    journal.close()
    counts = []
    for cut in range(0, len(whole) + 1, 997):
        directory = tmp_path / f"cut{cut}" / "data"
        directory.mkdir(parents=True)
        (directory / "journal.sqlite").write_bytes(base)
        (directory / "journal.sqlite-wal").write_bytes(whole[:cut])
        again = Journal.open(directory, reserve_bytes=0)
        rows = again.rows()
        again.close()
        assert [key for _, key, _ in rows] == [f"{number:02}" for number in range(len(rows))]
        counts.append(len(rows))
    assert counts == sorted(counts)
    assert counts[-1] >= 18


def test_closing_does_not_wait_for_a_hanging_system_call(tmp_path, monkeypatch):
    journal, released = opened(tmp_path), threading.Event()
    monkeypatch.setattr(journal, "commit", lambda group: released.wait(5))
    journal.start(failed=lambda error: None)
    journal.write([("t", "k", b"v")], lambda: None)
    journal.close(seconds=0.05)
    assert not released.is_set()
    journal._connection.execute("SELECT 1")  # still open: the writer thread uses it
    released.set()
    journal.close()


def test_any_other_failure_is_final_and_reported_once(tmp_path):
    journal = opened(tmp_path)
    failures = []
    told = threading.Event()
    journal.start(failed=lambda error: (failures.append(error), told.set()))
    called = []
    journal.write([("t", object(), b"v")], lambda: called.append(1))  # a key that SQLite cannot store
    assert told.wait(60)
    journal.write([("t", "k", b"later")], lambda: called.append(2))
    journal.close(seconds=1.0)
    assert len(failures) == 1
    assert not called


def test_memory_that_runs_out_is_a_failure_and_not_the_silent_end_of_the_writer(tmp_path, monkeypatch):
    journal = opened(tmp_path)

    def commit(group):
        raise MemoryError

    monkeypatch.setattr(journal, "commit", commit)
    failures = []
    journal.start(failed=failures.append)
    journal.write([("t", "k", b"v")], lambda: None)
    eventually(lambda: failures)
    journal.close()
    assert [type(failure) for failure in failures] == [MemoryError]


def test_a_journal_whose_files_were_removed_says_so_once_and_goes_on(tmp_path, caplog):
    journal = opened(tmp_path)
    done = [threading.Event() for _ in range(3)]
    journal.start(lambda error: None)
    journal.write([("store", "a", b"1")], done[0].set)
    assert done[0].wait(30.0)
    shutil.rmtree(tmp_path)
    for released in done[1:]:
        journal.write([("store", "a", b"2")], released.set)
        assert released.wait(30.0)
    journal.close()
    assert caplog.text.count(f"somebody has removed the journal in {tmp_path / 'data'}") == 1


def test_where_its_files_cannot_be_looked_at_the_journal_goes_on_without_a_word(tmp_path, caplog):
    """They are still there, as far as anybody knows, and what was committed is."""
    journal, written, failures = opened(tmp_path), threading.Event(), []
    journal.start(failures.append)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "data").symlink_to("x" * 300)
    journal.write([("store", "a", b"1")], written.set)
    assert written.wait(30.0)
    journal.close()
    assert (failures, caplog.text) == ([], "")


def test_a_journal_without_a_thread_says_so_and_closes(tmp_path, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    journal = opened(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(LimitExceededError, match=r"refuses a thread \(ferrorpc-journal\)"):
        journal.start(lambda error: None)
    journal.close()
