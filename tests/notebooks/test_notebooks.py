"""The notebooks: each runs on real runs, draws what a count by hand gives, and never takes what is missing for 0."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lifelike import Life, record_run
from replay_build import put_run, put_step, turn

pytest.importorskip("marimo")
pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from rolltape.notebooks import NOTEBOOKS, places, plots
from rolltape.notebooks.page import run_notebook, write_page
from rolltape.notebooks.tasks import add_task
from rolltape.record.demo.cli import demo
from rolltape.replay import cli, open_run
from rolltape.replay.sql import connect
from rolltape.replay.stats import stats
from rolltape.schema.errors import BadInput

Cli = Callable[..., tuple[int, str, str]]
ONE = [n for n in NOTEBOOKS.values() if n.runs == 1]


@pytest.fixture
def rolltape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call the command line; exit code, standard output and standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rolltape", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@cache
def opened(name: str, *runs: Path) -> tuple[dict[str, Axes], dict[str, Any]]:
    """Pictures of a notebook by title, and the names its cells define."""
    outputs, names = run_notebook(NOTEBOOKS[name], [str(r) for r in runs])
    return {ax.get_title(loc="left"): ax for ax in outputs if isinstance(ax, Axes)}, dict(names)


def check_pictures(pictures: dict[str, Axes], least: int) -> None:
    """Every picture is named, says what its axes are, and can be drawn; nothing in it is hidden."""
    assert len(pictures) >= least
    for title, ax in pictures.items():
        assert title
        assert ax.get_xlabel(), title
        assert ax.get_ylabel() or ax.get_yticklabels() or "no values" in texts_of(ax), title
        labels = [label for _, label in zip(*ax.get_legend_handles_labels(), strict=True)]
        assert len(labels) == len(set(labels)), title
        assert not labels or ax.get_legend() is not None, title
        plots.figure(ax).savefig(io.BytesIO(), dpi=40)


def texts_of(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rollouts that came to their end, as plain Python."""
    rows = open_run(run).table().to_pylist(maps_as_pydicts="strict")
    return [r for r in rows if r["disposition"] not in ("retried", "cancelled") and not r["error_types"]]


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


# -- they run


@pytest.mark.parametrize("notebook", ONE, ids=lambda n: n.name)
def test_a_notebook_runs_on_the_demo_run_and_on_a_made_up_one(notebook: Any, demo_run: Path, life: Path) -> None:
    for run in (demo_run, life):
        pictures, _ = opened(notebook.name, run)
        check_pictures(pictures, 6)


def test_two_runs_are_compared(life: Path, other: Path) -> None:
    pictures, names = opened("compare", other, life)
    check_pictures(pictures, 6)
    lines = {line.get_label(): line for line in pictures["Reward"].get_lines()}
    for run, letter in ((other, "A: other"), (life, "B: life")):
        by_step = defaultdict(list)
        for row in rows_of(run):
            if finite(row["reward"]):
                by_step[row["step"]].append(row["reward"])
        assert lines[letter].get_ydata() == pytest.approx([np.mean(v) for _, v in sorted(by_step.items())])
    assert names["diff"].totals["steps"] == (12, 12)


@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=lambda n: n.name)
def test_a_run_without_rows_and_one_without_rewards_leave_pictures_empty(notebook: Any, tmp_path: Path) -> None:
    unscored = put_run(tmp_path / "unscored")
    put_step(unscored, 0, [turn(id=f"t{i}", reward=None) for i in range(4)])
    if notebook.runs == 1:
        pictures, _ = opened(notebook.name, put_run(tmp_path / "empty"))
        assert all({"no values", "no value", "no errors"} & {*texts_of(ax)} for ax in pictures.values())
        pictures, _ = opened(notebook.name, unscored)
    else:
        pictures, _ = opened(notebook.name, unscored, shutil.copytree(unscored, tmp_path / "again"))
    check_pictures(pictures, 6)
    reward = [ax for title, ax in pictures.items() if title in ("Reward", "Signal of the groups", "Reward by length")]
    assert all("no values" in texts_of(ax) for ax in reward)


