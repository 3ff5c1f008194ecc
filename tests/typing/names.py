"""The names of the face, as mypy --strict and pyright know them; see arrays.py."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import ferrorpc
import ferrorpc.testing
from ferrorpc import *  # noqa: F403
from ferrorpc.testing import *  # noqa: F403


def reached(group: ferrorpc.ProcessGroup) -> None:
    """Rooms are reached by `import ferrorpc` alone."""
    assert_type(ferrorpc.__version__, str)
    assert_type(ferrorpc.schedules.zbv(2, 4), ferrorpc.schedules.Schedule)
    assert_type(ferrorpc.hooks.PowerSGD(2), ferrorpc.hooks.PowerSGD)
    assert_type(ferrorpc.rules.SGD(0.1), ferrorpc.rules.SGD)
    assert_type(ferrorpc.errors.UsageError("no"), ferrorpc.UsageError)
    assert_type(ferrorpc.testing.Kill(at_operation=2), ferrorpc.testing.Kill)


def misspelt(group: ferrorpc.ProcessGroup) -> None:
    """A name that is not there is an error."""
    ferrorpc.init_proces_group()  # type: ignore[attr-defined]
    ferrorpc.testing.run_wrld(3, misspelt)  # type: ignore[attr-defined]
    ferrorpc.hooks.PowerSDG(2)  # type: ignore[attr-defined]
    try:
        group.barrier()
    except ferrorpc.PeerLostEror:  # type: ignore[attr-defined]
        group.reform()


def settings() -> None:
    """Every setting is known by its name."""
    ferrorpc.init_process_group("grpc", timeout=30.0, world_size=(2, 4), lease="500ms", tls_ca=Path("ca.pem"), port=None)
    ferrorpc.init_process_group(timeot=30.0)  # type: ignore[call-arg]
    ferrorpc.init_process_group(world_size=2.0)  # type: ignore[arg-type]


def starred(group: ProcessGroup) -> int:  # noqa: F405
    """What `import *` brings."""
    assert_type(run_world(2, starred), list[int])  # noqa: F405
    return group.rank
