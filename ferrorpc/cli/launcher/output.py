"""The output of many processes on one console: whole lines, each prefixed with its rank, and working progress bars.

A line is shown once it is complete, as a terminal would show it: text before a carriage return is overwritten. An unfinished
line with a carriage return is *progress*. On a terminal the progress that changed last is drawn at the bottom, and redrawn
after other lines. Elsewhere progress is printed at most every 10 s, so that a log shows it without filling up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
from collections import deque
from collections.abc import Mapping
from typing import IO, Final

from ferrorpc.cli.terminal import cells, cut

TAIL_LINES: Final = 20
"""What a rank logged longer ago, such as an error that it handled, does not say why it ended."""
_TAIL_LINE_BYTES_MAX: Final = 1000
_TRACEBACK_MARKS: Final = re.compile(rb"(?:[ ^~]|\x1b\[[\d;]*m)*")
"""A line ^~~~ of a traceback, or an empty one; in colours, too."""
_LINE_BYTES_MAX: Final = 64 * 1024
"""Longer lines are split, so that a worker that never writes a newline cannot fill the launcher's memory."""
_PROGRESS_SECONDS: Final = 10.0
_POLL_MILLISECONDS: Final = 200
_COLUMNS: Final = 80
"""Assumed width of a terminal that reports none, as in some containers and editors."""
_COLOURS: Final = (b"36", b"33", b"35", b"32", b"34", b"31")
_CLEAR_LINE: Final = b"\r\x1b[2K"


class LineBuffer:
    """Splits a stream of bytes into the lines that a terminal would show."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their newlines."""
        *lines, rest = (self._held + data).split(b"\n")
        if b"\r" in rest:  # overwritten text is dropped, so that a progress line does not grow
            rest = b"\r" + _visible(rest) + b"\r" * rest.endswith(b"\r")
        while len(rest) > _LINE_BYTES_MAX:
            lines.append(rest[:_LINE_BYTES_MAX])
            rest = rest[_LINE_BYTES_MAX:]
        self._held = rest
        return [_visible(line) for line in lines]

    @property
    def progress(self) -> bytes:
        """What a terminal would show of an unfinished line with carriage returns; empty without one."""
        return _visible(self._held) if b"\r" in self._held else b""

    def finish(self) -> list[bytes]:
        """The end of the stream: the rest counts as a line."""
        last, self._held = _visible(self._held), b""
        return [last] if last else []


def _visible(line: bytes) -> bytes:
    written = [part for part in line.split(b"\r") if part]
    return written[-1] if written else b""


def _beginning(line: bytes) -> bytes:
    more = len(line) - _TAIL_LINE_BYTES_MAX
    return line if more <= 0 else b"%b [%d bytes more]" % (line[:_TAIL_LINE_BYTES_MAX], more)


