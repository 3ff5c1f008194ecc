"""The backend between processes: every operation as messages over gRPC. Slower lanes than others, but it works everywhere."""

from __future__ import annotations

from typing import Final

from ferrorpc.backends.message import MessageBackend
from ferrorpc.coordination.base import Session
from ferrorpc.transports.grpc import GrpcTransport
from ferrorpc.transports.grpc_server import WorkerServer
from ferrorpc.transports.mailbox import Mailbox

LAST_WORDS_SECONDS: Final = 0.5
"""How long an ended generation may take to say goodbye before the next one is joined."""


class GrpcBackend(MessageBackend):
    """One rank's backend in one generation.

    Args:
        session: the line to the coordinator; its current membership is the generation.
        server: this process's server for its peers, whose address the session announced when it joined. It outlives the
            backend: whoever made it closes it.
        timeout: seconds an operation may take where none are given.
    """

    name = "grpc"

    def __init__(self, session: Session, server: WorkerServer, *, timeout: float = 60.0) -> None:
        membership = session.membership
        assignment = membership.assignment
        transport = GrpcTransport(
            server,
            assignment,
            Mailbox(assignment.rank, session.report),
            membership.latch,
            session.clock,
            session.report_link_lost,
        )
        super().__init__(transport, session, timeout=timeout)
        self._line = session
        self._server = server

    def renew(self, timeout: float) -> GrpcBackend:
        """Closes this generation's streams, takes part in the next one and opens its, on the same server."""
        self.transport.close(LAST_WORDS_SECONDS)
        self._line.rejoin(timeout)
        return GrpcBackend(self._line, self._server, timeout=self.timeout)
