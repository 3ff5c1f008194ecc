"""The code in the documents runs, its commands have the options they are shown with, and the names of its tables exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from ferrorpc_coordinator.__main__ import _parser

import ferrorpc
from ferrorpc.cli.main import cli
from ferrorpc.config import SETTINGS
from ferrorpc.coordination.base import Session, Store
from ferrorpc.group import ProcessGroup
from tests.house.test_documents import DOCUMENTS
from tests.house.tree import ROOT

COMING_FROM = ROOT / "docs" / "coming_from.md"
GROUPS = ROOT / "docs" / "groups.md"
RANKS = 4
UNKNOWN = object()


def blocks(path: Path, language: str = "python") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    return [code for given, code in found if given == language]


def code_within(path: Path) -> list[str]:
    """Code within lines, outside blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))


# Whole scripts.

SCRIPTS = [(path, number) for path in (ROOT / "README.md", COMING_FROM, GROUPS) for number in range(len(blocks(path)))]
SAID = {"README.md": "rank 0 of 2: [0.5 0.5 0.5]", "coming_from.md": "3.141593", "groups.md": "[3 3 3] 2"}


@pytest.mark.parametrize(("path", "number"), SCRIPTS, ids=lambda value: getattr(value, "name", str(value)))
def test_a_script_runs_from_beginning_to_end(path: Path, number: int, tmp_path: Path) -> None:
    code = blocks(path)[number]
    if "torch" in code:
        pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [str(Path(sys.executable).with_name("ferrorpc")), "run", "-n", "2", str(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    if "print(" in code:
        assert SAID[path.name] in result.stdout
    if "checkpoint.pt" in code:
        assert (tmp_path / "checkpoint.pt").exists()


# Fragments, each after those before it on its page, with what the text around it takes for granted.


class Piece:
    """A stage that multiplies by a weight; of several x it takes the sum, to several others it gives the same."""

    def __init__(self, name: str, followers: int = 1, takes: int = 1) -> None:
        self._name, self._followers, self._takes = name, followers, takes
        self._weight = ferrorpc.Parameter(np.full((2, 2), 0.5))

    def parameters(self) -> list[ferrorpc.Parameter]:
        return [self._weight]

    def named_parameters(self) -> list[tuple[str, ferrorpc.Parameter]]:
        return [(self._name, self._weight)]

    def forward(self, x: Any) -> tuple[Any, Any]:
        whole = sum(x) if self._takes > 1 else x
        y = whole @ self._weight.data
        return (y,) * self._followers if self._followers > 1 else y, whole

    def backward(self, context: Any, grad_y: Any) -> Any:
        grad_y = sum(grad_y) if self._followers > 1 else grad_y
        grad = context.T @ grad_y
        self._weight.grad = grad if self._weight.grad is None else self._weight.grad + grad
        grad_x = grad_y @ self._weight.data.T
        return (grad_x,) * self._takes if self._takes > 1 else grad_x


def squares(y: Any, target: Any) -> tuple[float, Any]:
    """A loss and its gradient."""
    return float(((y - target) ** 2).mean()), 2 * (y - target) / y.size


def data_parallel(group: ProcessGroup) -> Iterator[dict[str, Any]]:
    import torch

    layers = {f"layer{number}": {"weight": np.ones((3, 3))} for number in (1, 2, 3)}
    a = np.ones((3, 3))
    module = torch.nn.Linear(3, 2)
    yield {
        "group": group,
        "x": torch.ones(4, 3),
        "target": torch.zeros(4, dtype=torch.long),
        "module": module,
        "criterion": torch.nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }
    yield {"like": layers, "grads": layers, "tokens": 8}
    yield {"x": a, "grad": a, "part": a, "grad_y": a}
    yield {"like": {"weight": np.zeros((3, 3), np.float32)}}
    yield {"weights": {"w": np.ones(9)}, "grads": {"w": np.ones(9)}}
    yield {"torch": torch, "model": torch.nn.Linear(3, 2), "x": torch.ones(4, 3)}
    yield {}
    yield {}


def pipeline(group: ProcessGroup) -> Iterator[dict[str, Any]]:
    import torch

    schedules = ferrorpc.schedules
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(RANKS)])
    x = np.ones((16, 2))
    yield {"group": group, "stage": Piece("weight"), "x": x, "target": x, "loss_fn": squares}
    yield {
        "torch": torch,
        "model": model,
        "schedule": schedules.one_f_one_b(RANKS, 8),
        "x": torch.ones(16, 2),
        "target": torch.zeros(16, dtype=torch.long),
    }
    yield {}
    yield {"stage": Piece("weight"), "x": x, "target": x}
    schedules.one_f_one_b(RANKS, 8).to_csv(f"rank{group.rank}.csv")
    Path(f"rank{group.rank}.csv").replace("mine.csv")
    yield {}
    wired = [Piece("embedding", followers=2), Piece("weight"), Piece("weight"), Piece("head", takes=2)]
    yield {"stage": wired[group.rank]}