def test_a_comparison_with_a_run_of_which_nothing_was_recorded_is_refused(life: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing was recorded in 'train'"):
        run_notebook(NOTEBOOKS["compare"], [str(life), str(put_run(tmp_path / "empty"))])


def test_names_from_a_run_are_drawn_as_they_are_and_never_read_as_markup(tmp_path: Path) -> None:
    put_run(tmp_path / "odd", model="<script>alert(1)</script> `*x*`")
    names = ("_hidden", "$a$", "it's <b>", "dots.and spaces")
    records = [
        turn(id=f"t{step}{i}", idx=i // 2, rewards={n: float((i + k + step) % 2) for k, n in enumerate(names)})
        for step in range(2)
        for i in range(4)
    ]
    for step in range(2):
        put_step(tmp_path / "odd", step, records[4 * step : 4 * step + 4], first=8 * step)
    pictures, _ = opened("reward", tmp_path / "odd")
    labels = pictures["The parts of the reward"].get_legend_handles_labels()[1]
    assert [label.strip() for label in labels] == sorted(names)
    write_page(NOTEBOOKS["look"], [str(tmp_path / "odd")], tmp_path / "look.html")
    page = (tmp_path / "look.html").read_text()
    assert "<script" not in page.split("<details>")[0]
    assert "&lt;script&gt;" in page.replace("&#40;", "(")


# -- they draw what is there


def test_rewards_and_what_is_left_out_are_those_of_stats(life: Path) -> None:
    _, names = opened("look", life)
    found = plots.columns(names["reward_by_step"])
    steps = stats(open_run(life)).steps
    assert found["step"].tolist() == [s.steps[0] for s in steps]
    assert found["mean"] == pytest.approx([s.reward.mean for s in steps])
    assert found["not_finite"].tolist() == [s.reward.not_finite for s in steps]
    assert found["unscored"].tolist() == [s.reward.missing for s in steps]
    assert found["not_finite"].sum() > 0
    assert found["unscored"].sum() > 0
    length = plots.columns(names["lengths"])
    assert length["p95"] == pytest.approx([s.length.p95 for s in steps])
    assert plots.columns(names["failures"])["errors"].sum() == sum(s.errors for s in steps) > 0
    assert plots.columns(names["speed"])["per_second"] == pytest.approx([s.tokens_per_second for s in steps])


def test_a_reward_that_came_later_has_no_curve_before(life: Path) -> None:
    pictures, names = opened("reward", life)
    cites = next(line for line in pictures["The parts of the reward"].get_lines() if line.get_label() == "cites")
    assert cites.get_xdata().tolist() == [6, 7, 8, 9, 10, 11]
    parts = plots.groups(plots.columns(names["parts"]), "name")
    for summary in stats(open_run(life)).steps:
        for name, spread in summary.rewards.items():
            at = parts[name]["step"] == summary.steps[0]
            assert parts[name]["mean"][at] == pytest.approx([spread.mean])


def test_the_parts_add_up_to_the_change_of_the_reward(life: Path) -> None:
    pictures, names = opened("reward", life)
    rows = [r for r in rows_of(life) if finite(r["reward"])]
    first, last = ([r["reward"] for r in rows if r["step"] in steps] for steps in ((0, 1), (10, 11)))
    change = np.mean(last) - np.mean(first)
    ax = pictures["What the change of the reward is made of"]
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(change)
    assert "cites (added)" in [label.get_text() for label in ax.get_yticklabels()]
    mix = {name: values[0] for name, values in plots.columns(names["mix"]).items()}
    assert mix["overall"] == pytest.approx(change)
    tasks = {r["task_idx"] for r in rows if r["step"] < 2} & {r["task_idx"] for r in rows if r["step"] > 9}
    of = lambda task, steps: np.mean([r["reward"] for r in rows if r["task_idx"] == task and r["step"] in steps])  # noqa: E731
    assert mix["same_tasks"] == pytest.approx(np.mean([of(t, (10, 11)) - of(t, (0, 1)) for t in tasks]))


def test_tasks_of_one_name_are_told_apart_and_those_of_two_names_are_one(tmp_path: Path) -> None:
    """The rule of `stats --by task` and `diff`: 0 and 8 have one name, 1 was renamed between the two steps."""
    put_run(tmp_path / "run")
    names = {(0, 0): "plums-0", (0, 1): "plums-1", (1, 1): "renamed", (1, 8): "plums-0"}
    for step in (0, 1):
        records = [turn(id=f"t{step}{idx}", idx=idx, reward=(idx + step) / 10) for s, idx in names if s == step]
        for record in records:
            record["task"]["data"]["name"] = names[step, record["task"]["data"]["idx"]]
        put_step(tmp_path / "run", step, records, first=8 * step)
    pictures, found = opened("reward", tmp_path / "run")
    mix = {name: values[0] for name, values in plots.columns(found["mix"]).items()}
    assert (mix["tasks"], mix["same_tasks"]) == (1, pytest.approx(0.1))
    named = {"plums-0 (0)", "plums-0 (8)", "plums-1"}
    assert {label.get_text() for label in pictures["Reward of each task"].get_yticklabels()} == named
    assert {str(s.task.index) for s in stats(open_run(tmp_path / "run")).tasks if s.task} == {"0", "1", "8"}
    lowest = opened("look", tmp_path / "run")[1]["lowest"]
    assert set(plots.columns(lowest)["task"]) == named - {"plums-0 (0)"}  # of the last step alone


def test_tasks_are_told_apart_by_their_key_where_all_have_one(life: Path) -> None:
    made = connect(open_run(life))
    made.execute("CREATE TEMP VIEW keyed AS SELECT * REPLACE ('key-' || task_idx % 2 AS task_key) FROM traces")
    made.execute("CREATE TEMP VIEW rollouts AS FROM keyed")
    add_task(made, traces="keyed")
    [(tasks, fewest)] = made.sql(
        "SELECT count(DISTINCT of_task), count(of_task) - count(*) FROM rollouts_by_task"
    ).fetchall()
    assert (tasks, fewest) == (2, 0)


def test_groups_without_signal_and_pass_at_k_are_those_of_stats(life: Path) -> None:
    pictures, names = opened("groups", life)
    signal = plots.columns(names["signal"])
    for summary in stats(open_run(life)).steps:
        mine = {
            s: n
            for s, n, at in zip(signal["signal"], signal["groups"], signal["step"], strict=True)
            if at in summary.steps
        }
        assert sum(n for s, n in mine.items() if s.startswith("all equal")) == summary.flat
        assert sum(n for s, n in mine.items() if s != "fewer than two scored") == summary.groups
    for line in pictures["pass@k"].get_lines():
        k = int(line.get_label().removeprefix("pass@"))
        known = [(s.steps[0], s.pass_at[k]) for s in stats(open_run(life)).steps if s.pass_at[k] is not None]
        drawn = np.isfinite(line.get_ydata())
        assert line.get_xdata()[drawn].tolist() == [step for step, _ in known]
        assert line.get_ydata()[drawn] == pytest.approx([value for _, value in known])


def test_versions_and_log_probs_are_as_counted_by_hand(life: Path) -> None:
    _, names = opened("drift", life)
    ages = plots.columns(names["ages"])
    turns = defaultdict(list)
    for row in open_run(life).table().to_pylist():
        turns[row["step"]] += [int(v) for v in row["turn_weight_version"]]
    counted = Counter((step, max(of) - v) for step, of in turns.items() for v in of)
    drawn = {
        (s, int(b)): n for s, b, n in zip(ages["step"], ages["behind"], ages["turns"], strict=True) if b != "4 or more"
    }
    assert drawn == {key: n for key, n in counted.items() if key[1] < 4}
    surprise = plots.columns(names["surprise"])
    values = [p for r in rows_of(life) if r["step"] == 3 for p in r["logprobs"] if p is not None]
    assert surprise["mean"][surprise["step"] == 3] == pytest.approx([-np.mean(values)])
    differences = plots.columns(names["differences"])
    by_hand = []
    for row in rows_of(life):
        if row["step"] == 4 and row["recomputed_logprobs"]:
            pairs = zip(row["logprobs"][row["sampled"].index(True) :], row["recomputed_logprobs"], strict=True)
            by_hand += [b - a for a, b in pairs if a is not None]
    at = differences["step"] == 4
    assert differences["tokens"][at] == len(by_hand) > 0
    assert differences["mean"][at] == pytest.approx([np.mean(by_hand)], abs=1e-9)
    assert differences["k3"][at] == pytest.approx([np.mean([math.exp(d) - 1 - d for d in by_hand])])


@pytest.mark.parametrize(("level", "name"), [("list", "logprob"), ("list", "logprobs"), ("token", "logprob")])
def test_annotated_log_probs_are_compared_where_the_trainer_recomputed_none(
    tmp_path: Path, level: str, name: str
) -> None:
    run = record_run(tmp_path / "run", Life(steps=2, groups=2, rollouts=4, tokens=8, tasks=2, recomputed=False))
    rows = rows_of(run)
    if level == "list":
        table = [{"trace_id": r["trace_id"], name: [p if p is None else p - 0.25 for p in r["logprobs"]]} for r in rows]
    else:
        table = [
            {"trace_id": r["trace_id"], "position": i, name: p - 0.25}
            for r in rows
            for i, p in enumerate(r["logprobs"])
            if p is not None
        ]
    open_run(run).annotate("trainer", table)
    pictures, names = opened("drift", run)
    assert list(names["SOURCES"]) == [f"annotation_trainer.{name}"]
    differences = plots.columns(names["differences"])
    assert differences["mean"] == pytest.approx([-0.25, -0.25])
    assert differences["tokens"].sum() == sum(p is not None for r in rows for p in r["logprobs"])
    assert pictures["Difference by age of the weights"].patches


def test_where_log_probs_were_pruned_it_says_so(tmp_path: Path, rolltape: Cli) -> None:
    put_run(tmp_path / "run")
    for step in range(2):
        put_step(tmp_path / "run", step, [turn(id=f"t{step}")], first=8 * step)
    assert rolltape("prune", tmp_path / "run", "--tokens", "--before", 1, "--yes")[0] == 0
    said = texts_of(opened("drift", tmp_path / "run")[0]["Entropy, estimated"])
    assert "left out: 0 sampled tokens without a log-prob, 3 whose log-probs were pruned" in said


def test_without_other_log_probs_it_says_so(demo_run: Path) -> None:
    pictures, names = opened("drift", demo_run)
    assert not names["SOURCES"]
    assert "no values" in texts_of(pictures["Other log-probs minus recorded ones"])


def test_changes_by_task_are_those_of_diff(life: Path, other: Path) -> None:
    pictures, names = opened("compare", life, other)
    bars = [bar.get_width() for bar in pictures["Tasks that changed most, B - A"].patches]
    assert bars == pytest.approx([r.changes["reward"].change for r in names["diff"].tasks.by_size("reward")][:15])
    shares = [bar.get_width() for bar in pictures["What became of the tries"].patches]
    assert sum(shares) == pytest.approx(2.0)


# -- gaps


@pytest.mark.parametrize("points", [9, 100])
def test_a_curve_has_gaps_where_a_step_or_its_value_is_missing(points: int) -> None:
    steps = np.delete(np.arange(points), 3)
    values = np.where(steps == 6, np.nan, np.where(steps == 7, np.inf, 1.0))
    ax = plots.axes("x", y="y")
    plots.line(ax, steps, values, "curve")
    curve = ax.get_lines()[-1]
    drawn = curve.get_xdata()[np.isfinite(curve.get_ydata())]
    assert drawn.tolist() == [s for s in range(points) if s not in (3, 6, 7)]
    assert 3 in curve.get_xdata()[np.isnan(curve.get_ydata())]
    assert set(curve.get_ydata()[np.isfinite(curve.get_ydata())]) == {1.0}


def test_bars_say_where_there_is_no_value() -> None:
    ax = plots.axes("x", x="value")
    plots.bars(ax, ["some", "none", "zero"], [0.5, np.nan, 0.0])
    assert texts_of(ax) == ["0.5", "no value", "0"]


def test_a_table_has_a_dash_where_there_is_no_value_and_counts_what_it_leaves_out() -> None:
    text = plots.table({"name": ["<a>", None, "c"], "n": [0.0, math.nan, 1234]}, most=2).text
    assert re.findall(r"<td[^>]*>(.*?)</td>", text) == ["&lt;a&gt;", "0", "–", "–"]
    assert "1 more rows" in text


# -- the command


def test_without_a_word_the_notebooks_are_listed(rolltape: Cli) -> None:
    code, out, _ = rolltape("notebook")
    assert code == 0
    assert all(n.name in out and n.title in out for n in NOTEBOOKS.values())
    _, out, _ = rolltape("notebook", "--json")
    assert [n["name"] for n in json.loads(out)["notebooks"]] == list(NOTEBOOKS)


def test_a_page_holds_everything_and_loads_nothing(rolltape: Cli, life: Path, tmp_path: Path) -> None:
    code, out, _ = rolltape("notebook", "groups", life, "--html", tmp_path / "groups.html", "--json")
    assert (code, json.loads(out)["bytes"]) == (0, (tmp_path / "groups.html").stat().st_size)
    page = (tmp_path / "groups.html").read_text().split("<details>")[0]
    assert page.count('src="data:image/png;base64,') == page.count("<img") == 6
    assert not re.search(r"<script|<marimo-|https?://", page)
    code, _, said = rolltape("notebook", "groups", life, "--html", tmp_path / "groups.html")
    assert (code, "--overwrite" in said) == (2, True)
    assert rolltape("notebook", life, "--html", tmp_path / "groups.html", "--overwrite")[0] == 0
    assert "Look at a run" in (tmp_path / "groups.html").read_text()
    assert [f.name for f in tmp_path.iterdir()] == ["groups.html"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "RUN"], "compare opens 2 runs, but 1 are given"),
        (["look", "RUN", "RUN"], "look opens 1 run, but 2 are given"),
        (["lok", "RUN"], "lok is no notebook (look, reward, groups, drift, compare)"),
        (["nowhere"], "nowhere does not exist"),
        (["look", "RUN", "--split", "eval"], "no split 'eval' was recorded; recorded are train"),
        (["look", "RUN", "--html", "page.htm"], "expected a name that ends in .html"),
        (["look", "RUN", "--out", "copy.txt"], "expected a name that ends in .py"),
        (["look", "RUN", "--html", "no/such/page.html"], "the folder no/such does not exist"),
        (["look", "RUN", "--html", "a.html", "--out", "b.py"], "--html and --out are both given"),
        (["look", "RUN", "--html", "a.html", "--port", "2718"], "--headless and --port say how a notebook is served"),
        (["look", "RUN", "--json"], "--json prints the list"),
        (["look", "RUN", "--out", "RUN/mine.py"], "lies inside the run"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_a_sentence(
    rolltape: Cli, demo_run: Path, words: list[str], said: str
) -> None:
    code, _, error = rolltape("notebook", *(w.replace("RUN", str(demo_run)) for w in words))
    assert code == 2
    assert said in error


def test_without_the_extra_it_says_what_to_install(
    rolltape: Cli, demo_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.replay.commands.notebook.find_spec", lambda _: None)
    code, _, error = rolltape("notebook", "look", demo_run)
    assert (code, "pip install 'rolltape[notebooks]'" in error) == (2, True)


def test_a_copy_is_written_with_the_command_that_opens_it_and_nothing_is_started(
    rolltape: Cli, demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    copy = tmp_path / "mine.py"
    code, out, _ = rolltape("notebook", "groups", demo_run, "--out", copy)
    assert (code, copy.read_bytes()) == (0, NOTEBOOKS["groups"].path.read_bytes())
    assert out.splitlines()[1] == f"marimo edit {copy} -- --split train --run {demo_run}"
    assert rolltape("notebook", "groups", demo_run, "--out", copy)[0] == 2
    code, out, _ = rolltape("notebook", "groups", demo_run, "--out", copy, "--overwrite", "--json")
    assert (code, json.loads(out)["path"]) == (0, str(copy))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "ended"])
def test_a_notebook_is_served_on_this_machine_until_it_is(end: signal.Signals, demo_run: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "rolltape.replay.cli",
        "notebook",
        str(demo_run),
        "--headless",
        "--port",
        str(port),
    ]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        until, page = time.monotonic() + 300, ""
        while not page and time.monotonic() < until and server.poll() is None:
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).read().decode()
            except OSError:
                time.sleep(0.2)
        assert "Look at a run" in page
        if end == signal.SIGINT:
            os.killpg(server.pid, end)  # as Ctrl-C does
            assert server.wait(60) == 0
        else:
            server.send_signal(end)
            server.wait(60)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "nothing is left behind"
    finally:
        log.close()
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


# -- which runs they open on


def run_as_script(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> dict[str, Any]:
    """Names that a notebook defines when it is started by itself."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    places.demo.cache_clear()
    try:
        return dict(importlib.import_module(f"rolltape.notebooks.{name}").app.run()[1])
    finally:
        places.demo.cache_clear()


def test_a_notebook_opens_on_what_it_is_given_else_on_the_demo_run_here(
    demo_run: Path, life: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-run").symlink_to(demo_run)
    found = run_as_script(monkeypatch, "look")
    assert (found["RUN"], found["SPLIT"], found["run"].run_id) == ("demo-run", "train", open_run(demo_run).run_id)
    assert run_as_script(monkeypatch, "look", "--run", str(life), "--split", "train")["RUN"] == str(life)
    found = run_as_script(monkeypatch, "compare", "--run", str(life), "--run", str(other))
    assert (found["A"], found["B"]) == (str(life), str(other))
    with pytest.raises(BadInput, match="2 runs are given; this notebook opens one"):
        run_as_script(monkeypatch, "look", "--run", str(life), "--run", str(other))


def test_where_no_demo_run_is_here_one_is_recorded_elsewhere(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "rolltape.replay.cli", "demo"]
        options = dict(zip(command[4::2], command[5::2], strict=True))
        assert set(options) == {f"--{name}" for name in ("run", "seed") if name in inspect.signature(demo).parameters}
        shutil.copytree(demo_run, options["--run"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places.subprocess, "run", record)
    run = run_as_script(monkeypatch, "look")["RUN"]
    assert open_run(run).table().num_rows == 48
    assert "No run was given" in places.about(run)
    assert not list(tmp_path.iterdir())


def test_where_none_can_be_recorded_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        places.subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, 2, "", "Error: needs 'live'.")
    )
    places.demo.cache_clear()
    with pytest.raises(
        BadInput, match="no run was given, demo-run/ is not here, and none could be recorded: needs 'live'"
    ):
        places.demo()
    places.demo.cache_clear()
