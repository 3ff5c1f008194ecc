"""Writes docs/reference.md, what `import ferrorpc` offers, from signatures and docstrings; or checks that it is fresh.

    python scripts/reference.py            write docs/reference.md
    python scripts/reference.py --check    compare with what is committed; exit 1 and print a diff when it differs

griffe reads the sources without importing them, so that what needs PyTorch is described where PyTorch is not installed.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"

SECTIONS = {
    "Beginning": ["init_process_group"],
    "The group": ["ProcessGroup", "Work", "operations.expected.Expected", "operations.stream.Stream", "Mesh"],
    "The coordinator's side of a group": [
        "coordination.base.Store",
        "coordination.base.Session",
        "coordination.base.MemberReport",
    ],
    "Data parallel": [
        "GradientSynchronizer",
        "ddp.synchroniser.SynchronizerStep",
        "DistributedDataParallel",
        "Parameter",
        "ZeroOptimizer",
        "ddp.steps.Steps",
        "ddp.steps.StepTimes",
        "batch_norm",
        "batch_norm_gradient",
        "ddp.batch_norm.Normalised",
        "ddp.batch_norm.Moments",
    ],
    "Update rules: `ferrorpc.rules`": ["ddp.rules"],
    "Compression: `ferrorpc.hooks`": ["ddp.hooks"],
    "Pipelines": ["Pipeline"],
    "Schedules: `ferrorpc.schedules`": ["pipeline.schedules"],
    "PyTorch: `ferrorpc.torch`": ["torch"],
    "Words for arrays": ["DType", "ReduceOp", "TensorSpec"],
    "Tests of your own code: `ferrorpc.testing`": [
        "testing",
        "testing.BackendContract",
        "testing.BasicBackendContract",
    ],
    "Backends": ["Backend", "Capabilities", "GrpcBackend", "SimulatedBackend"],
}
SHOWN = frozenset({"Backend", "BasicBackendContract", "Hook", "FerroError", "CollectiveTimeoutError"})
"""Classes that others on the page descend from: what they have is said once."""

FOR_USERS = {"Session": ("barrier", "describe"), "Steps": ("mean", "by_rank", "timeline", "to_chrome_trace")}
"""Of classes whose other members are for ferrorpc's own rooms."""

OPERATORS = ("__call__", "__getitem__")
"""What a class of the page is used by without a name."""

INTRODUCTION = """\
# Reference

Everything that `import ferrorpc` offers, as its docstrings say it (`help(ferrorpc.ProcessGroup)` shows the same). Classes that
are no names of `ferrorpc` itself are shown with their import, for annotations. Settings, ports, limits and exit codes are in
[operations.md](operations.md), commands in `ferrorpc --help`. `ferrorpc.__version__` is the version of the installed
distribution.

<!-- Written by `make reference`. -->
"""


class Page:
    """The page, as lines."""

    def __init__(self, package: griffe.Module) -> None:
        self._package = package
        self.lines = [INTRODUCTION]

    def write(self) -> str:
        """All of it."""
        headings = [*SECTIONS, "Errors"]
        self.lines += [f"- [{heading.replace('`', '')}](#{_anchor(heading)})" for heading in headings]
        for heading, paths in SECTIONS.items():
            self.lines += ["", f"## {heading}"]
            for path in paths:
                self._object(path, show_import="." in path and "`" not in heading)
        self.lines += ["", "## Errors", ""]
        self._errors()
        self._object("ErrorCode")
        return "\n".join(self.lines).rstrip() + "\n"

    def _object(self, path: str, show_import: bool = False) -> None:
        found = _target(self._package[path])
        if found.name in found.members:  # a function beside the module that bears its name
            found = found.members[found.name]
        if isinstance(found, griffe.Module):
            self._text(found)
            for name in map(str, found.exports or ()):
                if not name.startswith("_"):
                    self._object(f"{path}.{name}")
        elif isinstance(found, griffe.Class):
            self.lines += ["", f"### {found.name}"]
            if show_import:
                self.lines += ["", f"`from {found.module.path} import {found.name}`"]
            parameters = _parameters(found)
            if parameters:
                self.lines += ["", f"`{_signature(found.name, parameters)}`"]
            self._text(found)
            enumerated = _enumerated(found)
            if enumerated:
                self.lines += ["", enumerated]
            for member in _members(found):
                self._member(member)
        else:
            self.lines += ["", f"### {found.name}"]
            self._member(found)

    def _member(self, found: Any) -> None:
        if isinstance(found, griffe.Function) and not _is_shared_property(found):
            self.lines += ["", f"**`{_signature(found.name, list(found.parameters), found.returns)}`**"]
        else:
            self.lines += ["", f"**`{found.name}`**"]
        self._text(found)

    def _text(self, found: Any) -> None:
        in_list = False
        for section in found.docstring.parsed if found.docstring is not None else ():
            is_list = section.kind is not griffe.DocstringSectionKind.text
            self.lines += [*([] if in_list and is_list else [""]), *_section(section)]
            in_list = is_list

    def _errors(self) -> None:
        """As a tree of classes, each with what it carries."""
        classes = self._package["errors"].classes
        self.lines += [
            "All ranks raise the same first cause. Every error has `.code`, `.fields`, `.hint` (the last line of `str(error)`:",
            "what to try) and `.retryable`: whether `reform()` or a second attempt can help. Ranks in errors are world ranks.",
            "",
        ]

        def below(name: str, depth: int) -> None:
            found = classes[name]
            carries = [member.name for member in _members(found) if member.is_attribute and "property" in member.labels]
            facts = [*(f"`.{each}`" for each in carries), *(["retryable"] if _is_retryable(found) else [])]
            first = found.docstring.value.partition("\n\n")[0].replace("\n", " ")
            said = f" ({', '.join(facts)})" if facts else ""
            self.lines.append(f"{'  ' * depth}- **{name}**{said}: {first}")
            for other in classes.values():
                if name in [str(base) for base in other.bases]:
                    below(other.name, depth + 1)

        below("FerroError", 0)


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _is_shared_property(found: griffe.Function) -> bool:
    return any(str(each.value) == "shared_property" for each in found.decorators)


