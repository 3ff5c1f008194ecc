"""What certificates say of their holders, and what names listeners have."""

import pytest

from ferrorpc.wire.identity import EVERY_JOB, Identity, Role, identities, label, peer_identities, server_name

WORKER_A = Identity("a", Role.WORKER)


def test_a_plain_name_is_its_own_label_and_any_other_has_a_hash_of_its_own():
    assert [label(job) for job in ("a", "job-7", "x" * 63)] == ["a", "job-7", "x" * 63]
    odd = ["A", "a.b", "*", "x" * 64, "x--a", "-a", "a_b", "", label("A"), "\udcff"]
    labels = [label(job) for job in odd]
    assert len(set(labels)) == len(odd)
    assert all(len(one) == 35 and one.startswith("x--") for one in labels)


def test_uris_of_others_say_nothing():
    uris = [
        "ferrorpc://a/worker",
        "ferrorpc://a/king",
        "ferrorpc:///worker",
        "spiffe://a/worker",
        "ferrorpc://a/worker/x",
        "*/admin",
        "",
    ]
    assert identities(uris) == {WORKER_A}


def test_an_identity_is_of_its_job_alone():
    assert WORKER_A.covers("a")
    assert not WORKER_A.covers("A")
    assert Identity(EVERY_JOB, Role.ADMIN).covers("A")
    assert not Identity.of("*a", Role.ADMIN).covers("a")
    assert Identity.of("A", Role.WORKER).covers("A")
    assert not Identity("A", Role.WORKER).covers("A")  # certificates write that job as its hash


def test_roles_are_a_ladder_on_which_the_coordinator_does_not_stand():
    may = {role: {needed for needed in Role if role.may(needed)} for role in Role}
    assert may[Role.OBSERVER] == {Role.OBSERVER}
    assert may[Role.WORKER] == {Role.OBSERVER, Role.WORKER}
    assert may[Role.ADMIN] == {Role.OBSERVER, Role.WORKER, Role.ADMIN}
    assert may[Role.COORDINATOR] == set()


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ({}, None),
        ({"peer_uri": [b"ferrorpc://a/worker"]}, None),
        ({"x509_pem_cert": [b"..."]}, frozenset()),
        ({"x509_pem_cert": [b"..."], "peer_dns": [b"ferrorpc://a/admin"]}, frozenset()),
        ({"x509_pem_cert": [b"..."], "peer_uri": [b"ferrorpc://a/worker", b"\xff"]}, frozenset({WORKER_A})),
    ],
)
def test_only_uris_of_a_verified_certificate_count(context, found):
    assert peer_identities(context) == found


def test_a_listener_is_called_by_job_and_role():
    assert server_name("a", Role.WORKER) == "a.worker.ferrorpc"
    assert server_name(EVERY_JOB, Role.COORDINATOR) == "*.coordinator.ferrorpc"
