"""Ranks as processes that share one GPU, as they do in training: values, and what becomes of them when one is lost.

FERRORPC_TRIALS is the number of trials that end by chance: a few by default, more to be sure.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from ferrorpc.backends.cuda_ipc.connect import SLOT_BYTES
from ferrorpc.exit_codes import EXIT_RETRY
from tests.gpu.rank_processes import Ranks, ranks_of
from tests.gpu.scenarios import FAKE
from tests.gpu.without import skip_without_gpu

if not FAKE:
    skip_without_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
TRIALS = int(os.environ.get("FERRORPC_TRIALS", "2"))
CALLS = 100
LARGE_BYTES = 1 << 16 if FAKE else SLOT_BYTES
KNOWN_SECONDS = 20.0
"""A rank is lost: the others know so long after at the latest."""


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_random_programs_have_the_bits_of_numpy_where_ranks_read_each_others_memory(tmp_path: Path, size: int) -> None:
    with ranks_of(tmp_path, size, "cuda_ipc") as ranks:
        ranks.start_all("values", seed=size, count=CALLS, large_bytes=LARGE_BYTES)
        ranks.end_all()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_have_the_bits_of_numpy_through_pinned_memory(tmp_path: Path, size: int, transport: str) -> None:
    with ranks_of(tmp_path, size, "grpc", transport) as ranks:
        ranks.start_all("values", seed=10 + size, count=CALLS, large_bytes=LARGE_BYTES)
        ranks.end_all()


def knows(ranks: Ranks, rank: int, victim: int) -> None:
    """A survivor says who was lost, or has ended because its GPU waits for what is never reached."""
    process = ranks.now[rank]

    def has_said() -> bool:
        return process.heard("lost") is not None or process.code is not None

    ranks.wait(has_said, f"rank {rank} knows that rank {victim} is lost", KNOWN_SECONDS)
    said = process.heard("lost")
    if (said is None or int(said[0]) != victim) and process.code != EXIT_RETRY:
        ranks.fail(f"rank {rank} says {said}, and not that rank {victim} is lost")


def is_done_again(ranks: Ranks, rank: int, seed: int) -> bool:
    """Whether a rank has computed in the next generation. One that could only end, to be started again, is started again."""
    process = ranks.now[rank]
    if process.code == EXIT_RETRY:
        process = ranks.start(rank, "rejoin", seed=seed)
    elif process.code and process.heard("done") is None:
        ranks.fail(f"rank {rank} ended")
    return process.heard("done") is not None


@pytest.mark.parametrize("seed", range(TRIALS))
@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_known_to_the_others_and_can_be_replaced(tmp_path: Path, size: int, seed: int) -> None:
    chance = random.Random(f"{size} {seed}")
    victim = chance.randrange(size)
    with ranks_of(tmp_path, size, "cuda_ipc") as ranks:
        ranks.start_all("endure", seed=seed)
        ranks.hear_all("running")
        time.sleep(chance.uniform(0, 1))
        ranks.now[victim].process.send_signal(signal.SIGKILL)
        for rank in range(size):
            if rank != victim:
                knows(ranks, rank, victim)
        ranks.start(victim, "rejoin", seed=seed)
        ranks.wait(lambda: all(is_done_again(ranks, rank, seed) for rank in range(size)), "the next generation computes")
        ranks.end_all()
