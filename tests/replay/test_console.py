"""Printing: nothing that a recorded text holds may do anything to a terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from rolltape.replay import cli
from rolltape.replay.printing.console import SafeConsole, SafeFormatter, print_json, printable, table

HOSTILE = "a\x1b[31mred\x1b]0;title\x07 \x9b2J \x08\r\u202eback\u2028 \ud800 \U000e0041 \x7fend"
"""Colours, a window title, a cleared screen by an 8-bit code, a turned direction, half a character, an invisible tag."""
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e\ud800\U000e0041]")


def printed(*things: object, colour: bool = False, **options: object) -> str:
    file = io.StringIO()
    console = SafeConsole(file=file, width=300, color_system="truecolor" if colour else None, force_terminal=colour)
    console.print(*things, **options)  # type: ignore[arg-type]
    return file.getvalue()


def test_control_characters_are_shown_as_escapes() -> None:
    shown = printable(HOSTILE)
    assert not RAW.search(shown)
    assert shown.startswith(
        "a\\x1b[31mred\\x1b]0;title\\x07 \\x9b2J \\x08\\x0d\\u202eback\\u2028 \\ud800 \\U000e0041 \\x7f"
    )


def test_ordinary_text_stays_as_it_is() -> None:
    text = "two\tlines\n日本語 👩‍🚀 עברית :smile: [bold]\\x1b"
    assert printable(text) == text
    assert printable("a\nb\tc", one_line=True) == "a\\nb\\tc"
    assert printed(text.splitlines()[1], markup=False) == text.splitlines()[1] + "\n"


@pytest.mark.parametrize(
    "thing", [HOSTILE, Text(HOSTILE), Text("x").append(HOSTILE), table(HOSTILE, [HOSTILE], [[HOSTILE]])]
)
def test_the_console_lets_no_control_character_through_whatever_is_printed(thing: object) -> None:
    shown = printed(thing)
    assert not RAW.search(shown)
    assert "\\x1b[31mred" in shown


def test_colours_of_our_own_stay() -> None:
    assert "\x1b[31m" in printed("found", style="red", colour=True)
    assert "\\x1b[31m" in printed("\x1b[31m", style="bold", highlight=False, colour=True)


def test_cells_are_measured_as_they_are_printed() -> None:
    lines = printed(table("", ["text", "n"], [["\x1b" * 3, 1], ["plain", 2]])).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_json_holds_the_text_and_no_raw_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({HOSTILE: [HOSTILE, float("nan")]})
    text = capsys.readouterr().out
    assert not RAW.search(text)
    assert json.loads(text) == {HOSTILE: [HOSTILE, "nan"]}


def test_a_console_of_rich_would_let_it_through() -> None:
    file = io.StringIO()
    Console(file=file).print("\x1b[31m", markup=False)
    assert "\x1b" in file.getvalue()


def test_logs_hold_no_control_characters() -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "trace %s", (HOSTILE,), None)
    assert not RAW.search(SafeFormatter("%(message)s").format(record))


@pytest.mark.parametrize(("command", "code"), [("schema --json >&-", 0), ("verify /nowhere <&- >&- 2>&-", 2)])
def test_a_command_does_not_mind_a_closed_stream(command: str, code: int) -> None:
    done = subprocess.run(f"exec rolltape {command}", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_file_never_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What somebody prints would be written into it."""
    code = (
        "from rolltape.replay.cli import _open_closed_streams\n"
        "_open_closed_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "print('told'); file.write('kept')"
    )
    environment = {**os.environ, "PYTHON": sys.executable, "CODE": code}
    subprocess.run('exec "$PYTHON" -c "$CODE" >&-', shell=True, check=True, env=environment)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_full_standard_output_is_named(words: list[str], demo_run: Path) -> None:
    with open("/dev/full", "w") as full:
        program = [sys.executable, "-m", "rolltape.replay.cli", "list", str(demo_run), *words]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "Error: standard output: No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize(
    "words",
    [
        *((command, "RUN") for command in ("stats", "verify", "show", "list")),
        ("diff", "RUN", "RUN"),
        ("stats", "RUN", "--json"),
        ("sql", "RUN", "SELECT 'ü — \u4e2d' AS a"),
        ("sql", "--schema", "traces"),
        ("sql", "--schema", "--json"),
        ("schema",),
        ("--help",),
        ("stats", "nowhere-ü—\u4e2d"),
    ],
    ids=" ".join,
)
def test_every_command_prints_in_every_encoding(
    demo_run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], encoding: str
) -> None:
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["rolltape", *(str(demo_run) if word == "RUN" else word for word in words)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    streams["stdout"].flush()
    said = streams["stdout"].buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert (code, bool(said)) == ((2, False) if "nowhere" in words[-1] else (0, True))
    if "--json" in words:
        json.loads(said)
