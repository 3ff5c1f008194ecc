"""What can be said of the Dockerfile and the Compose files without an engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.tree import ROOT

TLS = ("--file", "docker-compose.yml", "--file", "deploy/compose/tls.yml")
PROFILES = ("--profile", "observability", "--profile", "gpu", "--profile", "chaos")


def ran(*command: str | Path) -> str:
    """What a command says, at the root; empty when it is content."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    return "" if done.returncode == 0 else f"{done.returncode}: {done.stdout}{done.stderr}"


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("there is no hadolint")
    assert ran(hadolint, "Dockerfile") == ""


@pytest.mark.parametrize("options", [(), PROFILES, (*TLS, *PROFILES)], ids=["plain", "profiles", "tls"])
def test_the_compose_files_are_what_compose_expects(options: tuple[str, ...]) -> None:
    if shutil.which("docker") is None or ran("docker", "compose", "version"):
        pytest.skip("there is no Docker Compose")
    assert ran("docker", "compose", *options, "config", "--quiet") == ""


def test_tls_is_for_every_container_that_joins_a_job() -> None:
    """With FERRORPC_INSECURE=1 and no certificate a rank waits in vain for a coordinator that refuses it."""
    plain = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    members = {name for name, service in plain.items() if "FERRORPC_INSECURE" in service.get("environment", {})}
    protected = yaml.safe_load((ROOT / "deploy" / "compose" / "tls.yml").read_text())["services"]
    assert {name for name, service in protected.items() if service["environment"]["FERRORPC_INSECURE"] == "0"} == members
