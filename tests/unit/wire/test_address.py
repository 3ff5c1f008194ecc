"""Addresses as people write them."""

import errno
import os
import socket

import pytest

from ferrorpc.wire.address import cannot_listen, is_loopback, is_taken, is_wildcard, join_address, listen, split_address


@pytest.mark.parametrize(
    ("host", "address"), [("gpu7", "gpu7:29700"), ("10.0.0.1", "10.0.0.1:29700"), ("fe80::1", "[fe80::1]:29700")]
)
def test_a_host_and_a_port_make_an_address_and_back(host, address):
    assert join_address(host, 29700) == address
    assert split_address(address) == (host, 29700)


def test_a_host_that_has_its_brackets_gets_no_others():
    assert join_address("[::]", 0) == "[::]:0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "a.localhost"])
def test_what_only_this_machine_reaches(host):
    assert is_loopback(host)
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_what_listens_everywhere(host):
    assert is_wildcard(host)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "gpu7", "localhost.example"])
def test_what_others_reach(host):
    assert not is_loopback(host)
    assert not is_wildcard(host)


def test_a_family_of_addresses_that_the_host_lacks_is_not_taken(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(99, 1, 6, "", ("::1", 1, 0, 0))])
    assert not is_taken("localhost", 1)


@pytest.mark.parametrize(
    ("reason", "said", "hint", "retryable"),
    [
        (errno.EADDRINUSE, "203.0.113.1: every port is in use", "net.ipv4.ip_local_port_range", True),
        (errno.EADDRNOTAVAIL, "cannot listen on 203.0.113.1: it is no address of this machine", "try another", False),
        (errno.EMFILE, f"cannot listen on 203.0.113.1: {os.strerror(errno.EMFILE)}", "ulimit -n", False),
        (errno.EACCES, f"cannot listen on 203.0.113.1: {os.strerror(errno.EACCES)}", "try another", False),
    ],
)
def test_a_host_on_which_nothing_can_listen_is_told_from_one_whose_ports_are_used_up(reason, said, hint, retryable):
    error = cannot_listen("203.0.113.1", OSError(reason, os.strerror(reason)), "try another")
    assert (error.message, error.retryable) == (said, retryable)
    assert hint in error.hint


@pytest.mark.parametrize("host", ["\u00fc..b", "\u00fc" * 70])
def test_what_cannot_be_the_name_of_a_host_is_no_address_of_this_one(host):
    with pytest.raises(OSError) as raised:
        listen(host, 0)
    assert raised.value.errno == errno.EADDRNOTAVAIL
