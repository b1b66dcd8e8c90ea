"""The command line: what it prints, its exit codes, and that an error is a sentence."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from replay_build import TRACES, put_run, put_step, turn

from rolltape.replay import cli
from rolltape.schema import RECORDS, ROW
from rolltape.schema.errors import install
from rolltape.schema.paths import Part, RunPaths

Run = Callable[..., tuple[int, str, str]]
GROUP_REWARDS = TRACES / "0.2.0" / "group_rewards.jsonl"


@pytest.fixture
def rolltape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line; exit code, standard output and standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def is_one_sentence(text: str) -> bool:
    return text.startswith("Error: ") and text.count("\n") == 1 and "Traceback" not in text


# -- import and verify


def test_an_imported_file_is_summed_up_and_verifies_clean(rolltape: Run, tmp_path: Path) -> None:
    code, out, _ = rolltape("import", GROUP_REWARDS, "--run", tmp_path / "run")
    assert (code, out) == (0, f"12 traces in 3 groups, 799 tokens → {tmp_path / 'run'}\n")
    code, out, _ = rolltape("verify", tmp_path / "run")
    assert code == 0
    assert out.endswith("clean\n")
    assert "1 file, 12 traces, 799 stored tokens; 12 Samples; imported, so there is no batch of a live run" in out


def test_expected_sums_pass_or_fail_naming_each_group(rolltape: Run, tmp_path: Path) -> None:
    rolltape("import", GROUP_REWARDS, "--run", tmp_path / "run")
    (tmp_path / "half.toml").write_text("[group_reward_sum]\nfastest = 0.5\n")
    (tmp_path / "less.toml").write_text("[group_reward_sum]\nfastest = 0.4\n")
    code, out, _ = rolltape("verify", tmp_path / "run", "--expect", tmp_path / "half.toml")
    assert (code, out.splitlines()[-1]) == (0, "clean")
    code, out, _ = rolltape("verify", tmp_path / "run", "--expect", tmp_path / "less.toml")
    assert (code, out.splitlines()[-1]) == (1, "3 findings")
    for group in (0, 1, 2):
        assert f"(step 0, group {group}): reward 'fastest' adds up to 0.5 over 4 scored traces of group {group}" in out


def test_findings_are_json_that_any_reader_takes_also_with_nan(rolltape: Run, tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn(id="a", reward=float("nan"))], fates={"a": "emitted"}, digest_converted=None)
    (tmp_path / "e.toml").write_text("group_size = 2\n[group_reward_sum]\nok = 1e308\n")
    code, out, err = rolltape("verify", tmp_path, "--json", "--expect", tmp_path / "e.toml")
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (code, err) == (1, "")
    assert report["path"] == str(tmp_path)
    assert report["run"] == "r1"
    assert report["clean"] is False
    assert {"reward_value", "expected_group_size"} <= {f["code"] for f in report["findings"]}
    assert all({"code", "severity", "message"} <= f.keys() for f in report["findings"])


def test_a_clean_run_is_json_too(rolltape: Run, tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn()])
    code, out, _ = rolltape("verify", tmp_path, "--json")
    report = json.loads(out)
    assert (code, report["clean"], report["findings"], report["traces"]) == (0, True, [], 1)


def test_a_verdict_says_what_batches_were_compared_with(rolltape: Run, tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn()])
    assert "1 batch converted again and compared with recorded digests, 1 Sample" in rolltape("verify", tmp_path)[1]
    assert json.loads(rolltape("verify", tmp_path, "--json")[1])["against"] == "recorded"
    rolltape("import", GROUP_REWARDS, "--run", tmp_path / "imported")
    assert json.loads(rolltape("verify", tmp_path / "imported", "--json")[1])["against"] is None


def test_warnings_are_shown_and_do_not_fail(rolltape: Run, tmp_path: Path) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn()])
    put_step(tmp_path, 1, [turn(id="u")], first=9)
    RunPaths(tmp_path).commit(Part("train", 1, 0, "main")).unlink()
    code, out, _ = rolltape("verify", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "clean, 1 warning")
    assert "warning uncommitted" in out


@pytest.mark.parametrize("what", ["traces", "commits"])
def test_a_damaged_file_is_named_with_exit_code_1(rolltape: Run, tmp_path: Path, what: str) -> None:
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn()])
    [file] = (tmp_path / what).glob("*/*")
    file.write_bytes(file.read_bytes()[:-20])
    code, out, _ = rolltape("verify", tmp_path)
    assert code == 1
    assert str(file) in out
    assert out.splitlines()[-1].startswith("1 finding")


# -- what is refused


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("verify", "{tmp}/nothing"), "does not exist; expected the folder of a recorded run"),
        (("verify", "{tmp}"), "holds no run.json"),
        (("verify", "{tmp}/file"), "is a file; a run is a folder"),
        (("verify", "{tmp}/run", "--expect", "{tmp}/nothing.toml"), "no such file; expected a TOML file"),
        (("verify", "{tmp}/run", "--expect", "{tmp}/file"), "no TOML"),
        (("verify", "{tmp}/run", "--expect", "{tmp}/key.toml"), "'moons' is no expectation"),
        (("verify", "{tmp}/newer"), "install a newer rolltape"),
        (("verify", "{tmp}/torn"), "no readable JSON"),
        (("import", "{tmp}/nothing", "--run", "{tmp}/new"), "no such file"),
        (("import", "{tmp}/empty", "--run", "{tmp}/new"), "0 lines and no Verifiers trace"),
        (("import", "{tmp}/file", "--run", "{tmp}/new"), "no Verifiers trace among them; line 1: no JSON"),
        (("import", "{tmp}/file", "--run", "{tmp}/run"), "is a recorded run, and only imported ones take more"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    rolltape: Run, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "file").write_text("this is [no TOML\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "key.toml").write_text("moons = 1\n")
    put_run(tmp_path / "run")
    put_run(tmp_path / "newer", schema="2.0")
    put_run(tmp_path / "torn")
    (tmp_path / "torn" / "run.json").write_text('{"run": ')
    code, out, err = rolltape(*(w.format(tmp=tmp_path) for w in words))
    assert (code, out) == (2, "")
    assert says in err
    assert is_one_sentence(err)


@pytest.mark.parametrize("words", [("verify",), ("nonsense",), ("verify", ".", "--nonsense"), ("schema", "moon")])
def test_bad_usage_is_exit_code_2(rolltape: Run, words: tuple[str, ...]) -> None:
    code, _, err = rolltape(*words)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("verify", "{tmp}/nothing"), "{tmp}/nothing does not exist; expected the folder"),
        (("list", "{tmp}/nothing"), "nothing does not exist"),
        (
            ("record", "{tmp}/e.toml", "--run=r", "--engine=http://127.0.0.1:1", "--model=m"),
            "There is no file {tmp}/e.toml",
        ),
        (("verify",), "Missing argument 'run'"),
        (("verify", ".", "--nonsense"), "No such option: --nonsense"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_what_is_refused_is_json_too_where_that_is_asked_for(
    rolltape: Run, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    code, out, err = rolltape(*(w.format(tmp=tmp_path) for w in words), "--json")
    said = json.loads(out)
    assert (code, said.keys()) == (2, {"error"})
    assert says.format(tmp=tmp_path) in said["error"]
    assert "".join(said["error"].split())[:40] in "".join(err.replace("│", "").split())


def test_json_that_is_not_asked_for_is_not_printed(rolltape: Run) -> None:
    assert rolltape("launch", "a", "b", "--nonsense", "--", "--json")[:2] == (2, "")


def test_a_full_standard_output_is_said_once() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "rolltape.replay.cli", "schema", "--json"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "Error: standard output: No space left on device\n")


# -- Ctrl-C

INTERRUPTED = """
import os, signal, sys
when = sys.argv[-1]
class Interrupting:
    def find_spec(name, *_):
        if name == when:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting)
