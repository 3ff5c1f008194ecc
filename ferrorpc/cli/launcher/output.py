"""The output of many processes on one console: whole lines, each behind its rank, and progress bars that stay bars.

A line is shown when its newline comes, and as a terminal would show it: what a carriage return overwrote is gone. A line
that has not ended but holds a carriage return is *progress*. On a terminal the progress that changed last is drawn at the
bottom, and redrawn after other lines; elsewhere it is printed at most every 10 s, so that a log shows that something moves
without filling up.
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

TAIL_LINES: Final = 20
_LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is cut: a worker that never writes a newline must not fill the launcher's memory."""
_PROGRESS_SECONDS: Final = 10.0
_LOOK_MILLISECONDS: Final = 200
_COLUMNS: Final = 80
"""Of a terminal that does not say, as those of some containers and editors."""
_COLOURS: Final = (b"36", b"33", b"35", b"32", b"34", b"31")
_ESCAPES: Final = re.compile(rb"\x1b\[[0-9;]*m")
_CLEAR_LINE: Final = b"\r\x1b[2K"


class LineBuffer:
    """Cuts a stream of bytes into the lines a terminal would show."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, rest = (self._held + data).split(b"\n")
        if b"\r" in rest:  # what was overwritten is not kept, so that no progress ever becomes too long
            rest = b"\r" + _visible(rest) + b"\r" * rest.endswith(b"\r")
        while len(rest) > _LINE_BYTES_MAX:
            lines.append(rest[:_LINE_BYTES_MAX])
            rest = rest[_LINE_BYTES_MAX:]
        self._held = rest
        return [_visible(line) for line in lines]

    @property
    def progress(self) -> bytes:
        """What a terminal would show of a line that overwrites itself; empty when there is none."""
        return _visible(self._held) if b"\r" in self._held else b""

    def finish(self) -> list[bytes]:
        """The stream has ended: a line without its newline counts as complete."""
        last, self._held = _visible(self._held), b""
        return [last] if last else []


def _visible(line: bytes) -> bytes:
    written = [part for part in line.split(b"\r") if part]
    return written[-1] if written else b""


class Console:
    """Where everything is shown. Lines of one call never mix with those of another.

    Args:
        out, err: raw binary streams; workers' streams keep to the one they came from.
        environment: NO_COLOR in it switches colours off.
    """

    def __init__(self, out: IO[bytes], err: IO[bytes], environment: Mapping[str, str]) -> None:
        self._sinks = {1: out, 2: err}
        self._terminals = {number: sink for number, sink in self._sinks.items() if sink.isatty()}
        self._colour = bool(self._terminals) and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        self._bottom = b""
        self._bottom_owner = (0, b"")
        """The stream whose progress is at the bottom, as its descriptor and prefix."""
        self._progress_shown: dict[tuple[int, bytes], float] = {}
        self._lost: dict[int, tuple[int, str]] = {}
        """Descriptor -> bytes that could not be written to it, and why."""
        self._hurried = False

    @property
    def attended(self) -> bool:
        """Whether somebody sees at once what the launcher says."""
        return 2 in self._terminals

    def hurry(self) -> None:
        """From now on nobody who stops reading is waited for. Until then workers wait with the console, as in any pipeline."""
        self._hurried = True

    def prefix(self, label: str, index: int) -> bytes:
        """What the lines of a worker begin with."""
        if not self._colour:
            return f"{label}: ".encode()
        return b"\x1b[" + _COLOURS[index % len(_COLOURS)] + b"m" + label.encode() + b":\x1b[0m "

    def lines(self, descriptor: int, prefix: bytes, lines: list[bytes]) -> None:
        """Prints whole lines. Raises BrokenPipeError when nobody reads any more."""
        if lines:
            self._write((descriptor, prefix), b"".join(prefix + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """A word of the launcher itself, on standard error."""
        self._write((2, b""), b"".join(b"ferrorpc: " + line.encode() + b"\n" for line in text.splitlines()))

    def progress(self, descriptor: int, prefix: bytes, line: bytes, now: float) -> None:
        """A line that overwrites itself has changed; an empty one for a stream that has none."""
        stream = (descriptor, prefix)
        if descriptor in self._terminals:
            self._draw_bottom(stream, _fitted(prefix, line, _columns(self._sinks[descriptor])))
        elif line and now - self._progress_shown.setdefault(stream, now) >= _PROGRESS_SECONDS:
            self._progress_shown[stream] = now
            self._write(stream, prefix + line + b"\n")

    def _write(self, stream: tuple[int, bytes], data: bytes) -> None:
        descriptor = stream[0]
        if self._bottom and descriptor in self._terminals:
            self._bottom = b"" if stream == self._bottom_owner else self._bottom
            data = _CLEAR_LINE + data + self._bottom
        self._put(descriptor, data)

    def _put(self, descriptor: int, data: bytes) -> None:
        """Writes, or counts what is lost: a full disk or a terminal that was closed ends no job. Raises BrokenPipeError."""
        try:
            self._write_all(descriptor, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            lost, _ = self._lost.get(descriptor, (0, ""))
            self._lost[descriptor] = lost + len(data), str(error.strerror)

    def _write_all(self, descriptor: int, data: bytes) -> None:
        """Writes all of it, each time only what a pipe takes at once, so that nothing but the look for room ever waits."""
        number, view = self._sinks[descriptor].fileno(), memoryview(data)
        sink = select.poll()
        sink.register(number, select.POLLOUT)
        while view:
            if sink.poll(0 if self._hurried and descriptor in self._lost else _LOOK_MILLISECONDS):
                with contextlib.suppress(BlockingIOError):  # another program that shares it was faster
                    view = view[os.write(number, view[: select.PIPE_BUF]) :]
            elif self._hurried:
                raise OSError(errno.ETIMEDOUT, "nobody reads it")

    def _draw_bottom(self, owner: tuple[int, bytes], line: bytes) -> None:
        if line == self._bottom or not (line or owner == self._bottom_owner):
            return  # nothing new, or a stream without progress while another one's is shown
        self._bottom, self._bottom_owner = line, owner
        self._put(next(reversed(self._terminals)), _CLEAR_LINE + line)

    def close(self) -> None:
        """Leaves the cursor on a fresh line, and tells of what was lost."""
        if self._bottom:
            self._bottom = b""
            self._put(next(reversed(self._terminals)), _CLEAR_LINE)
        for descriptor, (lost, why) in list(self._lost.items()):
            self.say(f"{lost} bytes of standard {'output' if descriptor == 1 else 'error'} could not be written: {why}")


def _columns(terminal: IO[bytes]) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _COLUMNS
    except OSError:  # it was closed
        return 0


def _fitted(prefix: bytes, line: bytes, columns: int) -> bytes:
    """The line cut so that it fills no second row, which could not be cleared. Nothing for an empty line."""
    text = line.decode(errors="replace")
    room = columns - 1 - len(_ESCAPES.sub(b"", prefix).decode())
    return prefix + text[: max(room, 0)].encode() if text else b""


class WorkerStream:
    """One stream of one worker on its way to the console and to its log file.

    Args:
        descriptor: 1 for standard output, 2 for standard error.
        log: also gets every byte, unchanged.
    """

    def __init__(self, console: Console, descriptor: int, prefix: bytes, *, shown: bool, log: IO[bytes] | None) -> None:
        self._console = console
        self._descriptor = descriptor
        self._prefix = prefix
        self._shown = shown
        self._log = log
        self._buffer = LineBuffer()
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> list[str]:
        """Its last lines."""
        return [line.decode(errors="replace") for line in self._tail]

    def feed(self, data: bytes, now: float) -> None:
        """New bytes; b"" for the end of the stream."""
        self._keep(data)
        lines = self._buffer.feed(data) if data else self._buffer.finish()
        self._tail.extend(line for line in lines if line.strip(b" ^~"))  # the marks of tracebacks say little without room
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
