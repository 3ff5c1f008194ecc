"""The launcher's own coordinator: started, started again on its address, and reached by the commands."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ferrorpc.cli.client import connect
from ferrorpc.config import Config
from ferrorpc.v1 import session_pb2, store_pb2
from tests.integration.launching import (
    children_of,
    coordinator_of,
    environment,
    read_numbers,
    run,
    start,
    started,
    wait_until_gone,
    write_script,
)
from tests.waiting import eventually

WAITER = """
    import os, sys, time
    with open(f"{sys.argv[1]}/ready{os.environ['RANK']}", "w") as file:
        file.write("1\\n")
    while not os.path.exists(f"{sys.argv[1]}/go"):
        time.sleep(0.02)
    print("went on")
"""


def ferrorpc(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ferrorpc", *arguments], capture_output=True, text=True, timeout=30, env=environment()
    )


def position(address):
    return json.loads(ferrorpc("status", "--addr", address, "--job", "night", "--json").stdout)["position"]


def wait_healthy(address):
    eventually(lambda: ferrorpc("health", "--addr", address).returncode == 0, f"a healthy coordinator at {address}")


def store(address, request_id, **operation):
    request = session_pb2.UnaryStoreRequest(
        job="night", client_id="test", request=store_pb2.StoreRequest(request_id=request_id, **operation)
    )
    with connect(Config({"coordinator": address})) as stub:
        return stub.Store(request, timeout=10, wait_for_ready=True).response


@pytest.fixture
def job(tmp_path):
    with started("-n", "2", "--job", "night", write_script(tmp_path, WAITER), str(tmp_path)) as launcher:
        read_numbers(tmp_path, "ready*", 2)
        yield launcher


def test_health_and_status_reach_the_launchers_coordinator(job, tmp_path):
    _, address = coordinator_of(job.pid)
    wait_healthy(address)
    assert ferrorpc("health", "--addr", address).stdout == f"{address}: SERVING\n"
    unknown = ferrorpc("health", "--addr", address, "--service", "nope")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "try: leave --service out" in unknown.stderr
    nobody = ferrorpc("status", "--addr", address, "--job", "night")
    assert (nobody.returncode, nobody.stdout) == (64, "")
    assert "there is no job 'night'" in nobody.stderr
    nothing = ferrorpc("status", "--addr", address)
    assert (nothing.returncode, nothing.stdout) == (0, f"no job has begun at {address} yet\n")
    empty = json.loads(ferrorpc("status", "--addr", address, "--json").stdout)
    assert (empty["job"], empty["members"]) == ("default", [])
    store(address, 1, set=store_pb2.SetOperation(key="k", value=b"v"))
    page = ferrorpc("status", "--addr", address, "--job", "night")
    assert page.returncode == 0, page.stderr
    assert page.stdout.startswith("job night  generation 0")
    assert ferrorpc("status", "--addr", address).returncode == 64, "another job has begun"
    found = json.loads(ferrorpc("status", "--addr", address, "--job", "night", "--json").stdout)
    assert (found["job"], found["durable"]) == ("night", True)
    (tmp_path / "go").touch()
    out, err = job.communicate(timeout=60)
    assert (job.returncode, sorted(out.splitlines()), err) == (0, ["0: went on", "1: went on"], "")


def is_served(page):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{page}/healthz", timeout=10).read() == b"ok\n"


def test_a_job_that_lives_a_while_is_told_of_how_to_watch_it_also_after_the_coordinator_was_started_again(tmp_path):
    pytest.importorskip("uvicorn", reason="the status page needs the extra ui")
    name = "night's;$(1)"
    launcher = start("-n", "1", "--job", name, "--http-port", "0", write_script(tmp_path, WAITER), str(tmp_path))
    try:
        line = launcher.stderr.readline()
        told = re.fullmatch(
            r"ferrorpc: to watch this job: \S*ferrorpc (status --watch --coordinator \S+ --job \S+), or (http://\S+)/\n", line
        )
        assert told, line
        words = shlex.split(told[1])
        assert words[-1] == name
        words.remove("--watch")
        assert ferrorpc(*words).returncode in (0, 64), "reached; the job is known once somebody joins"
        assert is_served(told[2])
        pid, address = coordinator_of(launcher.pid)
        os.kill(pid, signal.SIGKILL)
        assert not wait_until_gone([pid])
        eventually(lambda: is_served(told[2]), "the page at the address that was told")
    finally:
        (tmp_path / "go").touch()
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert err == f"ferrorpc: the coordinator ended (SIGKILL); it is started again on {address}\n"


def test_a_coordinator_that_dies_is_started_again_on_its_address_and_journal(job, tmp_path):
    pid, address = coordinator_of(job.pid)
    wait_healthy(address)
    store(address, 1, set=store_pb2.SetOperation(key="k", value=b"kept"))
    before = position(address)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: coordinator_of(job.pid)[0] != pid, "another coordinator")
    assert coordinator_of(job.pid)[1] == address
    wait_healthy(address)
    after = position(address)
    assert store(address, 2, get=store_pb2.GetOperation(key="k")).value == b"kept"
    assert after["cluster_id"] == before["cluster_id"]
    assert after["epoch"] == before["epoch"] + 1
    (tmp_path / "go").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0
    assert f"ferrorpc: the coordinator ended (SIGKILL); it is started again on {address}" in err


def can_bind(port):
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_nobody_else_gets_the_ports_of_a_job(job):
    """Neither that of torch.distributed's store before rank 0 has it, nor the coordinator's between its end and its restart."""
    worker = next(pid for pid, command in children_of(job.pid).items() if "script.py" in command)
    variables = dict(line.split("=", 1) for line in Path(f"/proc/{worker}/environ").read_text().split("\0") if line)
    assert not can_bind(int(variables["MASTER_PORT"]))
    pid, address = coordinator_of(job.pid)
    os.kill(pid, signal.SIGKILL)
    assert not wait_until_gone([pid])
    assert not can_bind(int(address.rpartition(":")[2]))
    wait_healthy(address)


def test_a_coordinator_that_cannot_be_configured_ends_the_job_with_64_and_says_why(tmp_path):
    script = write_script(tmp_path, "import time; time.sleep(60)")
    result = run("-n", "1", script, FERRORPC_TOKEN_FILE=str(tmp_path / "missing"), timeout=30)
    assert result.returncode == 64
    assert str(tmp_path / "missing") in result.stderr
    assert "ferrorpc: the coordinator cannot start on 127.0.0.1:" in result.stderr
    assert "started again" not in result.stderr, "it would be told the same"


def test_a_coordinator_that_fails_before_it_listens_ends_the_job_with_75(tmp_path):
    write_script(tmp_path, "raise SystemExit(70)", name="ferrorpc_coordinator.py")
    script = write_script(tmp_path, "import time; time.sleep(60)")
    result = run("-n", "1", script, timeout=30, PYTHONPATH=before_others(tmp_path))
    assert result.returncode == 75
    assert result.stderr.count("the coordinator ended (exit code 70); it is started again") == 2
    *_, reason, fate = result.stderr.splitlines()
    assert reason.startswith("ferrorpc: the coordinator cannot start on 127.0.0.1:")
    assert fate == "ferrorpc: then: rank 0 stopped by ferrorpc (SIGTERM)"


def before_others(directory):
    """A PYTHONPATH with which modules in this directory are found first."""
    return os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])


def test_workers_of_a_job_whose_coordinator_cannot_start_may_save_what_they_have(tmp_path):
    coordinator = f"""
