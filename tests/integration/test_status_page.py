"""The status page in a real browser: a healthy job, a barrier that waits for a rank, a death, a thousand ranks.

FERRORPC_SCREENSHOTS=DIR keeps a picture of each.
"""

import os
import re
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from ferrorpc_coordinator.web.event_streams import VIEWERS_MAX

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from tests.integration import chromium
from tests.integration.coordinator_process import coordinator
from tests.integration.crowd import Crowd
from tests.waiting import eventually

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
    return browser.evaluate("document.querySelector('#summary').className")


def test_without_javascript_the_page_says_so_and_what_else_shows_the_job(browser, process):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(f"http://{process.http_address}/")
        browser.until("document.querySelector('#headline').innerText === 'This page needs JavaScript'")
        assert browser.text("#subline") == "Without it: ferrorpc status --watch, or api/v1/state as JSON"
        assert browser.text("#connection") == ""
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_a_healthy_job(browser, process, job):
    crowd = Crowd(process.address, 4, job)
    working = Working(crowd, slow=2)
    try:
        picture = show(browser, process, job, "healthy")
        assert headline(browser, "All 4 ranks work") == "summary good"
        browser.until("document.querySelector('#subline').textContent.includes('The slowest is rank 2')")
        browser.until("document.querySelector('#link-hint').textContent.includes('Busiest: rank')")
        browser.until(f"{cell(0, 'ops/s')} > 1")
        first = cells(browser, 0)
        assert (first["rank"], first["name"], first["host"], first["state"]) == ("0", "w0000", "host-0", "active")
        assert first["last operation"].startswith("all_reduce(op=mean, float32[1000]) #")
        # who needs longest between operations comes first
        browser.until("document.querySelector('#steps .row span').textContent === 'rank 2'")
        assert "4 of 4 joined" in browser.text("#generations")
        assert browser.text("#connection") == "live"
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
        assert headline(browser, "Barrier epoch has waited") == "summary warn"
        browser.until("document.querySelector('#subline').textContent.includes('was last seen in recv(src=1)')")
        assert "for rank 2" in browser.text("#headline")
        assert "missing: rank 2" in browser.text("#barriers")
        assert cells(browser, 0)["last operation"] == "waits at barrier epoch"
        assert cells(browser, 2)["last operation"] == "missing at barrier epoch; last seen in recv(src=1)"
        browser.until("[...document.querySelectorAll('#ranks th')].some(head => head.textContent === 'behind for')")
        picture()
        crowd.barrier("epoch", [2])
        assert headline(browser, "All 4 ranks work") == "summary good"
        browser.until("document.querySelector('#stragglers').textContent.match(/rank 2.*1 barrier, waited for/)")
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=True)
        browser.until("innerWidth === 360 && document.documentElement.scrollWidth === 360")  # also fits on a phone
        browser.call("Emulation.clearDeviceMetricsOverride")
    finally:
        crowd.close()


MODEL = """(async () => {
  const { Model } = await import("/model.js");
  const model = new Model();
  const all = (value) => [value, value, value];
  model.update({
    cluster_id: "c", epoch: 1, generation: 1, at_ms: 0, links: [], generations: [{ generation: 1, end_reason: "" }],
    barriers: [{ name: "epoch", generation: 1, ordinal: 1, age_ms: 9000, arrived: [0], missing: [1, 2] }],
    headline: { level: "warn", title: "Rank 1 has been behind for 13 s", details: ["others are at step 21", "so"] },
    members: { name: ["w0", "w1", "w2"], rank: [0, 1, 2], state: all("active"), host: all("h"), step: [21, 20, 21],
      behind_ms: [0, 13000, 0], beat_age_ms: all(0), operation_ms: all(0), activity: all(""), training: all(null) },
  });
  return [...model.summary(), model.members.map((member) => member.lateMs)];
})()"""


LINKS = """(async () => {
  const { Model } = await import("/model.js");
  const model = new Model();
  const update = (at_ms, links, names) => model.update({
    cluster_id: "c", epoch: 1, generation: 1, at_ms, links, generations: [{ generation: 1, size: 3 }], barriers: [],
    headline: { level: "good", title: "", details: [] },
    members: { name: names, rank: names.map((_, i) => i), state: names.map(() => "active"), step: names.map(() => 1) },
  });
  update(0, [[0, 1, "grpc", 1e12]], ["w0", "w1", "w2"]);
  update(2000, [[0, 1, "grpc", 1e12 + 4e6], [1, 2, "grpc", 1e12]], ["w0", "w1", "w2"]);
  const first = model.links.map((link) => link.bytesPerSecond);
  update(4000, [[0, 1, "grpc", 1e12 + 8e6], [1, 2, "grpc", 1e12 + 1e6]], ["w0", "w1"]);
  return [first, model.links.map((link) => link.bytesPerSecond), model.size()];
})()"""


def test_what_a_link_carried_before_it_was_told_of_is_at_no_rate_and_a_rank_without_a_member_counts(browser, process):
    browser.open(f"http://{process.http_address}/")
    browser.until("document.readyState === 'complete' && location.protocol === 'http:'")
    assert browser.evaluate(LINKS) == [[2e6, None], [2e6, 5e5], 3]


