"""Ports that are kept for the children of this process."""

import contextlib
import socket

import pytest

from ferrorpc.cli.ports import free_port, held_ports
from ferrorpc.errors import ConfigError


def can_bind(port, *, reuse=False):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_a_held_port_is_left_to_whoever_asks_for_it_by_number():
    with held_ports(0, 0) as (port, other):
        assert port != other
        assert not can_bind(port)
        with socket.create_server(("127.0.0.1", port)) as server:  # sets SO_REUSEADDR
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"reached")
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(7) == b"reached"
            assert not can_bind(port, reuse=True), "it is in use"
    assert can_bind(port, reuse=True), "and is free afterwards"


def test_a_held_port_is_not_given_to_sockets_that_ask_for_any():
    with held_ports(0) as [port]:
        found = set()
        for _ in range(300):
            with held_ports(*[0] * 100) as others:
                found.update(others)
    assert port not in found
    assert len(found) > 5000, "most ports were tried"


def test_a_port_that_was_taken_meanwhile_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ConfigError, match=f"somebody has just taken port {server.getsockname()[1]}") as failed,
        held_ports(server.getsockname()[1]),
    ):
        pass
    assert failed.value.retryable


def test_a_free_port_differs_from_the_one_that_is_taken_next():
    first = free_port()
    assert free_port(first) != first


def test_a_free_port_differs_also_where_the_kernel_offers_the_same_one_for_as_long_as_it_is_free(monkeypatch):
    """As it does where few are left."""
    with held_ports(0, 0) as few:
        pass
    asked = []

    def bind(holder, number):
        asked.append(number)
        assert len(asked) < 10, "it asks for ever"
        for port in few:
            with contextlib.suppress(OSError):
                holder.bind(("127.0.0.1", port))
                return port
        raise ConfigError("every port is in use")

    monkeypatch.setattr("ferrorpc.cli.ports._bind", bind)
    assert free_port(few[0]) == few[1]
    with held_ports(0), pytest.raises(ConfigError, match="every port is in use"):
        free_port(few[0])


def test_a_machine_without_a_loopback_is_told_so(monkeypatch):
    monkeypatch.setattr("ferrorpc.cli.ports.LOOPBACK", "192.0.2.1")  # of the documentation's network: nobody has it
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        free_port()
