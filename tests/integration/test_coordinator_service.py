"""A real coordinator process, asked over real gRPC: what each RPC answers, and what it refuses."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrorpc.errors import (
    AuthenticationError,
    BarrierTimeoutError,
    CodecError,
    CoordinatorUnavailableError,
    LimitExceededError,
    MessageTooLargeError,
    PeerLostError,
    RendezvousTimeoutError,
    StoreTimeoutError,
    UsageError,
)
from ferrorpc.v1 import barrier_pb2, rendezvous_pb2, session_pb2, session_pb2_grpc, store_pb2
from ferrorpc.wire import options, status
from ferrorpc.wire.error_detail import restore
from tests.integration.coordinator_process import Client, channel_to, coordinator, join_request, joined
from tests.waiting import eventually

SERVICE = "ferrorpc.v1.CoordinatorService"


@pytest.fixture(scope="module")
def address():
    with coordinator() as process:
        yield process.address


@pytest.fixture(scope="module")
def stub(address):
    with channel_to(address) as channel:
        yield session_pb2_grpc.CoordinatorServiceStub(channel)


@pytest.fixture
def job(request):
    return request.node.name


def error_of(call, *arguments, **more):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **{"timeout": 10, **more})
    return caught.value.code(), status.error_of(caught.value)


def test_four_members_join_and_agree_on_the_world(address, job):
    members = joined(address, 4, job=job)
    worlds = [[(peer.rank, peer.name) for peer in member.results[1].join.peers] for member in members]
    assert worlds[0] == [(rank, member.name) for rank, member in enumerate(members)]
    assert all(world == worlds[0] for world in worlds)
    assert {member.results[1].join.generation for member in members} == {1}
    assert {position.cluster_id for member in members for position in member.positions} == {members[0].positions[0].cluster_id}
    for member in members:
        member.drop()


def test_a_barrier_gathers_the_payloads_in_rank_order(address, job):
    members = joined(address, 4, job=job)
    for ordinal in (1, 2):
        numbers = [
            member.begin(
                barrier=barrier_pb2.BarrierRequest(
                    generation=1, name="b", ordinal=ordinal, timeout_ms=10_000, payload=b"%d/%d" % (rank, ordinal)
                )
            )
            for rank, member in enumerate(members)
        ]
        for member, number in zip(members, numbers, strict=True):
            assert list(member.result(number).barrier.payloads) == [b"%d/%d" % (rank, ordinal) for rank in range(4)]
    for member in members:
        member.drop()


def test_a_barrier_that_lacks_a_rank_names_it(address, job):
    members = joined(address, 3, job=job)
    request = barrier_pb2.BarrierRequest(generation=1, name="b", ordinal=1, timeout_ms=300)
    numbers = [member.begin(barrier=request) for member in members[:2]]
    for member, number in zip(members, numbers, strict=False):
        with pytest.raises(BarrierTimeoutError, match=members[2].name) as caught:
            member.result(number)
        assert caught.value.missing == [2]
    for member in members:
        member.drop()


def test_a_rendezvous_that_lacks_members_says_how_many_came(address, job):
    with Client(address, "alone", job=job) as member, pytest.raises(RendezvousTimeoutError):
        member.call(join=join_request(3, timeout_ms=300))


def test_store_operations_over_the_stream(address, job):
    with Client(address, "m", job=job) as member:
        assert not member.store(get=store_pb2.GetOperation(key="a")).found
        member.store(set=store_pb2.SetOperation(key="a", value=b"1"))
        answer = member.store(get=store_pb2.GetOperation(key="a"))
        assert (answer.found, answer.value) == (True, b"1")
        assert member.store(add=store_pb2.AddOperation(key="n", amount=5)).number == 5
        assert member.store(add=store_pb2.AddOperation(key="n", amount=-7)).number == -2
        swap = store_pb2.CompareSetOperation(key="a", expected=b"0", value=b"2")
        assert not member.store(compare_set=swap).found
        swap.expected = b"1"
        assert member.store(compare_set=swap).found
        assert list(member.store(keys=store_pb2.KeysOperation()).keys) == ["a", "n"]
        assert member.store(delete=store_pb2.DeleteOperation(key="a")).found
        assert not member.store(delete=store_pb2.DeleteOperation(key="a")).found
        with pytest.raises(StoreTimeoutError, match="nowhere"):
            member.store(wait=store_pb2.WaitOperation(keys=["nowhere"], wait_ms=100))


def test_a_get_waits_on_the_server_until_another_member_sets(address, job):
    with Client(address, "reader", job=job) as reader, Client(address, "writer", job=job) as writer:
        number = reader.begin(store=store_pb2.StoreRequest(get=store_pb2.GetOperation(key="late", wait_ms=10_000)))
        writer.store(set=store_pb2.SetOperation(key="late", value=b"here"))
        assert reader.result(number).store.value == b"here"


def test_unary_twins_see_the_same_store_and_status(address, stub, job):
    members = joined(address, 2, job=job)
    members[0].store(set=store_pb2.SetOperation(key="k", value=b"from the stream"))

    def store(**operation):
        request = store_pb2.StoreRequest(request_id=1, **operation)
        message = session_pb2.UnaryStoreRequest(job=job, client_id="tool", request=request)
        return stub.Store(message, timeout=10).response

    assert store(get=store_pb2.GetOperation(key="k")).value == b"from the stream"
    assert store(add=store_pb2.AddOperation(key="n", amount=1)).number == 1
    assert store(add=store_pb2.AddOperation(key="n", amount=1)).number == 1  # the same request id: carried out once
    told = stub.Status(session_pb2.StatusRequest(job=job), timeout=10)
    assert [(member.name, member.rank) for member in told.members] == [(m.name, rank) for rank, m in enumerate(members)]
    assert told.store_keys == 2
    assert not told.durable
    assert told.position.generation == 1
    for member in members:
        member.drop()


def test_a_unary_barrier_meets_others(stub, job):
    def arrive(number):
        request = barrier_pb2.BarrierRequest(name="tools", ordinal=1, count=3, timeout_ms=10_000, payload=b"p")
        message = session_pb2.UnaryBarrierRequest(job=job, client_id=f"tool-{number}", request=request)
        return list(stub.Barrier(message, timeout=15).response.payloads)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(arrive, range(3))) == [[b"p"] * 3] * 3


def test_a_unary_call_without_a_deadline_is_refused(stub):
    code, error = error_of(stub.Status, session_pb2.StatusRequest(job="any"), timeout=None)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, UsageError)
    assert "deadline" in error.message


def test_a_caller_that_goes_away_is_taken_out_of_its_barrier(stub, job):
    request = barrier_pb2.BarrierRequest(name="b", ordinal=1, count=2, timeout_ms=60_000)
    message = session_pb2.UnaryBarrierRequest(job=job, client_id="tool", request=request)
    code, _ = error_of(stub.Barrier, message, timeout=0.3)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: not any(b.arrived_ranks for b in stub.Status(session_pb2.StatusRequest(job=job), timeout=10).barriers))


def test_the_death_of_a_member_is_pushed_to_the_others_at_the_end_of_its_grace(job):
    with coordinator("--grace", "0.3") as process:
        members = joined(process.address, 3, job=job)
        members[1].drop()
        for member in (members[0], members[2]):
            broken = member.event("broken", 3.0)
            cause = restore(broken.cause)
            assert isinstance(cause, PeerLostError)
            assert cause.rank == broken.origin_rank == 1
        for member in members:
            member.drop()


def test_a_clean_leave_is_no_death(address, job):
    with Client(address, "m", job=job) as member:
        member.call(leave=rendezvous_pb2.LeaveRequest())
    with Client(address, "other", job=job) as other:
        states = {m.name: m.state for m in other.call(describe=session_pb2.DescribeRequest()).describe.members}
    assert states.get("m", 7) == 7  # MEMBER_STATE_LEFT, or already forgotten


def test_health_is_served_for_the_whole_and_for_the_service(address):
    with channel_to(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        code, _ = error_of(health.Check, health_pb2.HealthCheckRequest(service="other"))
        assert code is grpc.StatusCode.NOT_FOUND


def raw_stream(channel, *messages):
    call = channel.stream_stream(f"/{SERVICE}/Session")(iter(messages), timeout=10)
    return list(call)


def test_a_stream_that_does_not_begin_with_a_hello_is_refused(address):
    with channel_to(address) as channel:
        code, error = error_of(
            lambda timeout: raw_stream(channel, session_pb2.ClientFrame(beat=session_pb2.Beat()).SerializeToString())
        )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "first frame" in error.message
    assert "beat" in error.message


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0a\x05ab", bytes(100)], ids=["tags", "cut", "zeros"])
def test_bytes_that_are_no_frame_end_the_stream_with_a_codec_error(address, garbage):
    hello = session_pb2.ClientFrame(
        hello=session_pb2.Hello(protocol_version=1, job="garbage", name="m", instance_id="i")
    ).SerializeToString()
    with channel_to(address) as channel:
        for messages in ((garbage,), (hello, garbage)):
            code, error = error_of(lambda timeout, messages=messages: raw_stream(channel, *messages))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert isinstance(error, CodecError)
        unary = channel.unary_unary(f"/{SERVICE}/Status")
        assert isinstance(error_of(unary, garbage)[1], CodecError)


def test_limits_are_named_and_end_no_session(address, job):
    with Client(address, "m", job=job) as member:
        with pytest.raises(LimitExceededError, match="key"):
            member.store(set=store_pb2.SetOperation(key="k" * 600, value=b""))
        with pytest.raises(MessageTooLargeError, match="value"):
            member.store(set=store_pb2.SetOperation(key="k", value=bytes((1 << 20) + 1)))
        member.store(set=store_pb2.SetOperation(key="k", value=bytes(1 << 20)))
        assert len(member.store(get=store_pb2.GetOperation(key="k")).value) == 1 << 20


def test_a_message_over_the_receive_limit_is_refused_by_grpc(address, job):
    with Client(address, "m", job=job) as member:
        member.begin(store=store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k", value=bytes(3 << 20))))
        member.until(lambda: member.ended)
        assert member.ended.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_proxy_in_the_environment_is_ignored(monkeypatch, job):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    with coordinator() as process, Client(process.address, "m", job=job) as member:
        assert member.welcome.incarnation == 1


def test_a_burst_of_two_thousand_calls_is_answered(address, job):
    """By default gRPC's server cancels some of so many at once."""
    connections, each = 40, 50
    channels = [grpc.insecure_channel(address, options=options.session_channel()) for _ in range(connections)]
    request = barrier_pb2.BarrierRequest(name="burst", ordinal=1, count=connections * each, timeout_ms=60_000)
    calls = [
        session_pb2_grpc.CoordinatorServiceStub(channel).Barrier.future(
            session_pb2.UnaryBarrierRequest(job=job, client_id=f"{c}-{n}", request=request), timeout=60
        )
        for n in range(each)
        for c, channel in enumerate(channels)
    ]
    assert all(len(call.result().response.payloads) == connections * each for call in calls)
    for channel in channels:
        channel.close()