PAGES: dict[str, Callable[[ProcessGroup], Iterator[dict[str, Any]]]] = {
    "data_parallel.md": data_parallel,
    "pipeline.md": pipeline,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_fragments_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    codes = [compile(code, f"{page}, block {number}", "exec") for number, code in enumerate(blocks(ROOT / "docs" / page), 1)]

    def body(group: ProcessGroup) -> dict[str, Any]:
        names: dict[str, Any] = {"np": np, "ferrorpc": ferrorpc}
        for code, given in zip(codes, PAGES[page](group), strict=True):
            names.update(given)
            exec(code, names)
        return names

    found = ferrorpc.testing.run_world(RANKS, body)
    assert all(len(names) > len(codes) for names in found)


TESTS = ("own_backend.md", "testing.md")


@pytest.mark.parametrize("page", TESTS)
def test_the_tests_that_a_page_shows_pass(page: str, tmp_path: Path) -> None:
    """Each page is one file of tests, cut in pieces."""
    (tmp_path / "test_page.py").write_text("\n\n".join(blocks(ROOT / "docs" / page)))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def test_commands_are_found_in_blocks_and_in_lines() -> None:
    found = [words[:2] for words in commands(ROOT / "docs" / "pipeline.md")]
    assert found == [["plan", "pipeline"], ["plan", "pipeline"]]
    assert ["config"] in list(commands(ROOT / "docs" / "operations.md"))


def test_no_block_of_python_escapes() -> None:
    pages = {path.name for path in DOCUMENTS if blocks(path)}
    assert pages == {*PAGES, *SAID, *TESTS}


# Commands.


def commands(path: Path) -> Iterator[list[str]]:
    """Those of `ferrorpc` that are shown, in lines of blocks or within the text."""
    shown = "".join([*blocks(path, ""), *blocks(path, "sh")])
    for line in [*shown.splitlines(), *code_within(path)]:
        found = re.match(r"(?:[A-Z_]+=\S+ )*ferrorpc ([a-z].*)", re.split(r"\s+#|\s{3,}", line)[0].strip())
        if found:
            yield shlex.split(found[1])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_that_is_shown_has_these_options(path: Path) -> None:
    for words in commands(path):
        command: click.Command = cli
        context = click.Context(cli, info_name="ferrorpc")
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words[0])
            if found is None and command is cli and words[0] == "all_reduce":
                break  # the name of a span, not a command
            assert found is not None, f"there is no command {words[0]!r}"
            command, words = found, words[1:]
        known = {option for parameter in command.params for option in parameter.opts} | set(
            command.get_help_option_names(context)
        )
        if command.name == "coordinator":  # it hands everything on
            known |= set(_parser()._option_string_actions)
        own = words[: next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))]
        assert [word for word in own if word.startswith("-") and word not in known] == [], command.name


# The tables of what replaces what.


