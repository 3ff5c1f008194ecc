"""A rank is killed or stopped at a random moment of operations of every kind: the others always learn who, and nothing stays.

FERRORPC_TRIALS is the number of trials of each kind: a few by default, hundreds to be sure.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.fault_trials import run_trials

TRIALS = int(os.environ.get("FERRORPC_TRIALS", "3"))
WORLDS = 3


@pytest.mark.timeout(120 + 5 * TRIALS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_a_rank_that_is_lost_is_named_to_all_and_leaves_nothing_behind(transport: str, how: signal.Signals) -> None:
    bad = run_trials(TRIALS, transport, how, min(WORLDS, TRIALS))
    assert not bad, f"{len(bad)} of {TRIALS} trials went wrong: {bad[:5]}"
