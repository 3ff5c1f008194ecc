"""A hundred thousand mutated control messages through parser, driver and state: nothing crashes, grows or stops answering."""

import asyncio
import random
import resource

import pytest
from ferrorpc_coordinator.driver import Driver
from ferrorpc_coordinator.metrics import Counters
from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.settings import Settings

from ferrorpc.errors import CodecError
from ferrorpc.v1 import barrier_pb2, nccl_pb2, rendezvous_pb2, session_pb2, store_pb2
from ferrorpc.wire.parse import parse
from tests.integration.coordinator_process import join_request

FRAMES = 100_000
SEEDS = 4
STREAMS = 4
SECOND = 1_000_000_000


def store(**operation):
    return {"store": store_pb2.StoreRequest(request_id=3, **operation)}


BODIES = (
    {"hello": session_pb2.Hello(protocol_version=1, job="j", name="m0", instance_id="i", lease_ms=1000)},
    {"beat": session_pb2.Beat(step=7, activity="all_reduce #7", generation=1)},
    {"join": join_request(STREAMS)},
    {"join": join_request(STREAMS, low=2, after=1, hinted=1)},
    {"leave": rendezvous_pb2.LeaveRequest(generation=1, reason="ValueError: x")},
    {"barrier": barrier_pb2.BarrierRequest(generation=1, name="b", ordinal=1, ranks=[0, 2], timeout_ms=100, payload=b"p")},
    {"barrier": barrier_pb2.BarrierRequest(name="b", ordinal=1, count=3, timeout_ms=100)},
    store(set=store_pb2.SetOperation(key="a/b", value=b"value", binding=2)),
    store(get=store_pb2.GetOperation(key="a/b", wait_ms=100)),
    store(add=store_pb2.AddOperation(key="n", amount=-5)),
    store(compare_set=store_pb2.CompareSetOperation(key="a/b", expected=b"value", value=b"other", expect_absent=True)),
    store(wait=store_pb2.WaitOperation(keys=["a/b", "c"], wait_ms=100)),
    store(delete=store_pb2.DeleteOperation(key="a/b")),
    store(keys=store_pb2.KeysOperation(prefix="a", after="a/a")),
    store(watch=store_pb2.WatchOperation(prefix="a", from_revision=1)),
    store(unwatch=store_pb2.UnwatchOperation(watch_id=1)),
    {
        "comm_bootstrap": nccl_pb2.CommBootstrapRequest(
            generation=1, communicator="world", attempt=1, ranks=[0, 1], unique_ids=[bytes(128)], timeout_ms=100
        )
    },
    {"report": session_pb2.ReportRequest(generation=1, failure={"code": 11, "message": "timeout"})},
    {"report": session_pb2.ReportRequest(generation=1, exit={"name": "m1", "returncode": -9})},
    {"report": session_pb2.ReportRequest(generation=1, link_lost={"peer_rank": 1, "reason": "reset"})},
    {"describe": session_pb2.DescribeRequest(ranks=[0, 99])},
)
NUMBERS = (b"\x00", b"\x7f", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x80" * 9 + b"\x01")
TEXTS = (b"", b"..", b"/", b"\x00", b"\xff\xfe", "é".encode(), b"a" * 600, b"x" * 5000)


def mutated(random_, corpus):
    """One to three random changes of a valid message, or a splice of two."""
    data = bytearray(random_.choice(corpus))
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(len(data) + 1)
        match random_.randrange(6):
            case 0:
                data[at : at + 1] = bytes([random_.randrange(256)])
            case 1:
                del data[at : at + random_.randint(1, 4)]
            case 2:
                data[at:at] = random_.choice(NUMBERS)
            case 3:
                data[at : at + 1] = random_.choice(NUMBERS)
            case 4:
                other = random_.choice(corpus)
                data[at:] = other[random_.randrange(len(other)) :]
            case 5:
                text = random_.choice(TEXTS)
                data[at:at] = bytes([len(text) & 0x7F]) + text if len(text) < 128 else text
    return bytes(data)


def set_one_field(random_, message):
    """Gives one field of a parsed message, at any depth, an extreme value: what survives every parser."""
    fields = message.DESCRIPTOR.fields
    field = random_.choice(fields)
    value = getattr(message, field.name)
    if field.message_type is not None and not field.is_repeated:
        set_one_field(random_, value)
        return
    extremes = {
        field.CPPTYPE_INT32: (0, -1, 2**31 - 1, -(2**31)),
        field.CPPTYPE_INT64: (0, -1, 2**63 - 1, -(2**63)),
        field.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
        field.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
        field.CPPTYPE_BOOL: (True, False),
        field.CPPTYPE_DOUBLE: (float("nan"), float("inf"), -0.0),
        field.CPPTYPE_ENUM: (0, 3, 999),
        field.CPPTYPE_STRING: TEXTS[:4] if field.type == field.TYPE_BYTES else ("", "..", "\x00\n", "é" * 300, "a" * 9000),
    }.get(field.cpp_type)
    if field.is_repeated:
        if extremes is None:
            value.add()
        else:
            value.extend([random_.choice(extremes)] * random_.choice((1, 2, 2000)))
    else:
        setattr(message, field.name, random_.choice(extremes))


def frames(random_):
    """Endless frames: half mutated as bytes (what does not parse is skipped), half as messages."""
    corpus = [session_pb2.ClientFrame(sequence=n + 1, **body).SerializeToString() for n, body in enumerate(BODIES)]
    while True:
        if random_.random() < 0.5:
            try:
                yield parse(session_pb2.ClientFrame, mutated(random_, corpus), "no frame")
            except CodecError:
                continue
        else:
            frame = session_pb2.ClientFrame.FromString(random_.choice(corpus))
            frame.sequence = random_.choice((0, 1, random_.randrange(1, 10_000), 2**64 - 1))
            set_one_field(random_, getattr(frame, frame.WhichOneof("body")))
            yield frame


class Bench:
    """A driver without sockets, and its streams."""

    def __init__(self):
        self.now_ns = 0
        self.coordinator = Coordinator(Settings(), mint=lambda: f"{random.getrandbits(128):032x}", now_ns=0)
        self.driver = Driver(self.coordinator, None, Counters(), now_ns=lambda: self.now_ns)
        self.lives = 0
        self.streams = [self.connect(number) for number in range(STREAMS)]

    def connect(self, number):
        self.lives += 1
        hello = session_pb2.Hello(protocol_version=1, job="j", name=f"m{number}", instance_id=f"life-{self.lives}")
        return self.driver.connect(hello)

    def revive(self):
        """Streams that the coordinator ended come again, as another process."""
        for number, queue in enumerate(self.streams):
            queue._frames.clear()
            queue._queued_bytes = 0
            if queue._finished:
                self.driver.disconnect(queue.stream)
                self.streams[number] = self.connect(number)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_mutated_frames_crash_nothing_and_the_coordinator_still_answers(seed):
    async def main():
        bench = Bench()
        random_ = random.Random(seed)
        source = frames(random_)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(FRAMES // SEEDS):
            bench.driver.receive(random_.choice(bench.streams).stream, next(source))
            if number % 50 == 0:
                bench.now_ns += random_.choice((0, SECOND // 10, SECOND // 2))
                bench.revive()
                await asyncio.sleep(0)
        # Every limit together allows far more; a length field taken at its word would allocate gigabytes.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
        assert not bench.driver.failure.done()
        client = bench.driver.connect(session_pb2.Hello(protocol_version=1, job="other", name="m", instance_id="i"))
        request = store_pb2.StoreRequest(request_id=1, add=store_pb2.AddOperation(key="n", amount=2))
        bench.driver.receive(client.stream, session_pb2.ClientFrame(sequence=1, store=request))
        answers = [session_pb2.ServerFrame.FromString(shared + overlay) for shared, overlay in client._frames]
        assert [frame.result.store.number for frame in answers if frame.HasField("result")] == [2]
        bench.driver.close()

    asyncio.run(main())


def test_mutated_unary_requests_crash_nothing():
    async def main():
        bench = Bench()
        random_ = random.Random(SEEDS)
        bodies = [getattr(session_pb2.ClientFrame(**body), next(iter(body))) for body in BODIES]
        corpus = [session_pb2.StatusRequest(job="j").SerializeToString()]
        for body in bodies:
            if isinstance(body, store_pb2.StoreRequest):
                corpus.append(session_pb2.UnaryStoreRequest(job="j", client_id="c", request=body).SerializeToString())
            elif isinstance(body, barrier_pb2.BarrierRequest):
                corpus.append(session_pb2.UnaryBarrierRequest(job="j", client_id="c", request=body).SerializeToString())
            elif isinstance(body, session_pb2.ReportRequest):
                corpus.append(session_pb2.UnaryReportRequest(job="j", request=body).SerializeToString())
        kinds = (
            session_pb2.StatusRequest,
            session_pb2.UnaryStoreRequest,
            session_pb2.UnaryBarrierRequest,
            session_pb2.UnaryReportRequest,
        )
        calls = set()
        for number in range(10_000):
            try:
                request = parse(random_.choice(kinds), mutated(random_, corpus), "no request")
            except CodecError:
                continue
            call = asyncio.ensure_future(bench.driver.call(request))
            calls.add(call)
            if number % 20 == 0:
                bench.now_ns += SECOND // 10
                bench.revive()
                await asyncio.sleep(0)
                if random_.random() < 0.2:
                    call.cancel()
                calls = {call for call in calls if not call.done()}
        assert not bench.driver.failure.done()
        bench.driver.close()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(main())
