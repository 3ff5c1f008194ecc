"""The coordinator's process from outside: flags, refusals, TLS, the HTTP port, and what it does not load."""

import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request

import grpc
import pytest
from ferrorpc_coordinator.journal import Journal

from ferrorpc.errors import LimitExceededError
from ferrorpc.v1 import barrier_pb2, session_pb2, session_pb2_grpc, store_pb2
from tests.integration.coordinator_process import Client, CoordinatorProcess, coordinator, joined, refused_start
from tests.integration.launching import environment
from tests.integration.ports import lasting_port
from tests.waiting import eventually


def test_it_loads_nothing_of_the_training_side():
    code = (
        "import sys, ferrorpc_coordinator.__main__, ferrorpc_coordinator.server;"
        "print([name for name in sys.modules if name.split('.')[0] in ('numpy', 'torch', 'cupy', 'prometheus_client', 'click')"
        " or name.startswith(('ferrorpc.group', 'ferrorpc.backends', 'ferrorpc.collectives', 'ferrorpc.coordination',"
        " 'ferrorpc.transports', 'ferrorpc.arrays', 'ferrorpc.kernels', 'ferrorpc.ddp', 'ferrorpc.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "environment", "complaint"),
    [
        (["--listen", "0.0.0.0:0"], {}, "without TLS"),
        (["--listen", "[::]:0"], {}, "without TLS"),
        (["--listen", "nonsense"], {}, "expected HOST:PORT"),
        (["--listen", "203.0.113.1:0", "--insecure"], {}, "cannot listen on 203.0.113.1:0"),
        ([], {"FERRORPC_LISTEN": "0.0.0.0:0"}, "without TLS"),
        (["--lease", "soon"], {}, "expected seconds"),
        ([], {"FERRORPC_LEASE": "soon"}, "FERRORPC_LEASE"),
        (["--tls-cert", "nowhere.pem"], {}, "belong together"),
        (["--tls-ca", "nowhere.pem"], {}, "protects nothing"),
        (["--tls-cert", "nowhere.pem", "--tls-key", "nowhere.pem"], {}, "nowhere.pem: No such file"),
        (["--token-file", "nowhere"], {}, "the token file cannot be read"),
        (["--data-dir", "/proc/nowhere"], {}, "/proc/nowhere cannot be used"),
        (["--no-such-flag"], {}, "unrecognized arguments: --no-such-flag"),
        ([], {"FERRORPC_STALL": "1e300"}, "FERRORPC_STALL"),
    ],
)
def test_what_cannot_work_is_refused_with_64_and_a_hint(flags, environment, complaint):
    environment = {"FERRORPC_LISTEN": "127.0.0.1:0", **environment}
    code, errors = refused_start(*flags, environment=environment)
    assert code == 64, errors
    assert complaint in errors
    assert errors.strip().splitlines()[-1].startswith("try: ")
    assert "Traceback" not in errors


