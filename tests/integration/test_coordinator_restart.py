"""What a coordinator's end means: kill -9 forgets nothing acknowledged, SIGTERM says goodbye, and there is only one."""

import shutil
import signal
import sqlite3
import threading
import time

import grpc
import pytest
from ferrorpc_coordinator.journal import Journal
from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.settings import Settings
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrorpc.errors import CoordinatorUnavailableError, StaleGenerationError
from ferrorpc.v1 import barrier_pb2, identity_pb2, session_pb2, session_pb2_grpc, store_pb2
from ferrorpc.wire import status
from ferrorpc.wire.error_detail import restore
from tests.integration.coordinator_process import (
    Client,
    CoordinatorProcess,
    channel_to,
    coordinator,
    joined,
    refused_start,
)
from tests.waiting import eventually


def resumed(member, address):
    """The same member on a new stream."""
    token = member.welcome.resume_token
    member.drop()
    again = Client(address, member.name, job=member.job, instance=member.instance, resume=token).greeted()
    again.sequence = member.sequence
    return again


def test_a_killed_coordinator_comes_back_with_members_generation_and_store(tmp_path):
    first = CoordinatorProcess("--data-dir", str(tmp_path / "data"))
    members = joined(first.address, 4)
    members[0].store(set=store_pb2.SetOperation(key="k", value=b"before"))
    members[1].store(add=store_pb2.AddOperation(key="n", amount=3))
    epoch = members[0].positions[-1].epoch
    first.kill()
    second = first.again()
    try:
        assert second.address == first.address
        assert second.cluster_id == first.cluster_id
        members = [resumed(member, second.address) for member in members]
        assert all(member.welcome.resumed and member.welcome.durable for member in members)
        assert members[0].positions[-1].epoch == epoch + 1
        assert members[0].positions[-1].generation == 1
        assert members[2].store(get=store_pb2.GetOperation(key="k")).value == b"before"
        assert members[2].store(get=store_pb2.GetOperation(key="n")).value == b"3"
        # The generation lives on: its barrier still works.
        request = barrier_pb2.BarrierRequest(generation=1, name="after", ordinal=1, timeout_ms=10_000)
        numbers = [member.begin(barrier=request) for member in members]
        for member, number in zip(members, numbers, strict=True):
            assert len(member.result(number).barrier.payloads) == 4
        assert not any(event.HasField("broken") for member in members for event in member.events)
        for member in members:
            member.drop()
    finally:
        second.kill()


def test_a_request_repeated_after_a_restart_is_carried_out_once(tmp_path):
    with coordinator("--data-dir", str(tmp_path / "data")) as first:
        member = Client(first.address, "m").greeted()
        request = store_pb2.StoreRequest(request_id=77, add=store_pb2.AddOperation(key="n", amount=1))
        assert member.call(store=request).store.number == 1
        first.kill()
        with_same_data = first.again()
        try:
            member = resumed(member, with_same_data.address)
            assert member.call(store=request).store.number == 1
            request.request_id = 78
            assert member.call(store=request).store.number == 2
            member.drop()
        finally:
            with_same_data.kill()


def test_every_acknowledged_set_survives_kills_at_any_moment(tmp_path):
    process = CoordinatorProcess("--data-dir", str(tmp_path / "data"))
    acknowledged = {}
    try:
        for life in range(4):
            member = Client(process.address, f"m{life}").greeted()
            stop = threading.Event()

            def write(member=member, life=life, stop=stop):
                number = 0
                try:
                    while not stop.is_set():
                        key, value = f"{life}.{number % 50}", b"%d" % number
                        member.store(set=store_pb2.SetOperation(key=key, value=value))
                        acknowledged[key] = number
                        number += 1
                except AssertionError:
                    pass  # the stream ended under the request: it may be there or not

            writer = threading.Thread(target=write)
            writer.start()
            eventually(lambda life=life: len([key for key in list(acknowledged) if key.startswith(f"{life}.")]) > 10 + 7 * life)
            process.kill()
            stop.set()
            writer.join(30)
            member.drop()
            process = process.again()
            with Client(process.address, f"reader{life}") as reader:
                for key, number in acknowledged.items():
                    found = int(reader.store(get=store_pb2.GetOperation(key=key)).value)
                    # One later write of the key may have been under way.
                    assert found in (number, number + 50)
    finally:
        process.kill()


