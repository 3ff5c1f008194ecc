"""The health service, without a server."""

import asyncio

import grpc
import grpc.aio
import pytest
from ferrorpc_coordinator import first_message, health
from ferrorpc_coordinator.health import Health
from grpc_health.v1 import health_pb2

LONG = "\1" * 2_000_000


class Call:
    """A call that records what is written and how it was aborted; `on_write` runs during the first write."""

    def __init__(self, service, on_write=lambda: None):
        self.written = []
        self.aborted = None
        self._request = None if service is None else health_pb2.HealthCheckRequest(service=service).SerializeToString()
        self._on_write = on_write

    async def read(self):
        if self._request is None:
            await asyncio.Event().wait()
        request, self._request = self._request, None
        return request

    async def write(self, response):
        self.written.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
        if len(self.written) == 1:
            self._on_write()

    async def abort(self, code, details, trailers=()):
        self.aborted = code, details
        raise grpc.aio.AbortError(details)


async def ended(answering):
    """What a method returns; None where it aborts its call."""
    try:
        return await asyncio.wait_for(answering, 5)
    except grpc.aio.AbortError:
        return None


def watched(service, on_write):
    async def watch():
        health = Health(("", "known"))
        call = Call(service, lambda: on_write(health))
        task = asyncio.ensure_future(health._watch(None, call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        health.stop()
        await asyncio.wait_for(task, 5)
        return call.written

    return asyncio.run(watch())


def checked(service):
    async def check():
        call = Call(service)
        return await ended(Health(("", "known"))._check(None, call)), call.aborted

    return asyncio.run(check())


def test_a_stop_while_the_first_answer_is_written_is_reported():
    assert watched("known", Health.stop) == ["SERVING", "NOT_SERVING"]


def test_a_stop_after_the_first_answer_is_reported():
    assert watched("", lambda health: None) == ["SERVING", "NOT_SERVING"]


@pytest.mark.parametrize("service", ["other", LONG], ids=["short", "long"])
def test_an_unknown_service_is_reported_once(service):
    assert watched(service, Health.stop) == ["SERVICE_UNKNOWN"]


def test_a_known_service_is_answered():
    answer, aborted = checked("known")
    assert (answer.status, aborted) == (health_pb2.HealthCheckResponse.SERVING, None)


@pytest.mark.parametrize("service", ["other", "known" + LONG], ids=["short", "long"])
def test_the_refusal_of_an_unknown_service_repeats_only_the_beginning_of_its_name(service):
    answer, (code, details) = checked(service)
    assert (answer, code) == (None, grpc.StatusCode.NOT_FOUND)
    assert service[:5] in details
    assert len(details) < 1_000


def test_a_call_without_its_request_is_ended(monkeypatch):
    monkeypatch.setattr(first_message, "FIRST_MESSAGE_SECONDS", 0.02)
    answer, (code, details) = checked(None)
    assert (answer, code) == (None, grpc.StatusCode.UNAVAILABLE)
    assert "sent no complete HealthCheckRequest" in details


def test_so_many_may_watch_at_once_and_another_as_soon_as_one_has_gone(monkeypatch):
    monkeypatch.setattr(health, "WATCHES_MAX", 1)

    async def watch():
        service = Health(("",))
        calls = [Call("") for _ in range(3)]
        first = asyncio.ensure_future(service._watch(None, calls[0]))
        await asyncio.sleep(0.01)
        await ended(service._watch(None, calls[1]))
        first.cancel()
        await asyncio.wait([first])
        last = asyncio.ensure_future(service._watch(None, calls[2]))
        await asyncio.sleep(0.01)
        last.cancel()
        return [call.aborted and call.aborted[0] for call in calls]

    assert asyncio.run(watch()) == [None, grpc.StatusCode.RESOURCE_EXHAUSTED, None]
