"""The command line. Commands of other modules are loaded by name only when they are called."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import io
import itertools
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import typer
from rich.markup import escape
from typer.core import TyperGroup

from rolltape.replay.options import BranchPolicy
from rolltape.replay.printing.console import err, out, print_json, progress, say_error, sentence, table
from rolltape.schema.errors import MissingExtra, RolltapeError, install
from rolltape.schema.fields import RECORDS, ROW, SCHEMA_VERSION

_ELSEWHERE = {
    "export": ("rolltape.replay.commands.export", "export", ""),
    "diff": ("rolltape.replay.commands.diff", "diff", ""),
    "demo": ("rolltape.record.demo.cli", "demo", "live"),
    "record": ("rolltape.record.cli", "record", "live"),
    "engine": ("rolltape.record.engine.cli", "engine", "live"),
    "recover": ("rolltape.record.writing.recover_cli", "recover", ""),
    "verify": ("rolltape.replay.commands.verify", "verify_command", ""),
    "rescore": ("rolltape.record.rescoring.cli", "rescore", "live"),
    "launch": ("rolltape.record.launching.cli", "launch_command", "live"),
    "approve": ("rolltape.replay.commands.approve", "approve_command", ""),
    "list": ("rolltape.replay.commands.list", "list_command", ""),
    "import": ("rolltape.replay.commands.import_", "import_command", ""),
    "stats": ("rolltape.replay.commands.stats", "stats_command", ""),
    "show": ("rolltape.replay.commands.show", "show_command", ""),
    "notebook": ("rolltape.replay.commands.notebook", "notebook_command", ""),
    "sql": ("rolltape.replay.commands.sql", "sql_command", ""),
    "annotate": ("rolltape.replay.commands.annotate", "annotate_command", ""),
    "compact": ("rolltape.replay.commands.compact", "compact_command", ""),
    "prune": ("rolltape.replay.commands.prune", "prune_command", ""),
}
"""Commands of other modules: module, function, and the extra that the module needs."""
_ORDER = (
    *("demo", "record", "launch", "engine", "import", "list", "stats", "show", "sql", "notebook", "verify", "approve"),
    *("diff", "convert", "export", "rescore", "annotate", "recover", "compact", "prune", "schema"),
)


_ALIKE = 0.65
"""How alike the names of two options are where one may have been meant by the other, without their dashes."""
_BROKEN = 80
"""Characters from which on a line of help was broken for its length."""
_PACKAGE = {"live": "verifiers"}
"""What tells that an extra is not installed, without importing anything."""


class _Commands(TyperGroup):
    """The commands of this module, and those of others, loaded when they are needed."""

    _listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, of which none is loaded: all of them together import for seconds."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called."""
        name = args[0] if args else ""
        if not _ELSEWHERE.get(name, ("", "", ""))[2] and name != "notebook":
            _without_pandas()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Call the command; of an option that it does not know, only those are named that are written alike."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if found := getattr(error.__cause__, "errors", None):  # of a wrong value typer says what pydantic said
                said, given = str(error.message).removeprefix("Value error, "), found()[0]["input"]  # type: ignore[attr-defined]
                error.message = said if repr(given) in said else f"{said} (found {given!r})"  # type: ignore[attr-defined]
            if possible := getattr(error, "possibilities", None):
                asked = getattr(error, "option_name", "").lstrip("-")
                near = difflib.get_close_matches(asked, [name.lstrip("-") for name in possible], cutoff=_ALIKE)
                error.possibilities = [name for name in possible if name.lstrip("-") in near]  # type: ignore[attr-defined]
            raise

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order people meet them."""
        names = {*super().list_commands(ctx), *_ELSEWHERE}
        return [n for n in _ORDER if n in names] + sorted(names - set(_ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by name."""
        if cmd_name not in _ELSEWHERE:
            command = super().get_command(ctx, cmd_name)
            if command is not None:
                command.help = unwrapped(command.help or "")
            return command
        module, function, extra = _ELSEWHERE[cmd_name]
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        if self._listing:
            summary = _summary(cmd_name)
            single.command(cmd_name, help=summary)(_stub(summary))
            return typer.main.get_command(single)
        try:
            found = importlib.import_module(module)
            single.command(cmd_name, context_settings=getattr(found, "CONTEXT", None))(getattr(found, function))
        except ImportError as error:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            sentence = _missing(cmd_name, extra, getattr(error, "name", None) or str(error))
            single.command(cmd_name, help=escape(sentence), context_settings=anything)(_stub(sentence))
        command = typer.main.get_command(single)
        command.name = cmd_name
        command.help = unwrapped(command.help or "")
        return command


def unwrapped(text: str) -> str:
    """Help with the lines put together again that its source had to break; a terminal breaks them where it is as wide."""
    return re.sub(rf"(?m)^(.{{{_BROKEN},}})\n(?=\S)", r"\1 ", text)


def _missing(name: str, extra: str, needs: str) -> str:
    return f"`rolltape {name}` needs the extra '{extra}' ({needs} is missing): {install(extra)}."


def _stub(sentence: str) -> Any:
    def stub() -> None:
        raise MissingExtra(sentence)

    return stub