def _is_abstract(found: griffe.Class) -> bool:
    return any(str(base) in ("ABC", "Protocol", "Enum", "IntEnum") for base in found.bases)


def _enumerated(found: griffe.Class) -> str:
    """The members of an enumeration with their values; nothing for other classes."""
    if not {"Enum", "IntEnum"}.intersection(map(str, found.bases)):
        return ""
    members = [f"`{each.name} = {each.value}`" for each in found.attributes.values() if each.name.isupper()]
    return ", ".join(members).replace("'", '"')


def _parameters(found: griffe.Class) -> list[griffe.Parameter]:
    """What a user makes one with; nothing where no user does."""
    if _is_abstract(found) or found.name in FOR_USERS:
        return []
    if any(str(base) == "NamedTuple" for base in found.bases):
        fields = [each for each in found.attributes.values() if each.annotation is not None and "property" not in each.labels]
        return [griffe.Parameter(each.name, default=each.value and str(each.value)) for each in fields]
    return list(found.parameters)


def _is_retryable(found: griffe.Class) -> bool:
    own = found.all_members.get("default_retryable")
    return own is not None and str(own.value) == "True"


def _members(found: griffe.Class) -> Iterator[Any]:
    """What is public and documented: its own first, then what it has of classes that are not on the page."""
    bases = [base for base in found.mro() if base.path.startswith("ferrorpc.")]
    seen = {name for base in bases if base.name in SHOWN for name in base.members}
    for place in [found, *bases]:
        for name, member in place.members.items():
            wanted = name in FOR_USERS.get(found.name, (name,))
            public = not name.startswith("_") or name in OPERATORS
            if wanted and public and name not in seen and _is_said(member.docstring):
                seen.add(name)
                yield _target(member)


def _is_said(docstring: griffe.Docstring | None) -> bool:
    return docstring is not None and not docstring.value.startswith(("See `", "For the "))


def _signature(name: str, parameters: Sequence[griffe.Parameter], returns: Any = None) -> str:
    """As one would write a call of it, with its defaults."""
    words, keyword_only = [], False
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        if each.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            words.append("*")
            keyword_only = True
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(each.kind, "")
        keyword_only = keyword_only or stars == "*"
        shown = "..." if str(each.default).startswith("_") else each.default
        default = "" if each.default is None or stars else f"={shown}"
        words.append(f"{stars}{each.name}{default}".replace("'", '"'))
    what = "" if str(returns) in ("None", "Any", "Self") else f" -> {returns}"
    return f"{name}({', '.join(words)}){what}"


def _section(section: Any) -> list[str]:
    """A part of a docstring as Markdown."""
    if section.kind is griffe.DocstringSectionKind.text:
        return _prose(section.value)
    lines = []
    for each in section.value:
        name, said = getattr(each, "name", ""), " ".join(each.description.split())
        if name.endswith(","):  # griffe takes what comes after the first of several names for a type
            name += f" {each.annotation}"
        error = str(each.annotation).strip("()")  # of several: a tuple
        label = {"raises": f"raises `{error}`", "returns": "returns"}.get(section.kind.value) or f"`{name}`"
        lines.append(f"- {label}: {said}")
    return lines


def _prose(text: str) -> list[str]:
    """Paragraphs as they are; what is indented as a list where it says `name: text`, as code elsewhere."""
    lines: list[str] = []
    for block in text.strip("\n").split("\n\n"):
        rows = block.splitlines()
        if not rows[0].startswith("    "):
            lines += [*rows, ""]
        elif re.match(r" {4}[\w, ().]+: ", rows[0]):
            entries = re.split(r"\n {4}(?=\S)", "\n" + block)[1:]
            lines += [re.sub(r"^(.*?): ", r"- `\1`: ", " ".join(entry.split()), count=1) for entry in entries]
            lines += [""]
        else:
            lines += ["```text", *(row.removeprefix("    ") for row in rows), "```", ""]
    return lines[:-1]


def _anchor(heading: str) -> str:
    """Where a heading is found, as GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page() -> str:
    """What docs/reference.md should be."""
    package = griffe.load(
        "ferrorpc",
        search_paths=[ROOT],
        docstring_parser="google",
        docstring_options={"warnings": False, "returns_multiple_items": False},
        resolve_aliases=True,
    )
    assert isinstance(package, griffe.Module)
    return Page(package).write()


def main() -> int:
    """Entry point."""
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    committed = PAGE.read_text(encoding="utf-8")
    diff = difflib.unified_diff(committed.splitlines(), fresh.splitlines(), "committed", "fresh", lineterm="")
    print("\n".join(list(diff)[:40]) or "docs/reference.md is fresh")
    return int(committed != fresh)


if __name__ == "__main__":
    raise SystemExit(main())
