"""How many may look at a coordinator at a time, what each of them is shown, and how much is remembered."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from ferrorpc_coordinator.web import feed as feeds
from ferrorpc_coordinator.web.feed import SAMPLES_MAX, VIEWERS_MAX, Feed

from ferrorpc.errors import LimitExceededError


def test_a_crowd_that_comes_at_once_is_limited_like_any_other():
    """Their streams begin only after all of them were let in; one that never begins gives its place back."""
    feed = Feed(SimpleNamespace(job=lambda name: None))

    async def look():
        streams = [feed.watch("a") for _ in range(VIEWERS_MAX)]
        with pytest.raises(LimitExceededError):
            feed.watch("a")
        assert (await anext(streams[0])).startswith(b"retry")
        await streams[0].aclose()
        streams[0] = feed.watch("a")
        with pytest.raises(LimitExceededError):
            feed.watch("a")
        streams.clear()
        gc.collect()
        assert (await anext(feed.watch("a"))).startswith(b"retry")

    asyncio.run(look())


def job_of(**heard_ms):
    """A job whose members were last heard of then; now is 1,000 ms."""
    roster = [SimpleNamespace(name=name, heard=at * 1_000_000, alive=True) for name, at in heard_ms.items()]
    return SimpleNamespace(roster=roster, desk=SimpleNamespace(now=1_000_000_000))


def test_a_minute_of_beats_is_remembered_of_the_jobs_that_are_there():
    jobs = {"a": job_of(first=990), "gone": job_of(other=1)}
    feed = Feed(SimpleNamespace(coordinator=SimpleNamespace(jobs=jobs)))
    feed._sample()
    assert feed.history("gone") == {"other": [999]}
    del jobs["gone"]
    jobs["a"] = job_of(first=900, late=1000)
    feed._sample()
    assert feed.history("a") == {"first": [10, 100], "late": [-1, 0]}
    assert feed._ages.keys() == {"a"}
    for _ in range(SAMPLES_MAX):
        feed._sample()
    assert feed.history("a") == {"first": [100] * SAMPLES_MAX, "late": [0] * SAMPLES_MAX}


def test_each_page_is_shown_the_job_that_it_asked_for(monkeypatch):
    monkeypatch.setattr(feeds, "TICK_SECONDS", 0.01)
    source = SimpleNamespace(job=lambda name: name, state=lambda job: job, coordinator=SimpleNamespace(jobs={}))

    async def look():
        feed = Feed(source)
        streams = {name: feed.watch(name) for name in ("a", "b")}
        feed.start()
        for name, stream in streams.items():
            states = [await anext(stream) for _ in range(6)][1:]
            assert states == [b'event: state\ndata: "%s"\n\n' % name.encode()] * 5
        feed.stop()

    asyncio.run(asyncio.wait_for(look(), 20))