def test_a_token_is_asked_for_on_streams_and_unary_calls(tmp_path, job):
    secret = tmp_path / "token"
    secret.write_text("correct-horse-battery-staple\n")
    with coordinator("--token-file", str(secret)) as process:
        for wrong in ("", "wrong", "correct horse battery staplé"):
            client = Client(process.address, "m", job=job, secret=wrong)
            assert isinstance(restore(client.event("fenced")), AuthenticationError)
            client.until(lambda client=client: client.ended)
            client.drop()
        with (
            Client(process.address, "m", job=job, secret="correct-horse-battery-staple"),
            channel_to(process.address) as channel,
        ):
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)
            code, error = error_of(stub.Status, session_pb2.StatusRequest(job=job, token="wrong"))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(error, AuthenticationError)
            assert "correct" not in str(error)
            right = session_pb2.StatusRequest(job=job, token="correct-horse-battery-staple")
            assert stub.Status(right, timeout=10).job == job


def test_one_connection_holds_at_most_64_streams(address, job):
    with channel_to(address) as channel:
        clients = [Client(address, f"m{number}", job=job, channel=channel) for number in range(70)]
        eventually(lambda: sum(client.welcome is not None for client in clients) == 64)
        clients[0].drop()
        eventually(lambda: sum(client.welcome is not None for client in clients) == 65)
        for client in clients:
            client.drop()


