"""deploy/kubernetes as a cluster would read it: every field exists, and what the manifests promise of ferrorpc is true.

Kubernetes' own kinds are validated against its schemas, those of JobSet and Kubeflow Trainer by parsing and writing back.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ferrorpc_coordinator.__main__ import _parser, options_from
from ferrorpc_coordinator.server import require_safe

from ferrorpc.config import SETTINGS, Config
from ferrorpc.exit_codes import EXIT_CONFIG, EXIT_RETRY
from tests.deploy.kustomize import Manifest, identity, render
from tests.house.tree import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate")
KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
VERSIONS = ("1.31", "1.37")
"""The oldest that has podFailurePolicy and backoffLimitPerIndex for good or in beta, and the newest there are schemas of."""
CUSTOM = ("jobset.x-k8s.io/", "trainer.kubeflow.org/")


def names(folder: Path) -> str:
    return folder.relative_to(KUBERNETES).as_posix()


every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=names)


def errors_in(manifest: Manifest) -> list[str]:
    """Why no cluster would take this."""
    return _errors_in(json.dumps(manifest))


@cache
def _errors_in(text: str) -> list[str]:
    manifest = json.loads(text)
    if manifest["apiVersion"].startswith(CUSTOM):
        models = pytest.importorskip("kubeflow_trainer_api.models")
        (name,) = [name for name in dir(models) if re.fullmatch(rf"\w+V1alpha[12]{manifest['kind']}", name)]
        try:
            written = getattr(models, name).from_dict(copy.deepcopy(manifest)).to_dict()
        except ValueError as error:
            return [str(error)]
        return differences(manifest, written)
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {error.message}")
    return found


def differences(wanted: Any, got: Any, where: str = "") -> list[str]:
    """Where what was written back lacks something of what was read."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [line for key, value in wanted.items() for line in differences(value, got.get(key), f"{where}/{key}")]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        pairs = enumerate(zip(wanted, got, strict=True))
        return [line for index, (one, other) in pairs for line in differences(one, other, f"{where}/{index}")]
    return [] if wanted == got else [f"{where}: {wanted!r} became {got!r}"]


@every_folder
def test_a_cluster_would_take_it(folder: Path) -> None:
    for manifest in render(folder):
        assert errors_in(manifest) == [], identity(manifest)


def misspelt(manifest: Manifest, path: tuple[str | int, ...]) -> Manifest:
    """A copy with one letter too many in the last field of the path."""
    changed = copy.deepcopy(manifest)
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[f"{path[-1]}x"] = place.pop(path[-1])
    return changed


