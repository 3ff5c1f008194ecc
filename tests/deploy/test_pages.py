"""The commands of docs/compose.md and docs/kubernetes.md: each is run by a test, or says what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT

NEEDS = re.compile(r"  # needs (?P<what>.+)$")


def commands(page: str) -> list[str]:
    """The commands of a page that need nothing but what the page is about."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line for line in block.splitlines() if NEEDS.search(line) is None]


@pytest.mark.parametrize("command", commands("kubernetes.md"))
def test_what_can_be_done_without_a_cluster_is_rendering_what_another_test_compares(command: str) -> None:
    (path,) = re.fullmatch(r"kubectl kustomize (\S+)", command).groups()
    assert (Path(ROOT) / path / "kustomization.yaml").exists()


def test_every_folder_of_manifests_is_told_of() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    folders = {path.parent for path in (ROOT / "deploy" / "kubernetes").rglob("kustomization.yaml")}
    assert {f"`{path.relative_to(ROOT / 'deploy' / 'kubernetes').as_posix()}`" for path in folders} <= set(
        re.findall(r"`[a-z/-]+`", page)
    )


def test_every_variable_of_the_compose_file_is_told_of() -> None:
    file = (ROOT / "docker-compose.yml").read_text()
    page = (ROOT / "docs" / "compose.md").read_text()
    told = set(re.findall(r"`([A-Z_]+)`", page)) | {"FERRORPC_LOG_LEVEL"}  # a setting of ferrorpc
    assert set(re.findall(r"\$\{([A-Z_]+)", file)) <= told
