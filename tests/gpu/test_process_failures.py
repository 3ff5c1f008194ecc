"""Ranks as processes that share one GPU, of which one stops, differs, raises, is interrupted, or has its GPU fail."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ferrorpc.exit_codes import EXIT_RETRY
from tests.gpu.rank_processes import Ranks, ranks_of
from tests.gpu.scenarios import FAKE
from tests.gpu.without import skip_without_gpu

if not FAKE:
    skip_without_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
PROGRAM = "failing_program"
STOPPED_TIMEOUT = 6.0
KNOWN_SECONDS = 10.0
"""Something fails: the ranks know so long after at the latest, which is much less than their deadlines."""
ENDS_SECONDS = 20.0


def ends(ranks: Ranks, rank: int, *codes: int) -> None:
    """A rank ends with one of these exit codes."""
    process = ranks.now[rank]
    ranks.wait(lambda: process.code is not None, f"rank {rank} ends", ENDS_SECONDS)
    if process.code not in codes:
        ranks.fail(f"rank {rank} ended with {process.code}")


def names(ranks: Ranks, rank: int, culprit: int, *classes: str, seconds: float = KNOWN_SECONDS) -> str:
    """A rank says an error of one of these classes that names another rank. Returns its message."""
    name, named, *words = ranks.hear(rank, "error", seconds)
    message = " ".join(words)
    if name not in classes or (int(named) != culprit and f"rank {culprit}" not in message):
        ranks.fail(f"rank {rank} does not name rank {culprit} by one of {classes}")
    return message


def test_a_stopped_rank_is_known_by_the_deadline(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "cuda_ipc", program=PROGRAM) as ranks:
        ranks.start_all("endless", timeout=STOPPED_TIMEOUT)
        ranks.hear_all("running")
        ranks.now[1].process.send_signal(signal.SIGSTOP)
        names(ranks, 0, 1, "CollectiveTimeoutError", "PeerLostError", seconds=STOPPED_TIMEOUT + KNOWN_SECONDS)
        ranks.now[1].process.send_signal(signal.SIGCONT)
        ranks.hear(1, "error", KNOWN_SECONDS)
        for rank in range(2):
            ranks.hear(rank, "computes", KNOWN_SECONDS)
        ranks.end_all()


def test_calls_that_differ_are_shown_to_every_rank_and_the_group_can_be_renewed(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "cuda_ipc", program=PROGRAM) as ranks:
        ranks.start_all("mismatch")
        ranks.end_all()


def test_an_error_of_one_rank_is_named_to_the_other(tmp_path: Path) -> None:
    with ranks_of(tmp_path, 2, "cuda_ipc", program=PROGRAM) as ranks:
        ranks.start(0, "endless")
        ranks.start(1, "endless", then="raise")
        ranks.hear_all("running")
        message = names(ranks, 0, 1, "GroupAbortedError", "PeerLostError")
        if "broken on purpose" not in message:
            ranks.fail("the error's text has not reached rank 0")
        ranks.hear(0, "computes", KNOWN_SECONDS)
        ends(ranks, 0, 0)
        ends(ranks, 1, 1)


@pytest.mark.parametrize("operation", ["all_reduce", "synchronize", "barrier", "recv"])
def test_a_rank_that_is_interrupted_while_it_waits_is_named_to_the_other(tmp_path: Path, operation: str) -> None:
    with ranks_of(tmp_path, 2, "cuda_ipc", program=PROGRAM) as ranks:
        ranks.start_all("wait_for_ever", operation=operation)
        ranks.hear_all("waiting")
        time.sleep(1.0)
        ranks.now[1].process.send_signal(signal.SIGINT)
        ranks.hear(1, "interrupted", KNOWN_SECONDS)
        if "KeyboardInterrupt" not in names(ranks, 0, 1, "GroupAbortedError", "PeerLostError"):
            ranks.fail("rank 0 does not know that rank 1 was interrupted")
        ends(ranks, 0, 0)
        ends(ranks, 1, -signal.SIGINT)


def test_a_gpu_that_fails_is_known_at_once_and_to_the_other_rank_within_seconds(tmp_path: Path) -> None:
    """The other rank's GPU may wait for what the failed one has not reached: it ends, to be started again."""
    with ranks_of(tmp_path, 2, "cuda_ipc", program=PROGRAM) as ranks:
        ranks.start(0, "endless")
        ranks.start(1, "endless", then="wreck")
        ranks.hear(1, "running")  # the other may not have come as far when it learns of the failure
        for rank, said in ((1, "the GPU has failed"), (0, "rank 1 ended the group: the GPU has failed")):
            name, _, *words = ranks.hear(rank, "error", KNOWN_SECONDS)
            if name != "BackendUnavailableError" or said not in " ".join(words):
                ranks.fail(f"rank {rank} does not say: {said}")
        ends(ranks, 1, 0, EXIT_RETRY)
        ends(ranks, 0, 0, EXIT_RETRY)