@pytest.mark.parametrize(
    ("overlay", "kind", "path"),
    [
        ("base", "StatefulSet", ("spec", "template", "spec", "containers", 0, "readinessProbe")),
        ("base", "Job", ("spec", "podFailurePolicy")),
        ("base", "Service", ("spec", "selector")),
        ("base", "PodDisruptionBudget", ("spec", "maxUnavailable")),
        ("base", "NetworkPolicy", ("spec", "egress")),
        ("overlays/tls", "Job", ("spec", "template", "spec", "containers", 0, "volumeMounts")),
        ("overlays/jobset", "JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "podFailurePolicy")),
        ("overlays/jobset", "JobSet", ("spec", "failurePolicy", "maxRestarts")),
        ("overlays/kubeflow-trainer", "TrainingRuntime", ("spec", "mlPolicy", "numNodes")),
        ("overlays/kubeflow-trainer", "TrainJob", ("spec", "trainer", "numNodes")),
    ],
)
def test_a_misspelt_field_is_caught(overlay: str, kind: str, path: tuple[str | int, ...]) -> None:
    manifest = next(manifest for manifest in render(KUBERNETES / overlay) if manifest["kind"] == kind)
    assert errors_in(manifest) == []
    assert errors_in(misspelt(manifest, path)) != []


@every_folder
def test_kubectl_renders_the_same(folder: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    result = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    theirs = {identity(manifest): settled(manifest) for manifest in yaml.safe_load_all(result.stdout)}
    assert theirs == {identity(manifest): settled(manifest) for manifest in render(folder)}


def settled(value: Any, field: str = "") -> Any:
    """Without the order of lists that are keyed, which means nothing."""
    if isinstance(value, dict):
        return {key: settled(element, key) for key, element in value.items()}
    if isinstance(value, list):
        elements = [settled(element) for element in value]
        keyed = field in ("containers", "env", "volumes", "volumeMounts")
        return (
            sorted(elements, key=lambda element: str(element.get("name")) + str(element.get("mountPath")))
            if keyed
            else elements
        )
    return value


def parts(value: Any, field: str) -> Iterator[Any]:
    """Every value of a field of this name, at whatever depth."""
    if isinstance(value, dict):
        for key, element in value.items():
            if key == field:
                yield element
            yield from parts(element, field)
    elif isinstance(value, list):
        for element in value:
            yield from parts(element, field)


def pods(folder: Path) -> list[dict[str, Any]]:
    """The pod specs of a folder."""
    return [
        spec
        for manifest in render(folder)
        for spec in [*parts(manifest, "spec")]
        if isinstance(spec, dict) and "containers" in spec
    ]


@every_folder
def test_sigterm_ends_a_pod_whose_process_does_not_handle_it_or_not_yet(folder: Path) -> None:
    """The first process of a PID namespace gets no signal that it does not handle."""
    assert all(spec.get("shareProcessNamespace") is True for spec in pods(folder))


@every_folder
def test_a_pod_may_do_as_little_as_possible(folder: Path) -> None:
    for spec in pods(folder):
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@every_folder
def test_the_variables_are_settings_with_values_that_ferrorpc_takes(folder: Path) -> None:
    known = {setting.variable for setting in SETTINGS}
    for spec in pods(folder):
        for container in spec["containers"]:
            variables = {entry["name"]: entry.get("value", "") for entry in container["env"]}
            assert {name for name in variables if name.startswith("FERRORPC_")} <= known
            Config(environment=variables)


@every_folder
def test_exit_codes_mean_what_operations_says(folder: Path) -> None:
    for policy in (policy for manifest in render(folder) for policy in parts(manifest, "podFailurePolicy")):
        codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in policy["rules"] if "onExitCodes" in rule}
        assert codes == {"FailJob": [EXIT_CONFIG], "Ignore": [EXIT_RETRY]}


@every_folder
def test_what_starts_a_failed_job_again_leaves_one_that_no_retry_can_help(folder: Path) -> None:
    for policy in (policy for manifest in render(folder) for policy in parts(manifest, "failurePolicy")):
        rules = {reason: rule["action"] for rule in policy["rules"] for reason in rule["onJobFailureReasons"]}
        assert rules == {"PodFailurePolicy": "FailJobSet"}


@every_folder
def test_a_job_has_as_many_pods_as_its_world(folder: Path) -> None:
    for manifest in render(folder):
        counts = {*parts(manifest, "completions"), *parts(manifest, "parallelism"), *parts(manifest, "numNodes")}
        entries = [entry for env in parts(manifest, "env") for entry in env]
        worlds = {int(entry["value"]) for entry in entries if entry["name"] == "FERRORPC_WORLD_SIZE"}
        assert counts == worlds


@every_folder
def test_selectors_find_the_pods_they_are_for(folder: Path) -> None:
    manifests = render(folder)
    labels = [
        template["metadata"]["labels"]  # and not what the Job controller adds, such as a name that a namePrefix changes
        for manifest in manifests
        for template in parts(manifest, "template")
        if "labels" in template.get("metadata", {})
    ]
    selectors = [manifest["spec"]["selector"] for manifest in manifests if manifest["kind"] == "Service"]
    selectors += [found["matchLabels"] for manifest in manifests for found in parts(manifest, "podSelector")]
    if labels and folder.name not in ("coordinator", "workers"):
        for selector in selectors:
            assert any(selector.items() <= pod.items() for pod in labels), selector


def test_workers_reach_dns_at_the_ports_that_its_pods_listen_on() -> None:
    """A policy counts after the service's port has become the pod's: 5353 in OpenShift."""
    policies = [one for one in render(KUBERNETES / "base") if one["kind"] == "NetworkPolicy"]
    (workers,) = [one["spec"] for one in policies if one["metadata"]["name"] == "ferrorpc-worker"]
    (anywhere,) = [rule["ports"] for rule in workers["egress"] if "to" not in rule]
    assert {(one["port"], one["protocol"]) for one in anywhere} == {(p, how) for p in (53, 5353) for how in ("UDP", "TCP")}


def test_tls_leaves_nothing_unprotected() -> None:
    (coordinator, workers) = sorted(pods(KUBERNETES / "overlays" / "tls"), key=lambda spec: spec["containers"][0]["name"])
    for spec in (coordinator, workers):
        (container,) = spec["containers"]
        config = Config(environment={entry["name"]: entry.get("value", "") for entry in container["env"]})
        assert config["insecure"] is False
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for name in ("tls_ca", "tls_cert", "tls_key"):
            assert str(Path(config[name]).parent) in mounts
    (job,) = (entry["value"] for entry in coordinator["containers"][0]["env"] if entry["name"] == "FERRORPC_JOB")
    assert job in {one["metadata"]["name"] for one in render(KUBERNETES / "overlays" / "tls") if one["kind"] == "Job"}
    startup, readiness, liveness = (
        coordinator["containers"][0][f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
    )
    assert all("exec" in probe and "grpc" not in probe for probe in (startup, readiness))
    assert set(liveness) & {"exec", "grpc", "httpGet"} == {"httpGet"}, "which an expired certificate does not fail"
    assert liveness["httpGet"] == {"path": "/healthz", "port": "http", "scheme": "HTTPS"}


@every_folder
def test_a_coordinator_starts_with_what_its_pod_gives_it(folder: Path, tmp_path: Path) -> None:
    """Its own word on it: schemas know nothing of what settings forbid each other."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokens").write_text(f"observer {'1a' * 32}")
    for container in (one for spec in pods(folder) for one in spec["containers"] if one["name"] == "coordinator"):
        environment = {entry["name"]: entry["value"].replace("/etc/ferrorpc", str(tmp_path)) for entry in container["env"]}
        given = vars(_parser().parse_args(container["args"][1:]))
        config = Config({name: given[name] for name in ("listen", "http_port", "data_dir")}, environment)
        require_safe(options_from(config))


def test_workers_with_a_gpu_train_on_it_and_keep_its_kernels_where_they_may_write() -> None:
    (workers,) = [spec for spec in pods(KUBERNETES / "overlays" / "gpu") if spec["containers"][0]["name"] == "worker"]
    (container,) = workers["containers"]
    assert container["args"][:2] == ["--device", "gpu"]
    cache = next(entry["value"] for entry in container["env"] if entry["name"] == "CUPY_CACHE_DIR")
    writable = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(Path(cache).is_relative_to(path) for path in writable)
