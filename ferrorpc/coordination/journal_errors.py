"""The errors of a coordinator that came back without what its members know: their generation is over."""

from __future__ import annotations

from ferrorpc.errors import StaleGenerationError
from ferrorpc.v1 import identity_pb2


def journal_lost(address: str, before: str, now: str) -> StaleGenerationError:
    """It has another journal than `before`, or none: its identity is another."""
    message = f"the coordinator at {address} restarted without its journal: cluster {before} is gone, this is cluster {now}"
    hint = "give the coordinator a --data-dir, so that a restart keeps its jobs; group.reform() starts anew"
    return StaleGenerationError(message, hint=hint)


def journal_older(address: str, before: identity_pb2.Position, now: identity_pb2.Position) -> StaleGenerationError:
    """It has the same journal, as it was before its member last heard of it."""
    message = (
        f"the coordinator at {address} came back with an older journal: it is in generation {now.generation} at revision "
        f"{now.revision}, after it had told this member of generation {before.generation} and revision {before.revision}"
    )
    hint = "start it on its newest data directory, or an empty one; group.reform() goes on with what the older one holds"
    return StaleGenerationError(message, hint=hint)
