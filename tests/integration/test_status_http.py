"""The HTTP port of a real coordinator: the page's parts, JSON, the stream of states, and who may read them."""

import base64
import http.client
import json
import socket
import subprocess
import sys

import pytest

from ferrorpc.v1 import barrier_pb2, session_pb2
from tests.integration.coordinator_process import START_SECONDS, coordinator, joined
from tests.waiting import eventually

pytest.importorskip("starlette", reason="the status page needs the extra ui")
pytest.importorskip("uvicorn", reason="the status page needs the extra ui")

SECRET = "correct-horse:battery-staple"


class Http:
    """Asks one HTTP port."""

    def __init__(self, address):
        self.address = address

    def ask(self, path, method="GET", **headers):
        """Status, headers, body."""
        connection = http.client.HTTPConnection(self.address, timeout=10)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body

    def json(self, path):
        status, headers, body = self.ask(path)
        assert (status, headers["content-type"]) == (200, "application/json"), body
        return json.loads(body)

    def events(self, path, count):
        """The first events of a stream, as (kind, value)."""
        connection = http.client.HTTPConnection(self.address, timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.getheader("content-type").startswith("text/event-stream")
        found, kind = [], ""
        while len(found) < count:
            line = answer.readline().decode().rstrip("\n")
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((kind, json.loads(line.removeprefix("data: "))))
        connection.close()
        return found


@pytest.fixture(scope="module")
def running():
    with coordinator("--http-port", "0", "--grace", "0.3", "--lease", "60") as process:
        yield process, Http(process.http_address)


@pytest.fixture
def job(request):
    return request.node.name


def test_the_page_and_everything_it_needs_come_from_here(running):
    _, port = running
    status, headers, body = port.ask("/")
    page = body.decode()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "http" not in page.replace("http-equiv", "")
    for name, kind in (("page.js", "text/javascript"), ("model.js", "text/javascript"), ("page.css", "text/css")):
        status, headers, body = port.ask(f"/{name}")
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert b"http:" not in body
        assert b"https:" not in body
    assert port.ask("/icon.svg")[1]["content-type"] == "image/svg+xml"
    assert port.ask("/../server.py")[0] == 404


def test_a_browser_is_told_to_load_nothing_from_elsewhere_and_to_keep_nothing(running):
    _, port = running
    for path in ("/", "/api/v1/jobs", "/nowhere", "/metrics"):
        _, headers, _ = port.ask(path)
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/api/v1/state", "/events", "/metrics"])
def test_nothing_can_be_written(running, method, path):
    _, port = running
    assert port.ask(path, method)[0] == 405


def test_a_state_tells_of_members_barriers_and_what_happened(running, job):
    process, port = running
    members = joined(process.address, 3, job=job)
    for rank in (0, 2):
        members[rank].send(beat=session_pb2.Beat(step=4 + rank, activity="all_reduce #4", operation_ms=120, generation=1))
        members[rank].begin(barrier=barrier_pb2.BarrierRequest(generation=1, name="epoch", ordinal=1, timeout_ms=60_000))
    both = ("epoch", [0, 2], [1])

    def state_with_both():
        found = port.json(f"/api/v1/state?job={job}")
        return found if [(each["name"], each["arrived"], each["missing"]) for each in found["barriers"]] == [both] else None

    state = eventually(state_with_both)
    assert (state["epoch"], state["generation"], len(state["cluster_id"])) == (1, 1, 32)
    columns = state["members"]
    assert {len(column) for column in columns.values()} == {3}
    assert columns["rank"] == [0, 1, 2]
    assert columns["state"] == ["active"] * 3
    assert (columns["step"][2], columns["activity"][2], columns["operation_ms"][2]) == (6, "all_reduce #4", 120)
    members[1].drop()
    state = eventually(lambda: (found := port.json(f"/api/v1/state?job={job}"))["generations"][-1]["end_reason"] and found)
    assert state["members"]["state"][1] == "dead"
    assert [event["kind"] for event in state["occurrences"]] == ["generation", "suspect", "dead", "broken"]
    assert state["occurrences"][-1]["rank"] == 1
    for member in members:
        member.drop()


def test_the_busiest_job_is_told_of_where_none_is_named(running, job):
    process, port = running
    members = joined(process.address, 5, job=job)
    jobs = port.json("/api/v1/jobs")
    assert jobs[0] == {"job": job, "members": 5, "generation": 1}
    assert port.json("/api/v1/state")["job"] == job
    assert port.ask("/api/v1/state?job=nowhere")[0] == 404
    for member in members:
        member.drop()


def test_states_stream_as_they_change_after_a_minute_of_beats(running, job):
    process, port = running
    members = joined(process.address, 2, job=job)
    history = eventually(lambda: dict(port.events(f"/events?job={job}", 1))["history"])
    assert sorted(history) == sorted(member.name for member in members)
    assert all(ages and all(isinstance(age, int) for age in ages) for ages in history.values())
    for member in members:
        member.send(beat=session_pb2.Beat(step=9, generation=1))
    (kind, _), *states = port.events(f"/events?job={job}", 4)
    assert kind == "history"
    assert [kind for kind, _ in states] == ["state"] * 3
    assert states[0][1]["at_ms"] < states[1][1]["at_ms"] < states[2][1]["at_ms"]
    assert states[-1][1]["members"]["step"] == [9, 9]
    for member in members:
        member.drop()


def test_a_job_that_does_not_exist_yet_streams_nothing_but_its_absence(running):
    _, port = running
    assert port.events("/events?job=later", 2) == [("history", {}), ("state", None)]


def test_a_stream_ends_with_the_coordinator():
    with coordinator("--http-port", "0") as process:
        connection = http.client.HTTPConnection(process.http_address, timeout=10)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.readline() == b"retry: 1000\n"
        assert process.stop()[0] == 0
        while answer.readline():
            pass
        connection.close()


def test_on_loopback_only_requests_for_loopback_are_answered(running):
    _, port = running
    for name in ("localhost", "127.0.0.2:29701", "[::1]:29701"):
        assert port.ask("/api/v1/jobs", host=name)[0] == 200
    for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert port.ask("/api/v1/jobs", host=name)[0] == 421


def test_with_a_token_everything_but_health_asks_for_it(tmp_path):
    secret = tmp_path / "token"
    secret.write_text(SECRET)
    basic = base64.b64encode(f"anybody:{SECRET}".encode()).decode()
    wrong = base64.b64encode(b"anybody:wrong").decode()
    with coordinator("--http-port", "0", "--token-file", str(secret)) as process:
        port = Http(process.http_address)
        for path in ("/", "/page.js", "/metrics", "/api/v1/jobs", "/events", "/healthz/metrics"):
            status, headers, body = port.ask(path)
            assert (status, headers["www-authenticate"]) == (401, 'Basic realm="ferrorpc"')
            assert (headers["cache-control"], headers["x-frame-options"]) == ("no-store", "DENY")
            assert SECRET.encode() not in body
        assert port.ask("/healthz")[0] == 200
        for given in (f"Bearer {SECRET}", f"Basic {basic}"):
            assert port.ask("/api/v1/jobs", authorization=given)[0] == 200
            assert port.ask("/api/v1/jobs", authorization=given.replace("B", "b", 1), host="page.example")[0] == 200
        for given in ("Bearer wrong", f"Basic {wrong}", "Basic !", f"Digest {SECRET}", SECRET):
            assert port.ask("/api/v1/jobs", authorization=given)[0] == 401


def test_without_the_extra_a_coordinator_with_an_http_port_says_what_to_install():
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'starlette' else real(name, *a)\n"
        "from ferrorpc_coordinator.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--listen", "127.0.0.1:0", "--http-port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert result.returncode == 64
    assert "needs starlette" in result.stderr
    assert "ferrorpc[ui]" in result.stderr


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_both_families():
    """A pod of a cluster without IPv4 is asked at its IPv6 address, by gRPC and by HTTP."""
    with coordinator("--http-port", "0", "--insecure", listen="0.0.0.0:0") as process:
        port = process.http_address.rpartition(":")[2]
        assert [Http(f"{host}:{port}").ask("/healthz")[0] for host in ("127.0.0.1", "[::1]")] == [200, 200]