class Console:
    """Writes all output of the launcher and the workers. Lines written by one call stay together.

    Args:
        out, err: raw binary streams; a worker's standard output goes to `out`, its standard error to `err`.
        environment: NO_COLOR in it turns colours off.
    """

    def __init__(self, out: IO[bytes], err: IO[bytes], environment: Mapping[str, str]) -> None:
        self._streams = {1: out, 2: err}
        self._terminals = {number: stream for number, stream in self._streams.items() if stream.isatty()}
        self._colour = bool(self._terminals) and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        self._progress_line = b""
        self._progress_owner = (0, b"")
        """The stream whose progress is drawn at the bottom, as its descriptor and prefix."""
        self._progress_printed: dict[tuple[int, bytes], float] = {}
        self._lost: dict[int, tuple[int, str]] = {}
        """Descriptor -> number of bytes that could not be written to it, and why."""
        self._no_waiting = False

    @property
    def on_terminal(self) -> bool:
        """Whether standard error is a terminal."""
        return 2 in self._terminals

    def stop_waiting(self) -> None:
        """From now on output is dropped if its reader does not keep up, or has gone: Ctrl-C ends `tee` too, while the workers
        still save what they have. Until then a slow reader blocks, and one that goes ends the job, as in any pipeline."""
        self._no_waiting = True

    def prefix(self, label: str, index: int) -> bytes:
        """The prefix of a worker's lines."""
        if not self._colour:
            return f"{label}: ".encode()
        return b"\x1b[" + _COLOURS[index % len(_COLOURS)] + b"m" + label.encode() + b":\x1b[0m "

    def lines(self, descriptor: int, prefix: bytes, lines: list[bytes]) -> None:
        """Prints whole lines. Raises BrokenPipeError when the reader has closed the pipe, unless the job is to stop."""
        if lines:
            self._write((descriptor, prefix), b"".join(prefix + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """Prints a message of the launcher itself, on standard error."""
        lines = (f"ferrorpc: {line}\n" for line in text.split("\n"))  # a worker's words in it may contain other separators
        self._write((2, b""), "".join(lines).encode(errors="surrogateescape"))

    def progress(self, descriptor: int, prefix: bytes, line: bytes, now: float) -> None:
        """Shows the changed progress of a stream; empty if it has none."""
        stream = (descriptor, prefix)
        if descriptor in self._terminals:
            self._draw_progress(stream, _fitted(prefix, line, _columns(self._streams[descriptor])))
        elif line and now - self._progress_printed.setdefault(stream, now) >= _PROGRESS_SECONDS:
            self._progress_printed[stream] = now
            self._write(stream, prefix + line + b"\n")

    def _write(self, stream: tuple[int, bytes], data: bytes) -> None:
        descriptor = stream[0]
        if self._progress_line and descriptor in self._terminals:
            self._progress_line = b"" if stream == self._progress_owner else self._progress_line
            data = _CLEAR_LINE + data + self._progress_line
        self._put(descriptor, data)

    def _put(self, descriptor: int, data: bytes) -> None:
        """Writes, and counts what cannot be written: a full disk or closed terminal ends no job. Raises BrokenPipeError."""
        try:
            self._write_all(descriptor, data)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not self._no_waiting:
                raise
            lost, _ = self._lost.get(descriptor, (0, ""))
            self._lost[descriptor] = lost + len(data), str(error.strerror)

    def _write_all(self, descriptor: int, data: bytes) -> None:
        """Writes everything, at most PIPE_BUF bytes at a time after a poll, so that `write` itself never blocks."""
        number, view = self._streams[descriptor].fileno(), memoryview(data)
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        while view:
            if poll.poll(0 if self._no_waiting and descriptor in self._lost else _POLL_MILLISECONDS):
                with contextlib.suppress(BlockingIOError):  # another process that writes to it was faster
                    view = view[os.write(number, view[: select.PIPE_BUF]) :]
            elif self._no_waiting:
                raise OSError(errno.ETIMEDOUT, "nobody reads it")

    def _draw_progress(self, owner: tuple[int, bytes], line: bytes) -> None:
        if line == self._progress_line or not (line or owner == self._progress_owner):
            return  # unchanged, or a stream without progress while another stream's is shown
        self._progress_line, self._progress_owner = line, owner
        self._put(next(reversed(self._terminals)), _CLEAR_LINE + line)

    def close(self) -> None:
        """Clears the progress line and reports lost output."""
        if self._progress_line:
            self._progress_line = b""
            self._put(next(reversed(self._terminals)), _CLEAR_LINE)
        for descriptor, (lost, why) in list(self._lost.items()):
            self.say(f"{lost} bytes of standard {'output' if descriptor == 1 else 'error'} could not be written: {why}")


def _columns(terminal: IO[bytes]) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _COLUMNS
    except OSError:  # it was closed
        return 0


def _fitted(prefix: bytes, line: bytes, columns: int) -> bytes:
    """The line, cut to one row of the terminal, because a second row could not be cleared; empty for an empty line."""
    room = columns - 1 - cells(prefix.decode())
    return prefix + cut(line.decode(errors="replace"), max(room, 0)).encode() if line else b""


class WorkerStream:
    """One output stream of one worker: passes it to the console and to a log file.

    Args:
        descriptor: 1 for standard output, 2 for standard error.
        shown: whether the console shows it.
        log: receives every byte unchanged.
    """

    def __init__(
        self, console: Console, descriptor: int, prefix: bytes, *, shown: bool = True, log: IO[bytes] | None = None
    ) -> None:
        self._console = console
        self._descriptor = descriptor
        self._prefix = prefix
        self._shown = shown
        self._log = log
        self._buffer = LineBuffer()
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> list[str]:
        """Its last lines; of long ones the beginning."""
        return [line.decode(errors="replace") for line in self._tail]

    def feed(self, data: bytes, now: float) -> None:
        """New bytes; b"" for the end of the stream."""
        self._keep(data)
        lines = self._buffer.feed(data) if data else self._buffer.finish()
        self._tail.extend(_beginning(line) for line in lines if not _TRACEBACK_MARKS.fullmatch(line))
        if self._shown:
            self._console.lines(self._descriptor, self._prefix, lines)
            self._console.progress(self._descriptor, self._prefix, self._buffer.progress, now)

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._log.write(view) :]
        except OSError as error:
            self._console.say(f"{self._log.name} is not written any further: {error.strerror}")
            self._log = None
