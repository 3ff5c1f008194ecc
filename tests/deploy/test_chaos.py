"""The faults of the Compose profile `chaos`, without an engine."""

from __future__ import annotations

import contextlib
import runpy

import pytest

from tests.house.tree import ROOT

MENDED = {"kill": "/containers/w1/start", "pause": "/containers/w1/unpause", "disconnect": "/networks/job/connect"}


@pytest.mark.parametrize("fault", MENDED)
@pytest.mark.parametrize("end", [None, KeyboardInterrupt, SystemExit])
def test_a_fault_is_mended_also_where_somebody_ends_it_early(fault: str, end: type[BaseException] | None) -> None:
    chaos = runpy.run_path(str(ROOT / "deploy" / "chaos" / "chaos.py"))
    asked: list[str] = []
    chaos[fault].__globals__["ask"] = lambda method, path, body=None: asked.append(path)

    def wait() -> None:
        if end is not None:
            raise end

    worker = {"Id": "w1", "Names": ["/worker-1"], "NetworkSettings": {"Networks": {"job": {}}}}
    with contextlib.nullcontext() if end is None else pytest.raises(end):
        chaos[fault](worker, wait)
    assert asked[1:] == [MENDED[fault]]