import os, time
while not os.path.exists({str(tmp_path / "ready")!r}):
    time.sleep(0.02)
raise SystemExit(64)
"""
    write_script(tmp_path, coordinator, name="ferrorpc_coordinator.py")
    body = """
        import signal, sys, time
        def save(number, frame):
            print("saved")
            raise SystemExit(3)
        signal.signal(signal.SIGTERM, save)
        open(sys.argv[1], "w").close()
        time.sleep(60)
    """
    result = run("-n", "1", write_script(tmp_path, body), str(tmp_path / "ready"), PYTHONPATH=before_others(tmp_path))
    assert (result.returncode, result.stdout) == (64, "0: saved\n"), result.stderr


def test_a_job_outlives_a_coordinator_that_has_served_and_cannot_be_started_again_for_a_while(tmp_path):
    """As while somebody else has the port of its page."""
    coordinator = f"""
import pathlib, sys, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
if count == 0:
    print("listening 127.0.0.1:29700 cluster 1", flush=True)
if count < 5:
    print("start", count, file=sys.stderr, flush=True)
    sys.exit(64)
pathlib.Path({str(tmp_path / "go")!r}).touch()
time.sleep(60)
"""
    write_script(tmp_path, coordinator, name="ferrorpc_coordinator.py")
    result = run("-n", "2", write_script(tmp_path, WAITER), str(tmp_path), PYTHONPATH=before_others(tmp_path))
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["0: went on", "1: went on"]), result.stderr
    assert result.stderr.count("the coordinator ended (exit code 64); it is started again") == 3, "the 1st, 2nd and 4th time"
    assert re.findall("^coordinator: start (.)$", result.stderr, re.MULTILINE) == ["0", "1", "2", "4"]


def test_a_given_coordinator_is_used_and_none_is_started(tmp_path):
    service = subprocess.Popen(
        [sys.executable, "-m", "ferrorpc", "coordinator", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        address = service.stdout.readline().split()[1]
        launcher = start("-n", "2", "--rdzv-endpoint", address, write_script(tmp_path, WAITER), str(tmp_path))
        read_numbers(tmp_path, "ready*", 2)
        with pytest.raises(AssertionError, match="a coordinator"):
            coordinator_of(launcher.pid, timeout=0.5)
        (tmp_path / "go").touch()
        assert launcher.wait(timeout=60) == 0
        launcher.communicate()
        service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=60) == 0, "SIGTERM drains"
    finally:
        service.kill()
        service.communicate()


def test_files_of_the_user_do_not_shadow_what_the_helpers_import(tmp_path):
    for name in ("random", "logging", "grpc", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.write_text(
        "import ferrorpc\nwith ferrorpc.init_process_group() as group:\n    print(float(group.all_reduce(1.0)))\n"
    )
    command = [sys.executable, "-P", "-m", "ferrorpc", "run", "-n", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["0: 2.0", "1: 2.0"]), result.stderr


def run_with_temporary_directory_of_size(tmp_path, size):
    """Runs two workers while TMPDIR is a tmpfs of `size` (as in its mount options); returns that directory and the result."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a disk of its own needs root")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no mount namespaces")
    script = write_script(
        tmp_path,
        """
        import ferrorpc
        with ferrorpc.init_process_group() as group:
            group.store.set(f"of/{group.rank}", bytes(1000))
            group.barrier()
            print(len(group.store.get("of/1")))
        """,
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    on_that_disk = f'mount -t tmpfs -o size={size} none "$0" && TMPDIR="$0" exec "$@"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", on_that_disk, disk, sys.executable, "-m", "ferrorpc", "run", "-n", "2", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0: 1000", "1: 1000"]
    return disk, result


@pytest.mark.root
@pytest.mark.parametrize("size", ["64k", "1m", "6m", "64m,nr_inodes=4", "64m,nr_inodes=7"])
def test_a_job_runs_though_its_temporary_directory_has_no_room_for_a_journal(tmp_path, size):
    small, result = run_with_temporary_directory_of_size(tmp_path, size)
    (line,) = result.stderr.splitlines()
    assert re.search(f" no journal: .*{re.escape(str(small))}/", line)
    assert line.endswith("should the coordinator end, so does the job (TMPDIR can name another disk)")


@pytest.mark.root
def test_a_temporary_directory_without_a_limit_has_room_for_a_journal(tmp_path):
    """A tmpfs of size 0 has none, and says of itself that it has no blocks at all."""
    _, result = run_with_temporary_directory_of_size(tmp_path, "0")
    assert result.stderr == ""
