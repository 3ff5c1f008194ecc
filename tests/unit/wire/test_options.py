"""The options say what they are meant to say; tests/integration/test_grpc_traps.py shows that they work."""

import pytest

from ferrorpc.wire import options

ENDS = [options.session_channel, options.control_server, options.data_channel, options.data_server]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_no_option_is_given_twice_and_no_size_is_unlimited(end) -> None:
    rows = end()
    assert len({name for name, _ in rows}) == len(rows)
    assert all(value >= 0 for _, value in rows)
    assert 0 < dict(rows)["grpc.max_receive_message_length"] <= 4 << 20


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_caller_may_change_its_copy(end) -> None:
    end().clear()
    assert end()


@pytest.mark.parametrize("channel", [options.session_channel, options.data_channel], ids=lambda channel: channel.__name__)
def test_a_channel_never_waits_longer_than_a_second_to_dial_again(channel) -> None:
    rows = dict(channel())
    assert rows["grpc.initial_reconnect_backoff_ms"] <= 100
    assert rows["grpc.max_reconnect_backoff_ms"] <= 1000
    assert rows["grpc.min_reconnect_backoff_ms"] <= 3000  # this one is the connect timeout as well


def test_who_gives_up_a_live_connection_last_is_who_cannot_take_it_up_again() -> None:
    """A stopped process answers no ping: the coordinator tells of it first, but no end goes on for gRPC's 60 s."""
    patience = [dict(end())["grpc.http2.ping_timeout_ms"] for end in (options.control_server, options.session_channel)]
    peers = {dict(end())["grpc.http2.ping_timeout_ms"] for end in (options.data_channel, options.data_server)}
    assert [*patience, *peers] == sorted({*patience, *peers})
    assert max(peers) < 60_000


def test_a_rank_that_accepts_a_stream_late_still_gets_it() -> None:
    """By default gRPC cancels it after 30 s, half of what FERRORPC_STALL allows a rank that holds the interpreter lock."""
    assert dict(options.data_server())["grpc.server_max_unrequested_time_in_server"] >= 3600


@pytest.mark.parametrize("end", [options.data_channel, options.data_server], ids=lambda end: end.__name__)
@pytest.mark.parametrize(
    ("lease_seconds", "expected_ms"), [(0.2, (3500, 20_000)), (12.0, (12_000, 20_000)), (1e9, (300_000, 300_000))]
)
def test_a_connection_between_ranks_lasts_as_long_as_their_lease(end, lease_seconds: float, expected_ms) -> None:
    rows = dict(end(lease_seconds))
    assert (rows["grpc.keepalive_timeout_ms"], rows["grpc.http2.ping_timeout_ms"]) == expected_ms


@pytest.mark.parametrize(
    ("version", "bounded"),
    [("1.76.0", False), ("1.81.2", False), ("1.82.0rc1", True), ("1.85.1", True), ("1.100.0", True), ("2.0.0.dev0", True)],
)
def test_which_grpcio_bounds_floods(version, bounded) -> None:
    assert options.bounds_floods(version) is bounded
