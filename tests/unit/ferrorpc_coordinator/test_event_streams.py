"""Event streams: the limit of viewers, the states that each gets, and the history that is kept."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from ferrorpc_coordinator.web import event_streams
from ferrorpc_coordinator.web.event_streams import SAMPLES_MAX, VIEWERS_MAX, EventStreams

from ferrorpc.errors import LimitExceededError


def test_viewers_that_come_at_once_are_limited():
    """Their streams start only after all were admitted; a stream that is never started must not count for ever."""
    streams = EventStreams(SimpleNamespace(job=lambda name: None))

    async def look():
        opened = [streams.watch("a") for _ in range(VIEWERS_MAX)]
        with pytest.raises(LimitExceededError):
            streams.watch("a")
        assert (await anext(opened[0])).startswith(b"retry")
        await opened[0].aclose()
        opened[0] = streams.watch("a")
        with pytest.raises(LimitExceededError):
            streams.watch("a")
        opened.clear()
        gc.collect()
        assert (await anext(streams.watch("a"))).startswith(b"retry")

    asyncio.run(look())


def job_of(**heard_ms):
    """A job whose members sent their last frames at these times in ms; the current time is 1,000 ms."""
    members = [SimpleNamespace(name=name, last_heard=at * 1_000_000, alive=True) for name, at in heard_ms.items()]
    return SimpleNamespace(members=members, context=SimpleNamespace(now=1_000_000_000))


def test_a_minute_of_beat_ages_is_kept_for_existing_jobs():
    jobs = {"a": job_of(first=990), "gone": job_of(other=1)}
    streams = EventStreams(SimpleNamespace(coordinator=SimpleNamespace(jobs=jobs)))
    streams._sample()
    assert streams.history("gone") == {"other": [999]}
    del jobs["gone"]
    jobs["a"] = job_of(first=900, late=1000)
    streams._sample()
    assert streams.history("a") == {"first": [10, 100], "late": [-1, 0]}
    assert streams._ages.keys() == {"a"}
    for _ in range(SAMPLES_MAX):
        streams._sample()
    assert streams.history("a") == {"first": [100] * SAMPLES_MAX, "late": [0] * SAMPLES_MAX}


def test_each_viewer_gets_the_states_of_its_job(monkeypatch):
    monkeypatch.setattr(event_streams, "TICK_SECONDS", 0.01)
    view = SimpleNamespace(job=lambda name: name, state=lambda job: job, coordinator=SimpleNamespace(jobs={}))

    async def look():
        streams = EventStreams(view)
        opened = {name: streams.watch(name) for name in ("a", "b")}
        streams.start()
        for name, stream in opened.items():
            states = [await anext(stream) for _ in range(6)][1:]
            assert states == [b'event: state\ndata: "%s"\n\n' % name.encode()] * 5
        streams.stop()

    asyncio.run(asyncio.wait_for(look(), 20))