def cells(column: int, *headings: str) -> list[str]:
    """The code in a column of the tables under these headings."""
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", COMING_FROM.read_text(), re.MULTILINE | re.DOTALL))
    found = [row for heading in headings for row in re.findall(r"^\| (.*?) \| (.*) \|$", sections[heading], re.MULTILINE)[1:]]
    return [span for row in found for span in re.findall(r"`([^`]+)`", row[column])]


def meant(node: ast.expr, homes: dict[str, Any]) -> Any:
    """What `a.b.c` means, where `a` is one of the homes; UNKNOWN where it is not, None where there is no such name."""
    if isinstance(node, ast.Name):
        return homes.get(node.id, UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return UNKNOWN
    found = meant(node.value, homes)
    if found is UNKNOWN:
        return UNKNOWN
    return homes.get(node.attr) if isinstance(getattr(found, node.attr, None), property) else getattr(found, node.attr, None)


def missing(spans: list[str], homes: dict[str, Any]) -> list[str]:
    """Which of these lead nowhere: by names below one of the homes, or by keywords of calls of them."""
    lost = []
    for span in spans:
        try:
            nodes = list(ast.walk(ast.parse(span)))
        except SyntaxError:
            continue  # words around code: a keyword, a `with` without its block
        names = [meant(node, homes) for node in nodes if isinstance(node, ast.Attribute)]
        calls = [(meant(node.func, homes), node) for node in nodes if isinstance(node, ast.Call)]
        known = [(keywords_of(found), node) for found, node in calls if callable(found)]
        if None in names or any(each.arg not in keywords for keywords, node in known for each in node.keywords):
            lost.append(span)
    return lost


def keywords_of(function: Callable[..., Any]) -> set[str]:
    """The keywords it takes; the names of settings too where it takes them."""
    keywords = set(inspect.signature(function).parameters)
    return keywords | {setting.name for setting in SETTINGS} if "settings" in keywords else keywords


def test_what_a_table_says_is_here_is_here() -> None:
    torch = pytest.importorskip("torch")
    import ferrorpc.torch

    kind = ferrorpc.torch.DistributedDataParallel
    (wrapper,) = ferrorpc.testing.run_world(1, lambda group: kind(torch.nn.Linear(1, 1), group))
    homes = {
        "group": ProcessGroup,
        "store": Store,
        "session": Session,
        "rank": int,
        "size": int,
        "ferrorpc": ferrorpc,
        "ddp": wrapper,
    }
    found = cells(1, "torch.distributed", "mpi4py", "Horovod", "JAX", "Ray")
    assert len(found) > 90
    assert missing(found, homes) == []
    keywords = {span.removesuffix("=") for span in found if re.fullmatch(r"\w+=", span)}
    assert keywords <= set(inspect.signature(kind).parameters)


def test_a_name_that_is_not_here_would_be_found() -> None:
    homes = {"group": ProcessGroup, "store": Store, "ferrorpc": ferrorpc}
    wrong = ["group.alltoall(x)", "y = group.reduce(x, dst=0)", "ferrorpc.hooks.Fewer(1)", "group.store.put(1)"]
    wrong += ["ferrorpc.init_process_group(address=1)"]
    assert missing([*wrong, "group.reduce(x, root=0)", "ferrorpc.hooks.Compress('f16')"], homes) == wrong


def test_what_a_table_says_was_there_was_there() -> None:
    distributed = pytest.importorskip("torch.distributed")
    names = set(re.findall(r"\bdist\.([\w.]+)", " ".join(cells(0, "torch.distributed"))))
    assert len(names) > 15
    assert [name for name in names if not hasattr(distributed, name.split(".")[0])] == []


def test_what_a_table_says_of_mpi4py_was_there() -> None:
    mpi = pytest.importorskip("mpi4py")
    source = (Path(mpi.__file__).parent / "MPI.pyi").read_text()  # importing it would start MPI in this process
    names = set(re.findall(r"\b(?:comm|MPI|Request|Op)\.(\w+)", " ".join(cells(0, "mpi4py"))))
    assert len(names) > 25
    assert [name for name in names if not re.search(rf"^\s*(?:def |class )?{name}\b", source, re.MULTILINE)] == []
