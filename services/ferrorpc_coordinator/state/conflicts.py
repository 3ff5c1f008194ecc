"""Why a process cannot be in a job beside another one that is there or asks: both are named.

Where the other's stream has ended, it may be dead, and the same request may be granted some seconds later.
"""

from __future__ import annotations

from ferrorpc.errors import ConfigError
from ferrorpc_coordinator.state.member import Member


def size_conflict(
    job: str, claimant: Member, size: tuple[int, int], holder: Member, wanted: tuple[int, int], has_left: bool = False
) -> ConfigError:
    """They want worlds of different sizes, each from the least to the most members.

    Args:
        has_left: the claimant was in the holder's generation and left it, as where a script goes on with some of its ranks.
    """
    gone = not holder.connected
    if has_left:
        hint = "ask again once the others have left that generation, too"
    elif gone:
        hint = "start this process again in some seconds, when those of the other size are known to be gone"
    else:
        hint = "give every process the same FERRORPC_WORLD_SIZE, or another FERRORPC_JOB"
    return ConfigError(
        f"{claimant} asks for a world of {_world(size)}, {holder}{', whose session ended,' if gone else ''} "
        f"for one of {_world(wanted)}, in the same job {job}",
        hint=hint,
        retryable=gone or has_left,
    )


def rank_conflict(rank: int, claimant: Member, holder: Member) -> ConfigError:
    """Both have, or claim, one rank."""
    gone = not holder.connected
    return ConfigError(
        f"rank {rank} is claimed by {claimant} and by {holder}{', whose session ended' if gone else ''}",
        hint="start this process again in some seconds, unless both run: then give every process its own RANK"
        if gone
        else "give every process its own RANK; a process whose rank nobody gave it may leave RANK unset",
        retryable=gone,
        claimants=[holder.name, claimant.name],
    )


def run_conflict(job: str, claimant: Member, holder: Member) -> ConfigError:
    """They are of two runs, each of which has its own world."""
    hint = (
        "give each run its own job (`ferrorpc run --job NAME`); where the other has just been killed, try again in some seconds"
    )
    text = f"{claimant} and {holder} are of two runs of `ferrorpc run`, with the same job {job} at this coordinator"
    return ConfigError(text, hint=hint, retryable=not holder.connected)


def _world(size: tuple[int, int]) -> str:
    """The size in the format of FERRORPC_WORLD_SIZE: "4", or "2:4"."""
    low, high = size
    return f"{low}" if low == high else f"{low}:{high}"
