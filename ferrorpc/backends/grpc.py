"""The backend between processes: shared memory where ranks share a host, messages over gRPC elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from ferrorpc.backends.message import MessageBackend
from ferrorpc.collectives.arena.calls import Calls
from ferrorpc.collectives.arena.control_blocks import ControlBlocks
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.tuning import Tuning, published
from ferrorpc.coordination.base import Session
from ferrorpc.transports.base import CLOSE_SECONDS, Transport
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.transports.routed import RoutedTransport
from ferrorpc.transports.shared_memory.discovery import discover_host_peers
from ferrorpc.transports.shared_memory.hosts import Hosts
from ferrorpc.transports.shared_memory.transport import SharedMemoryTransport


class GrpcBackend(MessageBackend):
    """One rank's backend in one generation. Made by every rank of it at the same time: ranks that share a host find each other.

    Args:
        session: with the coordinator; its current membership is the generation.
        server: this process's server for its peers, whose address the session announced when it joined. It outlives the
            backend: its creator closes it.
        path: how tensors travel: "auto" (through memory between ranks of one host, else over gRPC), "grpc", or
            "shared_memory" where all ranks must be on one host.
        timeout: default timeout of an operation, in seconds.
        asked: algorithms for calls that name none (`Tuning.algorithms`).

    Raises:
        BackendUnavailableError: "shared_memory" was asked for on any rank, and not all ranks share it.
    """

    name = "grpc"

    def __init__(
        self,
        session: Session,
        server: WorkerServer,
        *,
        path: str = "auto",
        timeout: float = 60.0,
        asked: tuple[tuple[Operation, str], ...] = (),
    ) -> None:
        membership = session.membership
        assignment, latch = membership.assignment, membership.latch
        host_peers = discover_host_peers(assignment, path, session.barrier, latch, session.clock)
        with ExitStack() as undo:
            undo.callback(host_peers.close, CLOSE_SECONDS)
            mailbox = Mailbox(assignment.rank, latch.end)
            told = partial(session.report_link_lost, latch=latch)
            transport: Transport = GrpcTransport(server, assignment, mailbox, latch, session.clock, told)
            undo.callback(transport.close, CLOSE_SECONDS)
            control = None
            if len(host_peers.ranks) > 1:
                near = SharedMemoryTransport(host_peers, mailbox, told)
                transport = RoutedTransport(near, near.peers, transport, session.clock)
                server.close_lanes = partial(transport.close, CLOSE_SECONDS, latch.unhealthy)
                control = ControlBlocks(host_peers)
            tuning = Tuning(published(assignment.cost_table), asked, _host_of_each(host_peers.hosts))
            super().__init__(transport, session, timeout=timeout, control=control, basis=tuning)
            self._asked = asked
            self._server = server
            self._path = path
            membership.activity.set_traffic_source(partial(_traffic, transport, None if control is None else control.calls))
            undo.pop_all()

    def renew(self, timeout: float) -> GrpcBackend:
        """Closes this generation's streams, takes part in the next one and opens its, on the same server."""
        until = self.clock.now() + timeout
        self.transport.close(min(CLOSE_SECONDS, timeout / 2))
        self.session.rejoin(max(0.0, until - self.clock.now()))
        return GrpcBackend(self.session, self._server, path=self._path, timeout=self.timeout, asked=self._asked)


def _traffic(transport: Transport, calls: Calls | None) -> dict[int, tuple[str, int]]:
    """World rank of a peer -> (kind of the lane to it, payload bytes that it has received from this rank).

    The session calls it beyond the end of the generation, so nothing here may keep the generation's memory alive.
    """
    told = transport.traffic()
    taken = {} if calls is None else calls.taken_bytes()
    return {peer: (kind, sent_bytes + taken.get(peer, 0)) for peer, (kind, sent_bytes) in told.items()}


def _host_of_each(hosts: Hosts) -> tuple[int, ...]:
    """The number of each rank's host."""
    number = {rank: place for place, ranks in enumerate(hosts) for rank in ranks}
    return tuple(number[rank] for rank in range(len(number)))