CLOCK = """(async () => {
  const { clock } = await import("/text.js");
  const hour = 3_600_000, then = new Date(Date.now() - 72 * hour);
  return [clock(hour), clock(72 * hour), then.toLocaleDateString([], { month: "short", day: "numeric" })];
})()"""


def test_what_is_days_old_has_its_date(browser, process):
    browser.open(f"http://{process.http_address}/")
    browser.until("document.readyState === 'complete' && location.protocol === 'http:'")
    today, days_old, date = browser.evaluate(CLOCK)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", today)
    assert re.fullmatch(rf"{date}, \d\d:\d\d:\d\d", days_old)


def test_the_headline_and_who_is_behind_are_the_coordinators_and_whoever_is_missing_at_a_barrier_is_late(browser, process):
    browser.open(f"http://{process.http_address}/")
    browser.until("document.readyState === 'complete' && location.protocol === 'http:'")
    level, title, details, late = browser.evaluate(MODEL)
    assert (level, title, details) == ("warn", "Rank 1 has been behind for 13 s", "others are at step 21 · so")
    assert late == [0, 13_000, 9_000]


DRAWN = """(async () => {
  const { tiles, colour } = await import("/draw.js");
  const { SEVERITY } = await import("/model.js");
  const states = Object.keys(SEVERITY);
  document.body.className = "";
  document.body.innerHTML = '<main class="card"><canvas></canvas><p></p><p class="timeline"></p></main>';
  const [canvas, badges, line] = document.querySelectorAll("canvas, p");
  const context = canvas.getContext("2d");
  const at = (x, y) => [...context.getImageData(x, y, 1, 1).data];
  const inks = [];
  context.fillText = (text) => inks.push(context.fillStyle);
  tiles(canvas, states.map((state, i) => ({ state, rank: i, lateMs: i === 0 ? 9000 : 0 })));
  const ring = [0, 3, 17, 30, 33, 34].map((y) => at(17, y));
  context.globalCompositeOperation = "destination-over";
  context.fillStyle = colour("card");
  context.fillRect(0, 0, 999, 99);
  const texts = states.map((state, i) => [`tile of ${state}`, inks[i], `rgb(${at(17 + 37 * i, 17).slice(0, 3).join()})`]);
  for (const name of [...states.map((state) => `badge ${state}`), "", "ended"]) {
    const span = Object.assign(document.createElement("span"), { className: name });
    (name.startsWith("badge") ? badges : line).append(span);
    const { color, backgroundColor } = getComputedStyle(span);
    texts.push([name || "generation", color, backgroundColor]);
  }
  return { ring, texts };
})()"""
"""A tile of each state, the first of a rank that is behind: its pixels downwards, and which ink is on which colour."""


def drawn(browser, process):
    browser.open(f"http://{process.http_address}/")
    browser.until("document.readyState === 'complete' && location.protocol === 'http:'")
    return browser.evaluate(DRAWN)


