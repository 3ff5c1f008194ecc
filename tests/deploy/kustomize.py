"""What `kubectl kustomize` makes of deploy/kubernetes, for machines without it: the part of it that is used there.

That part is `resources` (files and folders) and `patches` (strategic merges in files, found by kind and name). Anything else
in a kustomization is an error here rather than ignored. Where kubectl is installed, a test compares the two.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "patches"}
MERGE_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""Lists whose elements are merged by a key; all other lists are replaced."""


def render(folder: Path) -> list[Manifest]:
    """The manifests of a folder with a kustomization, patched."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(kustomization) - KNOWN
    if unknown:
        raise ValueError(f"{folder}: {sorted(unknown)} are beyond this renderer")
    manifests: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        manifests += render(path) if path.is_dir() else load(path)
    for patch in kustomization.get("patches", ()):
        if set(patch) != {"path"}:
            raise ValueError(f"{folder}: a patch is a file here, not {patch}")
        for wanted in load(folder / patch["path"]):
            (found,) = [index for index, manifest in enumerate(manifests) if identity(manifest) == identity(wanted)]
            manifests[found] = merged(manifests[found], wanted)
    return manifests


def load(path: Path) -> list[Manifest]:
    """The manifests of one file."""
    return [copy.deepcopy(manifest) for manifest in yaml.safe_load_all(path.read_text())]


def identity(manifest: Manifest) -> tuple[str, str, str]:
    """What tells manifests apart."""
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """A strategic merge: maps field by field, null takes a field away, keyed lists element by element, the rest replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        result = dict(base)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(base.get(key), value, key)
        return result
    if isinstance(base, list) and isinstance(patch, list) and field in MERGE_KEYS:
        key = MERGE_KEYS[field]
        by_key = {element[key]: element for element in base}
        for element in patch:
            by_key[element[key]] = merged(by_key.get(element[key]), element)
        return list(by_key.values())
    if isinstance(patch, dict):
        return {key: merged(None, value, key) for key, value in patch.items() if value is not None}
    return patch
