"""gRPC channel and server options. Each of them replaces a default of gRPC that harms a training job.

There are four sets: for a worker's channel to the coordinator (`session_channel`), the coordinator's server (`control_server`),
a worker's channel to a peer (`data_channel`) and the server that its peers dial (`data_server`). gRPC's fork handlers, which no
option turns off, are disabled where ferrorpc is imported.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from ferrorpc.wire.limits import LEASE_SECONDS_MAX

Options: TypeAlias = list[tuple[str, int]]

DATA_MESSAGE_BYTES_MAX: Final = 4 << 20
CONTROL_MESSAGE_BYTES_MAX: Final = 2 << 20

FLOODS_BOUNDED_SINCE: Final = (1, 82)
"""The first grpcio with which no flood of benchmarks/floods.py makes a server grow by 100 MiB. With 1.76 to 1.80 two seconds of
pings cost up to 1 GiB; with 1.81 messages cost 200 MiB."""


def _keepalive(acknowledged_ms: int, answered_ms: int) -> Options:
    """Keepalive: ends a connection when sent data is not acknowledged, or a ping, sent after a second of silence, not answered.

    Args:
        acknowledged_ms: how long the other host's kernel may take to acknowledge. Detects cut cables and vanished hosts.
        answered_ms: how long the answer to a ping may take, which includes the other process and all data that was sent before
            the ping. Detects stopped processes; must allow for links on which much data waits.
    """
    return [
        ("grpc.keepalive_time_ms", 1000),
        # In effect TCP_USER_TIMEOUT; gRPC's own timer of this length is never set.
        ("grpc.keepalive_timeout_ms", acknowledged_ms),
        # Its default is 60 s.
        ("grpc.http2.ping_timeout_ms", answered_ms),
        # Also between calls, or a broken idle connection is not detected.
        ("grpc.keepalive_permit_without_calls", 1),
        # No limit on pings without data: a barrier that waits for a minute sends none.
        ("grpc.http2.max_pings_without_data", 0),
    ]


_MEMBER_KEEPALIVE: Final = _keepalive(1500, 1500)
"""On the coordinator's server: detects a member that was stopped, or whose host vanished. A member that was only slow resumes
its session. Members send beats more often than it pings, so it pings only those whose beats do not arrive."""
_COORDINATOR_KEEPALIVE: Final = _keepalive(1500, 3000)
"""On a member's channel to the coordinator, which is silent while nothing happens, so pings are sent all the time. On a slow
link ping and answer both wait behind tensors: with the coordinator's timeout a rank whose beats arrive would lose its
session."""


def _peer_keepalive(lease_seconds: float) -> Options:
    """Between workers: detects a cut cable within five seconds. Of dead and stopped processes the coordinator tells sooner.

    A stream between two live ranks must not end, because it cannot be resumed. A ping waits behind the data that was sent
    before it on the same connection: some megabytes, which take 7 s at 10 Mbit/s. A rank that was stopped has its lease to go
    on, and its kernel acknowledges nothing more once its buffers are full.
    """
    lease_ms = round(min(lease_seconds, LEASE_SECONDS_MAX) * 1000)
    return _keepalive(max(3500, lease_ms), max(20_000, lease_ms))


_CHANNEL: Final = (
    # http_proxy would otherwise send even 127.0.0.1 through the proxy.
    ("grpc.enable_http_proxy", 0),
    # Channels of one process to one address would otherwise share a connection, and with it its limit of streams.
    ("grpc.use_local_subchannel_pool", 1),
    # The default backoff left a client away for 16 s after an outage of 28 s. The minimum also bounds one attempt to connect.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 3000),
    # Addresses are host:port; looking up service configurations in DNS only costs time.
    ("grpc.service_config_disable_resolution", 1),
)

_SERVER: Final = (
    # Two servers would otherwise share a port silently, each with some of the connections.
    ("grpc.so_reuseport", 0),
    # Pings once a second are wanted; by default a server hangs up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # A connection that never finishes its handshake is dropped.
    ("grpc.server_handshake_timeout_ms", 5000),
    # Calls that are not accepted yet keep the data they came with, even when their connection has ended: under a flood they are
    # most of the memory. Two thousand may wait (by default some of them are cancelled); members that are cut off dial again.
    ("grpc.server.max_pending_requests", 2200),
    ("grpc.server.max_pending_requests_hard_limit", 3000),
    # ferrorpc does not compress, so compressed messages are invalid and need not be decompressed. Before grpcio 1.84 they were
    # decompressed completely before their size was checked.
    ("grpc.per_message_decompression", 0),
)


def session_channel() -> Options:
    """Options of a channel to the coordinator."""
    return [*_COORDINATOR_KEEPALIVE, *_CHANNEL, ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES_MAX)]


def control_server() -> Options:
    """Options of the coordinator's server. A client that resets streams in a loop is limited to 64 of them at a time."""
    return [
        *_MEMBER_KEEPALIVE,
        *_SERVER,
        ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES_MAX),
        ("grpc.max_concurrent_streams", 64),
        # Buffered bytes of a message that is not read yet; the bandwidth probe would raise it on fast connections.
        ("grpc.http2.lookahead_bytes", 8 << 10),
        ("grpc.http2.bdp_probe", 0),
    ]


_DATA: Final = (
    # Never unlimited: one message could fill the memory.
    ("grpc.max_receive_message_length", DATA_MESSAGE_BYTES_MAX),
    # A chunk is one HTTP/2 frame instead of 64, whose headers would have to be found and removed. It delays nothing else,
    # because no other stream shares the connection.
    ("grpc.http2.max_frame_size", DATA_MESSAGE_BYTES_MAX),
)

_ACCEPTED_LATE: Final = ("grpc.server_max_unrequested_time_in_server", 24 * 3600)
"""gRPC cancels a stream that a server has not accepted for 30 s. A rank may hold the interpreter lock for longer and be well:
whether it is, the coordinator decides."""


def data_channel(lease_seconds: float = 0.0) -> Options:
    """Options of a channel to a peer, for a rank with this lease."""
    return [*_peer_keepalive(lease_seconds), *_CHANNEL, *_DATA]


def data_server(lease_seconds: float = 0.0) -> Options:
    """Options of a worker's server, for a rank with this lease. Each stream of a peer has a connection of its own."""
    return [*_peer_keepalive(lease_seconds), *_SERVER, *_DATA, _ACCEPTED_LATE, ("grpc.max_concurrent_streams", 16)]


def bounds_floods(grpcio_version: str) -> bool:
    """Whether a server with this grpcio (such as "1.85.1") limits its memory under floods, see FLOODS_BOUNDED_SINCE."""
    return tuple(int(part) for part in grpcio_version.split(".")[:2]) >= FLOODS_BOUNDED_SINCE
