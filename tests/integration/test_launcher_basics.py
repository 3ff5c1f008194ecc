"""`ferrorpc run` with scripts that know nothing of ferrorpc."""

import errno
import fcntl
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.integration.launching import environment, read_numbers, run, start, started, write_script
from tests.waiting import eventually


def test_an_empty_script_starts_and_ends(tmp_path):
    result = run("-n", "4", write_script(tmp_path, ""), timeout=20)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_worker_gets_its_environment_and_its_arguments(tmp_path):
    script = write_script(
        tmp_path,
        """
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FERRORPC_NAME",
                 "FERRORPC_COORDINATOR", "FERRORPC_WORLD_SIZE", "GRPC_ENABLE_FORK_SUPPORT", "TORCHELASTIC_RUN_ID"]
        with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
            json.dump({"argv": sys.argv[2:], **{name: os.environ[name] for name in names}}, file)
        """,
    )
    result = run("--nproc_per_node", "3", "--rdzv_id", "night", script, str(tmp_path), "-n", "--flag")
    assert result.returncode == 0, result.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in found} == {"3"}
    assert {one["TORCHELASTIC_RUN_ID"] for one in found} == {"night"}
    assert len({one["FERRORPC_NAME"] for one in found}) == 3
    assert len({(one["MASTER_PORT"], one["FERRORPC_COORDINATOR"]) for one in found}) == 1
    assert found[0]["argv"] == ["-n", "--flag"], "what follows the script belongs to it"


def test_a_launcher_in_a_worker_goes_by_what_the_worker_has_set_and_not_by_what_the_worker_was_given(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        os.environ.update(variable.split("=") for variable in sys.argv[1:])
        os.execv(sys.executable, [sys.executable, "-m", "ferrorpc", "run", "--dry-run", "-n", "2", sys.argv[0]])
        """,
    )
    shown = run("--job", "outer", script).stdout
    assert "(started by the launcher; this is a worker of another launcher" in shown
    assert "FERRORPC_JOB=default" in shown
    assert " RANK=1" in shown
    shown = run("--job", "outer", script, "FERRORPC_COORDINATOR=127.0.0.1:1234", "FERRORPC_WORLD_SIZE=1:2").stdout
    assert "coordinator 127.0.0.1:1234 (given)" in shown
    assert " RANK=1" not in shown, "an elastic world has no ranks before the rendezvous"


def test_lines_are_whole_and_carry_their_rank(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        for number in range(200):
            print("x" * 100, number)
        print("no newline at the end", end="", file=sys.stderr)
        """,
    )
    result = run("-n", "2", script)
    lines = result.stdout.splitlines()
    assert len(lines) == 400
    for rank in "01":
        mine = [line for line in lines if line.startswith(f"{rank}: ")]
        assert mine == [f"{rank}: {'x' * 100} {number}" for number in range(200)]
    assert sorted(result.stderr.splitlines()) == ["0: no newline at the end", "1: no newline at the end"]


def test_only_the_ranks_asked_for_are_shown_and_all_are_logged(tmp_path):
    body = "import os; [os.write(number, b'%d of rank %s\\n' % (number, os.environb[b'RANK'])) for number in (1, 2)]"
    script = write_script(tmp_path, body)
    result = run("-n", "3", "--ranks", "1", "--log-dir", str(tmp_path / "logs"), "--job", "j", script)
    assert (result.stdout, result.stderr) == ("1: 1 of rank 1\n", "1: 2 of rank 1\n")
    logs = sorted((tmp_path / "logs").rglob("*.log"))
    assert [str(path.relative_to(tmp_path)) for path in logs] == [f"logs/j/attempt0/rank{rank}.log" for rank in range(3)]
    assert [set(path.read_text().splitlines()) for path in logs] == [
        {f"{n} of rank {rank}" for n in (1, 2)} for rank in range(3)
    ]


def test_logs_of_an_earlier_launch_are_kept(tmp_path):
    """As when a scheduler starts a job that has failed again."""
    script = write_script(tmp_path, "import sys; print(sys.argv[1])")
    for number in range(3):
        assert run("-n", "1", "--log-dir", str(tmp_path / "logs"), "--job", "j", script, str(number)).returncode == 0
    kept = {path.name: path.read_text() for path in (tmp_path / "logs/j/attempt0").iterdir()}
    assert kept == {"rank0.log": "2\n", "rank0.log.1": "0\n", "rank0.log.2": "1\n"}


