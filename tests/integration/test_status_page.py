"""The status page in a real browser: a healthy job, a barrier that waits for a rank, a death, a thousand ranks.

FERRORPC_SCREENSHOTS=DIR keeps a picture of each.
"""

import os
import threading
from pathlib import Path

import pytest

from ferrorpc.v1 import identity_pb2
from tests.integration import chromium
from tests.integration.coordinator_process import coordinator
from tests.integration.crowd import Crowd

pytest.importorskip("starlette", reason="the status page needs the extra ui")
pytest.importorskip("uvicorn", reason="the status page needs the extra ui")
pytestmark = pytest.mark.skipif(chromium.executable() is None, reason="Chromium is not installed")

CROWD = 1000
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def process():
    with coordinator("--http-port", "0", "--grace", "0.3") as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def job(request):
    return request.node.name


class Working:
    """Lets a crowd's steps go on in the background; the slow rank takes three times as long between two of them."""

    def __init__(self, crowd, slow=None):
        self._crowd, self._slow = crowd, slow
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over.wait(0.02):
            for rank in self._crowd.ranks:
                rank.step += 1
                rank.operation_ms += 4 if rank.number == self._slow else 14
                rank.activity = f"all_reduce(op=mean, float32[1000]) #{rank.step}"

    def stop(self):
        self._over.set()
        self._thread.join()


def show(browser, process, job, name):
    """Opens the page of a job and waits for its first state."""
    browser.open("about:blank")
    browser.until("location.href === 'about:blank'")
    browser.logs.clear()
    browser.open(f"http://{process.http_address}/?job={job}")
    browser.until(f"document.title === '{job} · ferrorpc'", PATIENCE_SECONDS)

    def picture():
        if folder := os.environ.get("FERRORPC_SCREENSHOTS"):
            browser.screenshot(Path(folder) / f"{name}.png")
        assert browser.logs == [], "the page's console is clean"

    return picture


def cells(browser, row):
    """One row of the table of ranks, by the names of the columns."""
    return browser.evaluate(_ROW % row)


def cell(row, column):
    """The expression for what stands in one column of a row."""
    return f"({_ROW % row})[{column!r}]"


_ROW = (
    "Object.fromEntries([...document.querySelectorAll('#ranks th')].map((head, i) => "
    "[head.textContent, document.querySelectorAll('#ranks tbody tr')[%d].children[i].textContent]))"
)


def headline(browser, text, seconds=15.0):
    browser.until(f"document.querySelector('#headline').textContent.includes({text!r})", seconds)
    return browser.evaluate("document.querySelector('#verdict').className")


def test_a_healthy_job(browser, process, job):
    crowd = Crowd(process.address, 4, job)
    working = Working(crowd, slow=2)
    try:
        picture = show(browser, process, job, "healthy")
        assert headline(browser, "All 4 ranks work") == "verdict good"
        browser.until("document.querySelector('#subline').textContent.includes('The slowest is rank 2')")
        browser.until("document.querySelector('#link-hint').textContent.includes('Busiest: rank')")
        browser.until(f"{cell(0, 'ops/s')} > 1")
        first = cells(browser, 0)
        assert (first["rank"], first["name"], first["host"], first["state"]) == ("0", "w0000", "host-0", "active")
        assert first["doing"].startswith("all_reduce(op=mean, float32[1000]) #")
        assert browser.text("#steps .row span") == "rank 2", "who needs longest between operations comes first"
        assert "4 of 4 joined" in browser.text("#generations")
        assert browser.text("#line") == "live"
        picture()
    finally:
        working.stop()
        crowd.close()


def test_where_the_time_of_training_steps_goes(browser, process, job):
    """100 steps; rank 1 computes for 30 ms, the others for 10 and wait for it."""
    crowd = Crowd(process.address, 3, job)
    try:
        picture = show(browser, process, job, "training")
        headline(browser, "All 3 ranks work")
        assert browser.evaluate("document.querySelector('#training-card').hidden"), "nobody trains yet"
        for rank in crowd.ranks:
            compute, exposed = (3000, 100) if rank.number == 1 else (1000, 2100)
            rank.training = identity_pb2.Training(steps=100, compute_ms=compute, exposed_ms=exposed, hidden_ms=500)
        browser.until("document.querySelectorAll('#training .row').length === 3")
        assert not browser.evaluate("document.querySelector('#training-card').hidden")
        rows = browser.evaluate("[...document.querySelectorAll('#training .row')].map(row => row.textContent)")
        assert rows == ["rank 130.0 + 1.00 ms", "rank 010.0 + 21.0 ms", "rank 210.0 + 21.0 ms"]
        widths = browser.evaluate(
            "[...document.querySelectorAll('#training .bar i')].map(part => parseFloat(part.style.width))"
        )
        assert widths == pytest.approx([100 * part / 31 for part in (25, 5, 1, 5, 5, 21, 5, 5, 21)], abs=0.01)
        told = "The slowest is rank 1: 30 ms of computing in a training step, where others need 10 ms"
        browser.until(f"document.querySelector('#subline').textContent.includes({told!r})")
        picture()
    finally:
        crowd.close()


