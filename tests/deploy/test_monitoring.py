"""What watches a coordinator: metrics as Prometheus wants them, alerts that go off, a dashboard that asks for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ferrorpc_coordinator.metrics import Collector, Counters, Gauges
from ferrorpc_coordinator.state.job import Job
from ferrorpc_coordinator.state.settings import SECOND
from prometheus_client import CollectorRegistry, generate_latest

from tests.house.tree import ROOT
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import arrive, join, set_

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "ferrorpc.json"
NAME = re.compile(r"\bferrorpc_[a-z_]+\b")


def job() -> Job:
    """A job with something to measure."""
    world = World()
    for _ in range(2):
        join(world, "a", "b", "c")
    world.clients["a"].step = 1
    arrive(world, "a", "first")
    set_(world, "a", "key", b"value")
    world.tick(11 * SECOND // 2)
    arrive(world, "b", "second")
    world.clients["c"].frozen = True
    world.tick(3 * SECOND // 2)
    return world.coordinator.jobs["job"]


def exposition() -> str:
    """What /metrics says when everything has been counted once."""
    counters = Counters()
    for counted in (counters.first_causes, counters.member_changes, counters.request_errors):
        counted["some"] += 1
    counters.handled["Session", "OK"] += 1
    gauges = Gauges(
        sessions=3, journal_commits=1, journal_full=False, journal_waits_ns=0, certificate_ends_at=1.0, jobs={"j": job()}
    )
    registry = CollectorRegistry()
    registry.register(Collector(counters, lambda: gauges))
    return generate_latest(registry).decode()


def series() -> set[str]:
    """The names that can be asked for."""
    return {match[0] for line in exposition().splitlines() if (match := re.match(r"ferrorpc_\w+", line))}


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    result = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_metrics_are_well_formed_and_well_named() -> None:
    promtool("check", "metrics", text=exposition())


def test_operations_tells_of_every_metric() -> None:
    (section,) = re.findall(r"^## Metrics\n(.*?)^## ", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE | re.DOTALL)
    families = {line.split()[2] for line in exposition().splitlines() if line.startswith("# TYPE")}
    assert set(re.findall(r"`(ferrorpc_\w+)`", section)) == families


def test_the_gauges_of_a_job() -> None:
    lines = exposition().splitlines()
    for line in (
        'ferrorpc_members{job="j",state="active"} 3.0',
        'ferrorpc_generation{job="j"} 2.0',
        'ferrorpc_world_size{job="j"} 3.0',
        'ferrorpc_generations_broken_total{job="j"} 0.0',
        'ferrorpc_open_barriers{job="j"} 2.0',
        'ferrorpc_longest_barrier_seconds{job="j"} 7.0',
        'ferrorpc_heartbeat_age_seconds{job="j",rank="2"} 1.5',
        'ferrorpc_longest_behind_seconds{job="j"} 7.0',
        'ferrorpc_rendezvous_seconds{job="j"} 0.0',
        'ferrorpc_store_keys{job="j"} 1.0',
        'ferrorpc_store_bytes{job="j"} 8.0',
    ):
        assert line in lines


def test_the_alerts_are_valid_and_go_off_when_they_should() -> None:
    promtool("check", "config", RULES.with_name("prometheus.yml"))
    promtool("test", "rules", RULES.with_name("rules_test.yml"))


def test_the_alerts_ask_for_what_there_is() -> None:
    expressions = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert all(NAME.search(expression) for expression in expressions)
    assert {name for expression in expressions for name in NAME.findall(expression)} <= series()


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [entry["query"]["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    assert all(NAME.search(expression) for expression in expressions)
    assert {name for expression in expressions for name in NAME.findall(expression)} <= series()


def test_the_dashboard_says_what_is_not_of_the_chosen_job_alone() -> None:
    others = [
        f"{panel['title']}: {target['legendFormat']}"
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
        if "$job" not in target["expr"]
    ]
    assert [name for name in others if "all jobs" not in name and "oordinator" not in name] == []


def test_rates_are_taken_over_several_scrapes_of_prometheus_default_of_a_minute() -> None:
    """Over [1m] there are none: a rate needs two scrapes."""
    minutes = [int(found) for path in (RULES, DASHBOARD) for found in re.findall(r"\[(\d+)m\]", path.read_text())]
    assert len(minutes) > 5
    assert min(minutes) >= 5


def test_the_dashboards_expressions_are_valid(tmp_path: Path) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"].replace("$job", ".*") for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [{"record": f"dashboard:query_{number}", "expr": expression} for number, expression in enumerate(expressions)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)
