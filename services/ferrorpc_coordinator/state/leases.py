"""How alive members are: from a frame, the end of a stream, and silence.

    PRESENT --silent for a lease--> STALLED --silent for `stall`--> dead
    PRESENT, STALLED --stream ended--> SUSPECT --resumed--> PRESENT
    SUSPECT --the earlier of grace since the end and lease since the last frame--> dead

After a restart of the coordinator everybody is SUSPECT and has `restart_grace` (or its lease, if that is longer) to resume.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ferrorpc_coordinator.state.desk import Desk
from ferrorpc_coordinator.state.failures import seconds
from ferrorpc_coordinator.state.member import Member, Standing


class Leases:
    """One deadline per living member, moved as it is heard of.

    Args:
        changed: called after a member became present, stalled or suspect.
        lost: called when a member is dead, with the reason; it marks it so.
    """

    def __init__(self, desk: Desk, changed: Callable[[Member], None], lost: Callable[[Member, str], None]) -> None:
        self._desk = desk
        self._changed = changed
        self._lost = lost

    def connected(self, member: Member, stream: int) -> None:
        """A stream of this member is open, new or resumed."""
        member.stream = stream
        member.heard = self._desk.now
        if member.recovered:
            # Nobody was told that the restarted coordinator did not know of it yet, so nobody is told that it does.
            member.recovered, member.standing, member.reason = False, Standing.PRESENT, ""
        self._become(member, Standing.PRESENT, "")
        self._arm(member, member.heard + member.lease_ns)

    def heard(self, member: Member) -> None:
        """A frame came. The deadline finds the later time by itself when it comes."""
        member.heard = self._desk.now
        if member.standing is Standing.STALLED:
            self._become(member, Standing.PRESENT, "")
            self._arm(member, member.heard + member.lease_ns)

    def disconnected(self, member: Member) -> None:
        """Its stream ended without a Leave."""
        member.stream = None
        now, grace = self._desk.now, self._desk.settings.grace_ns
        member.patience_until = min(now + grace, member.heard + member.lease_ns)
        self._become(member, Standing.SUSPECT, "its session ended")
        self._arm(member, max(now, member.patience_until))

    def recovered(self, member: Member) -> None:
        """The coordinator restarted; this member has not been heard of yet."""
        patience = max(member.lease_ns, self._desk.settings.restart_grace_ns)
        member.patience_until = self._desk.now + patience
        member.reason = "not heard of since the coordinator restarted"
        self._arm(member, member.patience_until)

    def forget(self, member: Member) -> None:
        """The member died or left."""
        self._desk.disarm(("lease", member.name))

    def _arm(self, member: Member, when: int) -> None:
        self._desk.arm(("lease", member.name), when, partial(self._expired, member))

    def _become(self, member: Member, standing: Standing, reason: str) -> None:
        if member.standing is not standing:
            member.standing, member.reason = standing, reason
            self._note(member)
            self._changed(member)

    def _note(self, member: Member) -> None:
        back = member.standing is Standing.PRESENT
        kind, what = ("back", "it is back") if back else (member.standing.value, member.reason)
        self._desk.chronicle.add(kind, f"{member.title}: {what}", rank=member.rank, generation=member.generation)

    def _expired(self, member: Member) -> None:
        now = self._desk.now
        if member.standing is Standing.SUSPECT:
            self._lost(member, self._verdict(member))
            return
        if member.standing is Standing.STALLED:
            self._lost(member, f"no sign of life for {seconds(now - member.heard)} on an open session (stalled)")
            return
        due = member.heard + member.lease_ns
        if now < due:
            self._arm(member, due)
            return
        self._become(member, Standing.STALLED, f"its session is open, but it was silent for {seconds(member.lease_ns)}")
        self._arm(member, member.heard + max(member.lease_ns, self._desk.settings.stall_ns))

    def _verdict(self, member: Member) -> str:
        settings, silent = self._desk.settings, self._desk.now - member.heard
        if member.recovered:
            return f"it did not come back within {seconds(silent)} after the coordinator restarted"
        if silent >= member.lease_ns:
            return f"its session ended, and nothing was heard of it for {seconds(silent)}"
        return f"its session ended and did not come back within {seconds(settings.grace_ns)}"