def test_concurrent_clients_of_one_key_add_up(address, job):
    def add(number):
        with Client(address, f"m{number}", job=job) as member:
            for _ in range(50):
                member.store(add=store_pb2.AddOperation(key="n", amount=1))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with Client(address, "last", job=job) as member:
        assert member.store(get=store_pb2.GetOperation(key="n")).value == b"400"


def test_a_session_that_does_not_read_is_cut_off_and_disturbs_nobody(address, job):
    hello = session_pb2.Hello(protocol_version=1, job=job, name="slow", instance_id="i")
    watch = store_pb2.StoreRequest(request_id=1, watch=store_pb2.WatchOperation(prefix="k"))
    outgoing = queue.SimpleQueue()
    outgoing.put(session_pb2.ClientFrame(hello=hello))
    outgoing.put(session_pb2.ClientFrame(sequence=1, store=watch))
    with channel_to(address) as channel, Client(address, "m", job=job) as member:
        slow = session_pb2_grpc.CoordinatorServiceStub(channel).Session(iter(outgoing.get, None), timeout=30)
        assert next(slow).HasField("welcome")
        assert next(slow).HasField("result")
        for number in range(20):  # more than what may lie unread
            member.store(set=store_pb2.SetOperation(key=f"k{number % 2}", value=bytes(1 << 20)))
        with pytest.raises(grpc.RpcError) as caught:
            list(slow)
        assert isinstance(status.error_of(caught.value), CoordinatorUnavailableError)  # so that it resumes
        assert "unread" in status.error_of(caught.value).message


