"""What gRPC holds for the clients of each job until they read it.

grpc.aio takes nothing back: what it was given stays in memory until the client reads it, or the call or the connection ends.
So it is given no more than a bound for each job, and the clients of one job cannot fill the memory that serves the others.
"""

from __future__ import annotations

from typing import Final

UNREAD_BYTES_MAX: Final = 32 << 20
"""A job may leave so many bytes of answers to calls unread before it can call for more, and so many on ended streams."""
ANSWERS_BYTES_MAX: Final = 256 << 20
"""A job's calls that wait for the same may get so many bytes of answers at once."""


class UnreadBytes:
    """Counts bytes by job."""

    def __init__(self) -> None:
        self._of_job: dict[str, int] = {}

    def of(self, job: str) -> int:
        """How many the clients of a job leave unread."""
        return self._of_job.get(job, 0)

    def add(self, job: str, size_bytes: int) -> None:
        """Counts more; a negative size is of what is read or has ended."""
        left = self.of(job) + size_bytes
        if left:
            self._of_job[job] = left
        else:
            self._of_job.pop(job, None)