def _summary(name: str) -> str:
    """What a command of another module is for, out of the text of that module."""
    module, function, extra = _ELSEWHERE[name]
    needs = _PACKAGE.get(extra)
    if needs and importlib.util.find_spec(needs) is None:
        return escape(_missing(name, extra, needs))
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    found = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == function)
    return unwrapped(inspect.cleandoc(ast.get_docstring(found) or ""))


def _without_pandas() -> None:
    """Let pyarrow find no pandas: it imports it at its first array, for a second or more, and no command needs it."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([None])
        finally:
            sys.meta_path.remove(_NoPandas)


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Record every Verifiers rollout to Parquet, check it, and replay it into training samples.\n\n"
    "Start with [bold]rolltape demo[/bold].",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"rolltape {version('rolltape')}, schema {'.'.join(map(str, SCHEMA_VERSION))}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command("schema")
def schema(
    record: Annotated[
        Literal["trace", "group", "outcome", "step"] | None, typer.Argument(help="Only this record.")
    ] = None,
    as_json: JsonOption = False,
    arrow: Annotated[bool, typer.Option("--arrow", help="Print the Arrow schemas.")] = False,
) -> None:
    """Print the file format: the four records, their columns, types, units and sources.

    For example:

        rolltape schema trace
        rolltape schema --json
    """
    chosen = [r for r in RECORDS if record in (None, r.name)]
    if as_json:
        print_json(
            {
                "version": ".".join(map(str, SCHEMA_VERSION)),
                "fingerprint": ROW.fingerprint,
                "records": [
                    {"name": r.name, "description": r.description, "fields": [f.to_dict() for f in r.fields]}
                    for r in chosen
                ],
            }
        )
        return
    for r in chosen:
        if arrow:
            typer.echo(f"# {r.name}\n{r.arrow.to_string(show_field_metadata=False)}\n")
            continue
        rows = [(f.name, f.arrow_type, f.unit, f.source, f.description) for f in r.fields]
        out.print(table(f"{r.name}: {r.description}", ("column", "type", "unit", "source", "meaning"), rows))
        out.print()


@app.command("convert")
def convert_command(
    run: Annotated[str, typer.Argument(help="Folder or URL of the run.")],
    to: Annotated[
        str, typer.Option("--out", help="Files to write, such as 'out/{rollout_id}.pt'; also .jsonl, .parquet.")
    ],
    step: Annotated[list[int] | None, typer.Option(help="Only this step; repeatable.", show_default=False)] = None,
    evaluations: Annotated[
        bool, typer.Option("--eval", help="Also the evaluations, as eval_<rollout id>.", show_default=False)
    ] = False,
    branch_policy: Annotated[
        BranchPolicy | None,
        typer.Option(help="Convert like this instead of as recorded: siblings makes a Sample of every branch."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the Samples of recorded steps as the trainer got them: a file a step, one step in memory at a time.

    .pt (needs torch) is read by Miles with --load-debug-rollout-data; .jsonl and .parquet need nothing.

    A trace with several branches gives none unless the run was recorded with `siblings`, and an import never was: with
    --branch-policy siblings each of its branches becomes a Sample.

        rolltape convert runs/first --out 'samples/{rollout_id}.jsonl'
        rolltape convert runs/imported --branch-policy siblings \\
            --out 'samples/{rollout_id}.pt'

    Exit code: 0 written, 2 refused.
    """
    from rolltape.replay.exports.samples import write_samples
    from rolltape.replay.run import open_run

    opened = open_run(run)
    with progress("converting, files") as tell:
        number = itertools.count(1)
        written = write_samples(
            opened,
            to,
            steps=step or None,
            evaluations=evaluations,
            branch_policy=branch_policy,
            overwrite=overwrite,
            told=lambda _: tell(next(number)),
        )
    if as_json:
        files = [
            {
                "path": str(f.path),
                "rollout_id": f.name,
                "samples": f.samples,
                "left_out": dict(f.left_out),
                "warnings": list(f.warnings),
            }
            for f in written
        ]
        print_json({"run": opened.run_id, "files": files})
        return
    for file in written:
        out.print(file.line(run), markup=False, highlight=False, soft_wrap=True)
    for warning in dict.fromkeys(warning for file in written for warning in file.warnings):
        err.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _open_closed_streams() -> None:
    """Put the null device where a standard stream is closed: the next file would take its number, and what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _print_in_any_encoding() -> None:
    """Print a question mark for what the encoding of a standard stream has no character for, instead of failing over it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _refused(error: BaseException | None) -> None:
    """With --json, print why a command ends with exit code 2, so that standard output is JSON then too.

    Bad usage is an error of typer's, with a message of its own; `Exit` says nothing but may have been raised from one of ours.
    """
    if "--json" not in itertools.takewhile("--".__ne__, sys.argv[1:]):
        return
    told = getattr(error, "format_message", None)
    cause = error if isinstance(error, (OSError, RolltapeError)) else getattr(error, "__cause__", None)
    if why := told() if told else cause and sentence(cause):
        with suppress(OSError):  # of standard output itself
            print_json({"error": why})


def main() -> None:
    """Entry point: errors of ours are one sentence on standard error and exit code 2."""
    _open_closed_streams()
    _print_in_any_encoding()
    try:
        app()
    except (OSError, RolltapeError) as error:
        say_error(error)
        _refused(error)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 2:
            _refused(end.__context__)
        raise
    except KeyboardInterrupt:  # before typer is at work, which takes it as this too
        sys.exit(130)


if __name__ == "__main__":
    main()