def test_the_first_failing_rank_is_reported_last_with_its_words_and_its_exit_code(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            for number in range(30):
                print("line", number, file=sys.stderr)
            sys.exit(7)
        time.sleep(60)
        """,
    )
    result = run("-n", "3", "--grace", "0.3", script)
    assert result.returncode == 7
    report = [line for line in result.stderr.splitlines() if line.startswith("ferrorpc: ")]
    assert report[0] == "ferrorpc: rank 1 ended with exit code 7; it was the first to fail."
    assert report[2:-1] == [f"ferrorpc:   | line {number}" for number in range(10, 30)]
    assert report[-1] == "ferrorpc: then: ranks 0, 2 stopped by ferrorpc (SIGTERM)"
    assert "Traceback" not in result.stderr, "the launcher has no traceback of its own to show"


def test_a_rank_that_dies_of_a_signal_gives_128_plus_n(tmp_path):
    result = run("-n", "2", write_script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert result.returncode == 128 + 11
    assert "ended with SIGSEGV; it was the first to fail." in result.stderr


def test_a_traceback_of_a_worker_is_shown_and_its_code_kept(tmp_path):
    result = run("-n", "2", "--grace", "0.3", write_script(tmp_path, "raise ValueError('bad batch')"))
    assert result.returncode == 1
    assert "ferrorpc:   | ValueError: bad batch" in result.stderr


@pytest.mark.parametrize(("end", "code"), [("sys.exit(1)", 75), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_who_says_that_it_lost_a_member_is_a_victim_unless_its_exit_says_something_else(tmp_path, end, code):
    body = f"import os, sys; print('ferrorpc.errors.PeerLostError: rank 9 was lost', file=sys.stderr); {end}"
    assert run("-n", "1", write_script(tmp_path, body)).returncode == code


def test_a_gang_is_restarted_until_it_ends_well(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", attempt, flush=True)
        note = f"{sys.argv[1]}/{attempt}"
        if os.environ["RANK"] == "1":
            open(note, "w").close()
        while not os.path.exists(note):
            time.sleep(0.01)
        if attempt < 2 and os.environ["RANK"] == "0":
            sys.exit(1)
        if attempt < 2:
            time.sleep(60)
        """,
    )
    logs = tmp_path / "logs"
    result = run(
        "-n", "2", "--max-restarts", "3", "--grace", "0.2", "--log-dir", str(logs), "--job", "j", script, str(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    assert [(logs / f"j/attempt{attempt}/rank1.log").read_text() for attempt in range(3)] == [
        f"attempt {attempt}\n" for attempt in range(3)
    ]
    assert sorted(result.stdout.splitlines()) == [f"{rank}: attempt {attempt}" for rank in range(2) for attempt in range(3)]
    assert "ferrorpc: restart 2 of 3: ranks 0, 1, because rank 0 ended with exit code 1\n" in result.stderr


def test_a_restart_names_the_exception_in_whatever_colours(tmp_path):
    body = """
        import os, sys
        if os.environ["LOCAL_RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "00":
            print("\\x1b[1;35mValueError\\x1b[0m: \\x1b[35mloss is nan\\x1b[0m", file=sys.stderr)
            sys.exit(1)
    """
    result = run("-n", "1", "--max-restarts", "1", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert "because rank 0 ended with exit code 1: ValueError: loss is nan\n" in result.stderr


def test_nothing_of_a_failed_worker_is_left_when_it_is_started_again(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, subprocess, sys, time
        note = f"{sys.argv[1]}/child"
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            child = subprocess.Popen(["sleep", "60"])
            open(note, "w").write(str(child.pid))
            print("half a line", end="")
            sys.exit(1)
        try:
            state = open(f"/proc/{open(note).read()}/stat").read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            state = "gone"
        print(state)
        """,
    )
    result = run("-n", "1", "--max-restarts", "1", script, str(tmp_path), timeout=30)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "0: half a line"), result.stderr
    assert result.stdout.splitlines()[1] in ("0: gone", "0: Z")


def test_half_a_line_is_shown_though_somebody_else_could_still_end_it(tmp_path):
    body = "import subprocess; subprocess.Popen(['setsid', 'sleep', '5']); print('half a line', end='')"
    assert run("-n", "1", write_script(tmp_path, body), timeout=30).stdout == "0: half a line\n"


def test_workers_that_fail_together_are_started_again_once_their_reports_had_time_to_arrive(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        with open(f"{sys.argv[1]}/{'ended' if is_first else 'began'}{os.environ['RANK']}", "w") as file:
            file.write(f"{time.monotonic_ns()}\\n")
        sys.exit(1 if is_first else 0)
        """,
    )
    flags = ("--coordinator", "127.0.0.1:1", "--max-restarts", "2", "--restart", "worker")
    result = run("-n", "2", *flags, script, str(tmp_path))
    assert result.returncode == 0, result.stderr
    ended, began = (read_numbers(tmp_path, f"{name}?", 2, timeout=0.1) for name in ("ended", "began"))
    waits = [later - before for before, later in zip(ended, began, strict=True)]
    assert min(waits) >= 1e9, "a report that nobody answers, and that would name the successor, has a second"


def test_each_of_several_workers_that_fail_together_is_told_of_with_its_exception(tmp_path):
    body = """
        import os, sys, time
        directory, rank = sys.argv[1], os.environ["RANK"]
        if rank != "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError(f"loss of {rank} is nan")
        open(f"{directory}/began{rank}", "w").close()
        while not all(os.path.exists(f"{directory}/began{each}") for each in range(3)):
            time.sleep(0.02)
    """
    flags = ("--coordinator", "127.0.0.1:1", "--max-restarts", "4", "--restart", "worker")
    result = run("-n", "3", *flags, write_script(tmp_path, body), str(tmp_path))
    assert result.returncode == 0, result.stderr
    line = r"^ferrorpc: restart [12] of 4: rank (\d), because rank \1 ended with exit code 1: (.*)$"
    told = re.findall(line, result.stderr, re.MULTILINE)
    assert sorted(told) == [("1", "ValueError: loss of 1 is nan"), ("2", "ValueError: loss of 2 is nan")]


def test_a_stop_ends_a_restart_that_waits_for_an_unreachable_coordinator(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            open(f"{sys.argv[1]}/ended", "w").write("1\\n")
            sys.exit(1)
        time.sleep(60)
        """,
    )
    flags = ("--coordinator", "127.0.0.1:1", "--max-restarts", "1", "--shutdown-timeout", "60")
    with started("-n", "1", *flags, script, str(tmp_path)) as launcher:
        read_numbers(tmp_path, "ended", 1)
        time.sleep(0.4)  # until the launcher has seen the end: its restart may now wait a second for the report's answer
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_restart_that_waits_is_given_up_where_the_others_are_stopped(tmp_path):
    """Not begun after them: nobody would stop it before the shutdown timeout."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        ended = pathlib.Path(sys.argv[1], "ended")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            time.sleep(100)
        if os.environ["RANK"] == "1":
            while not ended.exists():
                time.sleep(0.01)
            time.sleep(0.2)  # until the restart of rank 0 waits a second for an answer to the report of its end
            sys.exit(3)
        ended.touch()
        sys.exit(1)
        """,
    )
    flags = ("--coordinator", "127.0.0.1:1", "--max-restarts", "1", "--restart", "worker", "--grace", "0")
    result = run("-n", "2", *flags, "--shutdown-timeout", "100", script, str(tmp_path), timeout=50)
    assert result.returncode == 3
    assert "then: rank 0 stopped by ferrorpc" in result.stderr


def test_a_restart_goes_without_the_log_that_cannot_be_made(tmp_path):
    """The disk may be full, or not there any more; the other workers are not ended for that."""
    body = "import os; assert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'; print('goes on')"
    in_the_way = tmp_path / "logs" / "default" / "attempt1"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    result = run("-n", "1", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), write_script(tmp_path, body))
    assert (result.returncode, result.stdout) == (0, "0: goes on\n")
    assert f"ferrorpc: {in_the_way / 'rank0.log'} is not written: File exists" in result.stderr


def test_workers_do_not_share_what_is_typed(tmp_path):
    script = write_script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "2", script]
    done = subprocess.run(command, env=environment(), input="typed\n", capture_output=True, text=True, timeout=60, check=False)
    assert sorted(done.stdout.splitlines()) == ["0: ''", "1: ''"]


def test_with_restart_worker_the_others_keep_running(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        directory, rank = sys.argv[1], os.environ["RANK"]
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        if rank == "1" and attempt == "0":
            raise ValueError("loss is nan")
        if rank == "1":
            open(f"{directory}/replaced", "w").close()
        while not os.path.exists(f"{directory}/replaced"):
            time.sleep(0.02)
        """,
    )
    result = run("-n", "2", "--max-restarts", "1", "--restart", "worker", script, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0: attempt 0", "1: attempt 0", "1: attempt 1"]
    told = "ferrorpc: restart 1 of 1: rank 1, because rank 1 ended with exit code 1: ValueError: loss is nan\n"
    assert told in result.stderr


def test_modules_and_programs_run_too(tmp_path):
    write_script(tmp_path, "import sys; print(sys.argv[1:])", name="ferro_module.py")
    result = run("-n", "1", "-m", "ferro_module", "a", PYTHONPATH=str(tmp_path))
    assert result.stdout == "0: ['a']\n"
    result = run("-n", "1", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert result.stdout == "0: 0 of 1\n"


def test_a_program_whose_reader_goes_away_ends_as_in_any_shell():
    result = run("-n", "1", "--no-python", "bash", "-c", "yes | head -1; echo ${PIPESTATUS[@]}")
    assert (result.stdout, result.stderr) == ("0: y\n0: 141 0\n", ""), "SIGPIPE must not stay ignored, as Python has it"


def test_dry_run_shows_what_would_be_set_and_runs_nothing(tmp_path):
    result = run("-n", "2", "--dry-run", write_script(tmp_path, "raise SystemExit(9)"))
    assert result.returncode == 0
    assert "  RANK=1\n" in result.stdout
    assert "  PATH=" not in result.stdout, "only what the launcher sets"
    assert f"command {sys.executable} " in result.stdout


def test_a_reader_that_stops_holds_the_job_up_and_not_the_signal_that_ends_it(tmp_path):
    process = start("-n", "1", write_script(tmp_path, "while True: print('x' * 200)"))
    try:
        eventually(lambda: is_full(process.stdout), "the launcher waits for its reader", seconds=60)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        _, err = process.communicate(timeout=60)
    assert "bytes of standard output could not be written: nobody reads it" in err


def is_full(pipe):
    """Whether much waits in it, and nothing more comes."""
    before = waiting_bytes(pipe)
    time.sleep(0.5)
    return before >= 1 << 14 and waiting_bytes(pipe) == before


def waiting_bytes(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def test_a_reader_that_goes_away_ends_the_job_as_it_ends_any_filter(tmp_path):
    script = write_script(tmp_path, "while True: print('y' * 80)")
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrorpc", "run", "-n", "2", script],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(writer)
    os.read(reader, 100)
    os.close(reader)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + 13, err


def test_ctrl_c_leaves_the_workers_their_time_also_where_it_ends_the_reader(tmp_path):
    """As in `ferrorpc run ... | tee log`, where it reaches tee as well."""
    script = write_script(
        tmp_path,
        """
        import signal, sys, time
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        open(f"{sys.argv[1]}/ready", "w").write("1\\n")
        signal.sigwait([signal.SIGINT])
        print("saving", flush=True)
        print("saving", file=sys.stderr, flush=True)
        time.sleep(1)
        open(f"{sys.argv[1]}/saved", "w").write("1\\n")
        """,
    )
    launcher = start("-n", "1", script, str(tmp_path))
    try:
        read_numbers(tmp_path, "ready", 1)
        launcher.stdout.close()
        launcher.stderr.close()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=60) == 0, "the worker ended well"
    finally:
        launcher.kill()
        launcher.wait()
    assert (tmp_path / "saved").exists()


def test_ctrl_c_ends_a_launcher_that_still_starts_workers(tmp_path):
    """Such as one with a zero too many."""
    with started("-n", "3000", "--log-dir", str(tmp_path), "--no-python", "sleep", "60") as launcher:
        eventually(lambda: len(list(tmp_path.rglob("*.log"))) > 3, "the first workers")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=100) == 128 + signal.SIGINT
        assert len(list(tmp_path.rglob("*.log"))) < 3000, "the others were not started"


@pytest.mark.parametrize(
    "body", ["import threading; threading.Thread(target=print, args=('x',)).start()", "import os; os._exit(0)"]
)
def test_scripts_may_end_as_they_like(tmp_path, body):
    assert run("-n", "2", write_script(tmp_path, body)).returncode == 0


@pytest.mark.parametrize("descriptors", [30, 10], ids=["at a worker", "at the guard process"])
def test_more_processes_than_the_machine_allows_are_refused_in_words(tmp_path, descriptors):
    script = write_script(tmp_path, "import time; time.sleep(60)")
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "100", script]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))  # noqa: E731
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    found = {**environment(), "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False)
    assert done.returncode == 64
    assert list(temporary.iterdir()) == []
    assert f"no other can be started: {os.strerror(errno.EMFILE)}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_launcher_without_standard_streams_runs_its_job(tmp_path, missing):
    script = write_script(tmp_path, f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').close()")
    line = f'exec "{sys.executable}" -m ferrorpc run -n 2 "{script}" {missing}'
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}
