"""`rolltape sql`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rolltape.replay.annotations import annotations_of
from rolltape.replay.printing.console import err, out, print_json, table
from rolltape.replay.printing.words import counted
from rolltape.replay.run import Run, open_run
from rolltape.replay.sql.added import described
from rolltape.replay.sql.answer import Answer
from rolltape.replay.sql.connection import ask, is_statement
from rolltape.replay.sql.declare import View
from rolltape.replay.sql.output import Format, shown, write
from rolltape.replay.sql.views import VIEWS
from rolltape.schema.errors import BadInput, RolltapeError, RunConflict

CONTEXT = {"ignore_unknown_options": True}
"""How the command line is read: a query may begin with a comment, `-- …`, which is no option."""
_HELP = """\
A query ends with `;`. `.schema` prints the views, `.schema NAME` one with its columns and examples, `.quit` ends."""
_WORDS = {"exit": ".quit", "quit": ".quit", "\\q": ".quit", "help": ".help"}
"""What other prompts take, as it is called here."""


def sql_command(
    given: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN... [QUERY]", help="Folders or URLs of runs, then the query.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File to read the query from.", show_default=False)
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option("--format", help="By default a table, or what the ending of --out says.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="File to write: .csv, .json or .parquet.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    split: Annotated[
        list[str] | None, typer.Option(help="Recorded split, by default train; repeatable.", show_default=False)
    ] = None,
    evaluations: Annotated[bool, typer.Option("--eval", help="Also the evaluations: every split.")] = False,
    attempt: Annotated[
        int | None, typer.Option(help="This attempt instead of the newest of each step.", show_default=False)
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Also what newer attempts took back, as superseded.")
    ] = False,
    live: Annotated[bool, typer.Option("--live", help="Also what journals hold and no commit does yet.")] = False,
    rows: Annotated[int, typer.Option(min=0, help="Most rows of a table; 0: all.")] = 100,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the views; with the name of one its columns and examples."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Ask recorded runs a question in SQL (DuckDB's).

    For example:

        rolltape sql demo-run "SELECT step, name, avg(value) FROM rewards
            WHERE ended GROUP BY ALL"
        rolltape sql runs/a runs/b "SELECT run, avg(reward) FROM traces
            WHERE ended GROUP BY run"
        rolltape sql demo-run -f question.sql --out answer.parquet
        rolltape sql --schema
        rolltape sql --schema rewards

    The views are traces, nodes, turns, tokens, rewards, metrics, groups, steps,
    outcomes, samples and errors. They hold what was committed, of the newest
    attempt of each step; what is left out is said on standard error. Queries
    read these views and nothing else, and write nothing.

    Without a query it is read from standard input; on a terminal a prompt opens.
    A null is not 0: it was not scored, not measured, not there.

    Exit code: 0 answered, 2 refused or bad usage.
    """
    words = list(given or ())
    for word in words:
        if word.startswith("-") and not any(map(str.isspace, word)):
            raise BadInput(f"{word} is no option of `rolltape sql`; `rolltape sql --help` lists them.")
    if schema:
        _schema(words, as_json)
        return
    runs, query = _taken(words, file)
    form = _format(format, to, as_json)
    selection = _selection(split, evaluations, attempt, all_attempts, live)
    opened = [open_run(run) for run in runs]
    if query is None:
        _prompt(opened, selection, rows)
        return
    _answer(opened, query, selection, form, to, overwrite, rows)


def _taken(words: Sequence[str], file: Path | None) -> tuple[list[str], str | None]:
    """(runs, query) of the command line; no query where a prompt is wanted. Raises BadInput."""
    runs = list(words)
    query = None
    if file is not None:
        try:
            query = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{file}: no UTF-8 text ({error}); a query is text.") from error
    elif runs and _is_query(runs[-1]):
        query = runs.pop()
    elif not sys.stdin.isatty():
        query = sys.stdin.read()
        if not query.strip():
            raise BadInput(
                'no query was given; write it behind the runs, such as "SELECT count(*) FROM traces", or use -f FILE.'
            )
    if not runs:
        raise BadInput("no run was given; write the folder of a run before the query.")
    return runs, query


def _is_query(word: str) -> bool:
    """Whether a word of the command line is a query rather than a run: it has a blank in it, or is a statement by itself, such
    as `begin`, and nothing is called so."""
    return not os.path.exists(word) and (any(c.isspace() for c in word.strip()) or is_statement(word))


def _format(format: Format | None, to: Path | None, as_json: bool) -> Format:
    if as_json and format not in (None, "json"):
        raise BadInput(f"--json and --format {format} contradict each other; choose one.")
    if as_json:
        format = "json"
    if to is None:
        if format == "parquet":
            raise BadInput("Parquet is not printed; name a file with --out.")
        return format or "table"
    endings: Mapping[str, Format] = {".csv": "csv", ".json": "json", ".parquet": "parquet"}
    if format is None and to.suffix not in endings:
        raise BadInput(f"{to} ends in {to.suffix or 'nothing'}; expected {', '.join(endings)}, or --format.")
    format = format or endings[to.suffix]
    if format == "table":
        raise BadInput("a table is printed, not written; choose --format csv, json or parquet for --out.")
    return format


