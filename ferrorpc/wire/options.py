"""gRPC's options: every row mends something that gRPC's defaults do to a training job.

Four kinds of ends: a worker's channel to the coordinator (`session_channel`), the coordinator's server (`control_server`), a
worker's channel to a peer (`data_channel`) and the server its peers dial (`data_server`). The one thing that no option mends,
gRPC's fork handlers, is seen to where ferrorpc is imported.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Options: TypeAlias = list[tuple[str, int]]

DATA_MESSAGE_BYTES_MAX: Final = 4 << 20
CONTROL_MESSAGE_BYTES_MAX: Final = 2 << 20

FLOODS_BOUNDED_SINCE: Final = (1, 82)
"""The grpcio since which no flood of benchmarks/floods.py makes a server grow by 100 MiB. Under 1.76 to 1.80 two seconds of
pings cost up to 1 GiB, under 1.81 messages 200 MiB."""


def _keepalive(silent_ms: int, acknowledged_ms: int, answered_ms: int) -> Options:
    """Ends a connection, pinged after so long a silence, once what was sent is not acknowledged or a ping not answered.

    Args:
        acknowledged_ms: how long the other host's kernel may take: a cut cable, a host that vanished.
        answered_ms: how long the other process may take as well, and all that was sent before the ping: a process that was
            stopped, or a link on which much waits.
    """
    return [
        ("grpc.keepalive_time_ms", silent_ms),
        # In effect TCP_USER_TIMEOUT: gRPC's own watch of this length is never set.
        ("grpc.keepalive_timeout_ms", acknowledged_ms),
        # Its default is 60 s.
        ("grpc.http2.ping_timeout_ms", answered_ms),
        # Between two calls as well, or an idle connection breaks unseen.
        ("grpc.keepalive_permit_without_calls", 1),
        # No limit on pings that carry no data: a barrier that waits for a minute has none.
        ("grpc.http2.max_pings_without_data", 0),
    ]


_MEMBER_KEEPALIVE: Final = _keepalive(1000, 1500, 1500)
"""By the coordinator: so a member that was stopped, or whose host vanished, is noticed. One that was only slow takes its
session up again. Members beat more often than it pings, so only one whose beats do not come is pinged."""
_COORDINATOR_KEEPALIVE: Final = _keepalive(1000, 1500, 3000)
"""By a member, which hears nothing as long as nothing happens, and so pings all the time. On a slow link ping and answer both
wait behind tensors: were it as impatient as the coordinator, it would end the session of a rank whose beats arrive."""
_PEER_KEEPALIVE: Final = _keepalive(1000, 3500, 20_000)
"""So a cut cable is noticed within five seconds. Of the dead, and of the stopped, the coordinator tells sooner, and a stream
between two ranks that live must not end: it cannot be taken up again. A ping waits behind what was sent before it on this very
connection: some megabytes, which take 7 s at 10 Mbit/s."""

_CHANNEL: Final = (
    # http_proxy would otherwise send even 127.0.0.1 through the proxy.
    ("grpc.enable_http_proxy", 0),
    # Channels of one process to one address would otherwise share a connection, and with it its limit of streams.
    ("grpc.use_local_subchannel_pool", 1),
    # The default backoff left a client away for 16 s after an outage of 28 s. The minimum also bounds one attempt to connect.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 3000),
    # Addresses are host:port; a lookup of service configurations in DNS only costs time.
    ("grpc.service_config_disable_resolution", 1),
)

_SERVER: Final = (
    # Two servers would otherwise share a port silently, each with some of the connections.
    ("grpc.so_reuseport", 0),
    # Pings once a second are wanted; by default a server hangs up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    # A connection that never finishes its handshake is dropped.
    ("grpc.server_handshake_timeout_ms", 5000),
    # Calls that nobody has taken up yet keep what came with them, those of connections that ended too: under a flood they are
    # most of the memory. Two thousand may wait (by default some of so many are cancelled); members that are cut off dial again.
    ("grpc.server.max_pending_requests", 2200),
    ("grpc.server.max_pending_requests_hard_limit", 3000),
    # Nobody of ours compresses: what is packed is no message, and is not unpacked to find that out. Before grpcio 1.84 that was
    # done whole, and only then was the size looked at.
    ("grpc.per_message_decompression", 0),
)


def session_channel() -> Options:
    """For a channel to the coordinator."""
    return [*_COORDINATOR_KEEPALIVE, *_CHANNEL, ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES_MAX)]


def control_server() -> Options:
    """For the coordinator's server. A client that resets streams in a loop is held to 64 of them at a time."""
    return [
        *_MEMBER_KEEPALIVE,
        *_SERVER,
        ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES_MAX),
        ("grpc.max_concurrent_streams", 64),
        # Of a message that is not read yet so much is taken in, and not more on faster connections: what waits stays small.
        ("grpc.http2.lookahead_bytes", 8 << 10),
        ("grpc.http2.bdp_probe", 0),
    ]


_DATA: Final = (
    # Never an unlimited size: one message would fill the memory.
    ("grpc.max_receive_message_length", DATA_MESSAGE_BYTES_MAX),
    # A chunk is one frame of HTTP/2 instead of 64, between which there would be headers to be found and cut out. Nothing else
    # waits behind it: no other stream shares the connection.
    ("grpc.http2.max_frame_size", DATA_MESSAGE_BYTES_MAX),
)


def data_channel() -> Options:
    """For a channel to a peer."""
    return [*_PEER_KEEPALIVE, *_CHANNEL, *_DATA]


def data_server() -> Options:
    """For a worker's server: one stream per peer and generation, on a connection of its own."""
    return [*_PEER_KEEPALIVE, *_SERVER, *_DATA, ("grpc.max_concurrent_streams", 16)]


def bounds_floods(grpcio_version: str) -> bool:
    """Whether a server on this grpcio ("1.85.1") keeps what strangers flood it with within bounds, see FLOODS_BOUNDED_SINCE."""
    return tuple(int(part) for part in grpcio_version.split(".")[:2]) >= FLOODS_BOUNDED_SINCE
