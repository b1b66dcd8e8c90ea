"""The commands in the READMEs: each is one that the command line takes, and those on the demo's run do what is said."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from rescore_build import DEMO

from rolltape.record.demo.cli import start_commands
from rolltape.record.demo.folder import ENVIRONMENT, EXPECTATION, MARK, TASKSET
from rolltape.record.demo.policy import DemoPolicy
from rolltape.record.engine import DemoEngine, write_tokenizer
from rolltape.replay.cli import app, main
from rolltape.replay.run import open_run

ROOT = Path(__file__).parents[2]
READMES = (
    "README.md",
    *(f"{part}/README.md" for part in ("record", "replay", "schema", "notebooks")),
    "record/MILES.md",
)


def commands(readme: str) -> list[list[str]]:
    """Commands of rolltape and pytest in the code blocks, as arguments."""
    text = (ROOT / readme).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip().removeprefix("uv run ") for line in text.splitlines() if line.startswith("    ")]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("rolltape ", "pytest "))]


@pytest.mark.parametrize("readme", READMES)
def test_every_command_is_one_that_the_command_line_takes(readme: str) -> None:
    group = typer.main.get_command(app)
    for _, name, *arguments in [c for c in commands(readme) if c[0] == "rolltape"]:
        if not {"…", "RUN", "RUN…", "[VIEW]"} & set(arguments):
            group.get_command(None, name).make_context(name, arguments)  # type: ignore[attr-defined, arg-type]


def test_commands_on_the_demo_do_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, setup = tmp_path / "demo-run", tmp_path / "demo-run-setup"
    shutil.copytree(DEMO, run, ignore=shutil.ignore_patterns("expected"))
    write_tokenizer(tmp_path / str(open_run(run).info["tokenizer"]))
    setup.mkdir()
    (setup / "env.toml").write_text(ENVIRONMENT.format(mark=MARK, taskset=TASKSET, seed=0), encoding="utf-8")
    (setup / "expect.toml").write_text(EXPECTATION.format(mark=MARK), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    trace = str(open_run(run).table("train", 0, columns=["trace_id"]).column(0)[0])
    said = {}
    for command in commands("README.md"):
        if command[0] == "rolltape" and command[1] not in ("demo", "engine", "record", "recover", "notebook"):
            arguments = [trace[:6] if a == "TRACE" else a for a in command]
            if arguments in (["rolltape", "sql", "demo-run"], ["rolltape", "stats", "runs/mine"]):
                continue  # a prompt; and a run that the next test is about
            monkeypatch.setattr(sys, "argv", arguments)
            with pytest.raises(SystemExit) as ended:
                main()
            shown = capsys.readouterr()
            assert ended.value.code == 0, (arguments, shown.err)
            said[" ".join(arguments[1:3])] = shown.out
    assert "pass@4" in said["stats demo-run"]
    assert "48 traces" in said["verify demo-run"]
    assert len(list((tmp_path / "samples").iterdir())) == 3
    assert (tmp_path / "conversations.parquet").is_file()
    assert (tmp_path / "fates.csv").is_file()
    program = [sys.executable, "-m", "pytest", "--rolltape", "demo-run", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert "3 passed" in done.stdout


def test_what_it_says_of_an_environment_of_ones_own_is_what_the_demo_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV", raising=False)
    shown = [shlex.split(command) for _, command in start_commands(Path("my-env"))]
    record = next(c for c in commands("README.md") if c[1:3] == ["record", "my-env/config.toml"])
    assert sorted(record) == sorted(shown[1])
    assert all(command in commands("README.md") for command in shown if command != shown[1])


def test_the_snippets_for_episodes_of_ones_own_record_and_leave_no_connection_open(tmp_path: Path) -> None:
    text = (ROOT / "record/README.md").read_text(encoding="utf-8")
    tape, client = (part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "async with" in part)
    config, tokenizer = tmp_path / "env.toml", write_tokenizer(tmp_path / "tokenizer")
    config.write_text('[taskset]\nid = "rolltape.record.demo"\n', encoding="utf-8")
    program = (
        "from pathlib import Path",
        "from rolltape.record.config import load_config, load_environment, load_tasks",
        f"environment = load_environment(load_config(Path({str(config)!r})))",
        "task = load_tasks(environment, rollouts=4)[0]",
        client.partition("    ...")[0] + textwrap.indent(tape, "    "),
    )
    lines = textwrap.indent("\n".join(program), "    ")
    engine = DemoEngine(tokenizer_dir=tokenizer, policy=DemoPolicy())
    with engine.serve_in_thread():
        for written, here in (
            ("http://127.0.0.1:30000", engine.url),
            ('tokenizer="Qwen/Qwen3-0.6B"', f"tokenizer={str(tokenizer)!r}"),
            ("runs/taped", str(tmp_path / "run")),
        ):
            assert written in lines
            lines = lines.replace(written, here)
        code = f"import asyncio\nasync def main():\n{lines}\nasyncio.run(main())\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Unclosed" not in done.stderr
    assert open_run(tmp_path / "run").steps()[0].counts["leftover"] == 4