def test_every_commit_leaves_a_journal_that_recovers(tmp_path):
    """The journal is copied after each group, as kill -9 at that moment would leave it, and recovered in this process."""
    data = tmp_path / "data"
    copies = []
    with coordinator("--data-dir", str(data)) as process:

        def copy():
            directory = tmp_path / f"copy{len(copies)}"
            directory.mkdir()
            with sqlite3.connect(data / "journal.sqlite") as source, sqlite3.connect(directory / "journal.sqlite") as target:
                source.backup(target)
            source.close()
            target.close()
            copies.append((directory, dict(expected)))

        expected = {}
        copy()
        members = joined(process.address, 3)
        copy()
        for number in range(12):
            member = members[number % 3]
            member.store(set=store_pb2.SetOperation(key=f"k{number % 5}", value=b"%d" % number))
            expected[f"k{number % 5}"] = b"%d" % number
            copy()
        cluster_id = process.cluster_id
        for member in members:
            member.drop()
    for directory, values in copies:
        journal = Journal.open(directory, reserve_bytes=0)
        recovered = Coordinator(Settings(durable=True), journal.rows(), mint=lambda: "fresh", now_ns=0)
        journal.close()
        assert recovered.cluster_id == cluster_id
        assert recovered.epoch == 2
        if values:
            keyspace = recovered.jobs["job"].store.keyspace
            assert {key: keyspace.get(key).value for key in values} == values
            assert sorted(m.rank for m in recovered.jobs["job"].members) == [0, 1, 2]
        shutil.rmtree(directory)


def test_without_a_data_directory_a_restart_is_another_cluster():
    first = CoordinatorProcess()
    member = Client(first.address, "m").greeted()
    assert not member.welcome.durable
    token = member.welcome.resume_token
    member.drop()
    first.kill()
    second = first.again()
    try:
        assert second.cluster_id != first.cluster_id
        again = Client(second.address, "m", resume=token)
        again.until(lambda: again.welcome or again.events)
        assert again.welcome is None or not again.welcome.resumed
        again.drop()
    finally:
        second.kill()


def test_a_second_coordinator_cannot_share_the_data_directory(tmp_path):
    with coordinator("--data-dir", str(tmp_path / "data")) as process:
        code, errors = refused_start("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
        assert code == 64
        assert f"in use by another coordinator (process {process.process.pid})" in errors
        assert "\ntry: " in errors


def test_a_second_coordinator_cannot_share_the_port(tmp_path):
    with coordinator() as process:
        code, errors = refused_start("--listen", process.address, "--data-dir", str(tmp_path / "data"))
        assert code == 64
        assert f"cannot listen on {process.address}" in errors
    # The refused one gave the data directory back.
    Journal.open(tmp_path / "data").close()


@pytest.mark.parametrize("durable", [True, False], ids=["journal", "memory"])
def test_sigterm_says_draining_ends_streams_and_exits_zero(tmp_path, durable):
    flags = ("--data-dir", str(tmp_path / "data")) if durable else ()
    process = CoordinatorProcess(*flags)
    members = joined(process.address, 2)
    waiting = members[0].begin(store=store_pb2.StoreRequest(get=store_pb2.GetOperation(key="never", wait_ms=60_000)))
    channel = channel_to(process.address)
    call = session_pb2_grpc.CoordinatorServiceStub(channel).Barrier.future(
        session_pb2.UnaryBarrierRequest(
            job="job", client_id="tool", request=barrier_pb2.BarrierRequest(name="b", ordinal=1, count=2, timeout_ms=60_000)
        ),
        timeout=30,
    )
    watch = iter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=30))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    began = time.monotonic()
    while process.process.poll() is None:  # more signals end it no other way, not even in its last milliseconds
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    code, errors = process.stop()
    assert code == 0, errors
    assert time.monotonic() - began < 20
    assert "Traceback" not in errors
    for member in members:
        assert member.event("draining").within_ms > 0
        member.until(lambda member=member: member.ended)
    assert waiting not in members[0].results
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert isinstance(status.error_of(caught.value), CoordinatorUnavailableError)
    channel.close()
    for member in members:
        member.drop()
    if durable:
        second = process.again()
        try:
            assert resumed(members[0], second.address).welcome.resumed
        finally:
            second.kill()


def test_a_replaced_member_is_fenced():
    with coordinator("--grace", "0.2") as process, channel_to(process.address) as channel:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        old = Client(process.address, "m").greeted()
        old.drop()
        request = session_pb2.StatusRequest(job="job")
        eventually(lambda: stub.Status(request, timeout=10).members[0].state == identity_pb2.MEMBER_STATE_DEAD)
        with Client(process.address, "m", instance="another") as new:
            assert new.welcome.incarnation == 2
            late = Client(process.address, "m", instance=old.instance, resume=old.welcome.resume_token)
            assert isinstance(restore(late.event("fenced")), StaleGenerationError)
            late.drop()
