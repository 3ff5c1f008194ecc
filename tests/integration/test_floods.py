"""A small version of benchmarks/floods.py: a job goes on, nobody is lost, and the coordinator does not grow without bounds."""

import grpc
import pytest

from benchmarks.floods import FLOODS, MEBIBYTE, Job, peak_bytes, resident_bytes, under
from ferrorpc.wire.options import bounds_floods
from tests.integration.coordinator_process import coordinator

pytestmark = pytest.mark.skipif(not bounds_floods(grpc.__version__), reason="this grpcio bounds no floods (SECURITY.md)")
RANKS = 64
SECONDS = 1.2
CONNECTIONS = 300


@pytest.fixture(scope="module")
def working():
    with coordinator() as process:
        job = Job(process.address, RANKS)
        job.meet()
        yield process, job, resident_bytes(process.process.pid)
        job.crowd.close()


@pytest.mark.parametrize("name", FLOODS)
def test_a_job_outlives_a_flood(working, name):
    process, job, before = working
    host, port = process.address.split(":")
    sent, _ = under(job, FLOODS[name], (host, int(port)), SECONDS, CONNECTIONS)
    assert sent >= 10
    assert peak_bytes(process.process.pid) - before < 100 * MEBIBYTE
    job.meet()
    assert job.evicted == 0
