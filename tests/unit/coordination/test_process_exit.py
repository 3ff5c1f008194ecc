"""How a process ends while it is a member."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MEMBER = """
import sys
from ferrorpc.coordination import process_exit
from ferrorpc.errors import BackendUnavailableError, ConfigError, PeerLostError
class Session:
    def leave(self, reason=""):
        process_exit.unregister(self)
        print("left:", reason, flush=True)
    def abandon_in_child(self):
        print("abandoned", flush=True)
"""
REGISTERED = """
session = Session()
process_exit.register(session)
"""


def run(code: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", MEMBER + REGISTERED + code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("", 0, "left: \n"),
        ("sys.exit(3)", 3, "left: \n"),
        ("raise ValueError('no such file')", 1, "left: ValueError: no such file\n"),
        ("raise KeyboardInterrupt", -2, "left: KeyboardInterrupt\n"),
        ("raise ConfigError('FERRORPC_LEASE')", 64, "left: ConfigError: FERRORPC_LEASE\n"),
        ("raise BackendUnavailableError('no GPU')", 64, "left: BackendUnavailableError: no GPU\n"),
        ("raise PeerLostError(2, 'signal 9')", 75, "left: PeerLostError: rank 2 was lost: signal 9\n"),
        ("process_exit.unregister(session)", 0, ""),
        ("process_exit.install_hooks(); raise ValueError('once')", 1, "left: ValueError: once\n"),
    ],
)
def test_a_process_says_goodbye_with_its_reason_and_ends_with_the_true_code(code, status, said):
    returned, output, _ = run(code)
    assert (returned, output) == (status, said)


def test_the_traceback_is_printed_by_the_hook_that_was_there_before():
    _, _, errors = run("raise ValueError('seen')")
    assert errors.count("ValueError: seen") == 1
    code = "sys.excepthook = lambda *about: print('mine', flush=True)\nprocess_exit._hook = None\n"
    code += "process_exit.install_hooks()\n1 / 0"
    _, output, _ = run(code)
    assert output == "mine\nleft: ZeroDivisionError: division by zero\n"


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise ConfigError('FERRORPC_LEASE')", 64)])
def test_an_interrupt_while_the_process_leaves_is_one_line_of_log_and_it_leaves_the_other_sessions(end, status):
    code = """
class Interrupted(Session):
    def leave(self, reason=""):
        super().leave(reason)
        raise KeyboardInterrupt
others = [Interrupted(), Interrupted()]
for each in others:
    process_exit.register(each)
"""
    returned, output, errors = run(code + end)
    assert (returned, output.count("left:"), errors.count("KeyboardInterrupt")) == (status, 3, 0)
    assert errors.count("interrupted at the end of this process: what it sent may not have arrived\n") == 2


KEPT = """
try:
    1 / 0
except ZeroDivisionError as error:
    sys.last_value = error  # as test runners and debuggers do
"""


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (KEPT, 0, ""),
        ("sys.excepthook = sys.__excepthook__\n1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("sys.excepthook = sys.__excepthook__\nsys.exit(3)", 3, ""),
    ],
    ids=["caught", "shown by a later hook", "an exit"],
)
def test_an_exception_that_was_kept_for_debuggers_is_a_reason_only_if_another_hook_may_have_shown_it(code, status, said):
    returned, output, _ = run(code)
    assert (returned, output) == (status, f"left: {said}\n")


AT_A_PROMPT = """
import code
lines = iter(["typo", "1 +* 1", "raise PeerLostError(2, 'at the prompt')", "print('still here', flush=True)"])
def read(prompt):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError
code.interact(banner="", readfunc=read, local=globals(), exitmsg="")
"""


@pytest.mark.parametrize(
    ("after", "status", "said"), [("", 0, ""), ("1 / 0", 1, "ZeroDivisionError: division by zero")], ids=["", "then fails"]
)
def test_an_error_at_a_prompt_is_shown_and_ends_nothing(tmp_path: Path, after, status, said):
    script = tmp_path / "script.py"
    script.write_text(MEMBER + REGISTERED + AT_A_PROMPT + after)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, f"still here\nleft: {said}\n"), done.stderr
    assert [done.stderr.count(name) for name in ("NameError", "SyntaxError", "at the prompt")] == [1, 1, 1]


def test_an_error_at_the_interpreters_own_prompt_is_shown_and_ends_nothing():
    lines = ["typo", "1 +* 1", "raise PeerLostError(2, 'at the prompt')", "print('still here', flush=True)", ""]
    command = [sys.executable, "-i", "-c", MEMBER + REGISTERED]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "still here\nleft: \n"), done.stderr
    assert [done.stderr.count(name) for name in ("NameError", "SyntaxError", "at the prompt")] == [1, 1, 1]


AFTER_A_LOSS = """
try:
    latch.check()
