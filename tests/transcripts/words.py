"""What a coordinator sends, in one line each."""

from __future__ import annotations

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from ferrorpc.wire.member_states import state_name


def frame_words(frame: session_pb2.ServerFrame) -> str:
    """One frame to a session."""
    body = frame.WhichOneof("body")
    if body == "welcome":
        welcome = frame.welcome
        how = "resumed" if welcome.resumed else "new"
        return f"welcome: {how} session, incarnation {welcome.incarnation}, lease {welcome.lease_ms} ms"
    if body == "result":
        return result_words(frame.result)
    return event_words(frame.event)


def event_words(event: session_pb2.Event) -> str:
    """Something that was pushed."""
    kind = event.WhichOneof("kind")
    if kind == "broken":
        return (
            f"generation {event.broken.generation} broken by rank {event.broken.origin_rank}: {error_words(event.broken.cause)}"
        )
    if kind == "standings":
        return f"member {'; '.join(map(member_words, event.standings.members))}"
    if kind == "pending":
        return f"pending: {', '.join(event.pending.names) or 'nobody'}"
    if kind == "store":
        return _store_event_words(event)
    if kind == "fenced":
        return f"fenced: {error_words(event.fenced)}"
    return f"draining: within {event.draining.within_ms} ms"


def _store_event_words(event: session_pb2.Event) -> str:
    change = event.store
    if change.compacted:
        return f"watch {change.watch_id}: older changes are forgotten"
    what = "deleted" if change.deleted else f"= {change.value.decode()}"
    return f"watch {change.watch_id}: {change.key} {what}"


def member_words(member: identity_pb2.Member) -> str:
    """A member in an event, a description or a status."""
    rank = f"rank {member.rank} " if member.rank >= 0 else ""
    reason = f" ({member.reason})" if member.reason else ""
    return f"{rank}{member.name}#{member.incarnation} {state_name(member.state)}{reason}"


def result_words(result: session_pb2.Result) -> str:
    """The answer of a request."""
    outcome = result.WhichOneof("outcome")
    head = f"#{result.sequence} "
    if outcome == "error":
        return head + error_words(result.error)
    if outcome == "join":
        peers = " ".join(peer.name for peer in result.join.peers)
        return f"{head}generation {result.join.generation}, rank {result.join.rank} of [{peers}]: {result.join.reason}"
    if outcome == "barrier":
        payloads = " ".join(payload.decode() or "-" for payload in result.barrier.payloads)
        return f"{head}released [{payloads}] spread {result.barrier.spread_ms} ms"
    if outcome == "store":
        return head + _store_words(result)
    if outcome == "comm_bootstrap":
        return f"{head}ids {' '.join(value[:4].decode() for value in result.comm_bootstrap.unique_ids)}"
    if outcome == "describe":
        return head + "; ".join(member_words(member) for member in result.describe.members)
    return f"{head}{outcome} done"


def _store_words(result: session_pb2.Result) -> str:
    store = result.store
    parts = ["found" if store.found else "absent"]
    if store.value:
        parts.append(f"= {store.value.decode()}")
    if store.number:
        parts.append(f"number {store.number}")
    if store.keys:
        parts.append(f"keys {' '.join(store.keys)}")
    if store.watch_id:
        parts.append(f"watch {store.watch_id}")
    return " ".join(parts)


def error_words(error: error_pb2.ErrorDetail) -> str:
    """An error: its code, whether to retry, its message."""
    again = ", retryable" if error.retryable else ""
    return f"{ErrorCode(error.code).name}{again}: {error.message}"
