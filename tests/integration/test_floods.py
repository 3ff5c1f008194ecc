"""A small version of benchmarks/floods.py: a job goes on, nobody is lost, and the coordinator does not grow without bounds."""

import pytest

from benchmarks.floods import FLOODS, MEBIBYTE, Job, resident_bytes, under
from tests.integration.coordinator_process import coordinator

RANKS = 16
SECONDS = 0.7
CONNECTIONS = 300


@pytest.fixture(scope="module")
def working():
    with coordinator() as process:
        job = Job(process.address, RANKS)
        job.meet()
        yield process, job
        job.crowd.close()


@pytest.mark.parametrize("name", FLOODS)
def test_a_job_outlives_a_flood(working, name):
    process, job = working
    host, port = process.address.split(":")
    before = resident_bytes(process.process.pid)
    sent, _ = under(job, FLOODS[name], (host, int(port)), SECONDS, CONNECTIONS)
    assert sent >= 10
    assert resident_bytes(process.process.pid) - before < 100 * MEBIBYTE
    job.meet()
    assert job.evicted == 0
