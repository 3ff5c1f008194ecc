"""A read-only view of the coordinator for the HTTP port. Used on the event loop only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrorpc.v1 import identity_pb2
from ferrorpc_coordinator.metrics import Collector
from ferrorpc_coordinator.state.access import Access
from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.job import Job
from ferrorpc_coordinator.web.status_json import status_json


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    """A view of one coordinator."""

    coordinator: Coordinator
    collector: Collector
    healthy: Callable[[], bool]
    """Whether the coordinator serves; False while it drains."""
    access: Access
    """Checks the tokens of readers."""
    tick: Callable[[], None]
    """Advances the coordinator's time. No timer does so while there is no deadline, and ages would be stale."""

    def metrics(self) -> bytes:
        """The metrics in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self.collector)
        return generate_latest(registry)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, those with the most living members first."""
        jobs = sorted(self.coordinator.jobs.items(), key=lambda item: (-item[1].members.living, item[0]))
        return [{"job": name, "members": job.members.living, "generation": job.context.newest_generation} for name, job in jobs]

    def job(self, name: str) -> Job | None:
        """The job of this name; for an empty name, the first of `jobs`."""
        if not name:
            known = self.jobs()
            name = known[0]["job"] if known else ""
        return self.coordinator.jobs.get(name)

    def state(self, job: Job) -> dict[str, Any]:
        """A job's status as JSON."""
        self.tick()
        status = job.status()
        status.position.CopyFrom(
            identity_pb2.Position(
                cluster_id=self.coordinator.cluster_id, epoch=self.coordinator.epoch, generation=job.context.newest_generation
            )
        )
        return status_json(status, time.monotonic_ns() // 1_000_000)
