"""Why a process cannot be in a job beside another one that is there or asks: both are named.

Where the other has a place in a generation it may be about to leave, and where its stream has ended it may be dead: the same
request may be granted some seconds later. Two newcomers that both live never fit.
"""

from __future__ import annotations

from ferrorpc.errors import ConfigError, VersionMismatchError
from ferrorpc_coordinator.state.member import Member


def size_conflict(job: str, claimant: Member, size: tuple[int, int], holder: Member, wanted: tuple[int, int]) -> ConfigError:
    """They want worlds of different sizes, each from the least to the most members."""
    text = f"{claimant} asks for a world of {_world(size)}, {holder}{_if_gone(holder)} for one of {_world(wanted)}, "
    return _conflict(
        f"{text}in the same job {job}", holder, "give every process the same FERRORPC_WORLD_SIZE, or another FERRORPC_JOB"
    )


def rank_conflict(rank: int, claimant: Member, holder: Member) -> ConfigError:
    """Both have, or claim, one rank."""
    return _conflict(
        f"rank {rank} is claimed by {claimant} and by {holder}{_if_gone(holder)}".removesuffix(","),
        holder,
        "give every process its own RANK; a process whose rank nobody gave it may leave RANK unset",
        claimants=[holder.name, claimant.name],
    )


def run_conflict(job: str, claimant: Member, holder: Member) -> ConfigError:
    """They are of two runs, each of which has its own world."""
    text = f"{claimant} and {holder}{_if_gone(holder)} are of two runs of `ferrorpc run`, with the same job {job}"
    return _conflict(f"{text} at this coordinator", holder, "give each run its own job (`ferrorpc run --job NAME`)")


def data_protocol_conflict(job: str, claimant: Member, holder: Member) -> VersionMismatchError:
    """What they send each other differs."""
    text = f"{claimant} speaks version {claimant.data_protocol} of the data plane's protocol, {holder}{_if_gone(holder)} "
    text += f"version {holder.data_protocol}, in the same job {job}"
    hint, passes = _what_to_try(VersionMismatchError.default_hint, holder)
    return VersionMismatchError(text, hint=hint, retryable=passes)


def _conflict(text: str, holder: Member, hint: str, **fields: list[str]) -> ConfigError:
    hint, passes = _what_to_try(hint, holder)
    return ConfigError(text, hint=hint, retryable=passes, **fields)


def _what_to_try(hint: str, holder: Member) -> tuple[str, bool]:
    """The hint, and whether the holder may go, so that the same request can be granted later."""
    passes = not holder.connected or holder.rank >= 0
    return f"{hint}; or start this process again when {holder.name} is known to be gone" if passes else hint, passes


def _if_gone(holder: Member) -> str:
    return "" if holder.connected else ", whose session ended,"


def _world(size: tuple[int, int]) -> str:
    """The size in the format of FERRORPC_WORLD_SIZE: "4", or "2:4"."""
    low, high = size
    return f"{low}" if low == high else f"{low}:{high}"