@pytest.mark.parametrize("durable", [False, True])
def test_what_a_session_asked_for_itself_does_not_cut_it_off(tmp_path, durable):
    with coordinator(*(("--data-dir", str(tmp_path)) if durable else ())) as service, Client(service.address, "m") as member:
        member.store(set=store_pb2.SetOperation(key="large", value=bytes(1 << 20)))
        numbers = []
        for number in range(24):  # all at once, and while writes are on their way to the disk
            get = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="large"))
            numbers.append(member.begin(store=get))
            add = store_pb2.StoreRequest(request_id=100 + number, add=store_pb2.AddOperation(key="n", amount=1))
            numbers.append(member.begin(store=add))
        sizes = [len(member.result(number).store.value) for number in numbers]
        assert sum(sizes) == 24 << 20


def test_a_watch_is_told_of_all_that_is_remembered_at_once(address, job):
    with Client(address, "m", job=job) as member:
        for number in range(1500):
            member.begin(store=store_pb2.StoreRequest(set=store_pb2.SetOperation(key=f"k{number}", value=bytes(6_000))))
        member.result(member.sequence)
        watch = store_pb2.StoreRequest(watch=store_pb2.WatchOperation(prefix="k", from_revision=1))
        member.call(store=watch)
        told = lambda: [event.store for event in member.events if event.HasField("store")]  # noqa: E731
        member.until(lambda: told() and told()[-1].key == "k1499")
        assert told()[0].compacted
        assert [event.key for event in told()[1:]] == [f"k{number}" for number in range(1501 - len(told()), 1500)]
