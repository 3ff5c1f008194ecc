"""init_process_group in real processes, started as launchers start them."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.launching import children_of, environment, wait_until_gone
from tests.integration.ports import lasting_port
from tests.waiting import eventually

RANK = """
import numpy, ferrorpc
group = ferrorpc.init_process_group(timeout=30.0)
total = float(group.all_reduce(numpy.float32(group.rank + 1)))
print(f"{group.rank} {group.size} {group.backend} {total}\\n", end="", flush=True)  # at once: ranks may share a pipe
"""


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets on one node; `port` is for the coordinator."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "FERRORPC_PORT": port}
    return environment(MASTER_ADDR="localhost", MASTER_PORT="29500", **{name: str(value) for name, value in numbers.items()})


def start(code: str, variables: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcome(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # one that hangs is not left to the tests that follow
    return process.returncode, output, errors


@pytest.fixture
def port():
    return lasting_port()


@pytest.fixture(scope="module")
def service():
    service = CoordinatorProcess()
    yield service
    service.stop()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_process_alone_is_a_world_of_one_without_a_socket():
    code, output, _ = outcome(start(RANK, environment()))
    assert (code, output) == (0, "0 1 simulated 1.0\n")


def test_replicas_that_know_only_the_coordinator_and_their_number_are_given_ranks(service):
    variables = environment(FERRORPC_COORDINATOR=service.address, FERRORPC_WORLD_SIZE="3", FERRORPC_JOB="replicas")
    outcomes = [outcome(process) for process in [start(RANK, variables) for _ in range(3)]]
    assert [code for code, _, _ in outcomes] == [0, 0, 0], outcomes
    assert sorted(output for _, output, _ in outcomes) == [f"{rank} 3 grpc 6.0\n" for rank in range(3)]


def test_under_torchrun_rank_0_starts_a_coordinator_that_ends_after_it(port):
    processes = [start(RANK, torchrun(rank, 3, port)) for rank in range(3)]
    outcomes = [outcome(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [0, 0, 0], outcomes
    assert [output for _, output, _ in outcomes] == [f"{rank} 3 grpc 6.0\n" for rank in range(3)]
    eventually(lambda: not listens(port), "the end of the coordinator with its job")


def test_rank_0s_coordinator_serves_the_others_until_they_have_left_too(port):
    longer = "\nif group.rank == 1:\n    import time; time.sleep(3); group.store.set('late', b'yes'); print(group.store.keys())"
    processes = [start(RANK + longer, torchrun(rank, 2, port)) for rank in range(2)]
    outcomes = [outcome(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert outcomes[1][1] == "1 2 grpc 3.0\n['late']\n"
    eventually(lambda: not listens(port), "the end of the coordinator with its job")


def test_kill_9_of_the_rank_that_started_the_coordinator_is_pushed_to_the_others(port):
    code = RANK + "\nif group.rank == 0:\n    import time; time.sleep(60)\ngroup.recv(0, timeout=30)"
    processes = [start(code, torchrun(rank, 2, port)) for rank in range(2)]
    assert [process.stdout.readline() for process in processes] == ["0 2 grpc 3.0\n", "1 2 grpc 3.0\n"]
    processes[0].send_signal(signal.SIGKILL)
    code, _, errors = outcome(processes[1])
    assert code == 75
    assert "PeerLostError: rank 0" in errors
    assert processes[0].wait(60) == -signal.SIGKILL
    processes[0].stdout.close()  # its coordinator, which stays for a while, has these too
    processes[0].stderr.close()
    eventually(lambda: not listens(port), "the end of the coordinator soon after that")


def test_ranks_that_are_started_again_at_once_meet_again(port):
    """As torchrun does it: the coordinator of those before lingers at their address, to tell others how they ended."""
    before = [start(RANK + "\nimport time; time.sleep(60)", torchrun(rank, 2, port)) for rank in range(2)]
    for process in before:
        assert process.stdout.readline().endswith(" 2 grpc 3.0\n")
        process.kill()
        process.wait(60)
        process.stdout.close()  # as below
        process.stderr.close()
    outcomes = [outcome(process) for process in [start(RANK, torchrun(rank, 2, port)) for rank in range(2)]]
    assert [(code, output) for code, output, _ in outcomes] == [(0, "0 2 grpc 3.0\n"), (0, "1 2 grpc 3.0\n")], outcomes


def test_signals_that_every_process_of_a_job_gets_do_not_end_the_coordinator_before_its_ranks(port):
    """As from a scheduler, before its time is up: ranks that handle them save what they have, together."""
    longer = "\nwarned = signal.sigwait({signal.SIGUSR1})\nprint(group.store.add('saved', 1), group.all_reduce(warned))"
    code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})" + RANK + longer
    ranks = [start(code, torchrun(rank, 2, port)) for rank in range(2)]
    assert [rank.stdout.readline() for rank in ranks] == ["0 2 grpc 3.0\n", "1 2 grpc 3.0\n"]
    (coordinator,) = children_of(ranks[0].pid)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGTERM):
        os.kill(coordinator, number)
    time.sleep(0.5)  # one that ends has time to
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
    outcomes = [outcome(rank) for rank in ranks]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert sorted(output for _, output, _ in outcomes) == [f"{place} {2 * signal.SIGUSR1}\n" for place in (1, 2)]
    assert wait_until_gone([coordinator]) == []


def test_a_rank_that_comes_before_the_coordinator_of_the_run_before_has_ended_joins_that_of_its_own(port):
    """It kept the old one going, on the port that the new rank 0 waited for, until both gave up."""
    before = [start(RANK, torchrun(rank, 2, port)) for rank in range(2)]
    assert [rank.wait(60) for rank in before] == [0, 0], "not their pipes, which the coordinator has too"
    early = start(RANK, torchrun(1, 2, port))
    time.sleep(0.5)
    outcomes = [outcome(rank) for rank in (start(RANK, torchrun(0, 2, port)), early, *before)]
    assert [(code, output) for code, output, _ in outcomes] == [(0, f"{rank} 2 grpc 3.0\n") for rank in (0, 1, 0, 1)], outcomes


def test_files_of_the_user_do_not_shadow_what_rank_0s_coordinator_imports(port, tmp_path):
    for name in ("random", "logging", "select", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.write_text(RANK)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)], env=torchrun(rank, 2, port), cwd=tmp_path, stdout=-1, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    outcomes = [outcome(process) for process in processes]
    assert [(code, output) for code, output, _ in outcomes] == [(0, "0 2 grpc 3.0\n"), (0, "1 2 grpc 3.0\n")], outcomes


HELD = """
import atexit, gc, threading

