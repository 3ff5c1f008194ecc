"""The output of many processes on one console."""

import io
import os
import pty
import threading
import tty

import pytest

from ferrorpc.cli.launcher.output import TAIL_LINES, Console, LineBuffer, WorkerStream


class Recorder:
    """A sink with a descriptor, so that it is written to as a real console is."""

    def __init__(self, terminal=False):
        self._reader, self._writer = pty.openpty() if terminal else os.pipe()
        if terminal:
            tty.setraw(self._writer)
        os.set_blocking(self._reader, False)
        self._terminal = terminal

    def isatty(self):
        return self._terminal

    def fileno(self):
        return self._writer

    def text(self):
        try:
            return os.read(self._reader, 1 << 20)
        except BlockingIOError:
            return b""

    def close(self):
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def sinks():
    made = []

    def make(terminal=False):
        made.append(Recorder(terminal))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


def test_lines_come_whole_however_the_bytes_are_cut():
    buffer = LineBuffer()
    seen = [line for byte in b"one\ntwo\r\nthree" for line in buffer.feed(bytes([byte]))]
    assert seen == [b"one", b"two"]
    assert buffer.progress == b"", "an ordinary line is no progress"
    assert buffer.finish() == [b"three"]
    assert buffer.finish() == []


def test_what_a_carriage_return_overwrote_is_gone():
    buffer = LineBuffer()
    assert buffer.feed(b"\r 0%\r50%\r") == []
    assert buffer.progress == b"50%"
    assert buffer.feed(b"\r100%\n") == [b"100%"]


def test_a_line_without_end_is_cut_instead_of_kept():
    buffer = LineBuffer()
    lines = buffer.feed(b"x" * (3 * 64 * 1024 + 5))
    assert [len(line) for line in lines] == [64 * 1024] * 3
    assert buffer.finish() == [b"x" * 5]


def test_a_progress_bar_that_runs_for_hours_never_becomes_a_line():
    buffer = LineBuffer()
    assert [line for step in range(3000) for line in buffer.feed(b"\r" + b"%4d " % step + b"#" * 75)] == []
    assert buffer.progress == b"2999 " + b"#" * 75
    assert buffer.feed(b"\r") == []
    assert buffer.progress == b"2999 " + b"#" * 75
    assert buffer.feed(b"\rdone\n") == [b"done"]
    assert buffer.feed(b"\r50%" * (1 << 15)) == [], "in whatever pieces it comes"


def test_empty_lines_stay_empty_lines():
    assert LineBuffer().feed(b"a\n\nb\n") == [b"a", b"", b"b"]


def test_each_line_carries_its_rank_and_no_colour_in_a_file(sinks):
    out, err = sinks(), sinks()
    console = Console(out, err, {})
    stream = WorkerStream(console, 1, console.prefix("3", 3), shown=True, log=None)
    stream.feed(b"hello\nworld\n", 0.0)
    assert out.text() == b"3: hello\n3: world\n"
    assert err.text() == b""


def test_whether_somebody_looks_is_told_by_where_the_launcher_speaks(sinks):
    assert Console(sinks(), sinks(terminal=True), {}).on_terminal
    assert not Console(sinks(terminal=True), sinks(), {}).on_terminal


def test_a_terminal_gets_colours_unless_no_color_is_set(sinks):
    out, err = sinks(terminal=True), sinks()
    assert Console(out, err, {}).prefix("0", 0) == b"\x1b[36m0:\x1b[0m "
    assert Console(out, err, {"NO_COLOR": ""}).prefix("13", 13) == b"\x1b[33m13:\x1b[0m ", "six colours do for all"
    assert Console(out, err, {"NO_COLOR": "1"}).prefix("0", 0) == b"0: "
    assert Console(out, err, {"TERM": "dumb"}).prefix("0", 0) == b"0: "


