"""Which address a worker tells the others."""

import contextlib
import time

import pytest

from ferrorpc.bootstrap.address import advertised_host, local_address_towards, require_authentication
from ferrorpc.config import Config
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError
from ferrorpc.wire.tls import TlsFiles

REMOTE = "192.0.2.1:29700"  # an address of the documentation's network: nothing is ever sent there


@pytest.fixture
def remote_route(monkeypatch):
    """A machine whose way to REMOTE starts at 10.1.2.3."""
    monkeypatch.setattr("ferrorpc.bootstrap.address._route", lambda host, port: "10.1.2.3")


def settings(**arguments):
    return Config(arguments, {})


def test_next_to_the_coordinator_loopback_will_do():
    assert advertised_host("127.0.0.1:29700", settings()) == "127.0.0.1"
    assert advertised_host("localhost:29700", settings(bind="127.0.0.1")) == "127.0.0.1"


def test_a_wildcard_is_told_as_the_address_on_the_way_to_the_coordinator(remote_route):
    assert advertised_host(REMOTE, settings(bind="0.0.0.0")) == "10.1.2.3"
    assert advertised_host(REMOTE, settings(bind="::")) == "10.1.2.3"


def test_on_a_host_that_gives_its_own_name_to_loopback_the_name_is_told(monkeypatch):
    """As Debian does, with 127.0.1.1; other hosts know the name by another address."""
    monkeypatch.setattr("ferrorpc.bootstrap.address._route", lambda host, port: "127.0.0.1")
    assert advertised_host("trainer-0:29700", settings(bind="0.0.0.0")) == "trainer-0"
    assert advertised_host("trainer-0:29700", settings()) == "127.0.0.1"
    assert advertised_host("localhost:29700", settings(bind="0.0.0.0")) == "127.0.0.1"


def test_a_specific_address_is_told_as_it_is(remote_route):
    assert advertised_host(REMOTE, settings(bind="10.9.9.9")) == "10.9.9.9"


def test_what_is_advertised_comes_before_everything(remote_route):
    assert advertised_host(REMOTE, settings(advertise="worker-3.example")) == "worker-3.example"


def test_loopback_with_a_coordinator_elsewhere_names_the_variable(remote_route):
    with pytest.raises(ConfigError, match=r"FERRORPC_BIND=127\.0\.0\.1"):
        advertised_host(REMOTE, settings())


def test_a_link_local_address_is_not_told(monkeypatch):
    """Peers would need the name of their own interface with it, as in fe80::1%eth0."""
    monkeypatch.setattr("ferrorpc.bootstrap.address._route", lambda host, port: "fe80::1")
    coordinator = "[fe80::2%eth0]:29700"
    with pytest.raises(ConfigError, match=r"from fe80::1, a link-local address(.|\n)*FERRORPC_ADVERTISE"):
        advertised_host(coordinator, settings(bind="0.0.0.0"))
    assert advertised_host(coordinator, settings(bind="fd00::3")) == "fd00::3"
    assert advertised_host(coordinator, settings(bind="0.0.0.0", advertise="worker-3")) == "worker-3"


@pytest.mark.parametrize(
    ("tls", "private"),
    [(None, False), (TlsFiles("ca"), False), (TlsFiles(None, "cert", "key"), False), (TlsFiles("ca", "cert", "key"), True)],
    ids=["none", "authority", "certificate", "both"],
)
def test_who_listens_beyond_loopback_must_know_who_dials(tls, private):
    require_authentication(settings(bind="127.0.0.1"), tls)
    require_authentication(settings(bind="0.0.0.0", insecure=True), tls)
    with contextlib.nullcontext() if private else pytest.raises(ConfigError, match="anyone who reaches this worker"):
        require_authentication(settings(bind="0.0.0.0"), tls)


def test_a_name_that_leads_nowhere_is_tried_again_until_the_timeout():
    started = time.monotonic()
    with pytest.raises(CoordinatorUnavailableError, match="nowhere"):
        local_address_towards("coordinator.invalid:29700", 0.6)
    assert time.monotonic() - started >= 0.6


def test_a_name_that_is_not_known_yet_is_told_of_while_it_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("ferrorpc.bootstrap.address._WARN_SECONDS", 0.2)
    with pytest.raises(CoordinatorUnavailableError), caplog.at_level("WARNING", "ferrorpc.bootstrap"):
        local_address_towards("coordinator.invalid:29700", 0.8)
    assert [record.getMessage().partition(" s: ")[0] for record in caplog.records][:1] == [
        "the coordinator's address coordinator.invalid:29700 has led nowhere for 0"
    ]