def test_a_barrier_that_waits_for_a_rank(browser, process, job):
    crowd = Crowd(process.address, 4, job)
    try:
        picture = show(browser, process, job, "barrier")
        crowd.ranks[2].activity = "recv(src=1)"
        crowd.barrier("epoch", [0, 1, 3])
        assert headline(browser, "Barrier epoch has waited") == "verdict warn"
        browser.until("document.querySelector('#subline').textContent.includes('was last seen in recv(src=1)')")
        assert "for rank 2" in browser.text("#headline")
        assert "missing: rank 2" in browser.text("#barriers")
        assert cells(browser, 0)["doing"] == "waits at barrier epoch"
        assert cells(browser, 2)["doing"] == "missing at barrier epoch; last seen in recv(src=1)"
        browser.until("[...document.querySelectorAll('#ranks th')].some(head => head.textContent === 'behind for')")
        picture()
        crowd.barrier("epoch", [2])
        assert headline(browser, "All 4 ranks work") == "verdict good"
        browser.until("document.querySelector('#stragglers').textContent.includes('rank 2')")
    finally:
        crowd.close()


def test_a_death(browser, process, job):
    crowd = Crowd(process.address, 4, job)
    try:
        picture = show(browser, process, job, "death")
        headline(browser, "All 4 ranks work")
        crowd.cut(1)
        assert headline(browser, "Generation 1 is over") == "verdict bad"
        assert "rank 1 (w0001 on host-2) was lost: its session ended" in browser.text("#subline")
        dead = cells(browser, 1)
        assert (dead["rank"], dead["state"]) == ("1", "dead")
        assert "its session ended" in dead["why"]
        kinds = browser.evaluate("[...document.querySelectorAll('#events .badge')].map(badge => badge.textContent)")
        assert kinds == ["broken", "dead", "suspect", "generation"], "the newest first"
        picture()
    finally:
        crowd.close()


def test_what_members_call_themselves_is_text_and_nothing_else(browser, process, job):
    crowd = Crowd(process.address, 1, job, prefix="<b>bold<b>")
    crowd.ranks[0].activity = "<script>document.title='taken'</script>"
    try:
        picture = show(browser, process, job, "names")
        browser.until("document.querySelector('#ranks tbody').textContent.includes('<script>')")
        assert cells(browser, 0)["name"].startswith("<b>bold<b>")
        assert browser.evaluate("document.querySelectorAll('#ranks b, #ranks script').length") == 0
        picture()
    finally:
        crowd.close()


def test_a_coordinator_that_ends_is_not_shown_as_live(browser, tmp_path, job):
    with coordinator("--http-port", "0", "--data-dir", str(tmp_path / "data")) as ending:
        crowd = Crowd(ending.address, 2, job)
        try:
            show(browser, ending, job, "gone")
            browser.until("document.querySelector('#line').textContent === 'live'")
            ending.kill()
            browser.until("document.querySelector('#line').textContent.startsWith('no news for')")
            assert browser.evaluate("document.body.classList.contains('stale')")
        finally:
            crowd.close()


@pytest.mark.slow
def test_a_thousand_ranks_are_shown_as_they_change(browser, process, job):
    crowd = Crowd(process.address, CROWD, job)
    working = Working(crowd)
    try:
        picture = show(browser, process, job, "crowd")
        headline(browser, f"All {CROWD} ranks work", PATIENCE_SECONDS)
        assert browser.text("#pager span") == "1-32 of 1,000"
        for number in range(5):
            crowd.barrier(f"change-{number}", [0])
            browser.until(f"document.querySelector('#barriers').textContent.includes('change-{number}')", PATIENCE_SECONDS)
        crowd.cut(700)
        headline(browser, "Generation 1 is over", PATIENCE_SECONDS)
        assert cells(browser, 0)["rank"] == "700", "whoever is in trouble comes first"
        picture()
    finally:
        working.stop()
        crowd.close()