except PeerLostError:
    {}
"""


INTERRUPTED = """
latch.cause.again = KeyboardInterrupt
latch.check()
"""


IN_A_THREAD = """
import threading
thread = threading.Thread(target=lambda: latch.check())
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("level", "raised", "shown", "shortened"),
    [
        ("WARNING", "latch.check()", ["<string>"], 1),
        ("DEBUG", "latch.check()", ["<string>", "guard.py"], 0),
        ("WARNING", "ferrorpc.config.whole_number(None)", ["<string>", "config.py"], 0),  # not an error that ferrorpc means
        ("WARNING", "ferrorpc.guard.seconds_of(seat2, 1.0)", ["<string>", "<string>"], 1),
        ("WARNING", AFTER_A_LOSS.format("latch.check()"), ["<string>", "<string>"], 2),
        ("WARNING", AFTER_A_LOSS.format("1 / 0"), ["<string>", "<string>"], 1),
        ("WARNING", AFTER_A_LOSS.format("raise KeyError('state') from ValueError('no state')"), ["<string>"], 0),
        ("WARNING", AFTER_A_LOSS.format("raise ExceptionGroup('all', [sys.exception()])"), ["<string>"] * 3, 2),
        ("DEBUG", AFTER_A_LOSS.format("1 / 0"), ["<string>", "guard.py", "<string>"], 0),
        ("WARNING", INTERRUPTED, ["<string>"], 1),
        ("DEBUG", INTERRUPTED, ["<string>", "guard.py"], 0),
        ("WARNING", IN_A_THREAD, ["threading.py", "threading.py", "<string>"], 1),
        ("DEBUG", IN_A_THREAD, ["threading.py", "threading.py", "<string>", "guard.py"], 0),
    ],
)
def test_an_error_of_the_library_and_ctrl_c_in_it_are_shown_without_the_librarys_own_lines(level, raised, shown, shortened):
    code = f"""
import logging
import ferrorpc.config
import ferrorpc.guard
logging.getLogger("ferrorpc").setLevel("{level}")
class Seat2:
    def __float__(self):
        raise PeerLostError(2, "signal 9")
seat2 = Seat2()
latch = ferrorpc.guard.Latch()
latch.trip(PeerLostError(2, "signal 9"))
{raised}
"""
    _, _, errors = run(code)
    assert [Path(name).name for name in re.findall(r'File "(.*)", line', errors)] == shown
    assert errors.count("(1 call within ferrorpc is left out above; FERRORPC_LOG_LEVEL=DEBUG shows it)") == shortened


def test_a_forked_child_has_no_seat_and_says_nothing_at_its_end():
    code = """
import os, warnings
warnings.simplefilter("ignore")
child = os.fork()
if child:
    os.waitpid(child, 0)
"""
    _, output, _ = run(code)
    assert output == "abandoned\nleft: \n"


IN_A_PROCESS_OF_MULTIPROCESSING = """
import multiprocessing
def body():
    global member
    member = Session()
    process_exit.register(member)
    {how}
if __name__ == "__main__":
    rank = multiprocessing.get_context("{method}").Process(target=body)
    rank.start()
    rank.join(60)
    sys.exit(rank.exitcode)
"""


FAILS_WITH = """
    try:
        1 / 0
    except ZeroDivisionError:
        sys.exit({})
"""
"""As torch.multiprocessing ends a process whose function raises."""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("", 0, "left: \n"),
        ("sys.exit(3)", 3, "left: \n"),
        ("1 / 0", 1, "left: ZeroDivisionError: division by zero\n"),
        (FAILS_WITH.format(3), 3, "left: ZeroDivisionError: division by zero\n"),
        (FAILS_WITH.format(0), 0, "left: \n"),
    ],
)
def test_a_process_of_multiprocessing_says_goodbye_like_any_other(tmp_path: Path, method, how, status, said) -> None:
    """Those that were forked run no function of atexit before Python 3.14, and sys.excepthook is called in none."""
    script = tmp_path / "script.py"
    script.write_text(MEMBER + IN_A_PROCESS_OF_MULTIPROCESSING.format(how=how, method=method))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, said)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_of_multiprocessing_leaves_after_its_threads_have_ended(tmp_path: Path, method: str) -> None:
    """As any other does: they may train."""
    script = tmp_path / "script.py"
    train = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.5), print('trained', flush=True))).start()"
    script.write_text(MEMBER + IN_A_PROCESS_OF_MULTIPROCESSING.format(how=train, method=method))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "trained\nleft: \n")
