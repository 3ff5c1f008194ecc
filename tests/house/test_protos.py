"""The wire: generated code is what the pinned generator makes of protos/, and its enums are ours."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ferrorpc.types import DType
from ferrorpc.v1 import tensor_pb2
from tests.house.tree import ROOT

PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


@pytest.mark.timeout(400)
def test_generated_code_is_fresh() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV_CORE", "COVERAGE"))}
    result = subprocess.run(
        [sys.executable, "scripts/protos.py", "--check"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    if "the generator cannot be installed" in result.stderr:
        pytest.skip(" ".join(result.stderr.split()))
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_generated_of_a_proto_that_is_gone_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    protos = importlib.import_module("protos")
    package = tmp_path / "ferrorpc" / "v1"
    package.mkdir(parents=True)
    (package / "gone_pb2.py").write_text("")

    def generate(target: Path) -> None:
        fresh = target / "ferrorpc" / "v1"
        fresh.mkdir(parents=True)
        (fresh / "here_pb2.py").write_text("x = 1\n")

    monkeypatch.setattr(protos, "ROOT", tmp_path)
    monkeypatch.setattr(protos, "generate", generate)
    assert protos.main(["--check"]) == 1, "also where the file that is gone is empty"
    assert protos.main([]) == 0
    assert [path.name for path in package.iterdir()] == ["here_pb2.py"]
    assert protos.main(["--check"]) == 0
    with pytest.raises(SystemExit):
        protos.main(["--chek"])  # it would have written


def test_the_dtype_enum_is_the_one_on_the_wire() -> None:
    proto = {name.removeprefix("DATA_TYPE_"): number for name, number in tensor_pb2.DataType.items() if number}
    assert proto == {dtype.name: dtype.value for dtype in DType}


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_a_proto_lies_where_its_package_says(path: Path) -> None:
    text = path.read_text()
    assert 'syntax = "proto3";' in text
    package = re.search(r"^package ([\w.]+);$", text, re.MULTILINE)
    assert package is not None
    assert package[1].replace(".", "/") == path.parent.relative_to(ROOT / "protos").as_posix()


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_enums_begin_with_unspecified_and_bear_their_name(path: Path) -> None:
    for name, body in re.findall(r"^enum (\w+) \{(.*?)^\}", path.read_text(), re.MULTILINE | re.DOTALL):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
        values = re.findall(r"^\s+(\w+) = (\d+);", body, re.MULTILINE)
        assert values[0] == (f"{prefix}_UNSPECIFIED", "0")
        assert all(value.startswith(f"{prefix}_") for value, _ in values)