def test_a_short_token_is_refused(tmp_path):
    (tmp_path / "token").write_text("abc")
    code, errors = refused_start("--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token"))
    assert code == 64
    assert "3 characters" in errors
    assert "abc" not in errors.replace(str(tmp_path), "")


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_coordinator_that_cannot_say_that_it_listens_serves_all_the_same(stdout):
    line = f'exec "{sys.executable}" -m ferrorpc_coordinator --listen 127.0.0.1:0 --log-level INFO {stdout}'
    with subprocess.Popen(["bash", "-c", line], stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert any("epoch 1" in told for told in process.stderr)
        process.terminate()
        process.stderr.read()


def test_insecure_allows_other_addresses():
    with coordinator("--insecure", listen="0.0.0.0:0") as process:
        port = process.address.rpartition(":")[2]
        with Client(f"127.0.0.1:{port}", "m") as member:
            assert member.welcome.incarnation == 1


def test_flags_win_over_variables_and_reach_the_members():
    variables = {"FERRORPC_LEASE": "9", "FERRORPC_HEARTBEAT_INTERVAL": "0.25"}
    with coordinator("--lease", "7", environment=variables) as process, Client(process.address, "m") as member:
        assert member.welcome.lease_ms == 7000
        assert member.welcome.heartbeat_interval_ms == 250


def test_the_command_without_flags_follows_its_variables(tmp_path):
    variables = {"FERRORPC_LISTEN": "127.0.0.1:0", "FERRORPC_DATA_DIR": str(tmp_path / "journal")}
    command = [sys.executable, "-m", "ferrorpc", "coordinator"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
    with process:
        address = process.stdout.readline().split()[1]
        process.terminate()
        assert process.wait(60) == 0
    assert address.startswith("127.0.0.1:")
    assert address != "127.0.0.1:29700"
    assert (tmp_path / "journal").is_dir()


def test_a_transient_one_does_without_the_journal_of_its_starter_and_not_without_that_of_its_user(tmp_path):
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "journal")
    with coordinator("--transient", "--data-dir", below) as process:
        assert "no journal: " in process.log()
    for flags, variables in (["--transient"], {"FERRORPC_DATA_DIR": below}), (["--data-dir", below], {}):
        code, errors = refused_start("--listen", "127.0.0.1:0", *flags, environment=variables)
        assert code == 64
        assert f"the data directory {below} cannot be used" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_end_of_a_terminal_drains_it_like_other_stop_signals(number):
    process = CoordinatorProcess()
    process.process.send_signal(number)
    process.process.wait(60)
    assert process.stop()[0] == 0


def started_where_it_is_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        return CoordinatorProcess()
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signals_drain_one_that_a_script_started_in_the_background(number):
    """There a shell makes its commands ignore SIGINT."""
    process = started_where_it_is_ignored(number)
    process.process.send_signal(number)
    process.process.wait(10)
    assert process.stop()[0] == 0


def test_one_that_is_to_outlive_its_terminal_does():
    process = started_where_it_is_ignored(signal.SIGHUP)  # as nohup does
    process.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.process.poll() is None
    assert process.stop()[0] == 0


def fetch(url):
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(text, name):
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture
def http_port():
    return lasting_port()


def test_metrics_tell_of_members_generations_and_the_store(tmp_path, http_port):
    flags = ("--http-port", str(http_port), "--grace", "0.2", "--data-dir", str(tmp_path / "data"))
    with coordinator(*flags) as process:
        assert fetch(f"http://127.0.0.1:{http_port}/healthz") == (200, "ok\n")
        assert fetch(f"http://127.0.0.1:{http_port}/other")[0] == 404
        members = joined(process.address, 3)
        members[0].store(set=store_pb2.SetOperation(key="k", value=b"12345"))
        for _ in range(3):
            members[0].send(beat=session_pb2.Beat())
        members[1].drop()
        members[0].event("broken")

        def scrape():
            status, text = fetch(f"http://127.0.0.1:{http_port}/metrics")
            assert status == 200
            return text if metric(text, "ferrorpc_heartbeats_total") == 3 else None

        text = eventually(scrape)
        assert metric(text, "ferrorpc_sessions ") == 2
        assert metric(text, 'ferrorpc_generation{job="job"}') == 1
        assert metric(text, 'ferrorpc_store_keys{job="job"}') == 1
        assert metric(text, 'ferrorpc_world_size{job="job"}') == 3
        assert metric(text, 'ferrorpc_open_barriers{job="job"}') == 0
        assert 0 <= metric(text, 'ferrorpc_heartbeat_age_seconds{job="job",rank="0"}') < 30
        assert 'rank="1"' not in text
        assert metric(text, "ferrorpc_build_info{") == 1
        assert metric(text, 'ferrorpc_generations_broken_total{job="job"}') == 1
        assert metric(text, 'ferrorpc_first_causes_total{cause="peer_lost"}') == 1
        assert metric(text, 'ferrorpc_member_changes_total{state="suspect"}') == 1
        assert metric(text, "ferrorpc_journal_commits_total") >= 2
        assert 'ferrorpc_members{job="job",state="dead"} 1.0' in text
        assert metric(text, 'ferrorpc_loop_lag_seconds_bucket{le="+Inf"}') > 0
        for member in (members[0], members[2]):
            member.drop()


def test_a_silent_connection_to_the_http_port_stops_nobody(http_port):
    with coordinator("--http-port", str(http_port)), socket.create_connection(("127.0.0.1", http_port)):
        assert fetch(f"http://127.0.0.1:{http_port}/healthz") == (200, "ok\n")


def test_everything_listens_on_ipv6_too(http_port):
    with coordinator("--http-port", str(http_port), listen="[::1]:0") as process:
        assert process.address.startswith("[::1]:")
        assert fetch(f"http://[::1]:{http_port}/healthz") == (200, "ok\n")
        with Client(process.address, "m") as member:
            assert member.welcome.incarnation == 1


def test_a_used_http_port_is_refused(http_port):
    with coordinator("--http-port", str(http_port)):
        code, errors = refused_start("--listen", "127.0.0.1:0", "--http-port", str(http_port))
        assert code == 64
        assert "--http-port" in errors


def test_log_lines_can_be_json(tmp_path):
    with coordinator("--log-level", "INFO", "--log-format", "json") as process:
        code, errors = process.stop()
        assert code == 0
        entries = [json.loads(line) for line in errors.splitlines()]
        assert any("draining" in entry["message"] for entry in entries)


@pytest.mark.root
def test_a_full_disk_refuses_writes_and_leaves_the_rest_working(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with coordinator("--data-dir", str(mount)) as process:
            members = joined(process.address, 2)
            members[0].store(set=store_pb2.SetOperation(key="k", value=b"kept"))
            with (mount / "filler").open("wb", buffering=0) as file:
                eventually(lambda: not _wrote(file, 65536))

            def write(key, data):
                try:
                    members[0].store(set=store_pb2.SetOperation(key=key, value=data))
                except LimitExceededError as error:
                    return str(error)
                return ""

            refusals = (write(f"big{number}", bytes(1 << 16)) for number in range(1000))
            assert "disk of the coordinator's journal is full" in next(filter(None, refusals))
            # Reads, barriers and pushes go on; deletes are taken.
            assert members[1].store(get=store_pb2.GetOperation(key="k")).value == b"kept"
            request = barrier_pb2.BarrierRequest(generation=1, name="b", ordinal=1, timeout_ms=10_000)
            numbers = [member.begin(barrier=request) for member in members]
            for member, number in zip(members, numbers, strict=True):
                assert len(member.result(number).barrier.payloads) == 2
            (mount / "filler").unlink()
            eventually(lambda: write("after", b"x") == "")
            for member in members:
                member.drop()
            assert process.stop()[0] == 0
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_once_its_journal_is_removed_the_status_says_that_it_keeps_all_in_memory(tmp_path):
    with coordinator("--data-dir", str(tmp_path / "data")) as process, Client(process.address, "m") as member:
        for durable in (True, False):
            member.store(set=store_pb2.SetOperation(key="k", value=b"v"))
            with grpc.insecure_channel(process.address) as channel:
                stub = session_pb2_grpc.CoordinatorServiceStub(channel)
                told = stub.Status(session_pb2.StatusRequest(job=member.job), timeout=10)
            assert told.durable is durable
            shutil.rmtree(tmp_path / "data", ignore_errors=True)


@pytest.mark.parametrize(
    "row",
    [
        ("member", "job/a", b"\xff\xff\xff"),
        ("generation", "job/first", b""),
        ("meta", "epoch", b"many"),
        ("meta", "cluster_id", None),
    ],
)
def test_a_journal_with_rows_that_make_no_sense_is_refused_in_words(tmp_path, row):
    journal = Journal.open(tmp_path, reserve_bytes=0)
    journal.commit([("meta", "cluster_id", b"c"), ("meta", "epoch", b"1"), row])
    journal.close()
    code, errors = refused_start("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path))
    assert code == 64
    assert f"the journal in {tmp_path} cannot be read" in errors
    assert "Traceback" not in errors


def test_a_start_that_waits_for_the_journal_says_so_and_can_be_ended(tmp_path):
    Journal.open(tmp_path, reserve_bytes=0).close()
    holder = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    code = (
        "import sys; from ferrorpc_coordinator.journal import Journal; from ferrorpc_coordinator.__main__ import main\n"
        "Journal.close.__defaults__ = (0.2,)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "another program holds the journal" in process.stderr.readline()
        process.terminate()
        told, _ = process.communicate(timeout=60)
    holder.close()
    assert process.returncode == 0
    assert not told  # it never said that it listens


def _wrote(file, count):
    try:
        return file.write(bytes(count)) == count
    except OSError:
        return False


def test_a_bug_in_the_state_ends_the_process_and_a_restart_goes_on(tmp_path):
    """After an exception memory and journal may differ, so it stops; what was acknowledged is on disk."""
    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")]
    code = (
        "import sys; from ferrorpc_coordinator.state.job import Job; from ferrorpc_coordinator.__main__ import main\n"
        "def receive(self, member, frame, real=Job.receive):\n"
        "    assert not frame.HasField('describe'), 'a planted bug'\n"
        "    real(self, member, frame)\n"
        "Job.receive = receive\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as broken:
        address = broken.stdout.readline().split()[1]
        member = Client(address, "m").greeted()
        member.store(set=store_pb2.SetOperation(key="k", value=b"kept"))
        member.begin(describe=session_pb2.DescribeRequest())
        _, errors = broken.communicate(timeout=60)
        assert broken.returncode == 70, errors
        assert "a planted bug" in errors
    token = member.welcome.resume_token
    member.drop()
    with coordinator(*flags[2:], listen=address) as process, Client(process.address, "m", resume=token) as again:
        assert again.welcome.resumed
        again.sequence = 10
        assert again.store(get=store_pb2.GetOperation(key="k")).value == b"kept"


def test_a_coordinator_that_keeps_nothing_says_so_to_whoever_starts_it_by_hand(tmp_path):
    for more, says in ((["--listen", "127.0.0.1:0"], True), (["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)], False)):
        command = [sys.executable, "-m", "ferrorpc_coordinator", *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            process.terminate()
            assert ("in memory" in process.stderr.read()) is says


def test_it_takes_as_many_descriptors_as_it_may_have():
    """Every member is one; what a service manager or a shell gives by default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        process = CoordinatorProcess()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        process.kill()


def test_where_it_ends_with_its_members_it_does_not_wait_for_those_that_it_may_be_cut_off_from():
    with coordinator("--lease", "0.5") as process:
        client = Client(process.address, "a").greeted()
        time.sleep(2)  # without a beat
        client.drop()
        eventually(lambda: "the coordinator may be cut off" in process.log(), "the coordinator to spare its member")
        process.process.send_signal(signal.SIGUSR1)
        assert process.process.wait(30) == 0
