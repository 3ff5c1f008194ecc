"""The simulated world keeps nothing of what is over, and takes no faults that it cannot have."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from ferrorpc import ConfigError, ProcessGroup
from ferrorpc.backends.simulated import Networks, SimulatedBackend
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import FaultPlan
from tests.threads import together

SECONDS = 20.0


def test_nothing_stays_of_members_that_were_killed_nor_of_what_they_had_not_received() -> None:
    world, networks = LocalWorld(2, timeout=SECONDS), Networks(SYSTEM_CLOCK, None, 0)

    def group(session: LocalSession) -> ProcessGroup:
        return ProcessGroup(SimulatedBackend(session, networks, SECONDS), timeout=SECONDS)

    survivor, gone = group(world.session(0)), []
    peer = group(world.session(1))
    for _ in range(4):
        together([lambda each=each: each.barrier() for each in (survivor, peer)])
        survivor.send(np.ones(1000), 1)
        gone.append(weakref.ref(peer._backend.transport.mailbox))
        world.kill(1, "signal 9")
        replacement: list[LocalSession] = []
        joining = threading.Thread(target=lambda found=replacement: found.append(world.join(SECONDS)))
        joining.start()
        survivor = survivor.reform(SECONDS)
        joining.join(SECONDS)
        peer = group(replacement[0])
    gc.collect()
    assert [reference() is None for reference in gone[:-1]] == [True] * 3
    assert len(world.sessions) == 2
    for each in (survivor, peer):
        each.close()


@pytest.mark.parametrize(
    ("faults", "text"),
    [("slow", "delays no messages"), (FaultPlan, "delays no messages"), (FaultPlan(kill={0: 0.1}), "kills or pauses ranks")],
)
def test_faults_that_a_group_cannot_have_are_refused(faults: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SimulatedBackend.create_group(2, faults=faults)