@pytest.mark.parametrize("columns", [80, 0], ids=["80", "it_does_not_say"])
def test_a_progress_bar_stays_at_the_bottom_of_a_terminal(sinks, columns):
    screen = sinks(terminal=True)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(screen.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    console = Console(screen, screen, {"NO_COLOR": "1"})
    bar = WorkerStream(console, 2, b"0: ", shown=True, log=None)
    other = WorkerStream(console, 1, b"1: ", shown=True, log=None)
    bar.feed(b"\r10%", 0.0)
    assert screen.text() == b"\r\x1b[2K0: 10%"
    other.feed(b"line\n", 0.0)
    assert screen.text() == b"\r\x1b[2K1: line\n0: 10%"
    bar.feed(b"\r20%", 0.0)
    assert screen.text() == b"\r\x1b[2K0: 20%"
    bar.feed(b"\r" + b"#" * 200, 0.0)
    other.feed(b"half a", 0.0)
    assert screen.text().startswith(b"\r\x1b[2K0: ####"), "a line on its way does not take the bar's place"
    bar.feed(b"\rdone\n", 0.0)
    assert screen.text() == b"\r\x1b[2K0: done\n", "the bar has become a line"
    bar.feed(b"\r" + b"#" * 200, 0.0)
    assert len(screen.text()) == len(b"\r\x1b[2K") + 79, "cut to one row: a second one could not be cleared"
    bar.feed(b"\r\x1b[32m" + "学".encode() * 200 + b"\x1b[0m", 0.0)
    assert screen.text() == b"\r\x1b[2K0: " + "学".encode() * 38, "each takes two cells, and what follows is not green"


def test_elsewhere_a_progress_bar_is_printed_now_and_then(sinks):
    out, err = sinks(), sinks()
    stream = WorkerStream(Console(out, err, {}), 2, b"0: ", shown=True, log=None)
    for second in range(25):
        stream.feed(f"\r{second}%".encode(), 1000.0 + second)
    assert err.text() == b"0: 10%\n0: 20%\n"
    stream.feed(b"\r100%\n", 1025.0)
    assert err.text() == b"0: 100%\n"


def test_the_tail_repeats_of_long_lines_only_how_they_begin(sinks):
    """Such as the keys that load_state_dict misses: the line itself was shown in full."""
    out, err = sinks(), sinks()
    stream = WorkerStream(Console(out, err, {}), 2, b"1: ", shown=True, log=None)
    stream.feed(b"KeyError: " + b"k" * 30_000 + b"\nnext\n", 0.0)
    first, second = stream.tail
    assert (first[:12], second) == ("KeyError: kk", "next")
    assert first.endswith(" [29010 bytes more]")
    assert len(first) < 1_100


def test_the_tail_keeps_the_last_lines_even_of_workers_that_are_not_shown(sinks):
    out, err = sinks(), sinks()
    log = io.BytesIO()
    stream = WorkerStream(Console(out, err, {}), 2, b"0: ", shown=False, log=log)
    marks = b"    ^^^^~~~^^\n\n    \x1b[31m~~\x1b[0m\x1b[1;31m^^\x1b[0m\n"
    stream.feed(b"".join(f"{n}\n".encode() for n in range(500)) + marks + b"last", 0.0)
    stream.feed(b"", 0.0)
    assert stream.tail == [*(str(n) for n in range(501 - TAIL_LINES, 500)), "last"]
    assert err.text() == b""
    assert log.getvalue().endswith(b"499\n" + marks + b"last")


def test_a_sink_that_does_not_block_is_waited_for(sinks):
    out = sinks()
    os.set_blocking(out.fileno(), False)
    read = []

    def slowly():
        while sum(map(len, read)) < 400_000:
            read.append(out.text())

    reader = threading.Thread(target=slowly)
    console = Console(out, sinks(), {})
    reader.start()
    console.lines(1, b"", [b"x" * 399_999])
    reader.join(20)
    assert b"".join(read) == b"x" * 399_999 + b"\n"


def test_who_stops_reading_is_waited_for_until_there_is_a_hurry(sinks):
    out, err = sinks(), sinks()
    console = Console(out, err, {})
    timer = threading.Timer(0.5, console.stop_waiting)
    timer.start()
    console.lines(1, b"", [b"x" * 199_999])
    assert not timer.is_alive()
    console.lines(1, b"", [b"nobody reads this either"])
    console.close()
    assert b"bytes of standard output could not be written: nobody reads it" in err.text()


def test_what_a_full_disk_does_not_take_is_counted_and_told_at_the_end(sinks):
    err = sinks()
    with open("/dev/full", "wb", buffering=0) as full:
        console = Console(full, err, {})
        console.lines(1, b"0: ", [b"seven"])
        console.lines(1, b"0: ", [b"eight"])
        console.close()
    assert err.text() == b"ferrorpc: 18 bytes of standard output could not be written: No space left on device\n"


def test_a_terminal_that_was_closed_ends_nothing(sinks):
    reader, writer = pty.openpty()
    os.close(reader)
    with open(writer, "wb", buffering=0) as gone:
        console = Console(gone, gone, {})
        console.lines(1, b"0: ", [b"line"])
        console.progress(1, b"0: ", b"40 %", 0.0)
        console.close()


def test_bytes_that_are_no_text_are_shown_as_they_came_and_told_as_well_as_can_be(sinks):
    screen, err = sinks(terminal=True), sinks()
    stream = WorkerStream(Console(screen, err, {"NO_COLOR": "1"}), 1, b"0: ", shown=True, log=None)
    stream.feed(b"caf\xe9\n", 0.0)
    assert screen.text() == b"0: caf\xe9\n"
    assert stream.tail == ["caf\ufffd"]
    stream.feed(b"\r\xff 5%", 0.0)
    assert screen.text() == "\r\x1b[2K0: \ufffd 5%".encode()


def test_what_a_worker_has_written_begins_no_line_of_the_launchers(sinks):
    """Its last line may contain what other programs take for the end of one."""
    err = sinks()
    Console(sinks(), err, {}).say("its last line:\n  | bad\x0crank 1 ended\u2028\x85\x1e")
    assert err.text().decode() == "ferrorpc: its last line:\nferrorpc:   | bad\x0crank 1 ended\u2028\x85\x1e\n"


def test_the_launcher_can_name_a_file_whose_name_is_no_text(sinks):
    err = sinks()
    Console(sinks(), err, {}).say("all of its output: caf\udce9.log, d\u00e9j\u00e0 vu")
    assert err.text() == b"ferrorpc: all of its output: caf\xe9.log, d\xc3\xa9j\xc3\xa0 vu\n"


def test_the_end_leaves_no_progress_on_the_last_row(sinks):
    screen = sinks(terminal=True)
    console = Console(screen, screen, {"NO_COLOR": "1"})
    console.progress(2, b"0: ", b"40 %", 0.0)
    screen.text()
    console.close()
    assert screen.text() == b"\r\x1b[2K"


def test_a_log_that_takes_a_little_at_a_time_gets_all_of_it(sinks):
    class Narrow(io.BytesIO):
        def write(self, data):
            return super().write(data[:3])

    log = Narrow()
    WorkerStream(Console(sinks(), sinks(), {}), 1, b"0: ", shown=False, log=log).feed(b"eight by", 0.0)
    assert log.getvalue() == b"eight by"


def test_a_log_file_that_cannot_be_written_is_given_up_and_the_console_goes_on(sinks):
    out, err = sinks(), sinks()
    with open("/dev/full", "wb", buffering=0) as log:
        stream = WorkerStream(Console(out, err, {}), 1, b"0: ", shown=True, log=log)
        stream.feed(b"one\n", 0.0)
        stream.feed(b"two\n", 0.0)
    assert out.text() == b"0: one\n0: two\n"
    assert err.text() == b"ferrorpc: /dev/full is not written any further: No space left on device\n"
