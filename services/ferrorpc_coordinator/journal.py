"""The journal: rows of (table, key, value) in SQLite that survive a restart, written in groups by one thread.

The driver passes all rows that were decided while the last group was being written, so a slow disk makes groups larger.
A group is one transaction in write-ahead mode with synchronous=FULL: when `done` is called, it has reached the disk.

The journal is prepared for a full disk, an exceeded quota, and files as large as `ulimit -f` allows. It keeps a reserve: a file
beside the database, which is emptied when the disk is full, and a part of the largest size of a file. So the rows already
decided can still be written, and `full` tells the driver to refuse requests that write. The reserve is filled again once there
is room. Any other write error is final (after a failed fsync a second one may report success for lost data): `failed` is called
and the coordinator stops.

Every row has a checksum of its own, because SQLite does not notice a flipped bit in a value. If one does not match, the
coordinator does not start.

Opening locks the directory and a file in it. The kernel releases the locks when their holder dies, so two coordinators never
write one journal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import resource
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ferrorpc.errors import ConfigError
from ferrorpc.guard import start_thread

Row = tuple[str, str, bytes | None]
"""Table, key and value; a value of None removes the row."""

SCHEMA_VERSION: Final = 2
APPLICATION_ID: Final = int.from_bytes(b"Frpc")
"""Marks the database as a journal."""
RESERVE_BYTES: Final = 4 << 20
_DATABASE: Final = "journal.sqlite"
_RESERVE: Final = "reserve"
_RETRY_SECONDS: Final = 0.25
_PAGES_MAX: Final = 0x3FFFFFFF
"""As many as any SQLite takes: 4 TiB."""
_SHRINK_PAGES: Final = 64
"""Pages freed in one step. The step writes about as many pages to the write-ahead log, so it must be small on a full disk."""
_LOG_BYTES_MAX: Final = 16 << 20
"""What SQLite keeps of the write-ahead log's file for the next groups, however large it has become."""
_PROBE: Final = "probe"
_PROBE_BYTES: Final = 64 << 10
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, an exceeded quota, and files that may not become so large (ulimit -f)."""
_WRITE_ERRORS: Final = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite's codes for a write that failed: also where a quota is exceeded, or the log's index finds no room."""
_log = logging.getLogger("ferrorpc.coordinator.journal")