def _selection(
    split: list[str] | None, evaluations: bool, attempt: int | None, all_attempts: bool, live: bool
) -> dict[str, Any]:
    if split and evaluations:
        raise BadInput("--eval reads every split; leave --split away, or name the splits one by one.")
    chosen: Any = None if evaluations else split or "train"
    return {"split": chosen, "attempt": attempt, "all_attempts": all_attempts, "live": live}


def _answer(
    runs: Sequence[Run],
    query: str,
    selection: Mapping[str, Any],
    format: Format,
    to: Path | None,
    overwrite: bool,
    rows: int,
) -> None:
    """Ask, and print or write what comes."""
    if to is not None:
        _may_write(runs, to, overwrite)
    answer = ask(runs, query, **selection)
    for note in answer.notes:
        err.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if to is not None:
        count = _written(answer, format, to)
        err.print(f"{to}: {counted(count, 'row')}", markup=False, highlight=False, soft_wrap=True)
    elif format == "table":
        out.print(shown(answer, rows, out))
    else:
        sys.stdout.flush()
        write(answer, format, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _may_write(runs: Sequence[Run], to: Path, overwrite: bool) -> None:
    for run in runs:
        root = run.paths.root
        if isinstance(root, Path) and to.resolve().is_relative_to(root.resolve()):
            raise BadInput(f"{to} lies inside the run; nothing but recordings belongs there. Choose another folder.")
    if to.exists() and not overwrite:
        raise RunConflict(f"{to} exists; choose another name, or set --overwrite.")


def _written(answer: Answer, format: Format, to: Path) -> int:
    """Write a file beside its place and put it there whole."""
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as sink:
            count = write(answer, format, sink)
        part.replace(to)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return count


# -- the prompt


def _prompt(runs: Sequence[Run], selection: Mapping[str, Any], rows: int) -> None:
    """Questions and answers until the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401
    out.print(_HELP, markup=False, highlight=False)
    lines: list[str] = []
    while True:
        try:
            line = input("   ...> " if lines else "rolltape> ")
        except EOFError:
            out.print()
            return
        except KeyboardInterrupt:
            out.print()
            lines.clear()
            continue
        word = line.strip().rstrip(";").lower()
        if not lines and (word.startswith(".") or word in _WORDS):
            if _command([_WORDS[word]] if word in _WORDS else line.split()):
                return
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            _tried(runs, "\n".join(lines), selection, rows)
            lines.clear()


def _command(words: Sequence[str]) -> bool:
    """Do what a line that begins with a dot says; True where it ends the prompt."""
    if words[0] in (".quit", ".exit", ".q"):
        return True
    try:
        if words[0] == ".schema":
            _schema(words[1:], False)
        else:
            out.print(_HELP, markup=False, highlight=False)
    except RolltapeError as error:
        _told(error)
    return False


def _tried(runs: Sequence[Run], query: str, selection: Mapping[str, Any], rows: int) -> None:
    try:
        _answer(runs, query, selection, "table", None, False, rows)
    except RolltapeError as error:
        _told(error)
    except KeyboardInterrupt:
        err.print("stopped")


def _told(error: RolltapeError) -> None:
    err.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


# -- what there is


def _schema(words: Sequence[str], as_json: bool) -> None:
    """Print the views that `words` name, or a line a view; with those that annotations of the runs among `words` give.

    As JSON all of each view is printed.
    """
    runs = [w for w in words if w not in VIEWS and (os.path.exists(w) or "://" in w)]
    names = [w for w in words if w not in runs]
    found = dict(VIEWS)
    for run in runs:
        views = map(described, annotations_of(open_run(run)).values())
        found.update((view.name, view) for view in views)
    unknown = [n for n in names if n not in found]
    if unknown:
        raise BadInput(f"no view is called {unknown[0]!r}; there are {', '.join(found)}.")
    if as_json:
        print_json({"views": [found[n].to_dict() for n in names or found]})
        return
    for name in names:
        _print_view(found[name])
    if not names:
        out.print(
            table(
                "",
                ("view", "one row"),
                [(view.name, view.row.partition(". ")[0].rstrip(".")) for view in found.values()],
            )
        )
        out.print("`rolltape sql --schema NAME` prints its columns and examples.", style="dim", highlight=False)


def _print_view(view: View) -> None:
    rows = [(c.name, c.type, c.meaning) for c in view.columns]
    out.print(Text(view.name, style="bold"))
    out.print(view.row, markup=False, highlight=False)
    out.print(table("", ("column", "type", "meaning"), rows))
    for example in view.examples:
        out.print()
        out.print(f"-- {example.question}", style="dim", markup=False, highlight=False, soft_wrap=True)
        out.print(example.sql, markup=False, highlight=False, soft_wrap=True)
    out.print()
