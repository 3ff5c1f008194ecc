"""The health service, without a server."""

import asyncio

from ferrorpc_coordinator.health import Health
from grpc_health.v1 import health_pb2


class Stream:
    """A call that records what is written; `on_write` runs during the first write."""

    def __init__(self, on_write):
        self.written = []
        self._on_write = on_write

    async def write(self, response):
        self.written.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
        if len(self.written) == 1:
            self._on_write()


def watched(service, on_write):
    async def watch():
        health = Health(("", "known"))
        stream = Stream(lambda: on_write(health))
        task = asyncio.ensure_future(health.Watch(health_pb2.HealthCheckRequest(service=service), stream))
        await asyncio.sleep(0)
        health.stop()
        await asyncio.wait_for(task, 5)
        return stream.written

    return asyncio.run(watch())


def test_a_stop_while_the_first_answer_is_written_is_reported():
    assert watched("known", Health.stop) == ["SERVING", "NOT_SERVING"]


def test_a_stop_after_the_first_answer_is_reported():
    assert watched("", lambda health: None) == ["SERVING", "NOT_SERVING"]


def test_an_unknown_service_is_reported_once():
    assert watched("other", Health.stop) == ["SERVICE_UNKNOWN"]
