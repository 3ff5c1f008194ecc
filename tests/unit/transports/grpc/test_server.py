"""What is said where a worker's server finds no port."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from ferrorpc.errors import ConfigError
from ferrorpc.transports.grpc.server import WorkerServer

ELSEWHERE = "203.0.113.1"
"""Of the documentation's network: nobody has it, so that gRPC listens on none of its ports."""


def refused() -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        WorkerServer(ELSEWHERE, ELSEWHERE)
    return raised.value


def test_an_address_of_another_machine_is_a_wrong_setting() -> None:
    error = refused()
    assert error.message == f"cannot listen on {ELSEWHERE}: it is no address of this machine"
    assert not error.retryable
    assert "FERRORPC_BIND" in error.hint


def test_ports_that_are_used_up_are_no_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC says no more than that it could not listen."""

    def create_server(address: tuple[str, int], **_: object) -> socket.socket:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    monkeypatch.setattr(socket, "create_server", create_server)
    error = refused()
    assert error.message == f"{ELSEWHERE}: every port is in use"
    assert error.retryable
    assert "FERRORPC_BIND" not in error.hint


def test_what_is_refused_to_grpc_alone_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", lambda address, **_: socket.socket())
    assert "Failed to bind" in refused().message