class Journal:
    """The rows on disk, and the thread that writes them.

    Invariants: 1. Only one process has a journal's directory open. 2. Groups are written in the order they were given.
    3. `done` of a group is called once, after it is durable. 4. The rows read at opening are those of a prefix of the groups.
    """

    def __init__(
        self, directory: Path, locks: contextlib.ExitStack, connection: sqlite3.Connection, reserve_bytes: int
    ) -> None:
        self._directory = directory
        self._locks = locks
        self._connection = connection
        self._reserve = directory / _RESERVE
        self._reserve_bytes = reserve_bytes
        self._groups: queue.SimpleQueue[tuple[Sequence[Row], Callable[[], None]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.full = False
        """Whether the disk is full: what was decided is still written, requests that write must be refused."""
        self._check_room_at = 0.0
        """When to look next whether a full disk has room again, on the monotonic clock."""
        self.removed = False
        """Whether the database was seen to be removed."""
        self.commits = 0
        """Groups written since opening."""

    @classmethod
    def open(cls, directory: Path, *, reserve_bytes: int = RESERVE_BYTES, room_bytes: int = 0) -> Journal:
        """Opens or creates the journal in `directory`, with a reserve of `reserve_bytes` for a full disk.

        Raises:
            ConfigError: another coordinator has it open, it cannot be written, it is damaged, or less than `room_bytes` of room
                are left.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            locks = _take_locks(directory)
        except OSError as error:
            raise ConfigError(
                f"the data directory {directory} cannot be used: {error.strerror}", hint="give another --data-dir"
            ) from None
        try:
            if not _has_room(directory):
                _empty(directory / _RESERVE)
            connection = _connect(directory / _DATABASE)
        except BaseException:
            locks.close()
            raise
        journal = cls(directory, locks, connection, reserve_bytes)
        if room_bytes and not _has_room(directory, room_bytes):
            journal.close()
            raise ConfigError(f"{directory} has no room for {room_bytes >> 20} MiB", hint="give another --data-dir")
        if not journal._take_reserve():
            journal._mark_full()
        return journal

    def rows(self) -> list[tuple[str, str, bytes]]:
        """All rows. To be called before `start`.

        Raises:
            ConfigError: the database is damaged.
        """
        # A flipped bit may make bytes a text, and a text one that is not UTF-8: the row is to be named then too.
        self._connection.text_factory = lambda text: text.decode(errors="backslashreplace")
        try:
            found = list(self._connection.execute("SELECT tab, key, value, checksum FROM rows ORDER BY tab, key"))
        except sqlite3.DatabaseError as error:
            raise _open_error(self._directory, error) from None
        for table, key, value, checksum in found:
            if not isinstance(value, bytes) or checksum != _checksum(table, key, value):
                raise damaged(self._directory, f"the row {key!r} of {table!r} in journal.sqlite is not what was written")
        return [(table, key, value) for table, key, value, _ in found]

    def start(self, failed: Callable[[Exception], None]) -> None:
        """Starts the writer thread. It calls `failed`, once, when a group cannot be written.

        Raises:
            LimitExceededError: the system refuses the thread.
        """
        thread = threading.Thread(target=self._write_groups, args=(failed,), name="ferrorpc-journal", daemon=True)
        start_thread(thread)
        self._thread = thread

    def write(self, group: Sequence[Row], done: Callable[[], None]) -> None:
        """Queues one group; the writer thread calls `done` once it is durable. Never blocks."""
        self._groups.put((group, done))

    def close(self, seconds: float = 5.0) -> None:
        """Writes what is queued, waiting at most `seconds`, and releases the directory."""
        if self._thread is not None:
            self._groups.put(None)
            self._thread.join(seconds)
            self._closing.set()
            self._thread.join(2 * _RETRY_SECONDS)
            if self._thread.is_alive():  # it hangs in a system call: its connection cannot be closed
                return
            self._thread = None
        self._connection.close()
        self._locks.close()

    def commit(self, group: Sequence[Row]) -> None:
        """Writes one group and returns when it is durable. The writer thread calls this for `write`.

        Raises:
            sqlite3.Error: it was not written; the rows are as before.
        """
        removed = [(table, key) for table, key, value in group if value is None]
        changed = [(table, key, value, _checksum(table, key, value)) for table, key, value in group if value is not None]
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany("INSERT OR REPLACE INTO rows (tab, key, value, checksum) VALUES (?, ?, ?, ?)", changed)
            connection.executemany("DELETE FROM rows WHERE tab = ? AND key = ?", removed)
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.commits += 1

    def _write_groups(self, failed: Callable[[Exception], None]) -> None:
        try:
            while (item := self._next_group()) is not None:
                group, done = item
                if not self._commit_with_retries(group):
                    return
                self._look_for_files()
                done()
        except Exception as error:  # noqa: BLE001  without this thread nothing is answered any more
            _log.critical("the journal in %s cannot be written: %s: %s", self._directory, type(error).__name__, error)
            failed(error)

    def _look_for_files(self) -> None:
        """Tells once when somebody has removed the files. SQLite goes on writing to what no longer has a name."""
        if not self.removed and _is_gone(self._directory / _DATABASE):
            self.removed = True
            _log.error(
                "somebody has removed the journal in %s: this coordinator goes on, but after a restart it will know nothing of "
                "its jobs, and their members will fail; let the jobs end, or start them anew, before it restarts",
                self._directory,
            )

    def _next_group(self) -> tuple[Sequence[Row], Callable[[], None]] | None:
        """The next group; None to stop. While the disk is full, checks for room every _RETRY_SECONDS, also between groups."""
        while self.full:
            seconds = self._check_room_at - time.monotonic()
            if seconds > 0.0:
                with contextlib.suppress(queue.Empty):
                    return self._groups.get(timeout=seconds)
            self._shrink()
            if self._take_reserve():
                self.full = False
                _log.warning("there is room for the journal in %s again", self._directory)
            self._check_room_at = time.monotonic() + _RETRY_SECONDS
        return self._groups.get()

    def _commit_with_retries(self, group: Sequence[Row]) -> bool:
        """Commits, and waits while the disk is full. False if the journal was closed meanwhile."""
        held = False
        while not self._closing.is_set():
            try:
                self.commit(group)
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
                if not busy and not self._means_full(error):
                    raise
                if not busy and not self.full:
                    self._mark_full()
                    self._give_up_reserve()
                    self._shrink()
                    continue
                if busy and not held:
                    held = True
                    _log.error("another program holds the journal in %s: nothing is answered until it lets go", self._directory)
                if self.full:
                    self._shrink()
                self._closing.wait(_RETRY_SECONDS)
            else:
                return True
        return False

    def _means_full(self, error: sqlite3.Error) -> bool:
        """Whether a group was not written because there was no room. SQLite knows only one of the reasons by name."""
        code = error.sqlite_errorcode
        return code == sqlite3.SQLITE_FULL or (code in _WRITE_ERRORS and not _has_room(self._directory))

    def _mark_full(self) -> None:
        self.full = True
        self._check_room_at = time.monotonic() + _RETRY_SECONDS
        _log.error("no room (disk, quota, ulimit -f) for the journal in %s: writes are refused until there is", self._directory)

    def _shrink(self) -> None:
        """Truncates the log and frees unused pages of the database, as far as there is room to do so."""
        before = 0
        with contextlib.suppress(sqlite3.Error):
            while True:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                free = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
                if free in (0, before):
                    return
                self._connection.execute(f"PRAGMA incremental_vacuum({_SHRINK_PAGES})").fetchall()
                before = free

    def _take_reserve(self) -> bool:
        if self._reserve_bytes == 0:
            return True
        taken = self._limit_size(self._reserve_bytes) and _has_room_for(self._reserve, self._reserve_bytes)
        if not taken:
            self._give_up_reserve()
        return taken

    def _give_up_reserve(self) -> None:
        _empty(self._reserve)
        self._limit_size(0)

    def _limit_size(self, reserve_bytes: int) -> bool:
        """Keeps the database this much below the largest size of a file, beyond which SQLite would meet an I/O error. False if
        it is larger already."""
        limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        page_bytes: int = self._connection.execute("PRAGMA page_size").fetchone()[0]
        unlimited = limit_bytes == resource.RLIM_INFINITY  # perhaps only since a moment ago
        pages = _PAGES_MAX if unlimited else (limit_bytes - reserve_bytes) // page_bytes
        allowed: int = self._connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()[0]
        return allowed <= pages


def _is_gone(path: Path) -> bool:
    """Whether nothing has this name any more. Where that cannot be seen, it may well still be there."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _has_room(directory: Path, size_bytes: int = _PROBE_BYTES) -> bool:
    """Whether a file of this size finds room there."""
    probe = directory / _PROBE
    try:
        return _has_room_for(probe, size_bytes)
    finally:
        probe.unlink(missing_ok=True)


def _has_room_for(path: Path, size_bytes: int) -> bool:
    """Makes a file occupy so many bytes of the disk. False if there is no room; any other error says nothing about that."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            _occupy(handle, size_bytes)
        except OSError:
            os.ftruncate(handle, 0)
            raise
        finally:
            os.close(handle)
    except OSError as error:
        return error.errno not in _NO_ROOM
    return True


def _occupy(handle: int, size_bytes: int) -> None:
    """Reserves room, or writes zeros where that is not possible: on NFS with musl (glibc does this itself), on macOS."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(handle, 0, size_bytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
    with open(handle, "wb", closefd=False) as file:
        file.write(bytes(size_bytes))
    os.fsync(handle)  # NFS may tell only now that there is no room


def _empty(reserve: Path) -> None:
    """Gives up the reserve. The file stays, as a sign that there is a journal beside it."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(reserve, 0)


def _take_locks(directory: Path) -> contextlib.ExitStack:
    """Locks the directory, because somebody may remove a file in it, and a file, because NFS locks no directories."""
    with contextlib.ExitStack() as handles:
        own = os.open(directory, os.O_RDONLY)
        handles.callback(os.close, own)
        file = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        handles.callback(os.close, file)
        try:
            problem = _lock(file)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"the data directory {directory} is in use by another coordinator (process {holder})",
                hint="stop that coordinator first, or give this one another --data-dir",
            ) from None
        try:
            _lock(own)
        except BlockingIOError:
            raise ConfigError(
                f"the data directory {directory} is locked: by a coordinator whose file 'lock' was removed, or another program",
                hint="stop it first (`fuser` names it), lock another file around the coordinator, or give another --data-dir",
            ) from None
        if problem:
            raise ConfigError(
                f"the data directory {directory} cannot be used: its file system has no locks ({problem})",
                hint="give a --data-dir on another file system, or mount this one with locks",
            )
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        return handles.pop_all()


def _lock(handle: int) -> str:
    """Locks a file or a directory. Returns why it cannot be locked at all; empty if it is locked now.

    Raises:
        BlockingIOError: another process has locked it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def _connect(path: Path) -> sqlite3.Connection:
    # The file holds token hashes and values of jobs: only its owner may read it.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be opened: {error.strerror}", hint="give another --data-dir") from None
    try:
        try:
            return _open_database(path, locking_mode="NORMAL")
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_IOERR_SHMMAP:
                raise
        # Only connections that share the file need shared memory, for the index of the write-ahead log.
        _log.warning(
            "the file system of %s cannot map shared memory: no other program can read the journal while this one runs",
            path.parent,
        )
        return _open_database(path, locking_mode="EXCLUSIVE")
    except sqlite3.Error as error:
        raise _open_error(path.parent, error) from None


def _open_database(path: Path, *, locking_mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=16)
    try:
        connection.execute(f"PRAGMA locking_mode = {locking_mode}")
        _prepare(path, connection)
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        raise
    return connection


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA busy_timeout = 1000")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    _require_journal(path, connection, version)
    if not path.stat().st_size:  # it must be set before the first table is created
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES_MAX}")
    if version not in (0, SCHEMA_VERSION):
        raise ConfigError(
            f"the journal {path} has format {version}, this version reads format {SCHEMA_VERSION}",
            hint="run the version of ferrorpc that wrote it, or give another --data-dir",
        )
    if version == 0 and (path.parent / _RESERVE).exists():  # the reserve is only created beside a database
        raise damaged(path.parent, f"nothing is left in {path.name}")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":  # SQLite can read a truncated file, with fewer rows
        raise damaged(path.parent, " ".join(found.split()))
    if version == SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS rows (tab, key, value, checksum, PRIMARY KEY (tab, key)) WITHOUT ROWID")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _require_journal(path: Path, connection: sqlite3.Connection, version: int) -> None:
    """Raises ConfigError if the database is another program's, before anything in it is changed."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    tables = [name for (name,) in connection.execute(query)]
    columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(rows)")]
    is_new = not tables and not version
    # Read from an SQL dump, which has no marks.
    is_unmarked = tables == ["rows"] and columns == ["tab", "key", "value", "checksum"]
    if application != APPLICATION_ID and (application or not (is_new or is_unmarked)):
        raise ConfigError(f"{path} is not a journal of ferrorpc", hint="give another --data-dir")


def _checksum(table: str, key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(f"{table}\0{key}".encode()))


def damaged(directory: Path, what: object) -> ConfigError:
    """The error for a journal with invalid content."""
    return ConfigError(
        f"the journal in {directory} cannot be read: {what}",
        hint="restore a copy to an empty directory, or start with an empty --data-dir (a new cluster: all members join again)",
    )


def _open_error(directory: Path, error: sqlite3.Error) -> ConfigError:
    """The error for a database that SQLite cannot read, or cannot open at present."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(directory, error)
    return ConfigError(
        f"the journal in {directory} cannot be used now: {error}",
        hint="see that the disk has room and is writable, and that no other program holds the file open; what is in it is kept",
    )