from {module} import {function}
sys.argv = ["rolltape", "list", "."]
sys.exit({function}())
"""


@pytest.mark.parametrize(
    "when", ["numpy", "pyarrow.lib", "typer.main", "rolltape.replay.printing.console", "rolltape.replay.commands.list"]
)
def test_ctrl_c_while_modules_are_imported_ends_without_a_word(when: str, tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["rolltape"].split(":")
    words = [sys.executable, "-c", INTERRUPTED.format(module=module, function=function), when]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# -- schema


def test_the_schema_is_printed_as_a_table_of_every_column(rolltape: Run) -> None:
    code, out, _ = rolltape("schema")
    assert code == 0
    text = "".join(out.split())
    for record in RECORDS:
        for field in record.fields:
            assert field.name in text


def test_one_record_of_the_schema_can_be_chosen(rolltape: Run) -> None:
    code, out, _ = rolltape("schema", "group")
    assert code == 0
    assert "first_sample_index" in "".join(out.split())
    assert "logprobs" not in out


def test_the_schema_as_json_says_everything_of_every_column(rolltape: Run) -> None:
    code, out, _ = rolltape("schema", "--json")
    said = json.loads(out)
    assert (code, said["version"], said["fingerprint"]) == (0, "1.0", ROW.fingerprint)
    assert [r["name"] for r in said["records"]] == ["trace", "group", "outcome", "step"]
    for record, declared in zip(said["records"], RECORDS, strict=True):
        assert [f["name"] for f in record["fields"]] == [f.name for f in declared.fields]
        assert all(f["type"] and f["description"] and f["source"] for f in record["fields"])


def test_the_schema_as_arrow_names_every_column_with_its_type(rolltape: Run) -> None:
    code, out, _ = rolltape("schema", "trace", "--arrow")
    assert code == 0
    for field in pa.schema([f.arrow for f in RECORDS[0].fields]):
        assert f"{field.name}: {field.type}" in out


def test_the_version_says_which_schema_is_known(rolltape: Run) -> None:
    code, out, _ = rolltape("--version")
    assert code == 0
    assert out.startswith("rolltape ")
    assert out.endswith("schema 1.0\n")


def test_lines_of_help_are_broken_by_the_terminal_and_not_by_the_source() -> None:
    long = "a sentence that the source had to break because it does not take lines of more than 128 characters"
    assert cli.unwrapped(f"{long}\n{long}\nend.\n\nNext.\n") == f"{long} {long} end.\n\nNext.\n"
    kept = f"A table:\n\n    a = 1\n    b = 2\n\n{long}\n    code"
    assert cli.unwrapped(kept) == kept


@pytest.mark.parametrize("command", cli._ORDER)
def test_examples_of_help_stay_whole_on_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that they can be pasted."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["rolltape", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = typer.main.get_command(cli.app).get_command(None, command)  # type: ignore[attr-defined]
    examples = [line.strip().replace("\\[", "[") for line in found.help.splitlines() if line.startswith("    ")]
    assert any(line.startswith("rolltape ") for line in examples)
    assert [line for line in examples if line not in shown] == []


def test_help_lists_the_commands_of_both_sides(rolltape: Run) -> None:
    code, out, _ = rolltape("--help")
    assert code == 0
    for command in ("demo", "record", "engine", "import", "verify", "schema"):
        assert f" {command} " in out


# -- without the live packages

BLOCKED = """
import json, sys
from importlib.machinery import PathFinder
names = ("verifiers", "renderers", "transformers", "aiohttp", "mcp", "openai", "torch", "click")
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in names else find(name, path, target)
)
from rolltape.replay.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["rolltape", *words]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code, flush=True)
"""


def without_live_packages(*commands: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Commands, one after the other, in a process that has the core packages only."""
    words = [sys.executable, "-c", BLOCKED, json.dumps(commands)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


def test_live_commands_without_their_packages_say_what_to_install(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    done = without_live_packages(
        ("record", "env.toml", "--run", run, "--engine", "http://127.0.0.1:1", "--model", "m"),
        ("demo", "--run", run),
        ("engine", "--port", "1"),
        ("launch", "--taskset", "x", "--run", run, "--dry-run"),
    )
    assert done.stdout == "exit code 2\n" * 4
    assert done.stderr.count("pip install 'rolltape[live]'") == 4
    assert len(done.stderr.splitlines()) == 4
    assert list(tmp_path.iterdir()) == []


def test_reading_works_without_the_live_packages(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    done = without_live_packages(("import", str(GROUP_REWARDS), "--run", run), ("verify", run), ("schema", "--json"))
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if line.startswith(("exit code", "clean"))] == [
        "exit code 0",
        "clean",
        "exit code 0",
        "exit code 0",
    ]


def test_a_command_that_cannot_be_loaded_takes_any_arguments_and_says_why(
    rolltape: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli._ELSEWHERE, "record", ("a_package_that_is_missing.cli", "record", "live"))
    code, _, err = rolltape("record", "env.toml", "--run", "r", "--model=m", "-x")
    assert code == 2
    assert is_one_sentence(err)
    assert "`rolltape record` needs the extra 'live' (a_package_that_is_missing is missing)" in err


@pytest.mark.parametrize("name", cli._ELSEWHERE)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    command = typer.main.get_command(cli.app)
    assert isinstance(command, cli._Commands)
    context = typer.Context(command)
    loaded = command.get_command(context, name).help
    assert inspect.cleandoc(loaded) == cli._summary(name)


def test_how_to_install_an_extra_is_said_in_one_place_and_fits_a_checkout_too() -> None:
    root = Path(__file__).parents[2]
    sources = [path for part in ("schema", "record", "replay", "notebooks") for path in (root / part).rglob("*.py")]
    assert [p.name for p in sources if "pip install" in p.read_text(encoding="utf-8")] == ["errors.py"]
    assert "pip install '.[torch]' in a checkout" in install("torch")


def test_the_list_of_commands_says_what_is_not_installed() -> None:
    done = without_live_packages(("--help",))
    assert done.stdout.count("needs the extra 'live'") == sum(extra == "live" for *_, extra in cli._ELSEWHERE.values())
    assert done.stdout.count("'rolltape[live]'") == done.stdout.count("needs the extra 'live'")


def test_what_a_killed_recording_left_is_settled_without_the_live_packages(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    done = without_live_packages(("import", str(GROUP_REWARDS), "--run", run), ("recover", run), ("--help",))
    assert done.stderr == ""
    assert "nothing to settle\nexit code 0\n" in done.stdout
    assert "`rolltape recover` needs" not in done.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["list", "."], ["stats", "--help"], ["sql", "--help"], ["launch", "--help"]]
)
def test_commands_that_read_load_neither_pandas_nor_verifiers(words: list[str], tmp_path: Path) -> None:
    assert importlib.util.find_spec("pandas"), "what is not there cannot be loaded"
    code = (
        "import sys, rolltape.replay.cli as cli\n"
        f"sys.argv[1:] = {words}\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print([m for m in ('pandas', 'verifiers', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    put_run(tmp_path)
    put_step(tmp_path, 0, [turn()])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_importing_the_reading_side_loads_no_live_package() -> None:
    code = (
        "import sys, rolltape.replay, rolltape.schema;"
        "print([m for m in ('verifiers', 'renderers', 'transformers', 'aiohttp', 'torch', 'duckdb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_an_import_converts_to_the_samples_of_its_sound_groups(rolltape: Run, tmp_path: Path) -> None:
    rolltape("import", GROUP_REWARDS, "--run", tmp_path / "run")
    code, out, _ = rolltape("convert", tmp_path / "run", "--out", tmp_path / "{rollout_id}.jsonl")
    assert (code, out) == (0, f"{tmp_path / '0.jsonl'}: 12 samples\n")
    assert len((tmp_path / "0.jsonl").read_text().splitlines()) == 12


def test_converting_says_how_many_traces_gave_no_sample(rolltape: Run, tmp_path: Path) -> None:
    rolltape("import", GROUP_REWARDS.with_name("zero.jsonl"), GROUP_REWARDS, "--run", tmp_path / "run")
    code, out, _ = rolltape("convert", tmp_path / "run", "--out", tmp_path / "{rollout_id}.jsonl", "--json")
    [file] = json.loads(out)["files"]
    assert (code, file["samples"], sum(file["left_out"].values())) == (0, 12, 4)
    code, out, _ = rolltape("convert", tmp_path / "run", "--out", tmp_path / "again-{rollout_id}.jsonl")
    assert (code, ": 12 samples; 4 traces gave none: " in out) == (0, True)


def test_an_export_of_samples_says_it_in_the_words_of_convert(rolltape: Run, tmp_path: Path) -> None:
    rolltape("import", GROUP_REWARDS.with_name("zero.jsonl"), GROUP_REWARDS, "--run", tmp_path / "run")
    to = tmp_path / "{rollout_id}.jsonl"
    _, converted, _ = rolltape("convert", tmp_path / "run", "--out", to)
    code, exported, _ = rolltape("export", tmp_path / "run", "--format", "samples", "--out", to, "--overwrite")
    assert (code, exported) == (0, converted)
    assert ": 12 samples; 4 traces gave none: " in exported
    code, out, _ = rolltape("export", tmp_path / "run", "--format", "samples", "--out", to, "--overwrite", "--json")
    [file] = json.loads(out)["files"]
    assert (code, file["lines"], sum(file["left_out"].values())) == (0, 12, 4)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--frobnicate", ""),
        ("--strcit", "--strict"),
        ("--tokeniser", "--tokenizer"),
        ("--branch-polcy", "--branch-policy"),
    ],
)
def test_of_an_option_that_is_not_known_only_those_written_alike_are_named(
    rolltape: Run, given: str, named: str
) -> None:
    code, _, said = rolltape("verify", "run", given)
    assert code == 2
    assert f"No such option: {given}" in said
    assert ("Possible options" in said) == bool(named)
    assert named in said


@pytest.mark.parametrize(("option", "given"), [("--by", "colour"), ("--last", "several")])
def test_of_a_wrong_value_what_was_given_is_said_in_plain_words(rolltape: Run, option: str, given: str) -> None:
    code, _, said = rolltape("stats", "run", option, given)
    assert code == 2
    assert f"'{given}'" in said
    assert "Value error" not in said


def test_a_name_that_is_no_utf_8_is_refused_at_once_by_every_command(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolltape: Run
) -> None:
    run = Path(os.fsdecode(bytes(tmp_path) + b"/r\xff"))
    try:
        shutil.copytree(demo_run, run)
    except OSError:
        pytest.skip("this file system takes no such name")
    told = f"{tmp_path}/r\\udcff: the name is no UTF-8"
    plain = ("verify", "stats", "show", "list", "compact", "notebook", "prune", "recover", "approve")
    for command, *words in (
        *((name,) for name in plain),
        ("diff", demo_run),
        ("sql", "FROM traces"),
        ("convert", "--out", "x.jsonl"),
        ("export", "--format", "hf", "--out", "x.parquet"),
        ("annotate", "x", "x.csv"),
    ):
        code, _, err = rolltape(command, run, *words)
        assert (code, told in err) == (2, True), (command, err)
    for words in (("import", GROUP_REWARDS, "--run", f"{run}-new"), ("demo", "--run", f"{run}-new")):
        code, _, err = rolltape(*words)
        assert (code, "the name is no UTF-8" in err) == (2, True), (words, err)
    assert [p.name for p in tmp_path.iterdir()] == [run.name]
    code, out, _ = rolltape("list", tmp_path, "--json")
    assert (code, [told in r["why"] for r in json.loads(out)["runs"]]) == (0, [True])
    monkeypatch.chdir(run)
    assert rolltape("stats", ".")[0] == 2