def luminance(colour):
    """WCAG's relative luminance of "#rrggbb" or "rgb(r, g, b)"."""
    parts = bytes.fromhex(colour[1:]) if colour.startswith("#") else map(int, re.findall(r"\d+", colour))
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_stands_on_the_colour_of_a_state_is_easy_to_read(browser, process, scheme):
    """A contrast of 4.5, as WCAG AA asks."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        texts = drawn(browser, process)["texts"]
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])
    contrasts = {}
    for name, *colours in texts:
        darker, lighter = sorted(map(luminance, colours))
        contrasts[name] = round((lighter + 0.05) / (darker + 0.05), 2)
    assert len(contrasts) == 2 * 7 + 2
    assert {name: contrast for name, contrast in contrasts.items() if contrast < 4.5} == {}


def test_the_ring_around_a_rank_that_is_behind_lies_within_its_tile(browser, process):
    above, upper, middle, lower, below, outside = drawn(browser, process)["ring"]
    assert above == upper == lower == below != middle
    assert outside == [0, 0, 0, 0]


def test_a_coordinator_without_a_job_says_so(browser, process):
    with coordinator("--http-port", "0") as idle:
        browser.open(f"http://{idle.http_address}/")
        headline(browser, "There is no job yet")
        browser.until("document.querySelector('#connection').textContent === 'live'")
        assert "ferrorpc run --coordinator" in browser.text("#subline")
        browser.open(f"http://{idle.http_address}/?job=other")
        headline(browser, "Nobody has joined the job other yet")
        assert browser.text("main").count("Ranks") == 0, "nothing else is shown"


def test_a_death(browser, process, job):
    crowd = Crowd(process.address, 4, job)
    try:
        picture = show(browser, process, job, "death")
        headline(browser, "All 4 ranks work")
        crowd.cut(1)
        assert headline(browser, "Rank 1 (w0001 on host-2) was lost") == "summary bad"
        assert browser.text("#subline").startswith("its session ended")
        assert browser.text("#subline").endswith(" · generation 1 is over")
        dead = cells(browser, 1)
        assert (dead["rank"], dead["state"]) == ("1", "dead")
        assert "its session ended" in dead["why"]
        kinds = browser.evaluate("[...document.querySelectorAll('#events .badge')].map(badge => badge.textContent)")
        assert kinds == ["broken", "dead", "suspect", "generation"], "the newest first"
        assert browser.evaluate("document.querySelectorAll('#generations .end.broken').length") == 1
        picture()
    finally:
        crowd.close()


def test_a_job_that_ends_well_is_no_alarm_and_goes_at_no_rate(browser, process, job):
    crowd = Crowd(process.address, 4, job)
    working = Working(crowd)
    try:
        picture = show(browser, process, job, "over")
        headline(browser, "All 4 ranks work")
        browser.until(f"{cell(0, 'ops/s')} > 1")
        working.stop()
        crowd.leave()
        assert headline(browser, "The job is over: all its members left") == "summary idle"
        assert browser.text("#generations .end") == "ended: all its members left"
        assert browser.evaluate("document.querySelectorAll('#generations .broken').length") == 0
        row = cells(browser, 0)
        assert (row["state"], row["ops/s"], row["last beat"]) == ("left", "\u2013", "")
        numbers = browser.evaluate("[...document.querySelectorAll('.number')].map(number => number.textContent)")
        assert numbers[0].startswith("0 / 4")
        assert numbers[1].startswith("1generation, lasted ")
        assert [number[0] for number in numbers[2:5]] == ["\u2013"] * 3
        picture()
    finally:
        working.stop()
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


def test_words_of_members_that_mean_something_in_a_script_do_not_stop_the_page(browser, process, job):
    """A kind of link with the name of a method of every object, and a cause that begins where others have a colon."""
    crowd = Crowd(process.address, 2, job)
    link = identity_pb2.Link(peer_rank=0, kind="constructor", sent_bytes=1 << 30)
    failure = error_pb2.ErrorDetail(code=error_pb2.ERROR_CODE_NCCL, message=": no such device")

    async def say(**body):
        crowd.ranks[0].outgoing.put_nowait(session_pb2.ClientFrame(**body))

    try:
        picture = show(browser, process, job, "words")
        headline(browser, "All 2 ranks work")
        crowd.do(say(beat=session_pb2.Beat(generation=1, links=[link])))
        browser.until("document.querySelector('#link-scale').textContent.includes('constructor')")
        crowd.do(say(sequence=9, report=session_pb2.ReportRequest(generation=1, failure=failure)))
        browser.until("document.querySelector('#subline').textContent.startsWith('no such device')")
        picture()
    finally:
        crowd.close()


def test_a_page_that_has_news_is_live_at_once(browser, process, job):
    """Not when its clock next looks, half a second later; this page's clock stands still."""
    crowd = Crowd(process.address, 2, job)
    still = browser.call("Page.addScriptToEvaluateOnNewDocument", source="window.setInterval = () => 0")
    try:
        show(browser, process, job, "live")
        headline(browser, "All 2 ranks work")
        assert browser.text("#connection") == "live"
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **still)
        crowd.close()


def test_a_coordinator_that_ends_is_not_shown_as_live(browser, tmp_path, job):
    with coordinator("--http-port", "0", "--data-dir", str(tmp_path / "data")) as ending:
        crowd = Crowd(ending.address, 2, job)
        try:
            show(browser, ending, job, "gone")
            browser.until("document.querySelector('#connection').textContent === 'live'")
            ending.kill()
            browser.until("document.querySelector('#connection').textContent.startsWith('no news for')")
            assert browser.evaluate("document.body.classList.contains('stale')")
        finally:
            crowd.close()


def viewer_of(process):
    """A connection on which events come; None if there is no place for one, which must be the answer then."""
    host, _, port = process.http_address.rpartition(":")
    viewer = socket.create_connection((host, int(port)))
    viewer.sendall(b"GET /events?job=elsewhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = viewer.recv(1000)
    if answer.startswith(b"HTTP/1.1 200"):
        return viewer
    viewer.close()
    assert answer.startswith(b"HTTP/1.1 503"), answer
    return None


def test_a_page_that_was_refused_its_events_asks_for_them_again(browser, process, job):
    """A browser does not by itself, neither here nor where a proxy answers in place of a coordinator that restarts."""
    crowd = Crowd(process.address, 2, job)
    try:
        browser.open("about:blank")  # the page before has a place until the coordinator sees that it is gone
        with ExitStack() as viewers:
            for _ in range(VIEWERS_MAX):
                viewers.enter_context(eventually(lambda: viewer_of(process), "a place for a viewer", PATIENCE_SECONDS))
            browser.logs.clear()
            browser.open(f"http://{process.http_address}/?job={job}")
            while "503" not in "".join(browser.logs):
                browser.evaluate("null")
        browser.until("document.querySelector('#connection').textContent === 'live'")
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
        headline(browser, "Rank 700 ", PATIENCE_SECONDS)
        assert cells(browser, 0)["rank"] == "700", "whoever is in trouble comes first"
        picture()
    finally:
        working.stop()
        crowd.close()
