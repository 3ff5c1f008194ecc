"""Decides whether members are alive, from received frames, ended streams and silence.

    PRESENT --no frame for a lease--> STALLED --no frame for `stall`--> dead
    PRESENT, STALLED --stream ended--> SUSPECT --resumed--> PRESENT
    SUSPECT --the earlier of grace after the end, lease after the last frame--> dead

After a restart of the coordinator every member is SUSPECT and has `restart_grace` (or its lease, if that is longer) to resume.

A coordinator that hears of nobody at all is probably cut off itself, while the members go on without it. So it spares those
whose time is over until somebody is heard of again, but no longer than they wait for a coordinator (`outage`). Then they have
the time that they have after a restart. A stream that ended between two beats was perhaps ended by the end of its process:
that member is spared for `restart_grace` at most, and has a grace then. If all streams had ended, however briefly, the others
have a grace from the return of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ferrorpc_coordinator.state.context import JobContext
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.settings import format_seconds


class Leases:
    """One deadline per living member.

    Args:
        on_change: called after a member became present, stalled or suspect.
        on_dead: called with the reason when a member is dead; it marks the member as dead.
    """

    def __init__(
        self, context: JobContext, on_change: Callable[[Member], None], on_dead: Callable[[Member, str], None]
    ) -> None:
        self._context = context
        self._on_change = on_change
        self._on_dead = on_dead

    def connected(self, member: Member, stream: int) -> None:
        """A stream of this member is open, new or resumed."""
        member.stream, member.spared = stream, False
        member.last_heard = self._context.now
        if member.recovered:
            # The others were not told that the restarted coordinator lost sight of it, so its return is no change either.
            member.recovered, member.liveness, member.reason = False, Liveness.PRESENT, ""
        self._set_liveness(member, Liveness.PRESENT, "")
        self._arm(member, member.last_heard + member.lease_ns)

    def frame_received(self, member: Member) -> None:
        """A frame was received. An armed deadline is not moved: when it passes, it is set anew to the later time."""
        member.last_heard = self._context.now
        if member.liveness is Liveness.STALLED:
            self._set_liveness(member, Liveness.PRESENT, "")
            self._arm(member, member.last_heard + member.lease_ns)

    def disconnected(self, member: Member) -> None:
        """Its stream ended without a Leave."""
        member.stream = None
        now, grace = self._context.now, self._context.settings.grace_ns
        member.fell_silent = now - member.last_heard >= self._context.settings.missed_beat_ns(member.lease_ns)
        self._set_liveness(member, Liveness.SUSPECT, "its session ended")
        self._arm(member, max(now, min(now + grace, member.last_heard + member.lease_ns)))

    def recovered(self, member: Member) -> None:
        """The coordinator restarted, and this member has not resumed yet."""
        member.reason = "not heard of since the coordinator restarted"
        self._arm(member, self._context.now + max(member.lease_ns, self._context.settings.restart_grace_ns))

    def cancel(self, member: Member) -> None:
        """Cancels the deadline of a member that died or left."""
        self._context.disarm(("lease", member.name))

    def _arm(self, member: Member, when: int) -> None:
        self._context.arm(("lease", member.name), when, partial(self._expired, member))

    def _set_liveness(self, member: Member, liveness: Liveness, reason: str) -> None:
        if member.liveness is not liveness:
            member.liveness, member.reason = liveness, reason
            self._log(member, "active" if liveness is Liveness.PRESENT else liveness.value)
            self._on_change(member)

    def _log(self, member: Member, new_state: str = "") -> None:
        back = member.liveness is Liveness.PRESENT
        kind, what = ("back", "it is back") if back else (member.liveness.value, member.reason)
        text = f"{member.display_name}: {what}"
        self._context.occurrences.add(kind, text, rank=member.rank, generation=member.generation, state=new_state)

    def _expired(self, member: Member) -> None:
        now = self._context.now
        if member.liveness is Liveness.SUSPECT:
            self._judge_suspect(member)
            return
        if member.liveness is Liveness.STALLED:
            self._on_dead(member, f"no sign of life for {format_seconds(now - member.last_heard)} on an open session (stalled)")
            return
        due = member.last_heard + member.lease_ns
        if now < due:
            self._arm(member, due)
            return
        self._set_liveness(
            member, Liveness.STALLED, f"its session is open, but it was silent for {format_seconds(member.lease_ns)}"
        )
        self._arm(member, member.last_heard + max(member.lease_ns, self._context.settings.stall_ns))

    def _judge_suspect(self, member: Member) -> None:
        """Decides about a member whose stream ended and whose time is over."""
        now, settings, shared = self._context.now, self._context.settings, self._context.shared
        spared_ns, back_ns = settings.restart_grace_ns, settings.grace_ns
        if member.fell_silent or member.recovered:
            spared_ns, back_ns = settings.outage_ns, max(member.lease_ns, settings.restart_grace_ns)
        ended, give_up = shared.silence_ended, member.last_heard + spared_ns
        if shared.hears_nobody and now < give_up:
            if not member.spared:
                member.spared = True
                member.reason += ", and nobody is heard of: the coordinator may be cut off"
                self._log(member)
            self._arm(member, min(now + member.lease_ns // 2, give_up))
        elif member.last_heard < ended and now < (last_moment := min(ended, give_up) + back_ns):
            self._arm(member, last_moment)
        else:
            self._on_dead(member, self._death_reason(member))

    def _death_reason(self, member: Member) -> str:
        settings, silent = self._context.settings, self._context.now - member.last_heard
        if member.recovered:
            return f"it did not come back within {format_seconds(silent)} after the coordinator restarted"
        if silent >= member.lease_ns:
            return f"its session ended, and nothing was heard of it for {format_seconds(silent)}"
        return f"its session ended and did not come back within {format_seconds(settings.grace_ns)}"
