"""What a timeline measures, and the files it is written to."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ferrorpc.errors import BackendUnavailableError, UsageError
from ferrorpc.plans.drawing import CHARACTER, Panel, Row, lay_out
from ferrorpc.plans.span import Span
from ferrorpc.plans.timeline import SPANS_SHOWN_MOST, Timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline() -> Timeline:
    """Two lanes; the first works 3 of 4, the second 1 of 4. It begins at 10."""
    spans = (
        Span("0F0", 0, 10.0, 12.0, "forward", "0"),
        Span("0B0", 0, 13.0, 14.0, "backward", "0"),
        Span("1F0", 1, 12.0, 13.0, "forward", "0", 1),
    )
    return Timeline(("rank 0", "rank <1>"), spans, "a & b")


def test_makespan_and_bubbles_come_from_the_spans(timeline: Timeline):
    assert timeline.makespan == 4.0
    assert timeline.busy == [3.0, 1.0]
    assert timeline.bubbles == [0.25, 0.75]
    assert timeline.bubble_fraction == 0.5
    assert "makespan 4, bubble 50.0%" in repr(timeline)


def test_an_empty_timeline_has_no_bubble():
    empty = Timeline(("rank 0",), ())
    assert (empty.makespan, empty.bubble_fraction) == (0.0, 0.0)


def boxes(path: Path) -> dict[str, ElementTree.Element]:
    """Every box of an SVG file that says what it is."""
    root = ElementTree.parse(path).getroot()
    return {rect[0].text or "": rect for rect in root.iter(f"{SVG}rect") if len(rect)}


def test_an_svg_has_a_box_to_scale_for_every_span(timeline: Timeline, tmp_path: Path):
    timeline.to_svg(tmp_path / "t.svg")
    found = boxes(tmp_path / "t.svg")
    assert set(found) == {"0F0", "0B0", "1F0"}
    widths = {name: float(box.attrib["width"]) for name, box in found.items()}
    assert widths["0F0"] == pytest.approx(2 * widths["0B0"], rel=0.02)
    assert float(found["1F0"].attrib["x"]) > float(found["0F0"].attrib["x"]) + widths["0F0"]
    assert float(found["1F0"].attrib["y"]) > float(found["0F0"].attrib["y"])
    words = {text.text for text in ElementTree.parse(tmp_path / "t.svg").iter(f"{SVG}text")}
    assert {"rank 0", "rank <1>", "a & b", "idle 25%", "forward, chunk 0", "forward, chunk 1", "backward"} <= words


def test_a_notebook_shows_the_same_picture(timeline: Timeline, tmp_path: Path):
    timeline.to_svg(tmp_path / "t.svg")
    assert timeline._repr_svg_() == (tmp_path / "t.svg").read_text()
    spans = [Span("task", 0, start, start + 1.0) for start in range(SPANS_SHOWN_MOST + 1)]
    assert Timeline(("rank 0",), spans)._repr_svg_() is None  # the words it has are shown then


def test_kinds_and_shades_differ_in_colour(timeline: Timeline, tmp_path: Path):
    timeline.to_svg(tmp_path / "t.svg")
    assert len({box.attrib["fill"] for box in boxes(tmp_path / "t.svg").values()}) == 3


def test_two_timelines_share_one_scale(timeline: Timeline, tmp_path: Path):
    slower = Timeline(("rank 0",), (Span("other", 0, 0.0, 8.0, "forward"),))
    timeline.to_svg(tmp_path / "t.svg", beside=slower)
    found = boxes(tmp_path / "t.svg")
    assert float(found["other"].attrib["width"]) == pytest.approx(4 * float(found["0F0"].attrib["width"]), rel=0.02)


def test_two_timelines_share_one_legend(tmp_path: Path):
    """Also where one has more chunks than the other."""
    few, many = (
        Timeline(
            ("rank 0",),
            tuple(Span(f"{chunk} of {chunks}", 0, chunk, chunk + 1.0, "forward", shade=chunk) for chunk in range(chunks)),
        )
        for chunks in (2, 4)
    )
    few.to_svg(tmp_path / "t.svg", beside=many)
    found = boxes(tmp_path / "t.svg")
    for chunk in range(2):
        assert found[f"{chunk} of 2"].attrib["fill"] == found[f"{chunk} of 4"].attrib["fill"]


def test_two_timelines_on_one_scale_are_in_one_unit(timeline: Timeline, tmp_path: Path):
    timeline.unit = "seconds"  # as of what was recorded, beside its simulation at costs in seconds
    timeline.to_svg(tmp_path / "t.svg", beside=Timeline(("rank 0",), (Span("other", 0, 0.0, 8.0, "forward"),)))
    words = [text.text for text in ElementTree.parse(tmp_path / "t.svg").iter(f"{SVG}text")]
    assert (words.count("seconds"), words.count("time units")) == (2, 0)


def test_the_unit_of_the_axis_fits_on_the_picture():
    """Also where no note beside a lane is as long."""
    lone = Panel("", "", (Row("rank 0", (), ""),), 1.0, unit="milliseconds")
    sheet = lay_out([lone])
    (unit,) = [text for text in sheet.texts if text.words == "milliseconds"]
    assert unit.x + len(unit.words) * CHARACTER <= sheet.width


@pytest.mark.parametrize(
    ("unit", "scale", "unit_us"),
    [("time units", {}, 1e3), ("seconds", {}, 1e6), ("seconds", {"unit_seconds": 1e-3}, 1e3)],
)
def test_a_chrome_trace_has_threads_and_microseconds(timeline: Timeline, tmp_path: Path, unit, scale, unit_us):
    timeline.unit = unit
    timeline.to_chrome_trace(tmp_path / "t.json", **scale)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {0: "rank 0", 1: "rank <1>"}
    (second,) = [event for event in events if event["name"] == "1F0"]
    assert (second["ph"], second["tid"], second["ts"], second["dur"]) == ("X", 1, 2 * unit_us, unit_us)


def test_a_png_is_one(timeline: Timeline, tmp_path: Path):
    pytest.importorskip("matplotlib")
    timeline.to_png(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_png_is_refused_with_what_to_install(timeline: Timeline, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailableError, match="matplotlib"):
        timeline.to_png(tmp_path / "t.png")


def test_only_a_timeline_is_drawn_beside_another(timeline: Timeline, tmp_path: Path):
    with pytest.raises(UsageError, match="is no timeline"):
        timeline.to_svg(tmp_path / "t.svg", beside=[timeline])  # type: ignore[arg-type]