ending, held = threading.Event(), threading.Event()

def hold():
    ending.wait()
    for call in [each for each in gc.get_objects() if type(each).__name__ == "_MultiThreadedRendezvous"]:
        call._state.condition.acquire()
        print("held", flush=True)
    held.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
atexit.register(lambda: (ending.set(), held.wait()))  # first in, last out
"""


def test_a_script_that_closes_nothing_ends_although_threads_of_grpc_stopped_with_their_locks(port):
    ranks = [start(HELD + RANK, torchrun(rank, 2, port) | {"FERRORPC_TRANSPORT": "grpc"}) for rank in range(2)]
    outcomes = [outcome(rank) for rank in ranks]
    assert [(code, errors) for code, _, errors in outcomes] == [(0, "")] * 2
    assert [output.splitlines()[0] for _, output, _ in outcomes] == ["0 2 grpc 3.0", "1 2 grpc 3.0"]
    assert all("held" in output for _, output, _ in outcomes)


SLOW_STREAMS = """
import time, ferrorpc
from grpc._channel import Channel

def slowly(*arguments, method=Channel.stream_stream, **options):
    time.sleep(0.5)
    return method(*arguments, **options)

Channel.stream_stream = slowly
"""

NO_THREADS_AT_EXIT = """
import atexit, threading

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

