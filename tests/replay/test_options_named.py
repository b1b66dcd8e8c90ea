"""Options that sentences name: each is an option of the command that the sentence is about, or of some command."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from rolltape.replay.cli import _ELSEWHERE, app

ROOT = Path(__file__).parents[2]
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_CALL = re.compile(r"(?:^|[`\s(}])rolltape ([a-z]+)\b([^`\n#]*)")
_FOREIGN = {
    *("--rolltape", "--lf"),  # pytest's
    *("--load-debug-rollout-data", "--debug-train-only", "--rollout-function-path", "--hf-checkpoint"),  # Miles'
    *("--n-samples-per-prompt", "--output-dir"),  # Miles', Verifiers' replay
    *("--host", "--include-code", "--run"),  # marimo's and the notebooks'
    *("--version", "--name"),  # rolltape's own, and any option whose value may be a secret
}
"""Options that are of no command."""
_SENTENCES_OF = {
    "replay/annotations.py": ("annotate",),
    "replay/checks/traces.py": ("verify", "convert", "record"),
    "replay/chosen.py": ("export", "diff", "show", "stats"),
    "replay/printing/fitting.py": ("list", "stats", "show", "diff"),
    "replay/rollouts.py": ("stats",),
    "replay/show/list.py": ("show",),
    "replay/printing/traces.py": ("show",),
    "replay/sql/connection.py": ("sql",),
    "replay/sql/output.py": ("sql",),
    "replay/stats.py": ("stats",),
    "replay/printing/stats.py": ("stats",),
    "replay/whole.py": ("convert", "export"),
    "record/rechecking/logprobs.py": ("verify",),
    "record/rechecking/picked.py": ("verify",),
    "record/rechecking/renderings.py": ("verify",),
    "record/rescoring/rescore.py": ("rescore",),
    "record/rescoring/plan.py": ("rescore",),
    "record/live.py": ("record",),
    "record/config.py": ("record",),
    "record/writing/resume.py": ("record",),
    "record/transport.py": ("record",),
    "record/demo/folder.py": ("demo",),
    "record/demo/start.py": ("demo",),
    "record/engine/faults.py": ("engine",),
}
"""Commands whose users read what these modules say. What a command's own module says is read by its users."""
_OF_MILES = re.compile(r"record/(miles/|launching/|demo/problems)")
"""Modules whose sentences are about Miles' own options."""


@cache
def options() -> dict[str, frozenset[str]]:
    """Options of each command, `--help` among them."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    with typer.Context(group) as context:
        commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    found = {}
    for name, command in commands.items():
        assert command is not None
        names = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
        found[name] = frozenset({*names, "--help"})
    return found


def sentences(path: Path) -> Iterator[str]:
    """The string constants of a module, docstrings among them; parts of one text are joined, with {} between."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def modules() -> list[Path]:
    return [
        p for package in ("replay", "record", "notebooks", "schema") for p in sorted((ROOT / package).rglob("*.py"))
    ]


def unknown(text: str) -> list[str]:
    """Options that the text gives to a command which does not have them."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        f"rolltape {command} {option}"
        for command, rest in _CALL.findall(joined)
        if command in options()
        for option in _OPTION.findall(rest.partition(" -- ")[0])
        if option not in options()[command]
    ]


def test_commands_have_options() -> None:
    assert {"--out", "--branch-policy", "--step", "--help"} <= options()["convert"]
    assert "--step" not in options()["verify"]
    assert unknown("`rolltape verify RUN --step 3` and `rolltape show RUN --step 3`") == ["rolltape verify --step"]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.md")), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_give_commands_only_options_they_have(path: Path) -> None:
    assert unknown(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_sentences_name_options_that_there_are(path: Path) -> None:
    texts = list(sentences(path))
    assert [found for text in texts for found in unknown(text)] == []
    where = path.relative_to(ROOT)
    if _OF_MILES.match(where.as_posix()):
        return
    every = {option for of in options().values() for option in of}
    readers = _SENTENCES_OF.get(where.as_posix(), _commands_of(where))
    known = set.intersection(*(set(options()[name]) for name in readers)) if readers else every
    named = {option for text in texts for option in _OPTION.findall(_CALL.sub("", text))}
    assert sorted(named - known - _FOREIGN - {"--max"}) == []  # --max-drop and --max-rise, whose end is filled in


def _commands_of(path: Path) -> tuple[str, ...]:
    """The command that a module holds."""
    module = f"rolltape.{path.with_suffix('').as_posix().replace('/', '.')}"
    return tuple(name for name, (of, *_) in _ELSEWHERE.items() if of == module)
