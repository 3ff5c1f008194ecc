"""How many may look at a coordinator at a time."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from ferrorpc_coordinator.web.feed import VIEWERS_MAX, Feed

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