atexit.register(setattr, threading.Thread, "start", refuse)  # last in, first out
"""


def test_a_script_that_closes_nothing_has_sent_everything_where_an_exiting_interpreter_starts_no_threads(port):
    """As that of Python 3.12. Rank 0 has its result before its own stream to rank 1 begins, and gRPC needs threads for it."""
    scripts = [SLOW_STREAMS + RANK + NO_THREADS_AT_EXIT, RANK]
    ranks = [start(script, torchrun(rank, 2, port) | {"FERRORPC_TRANSPORT": "grpc"}) for rank, script in enumerate(scripts)]
    assert [outcome(rank) for rank in ranks] == [(0, f"{rank} 2 grpc 3.0\n", "") for rank in range(2)]


def test_a_port_that_is_taken_is_a_config_error_naming_its_variable(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        impatient = "from ferrorpc.bootstrap import coordinator\ncoordinator.PORT_SECONDS = 0.1\n"
        code, _, errors = outcome(start(impatient + RANK, torchrun(0, 2, port)))
    assert code == 64
    assert "FERRORPC_PORT" in errors


def test_two_runs_of_mpiexec_that_meet_at_one_port_do_not_mix(port):
    """Rank 1 of another run asks at this run's coordinator before its own rank 1 does."""
    launched = environment(PMI_SIZE="2", MPI_LOCALNRANKS="2", FERRORPC_PORT=str(port))
    stranger = 'PMI_RANK=1 "$0" -c "$1"; true'
    run = 'PMI_RANK=0 "$0" -c "$1" & sleep 2; PMI_RANK=1 "$0" -c "$1"; wait'
    other, own = (
        subprocess.Popen(
            ["sh", "-c", commands, sys.executable, RANK],
            env=launched,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for commands in (stranger, run)
    )
    code, output, errors = outcome(own)
    os.killpg(other.pid, signal.SIGKILL)
    assert (code, sorted(output.splitlines())) == (0, ["0 2 grpc 3.0", "1 2 grpc 3.0"]), errors
    assert other.communicate(timeout=60)[0] == ""


def test_two_processes_of_one_launcher_on_a_host_are_one_run(port):
    """As of `mpiexec -hosts localhost,127.0.0.1`: each believes to be alone on its node."""
    launched = environment(PMI_SIZE="2", MPI_LOCALNRANKS="1", MASTER_ADDR="127.0.0.1", FERRORPC_PORT=str(port))
    commands = [f'PMI_RANK={rank} "$0" -c "$1"; true' for rank in range(2)]
    ranks = [
        subprocess.Popen(["sh", "-c", command, sys.executable, RANK], env=launched, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["0 2 grpc 3.0\n", "1 2 grpc 3.0\n"]


def test_where_rank_0_does_not_come_the_others_say_who_starts_the_coordinator(port):
    code, _, errors = outcome(start(RANK.replace("30.0", "1.0"), torchrun(1, 2, port)))
    assert code != 0
    assert "CoordinatorUnavailableError" in errors
    assert "try: rank 0 starts the coordinator there" in errors


def test_a_process_that_waits_alone_is_told_which_variables_say_that_there_are_others(port):
    code, _, errors = outcome(start(RANK.replace("30.0", "1.0"), torchrun(0, 2, port)))
    assert code != 0
    assert "missing: rank 1" in errors
    assert "or, if this process is to run alone, unset RANK and WORLD_SIZE" in errors


def test_a_misspelt_variable_is_told_of():
    _, _, errors = outcome(start(RANK, environment(FERRORPC_TIMOUT="3")))
    assert "FERRORPC_TIMOUT is set, but no setting is called so: FERRORPC_TIMEOUT is" in errors


def test_a_wrong_variable_ends_with_exit_code_64():
    code, _, errors = outcome(start(RANK, environment(RANK="3", WORLD_SIZE="2")))
    assert code == 64
    assert "RANK=3 is not below WORLD_SIZE=2" in errors


def test_a_second_group_while_one_is_open_is_refused_and_after_close_allowed(service):
    code = """
import ferrorpc
first = ferrorpc.init_process_group(world_size=1, job="twice")
try:
    ferrorpc.init_process_group()
except ferrorpc.UsageError as error:
    print(error.message)
first.close()
with ferrorpc.init_process_group(world_size=1, job="twice") as second:
    print(second.rank, second.backend)
"""
    code, output, errors = outcome(start(code, environment(FERRORPC_COORDINATOR=service.address)))
    assert code == 0, errors
    assert output == "this process has an open group already\n0 grpc\n"


@pytest.mark.parametrize("hook", ["", "import sys; sys.excepthook = sys.__excepthook__"], ids=["", "shown by a later hook"])
def test_an_exception_in_the_script_is_the_others_cause(service, hook):
    code = RANK + f"\nif group.rank == 1:\n    {hook}\n    raise ValueError('bad batch')\ngroup.recv(1)"
    processes = []
    for rank in range(2):
        more = {"FERRORPC_COORDINATOR": service.address, "FERRORPC_JOB": f"raises{bool(hook)}"}
        processes.append(start(code, torchrun(rank, 2, 1) | more))
    outcomes = [outcome(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [75, 1], outcomes
    assert "ValueError: bad batch" in outcomes[0][2]


def test_a_script_that_never_closes_ends_soon(service):
    code = RANK + "\nimport sys, time\nsys.stderr.write(str(time.time()))"
    variables = environment(FERRORPC_COORDINATOR=service.address, FERRORPC_WORLD_SIZE="1", FERRORPC_JOB="unclosed")
    code, _, errors = outcome(start(code, variables))
    assert code == 0
    assert time.time() - float(errors) < 10.0


def test_nothing_begins_on_a_rank_after_it_has_aborted(service):
    code = """
import ferrorpc
for _ in range(5):
    with ferrorpc.init_process_group() as group:
        group.abort("enough")
        try:
            print("went on to", group.all_reduce(1))
        except ferrorpc.GroupAbortedError as error:
            print(error.rank, error.cause)
"""
    variables = environment(FERRORPC_COORDINATOR=service.address, FERRORPC_WORLD_SIZE="1", FERRORPC_JOB="aborts")
    code, output, errors = outcome(start(code, variables))
    assert (code, output) == (0, "0 enough\n" * 5), errors


def test_what_is_asked_for_goes_before_the_variable_which_auto_leaves_it_to():
    code = """
import ferrorpc
for asked in ({}, {"backend": "simulated"}, {"backend": "hybrid"}):
    try:
        with ferrorpc.init_process_group(**asked) as group:
            print(group.backend)
    except ferrorpc.BackendUnavailableError as error:
        print(error.message)
"""
    exit_code, output, errors = outcome(start(code, environment(FERRORPC_BACKEND="grpc", CUDA_VISIBLE_DEVICES="")))
    assert exit_code == 0, errors
    asked_by_variable, asked_for, other = output.splitlines()
    assert (asked_by_variable, asked_for) == ("grpc", "simulated")
    assert "GPU" in other
