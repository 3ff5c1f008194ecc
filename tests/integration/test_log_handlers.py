"""A program's log handlers that raise, or that use the coordinator themselves, while it is lost and comes back."""

import logging

import pytest

from ferrorpc.errors import GroupAbortedError, UsageError
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join
from tests.waiting import eventually


@pytest.fixture
def durable(tmp_path):
    service = CoordinatorProcess("--data-dir", str(tmp_path / "journal"))
    yield service
    service.stop()


class Handler(logging.Handler):
    def __init__(self, act):
        super().__init__()
        self.act = act
        self.errors = []

    def emit(self, record):
        try:
            self.act(record)
        except Exception as error:
            self.errors.append(error)
            raise


@pytest.mark.parametrize("kind", ["strict", "store"])
def test_a_coordinator_that_is_lost_and_comes_back_is_used_again(durable, kind):
    session = join(durable.address, 0, 1, heartbeat_interval=0.2)
    log = logging.getLogger("ferrorpc.coordination")
    acts = {"strict": lambda record: {}[record.name], "store": lambda record: session.store.set("log", b"a line")}
    handler = Handler(acts[kind])
    log.addHandler(handler)
    try:
        durable.kill()
        eventually(lambda: handler.errors)
        durable.start()
        session.store.set("checkpoint", b"7")
        assert session.store.get("checkpoint", timeout=20.0) == b"7"
    finally:
        log.removeHandler(handler)
    assert all(isinstance(error, KeyError if kind == "strict" else UsageError) for error in handler.errors)
    session.leave()


def test_a_handler_may_end_the_generation(durable):
    session = join(durable.address, 0, 1, heartbeat_interval=0.2)
    log = logging.getLogger("ferrorpc.coordination")
    handler = Handler(lambda record: session.membership.latch.end(GroupAbortedError(0, "no coordinator")))
    log.addHandler(handler)
    try:
        durable.kill()
        assert eventually(lambda: session.membership.latch.cause).message == "rank 0 ended the group: no coordinator"
        durable.start()
        session.store.set("checkpoint", b"7")
    finally:
        log.removeHandler(handler)
    session.leave()
