"""Members of a job, with sessions of a coordinator process."""

from __future__ import annotations

from typing import Any

from ferrorpc.config import Config
from ferrorpc.coordination.session import RemoteSession
from tests.threads import in_threads, results_of


def join(address: str, rank: int, size: int | tuple[int, int], **more: Any) -> RemoteSession:
    """One member; `more` are arguments of RemoteSession or settings."""
    policy = (size, size) if isinstance(size, int) else size
    names = ("job", "name", "pinned_rank", "hinted_rank", "labels", "worker_address")
    arguments = {name: more.pop(name) for name in names if name in more}
    if policy[0] == policy[1]:
        arguments.setdefault("pinned_rank", rank)
    config = Config({"timeout": 20.0} | more, {})
    return RemoteSession(
        address,
        job=arguments.pop("job", "trial"),
        name=arguments.pop("name", f"member-{rank}"),
        policy=policy,
        hinted_rank=arguments.pop("hinted_rank", rank),
        config=config,
        **arguments,
    ).join()


def join_all(address: str, size: int, policy: tuple[int, int] | None = None, **more: Any) -> list[RemoteSession]:
    """A whole world of members in this process, in rank order."""
    sessions = results_of(in_threads(size, lambda rank: join(address, rank, policy or size, **more)))
    return sorted(sessions, key=lambda session: session.membership.assignment.rank)
