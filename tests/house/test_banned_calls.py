"""What the packages must not use, each with the reason and what to use instead."""

from __future__ import annotations

import ast
import builtins

from tests.house.tree import name_of, package_files, syntax_of

BANNED_MODULES = {
    "pickle": "it runs code from the wire: use protobuf or .npz without objects",
    "cloudpickle": "it runs code from the wire",
    "dill": "it runs code from the wire",
    "marshal": "it is no format",
    "shelve": "it is pickle in a file",
    "yaml": "yaml.load runs code: settings are variables and flags",
}
BANNED_CALLS = {
    "eval": "never",
    "exec": "never",
    "print": "use click.echo in ferrorpc.cli and logging elsewhere",
    "time.time": "wall clocks jump: use guard.Clock.now() or time.monotonic()",
    "time.sleep": "nothing sleeps: wait with a deadline on a Parker, an Event or a condition that an abort can wake",
    "asyncio.get_event_loop": "use asyncio.get_running_loop()",
    "random.random": "pass a random.Random(seed)",
    "random.randint": "pass a random.Random(seed)",
    "random.choice": "pass a random.Random(seed)",
    "random.uniform": "pass a random.Random(seed)",
    "os.system": "use subprocess with a list",
    "numpy.random.seed": "use numpy.random.default_rng(seed)",
}
ALLOWED: dict[tuple[str, str], str] = {
    ("ferrorpc/bootstrap/address.py", "time.sleep"): "before there is a session to wait on; bounded by the caller's timeout",
    ("ferrorpc/bootstrap/coordinator.py", "time.sleep"): "before there is a session to wait on; bounded by PORT_SECONDS",
    ("ferrorpc/guard.py", "time.sleep"): "of no seconds: other threads go first, and this one goes on",
    ("ferrorpc/trace.py", "time.time"): "once, so that the traces of several processes can be laid side by side",
    ("ferrorpc/cli/status.py", "time.sleep"): "a screen that is drawn again until Ctrl-C, in a process that does nothing else",
}
"""(file, call) -> why it is right there."""


def imported(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and top-level module of every import."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module.split(".")[0]))
    return found


def names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: {"np": "numpy", "sleep": "time.sleep"}; not those that are also parameters."""
    result = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result.update({alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            result.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {name: full for name, full in result.items() if name not in parameters}


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """The full name of what is called, as far as the syntax tells; one that was not imported is in brackets, unless builtin."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id if hasattr(builtins, node.id) else f"<{node.id}>")
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, known)}.{node.attr}"
    return ""


def called(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and full name of every call."""
    known = names(tree)
    return [(node.lineno, dotted(node.func, known)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_banned_is_imported() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {module}: {BANNED_MODULES[module]}"
        for path in package_files()
        for line, module in imported(syntax_of(path))
        if module in BANNED_MODULES
    ]
    assert wrong == []


def test_nothing_banned_is_called_and_every_exception_is_needed() -> None:
    found = [(name_of(path), line, call) for path in package_files() for line, call in called(syntax_of(path))]
    banned = [each for each in found if each[2] in BANNED_CALLS]
    wrong = [f"{name}:{line}: {call}: {BANNED_CALLS[call]}" for name, line, call in banned if (name, call) not in ALLOWED]
    assert wrong == []
    assert {(name, call) for name, _, call in banned} == set(ALLOWED)


def test_the_search_finds_what_it_looks_for() -> None:
    lines = ["import pickle as p", "from time import sleep", "import time", "import numpy as np"]
    lines += ["sleep(1)", "time.time()", "eval('1')", "np.random.seed(0)"]
    tree = ast.parse("\n".join(lines))
    assert [module for _, module in imported(tree) if module in BANNED_MODULES] == ["pickle"]
    assert [call for _, call in called(tree) if call in BANNED_CALLS] == [
        "time.sleep",
        "time.time",
        "eval",
        "numpy.random.seed",
    ]
