"""`rolltape launch`: the command it makes, what it forwards and writes, what it refuses, and how it runs Miles' helpers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from rolltape.record.launching import launch as module
from rolltape.record.launching.launch import ROLLOUT_CLASS, ROLLOUT_FUNCTION, Plan, namespace, parse, plan_launch
from rolltape.record.launching.options import LEGACY_VARIABLE, LaunchOptions
from rolltape.record.recorder import Recorder
from rolltape.replay.cli import app
from rolltape.schema.errors import BadInput, MissingExtra, RunConflict

DEMO = "rolltape.record.demo"
REAL = importlib.util.find_spec("miles") is not None and importlib.util.find_spec("ray") is not None
SMOKE = """
    --num-rollout 3 --rollout-batch-size 3 --n-samples-per-prompt 4 --over-sampling-batch-size 3 --global-batch-size 12
    --rollout-max-response-len 512 --rollout-max-context-len 2048 --rollout-temperature 0.8 --rollout-num-gpus-per-engine 1
    --advantage-estimator grpo --balance-data --entropy-coef 0.0 --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 --use-dynamic-batch-size
    --max-tokens-per-gpu 4096 --no-gradient-accumulation-fusion --sglang-mem-fraction-static 0.6 --sglang-enable-metrics
    --attention-backend flash --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 2 --save-interval 1000
    --sglang-tokenizer-path Qwen/Qwen3-0.6B --disable-rollout-global-dataset
"""


TASKSET = """
import verifiers.v1 as vf

class Asks(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(idx=0, prompt="?"), self.config.task)]

__all__ = ["Asks"]
"""


def plan(folder: Path, *extra: str, environ: dict[str, str] | None = None, **changes: Any) -> Plan:
    given: dict[str, Any] = {"run": folder / "run", "taskset": DEMO, "models": folder / "models", "check": False}
    return plan_launch(LaunchOptions(**{**given, **changes, "extra": extra}), environ or {})


# -- the command


def test_the_defaults_are_the_smoke_run(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for name, values in parse(SMOKE.split()).items():
        assert made.arguments[name] == values
    assert made.arguments["--hf-checkpoint"] == (str(tmp_path / "models/Qwen3-0.6B"),)
    assert made.arguments["--ref-load"] == (str(tmp_path / "models/Qwen3-0.6B_torch_dist"),)
    assert made.arguments["--save"] == (str(tmp_path / "run-checkpoints"),)
    assert shlex.split(made.train_args) == made.words


@pytest.mark.parametrize(
    ("environ", "env", "function", "forwarded"),
    [
        ({}, (), ROLLOUT_CLASS, None),
        ({LEGACY_VARIABLE: "1"}, (), ROLLOUT_FUNCTION, "1"),
        ({LEGACY_VARIABLE: "0"}, (f"{LEGACY_VARIABLE}=1",), ROLLOUT_FUNCTION, "1"),
        ({LEGACY_VARIABLE: "1"}, (f"{LEGACY_VARIABLE}=0",), ROLLOUT_CLASS, "0"),
    ],
)
def test_the_rollout_function_is_the_one_that_the_actors_variable_asks_for(
    tmp_path: Path, environ: dict[str, str], env: tuple[str, ...], function: str, forwarded: str | None
) -> None:
    made = plan(tmp_path, environ=environ, env=env)
    assert made.arguments["--rollout-function-path"] == (function,)
    assert made.variables.get(LEGACY_VARIABLE) == forwarded


def test_the_rollout_functions_exist() -> None:
    for path in (ROLLOUT_CLASS, ROLLOUT_FUNCTION):
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_actors_get_the_config_the_run_and_where_to_import_from(tmp_path: Path) -> None:
    settings = tmp_path / "own.toml"
    settings.write_text("thinking = false\n")
    made = plan(
        tmp_path,
        environ={"PYTHONPATH": "/mine:/other"},
        settings=settings,
        pythonpath=(tmp_path / "tasks",),
        megatron="/megatron",
        env=("HF_HUB_OFFLINE=1",),
    )
    assert made.variables["VERIFIERS_CONFIG"] == str(tmp_path / "run-env.toml")
    assert made.variables["ROLLTAPE_RUN"] == str(tmp_path / "run")
    assert made.variables["ROLLTAPE_CONFIG"] == str(settings)
    assert made.variables["HF_HUB_OFFLINE"] == "1"
    folders = made.variables["PYTHONPATH"].split(":")
    assert folders[0] == "/megatron"
    assert folders[-3:] == [str(tmp_path / "tasks"), "/mine", "/other"]


def test_a_config_is_written_for_a_taskset_and_a_given_one_is_named(tmp_path: Path) -> None:
    made = plan(tmp_path, taskset="owner/golf")
    assert made.files == {tmp_path / "run-env.toml": '[taskset]\nid = "owner/golf"\n'}
    mine = tmp_path / "mine.toml"
    mine.write_text(f'[taskset]\nid = "{DEMO}"\n')
    made = plan(tmp_path, taskset=None, config=mine)
    assert made.files == {}
    assert made.variables["VERIFIERS_CONFIG"] == str(mine)


def test_evaluation_comes_with_the_dataset_that_miles_demands(tmp_path: Path) -> None:
    assert "--eval-prompt-data" not in plan(tmp_path).arguments
    made = plan(tmp_path, eval_every=5)
    assert made.arguments["--eval-interval"] == ("5",)
    assert made.arguments["--n-samples-per-eval-prompt"] == ("2",)
    assert made.arguments["--eval-prompt-data"] == ("verifiers-taskset", str(tmp_path / "run-env.toml"))


def test_presets_can_be_replaced_and_left_away(tmp_path: Path) -> None:
    made = plan(
        tmp_path, "--lr=2e-6", "--use-wandb", "--load", "saved", without=("balance-data", "--sglang-enable-metrics")
    )
    assert made.arguments["--lr"] == ("2e-6",)
    assert made.arguments["--use-wandb"] == ()
    assert made.words.count("--lr") == 1
    assert not {"--balance-data", "--sglang-enable-metrics"} & made.arguments.keys()


def test_words_with_spaces_reach_miles_whole(tmp_path: Path) -> None:
    template = '{"enable_thinking": false}'
    made = plan(tmp_path, "--apply-chat-template-kwargs", template)
    assert template in shlex.split(made.train_args)
    assert namespace(made.arguments).apply_chat_template_kwargs == {"enable_thinking": False}


# -- what is refused


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--rollout-function-path", "mine.f"], LEGACY_VARIABLE),
        (["--rollout-function-path=mine.f"], LEGACY_VARIABLE),
        (["--rollout-func", "mine.f"], "that is --rollout-function-path"),
        (["--eval-function-path", "mine.f"], "--eval-function-path"),
        (["--rollout-global-dataset"], "--rollout-global-dataset"),
        (["--disable-rollout-global-dataset"], "always set"),
        (["--prompt-data", "x.jsonl"], "the taskset gives the tasks"),
        (["--eval-prompt-data", "a", "b"], "--eval-every"),
        (["--debug-train-only"], "--debug-train-only"),
        (["--num-rollout", "5"], "--steps"),
        (["--partial-rollout"], "--partial-rollout is not supported"),
        (["--fully-async"], "--fully-async is not supported"),
        (["--multimodal-keys", '{"image": "x"}'], "--multimodal-keys is not supported"),
        (["--chat-template-path", "x"], "--chat-template-path is not supported"),
        (["--use-opd"], "--use-opd is not supported"),
        (["--use-rollout-routing-replay"], "--use-rollout-routing-replay"),
        (["--eval-num-gpus", "1"], "--eval-num-gpus"),
        (["stray"], "belongs to no option"),
        (["--tensor-model-parallel-size", "4"], "parallel groups of 4"),
        (["--rollout-num-gpus-per-engine", "4"], "more than the 2 GPUs"),
    ],
)
def test_extra_arguments_that_do_not_go_with_the_integration_are_refused(
    tmp_path: Path, extra: list[str], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        plan(tmp_path, *extra)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"taskset": None}, "either CONFIG"),
        ({"config": Path("a.toml")}, "either CONFIG"),
        ({"taskset": None, "config": Path("missing.toml")}, "There is no file"),
        ({"groups": 0}, "--groups is 0"),
        ({"over_sampling": 2}, "--over-sampling 2 is below --groups 3"),
        ({"global_batch_size": 5}, "does not divide the 12 samples"),
        ({"max_response": 2048}, "leaves no room"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"without": ("colocate",)}, "Neither --colocate nor --rollout-num-gpus"),
        ({"without": ("max-tokens-per-gpu",)}, "needs --max-tokens-per-gpu"),
        ({"without": ("nothing",)}, "no such option"),
        ({"ref_load": Path("somewhere")}, "_torch_dist"),
        ({"env": ("ROLLTAPE_RUN=x",)}, "use --run"),
        ({"env": ("NAME",)}, "NAME=VALUE"),
        ({"env": (f"{LEGACY_VARIABLE}=yes",)}, "expected 0 or 1"),
        ({"settings": Path("missing.toml")}, "There is no file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        plan(tmp_path, **changes)


def test_siblings_are_refused_where_miles_could_not_train_them(tmp_path: Path) -> None:
    settings = tmp_path / "own.toml"
    settings.write_text('branch_policy = "siblings"\n')
    with pytest.raises(BadInput, match="--use-dynamic-batch-size is not set"):
        plan(tmp_path, settings=settings, without=("use-dynamic-batch-size",))


@pytest.mark.parametrize("changes", [{"rollouts": 1}, {"eval_every": 1, "eval_rollouts": 1}])
def test_rewards_that_compare_rollouts_need_several(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"@group_reward fastest, shortest"):
        plan(tmp_path, check=True, **changes)
    assert plan(tmp_path, check=True).problems == []


def test_an_environment_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not installed"):
        plan(tmp_path, check=True, taskset="no-such-taskset-v1")
    old = tmp_path / "v0.toml"
    old.write_text('id = "gsm8k"\n')
    with pytest.raises(BadInput, match="V0 environment"):
        plan(tmp_path, taskset=None, config=old)


def test_another_config_in_the_place_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run-env.toml").write_text("# mine\n")
    with pytest.raises(RunConflict, match="says something else"):
        plan(tmp_path)


def test_a_run_of_another_model_and_a_missing_checkpoint_are_named(tmp_path: Path) -> None:
    Recorder.open(tmp_path / "run", model="other", tokenizer="other", taskset=DEMO, settings={}, versions={}).close()
    made = plan(tmp_path, skip_prepare=True)
    assert [problem.split()[0:2] for problem in made.problems] == [
        ["There", "is"],
        ["There", "is"],
        made.problems[2].split()[:2],
    ]
    assert "was recorded with the model 'other'" in made.problems[2]


# -- running


class Helpers(ModuleType):
    """Stands in for Miles' command helpers: remembers what was called."""

    def __init__(self) -> None:
        super().__init__("command_utils")
        self.called: list[tuple[str, Any]] = []
        self.repo_base_dir = "/checkout"

    def exec_command_cpu(self, command: str) -> None:
        self.called.append(("exec", command))

    def convert_checkpoint(self, **given: Any) -> None:
        self.called.append(("convert", given))

    def execute_train(
        self,
        train_args: str,
        num_gpus_per_node: int,
        megatron_model_type: str,
        extra_env_vars: dict[str, str],
        megatron_path: str = "/default/Megatron",
    ) -> None:
        given = dict(locals())
        given.pop("self")
        self.called.append(("train", given))


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Helpers:
    made = Helpers()
    monkeypatch.setattr(module, "command_helpers", lambda: made)
    return made


def test_it_prepares_and_trains_through_miles_own_helpers(tmp_path: Path, helpers: Helpers) -> None:
    made = plan(tmp_path)
    module.launch(made)
    assert [name for name, _ in helpers.called] == ["exec", "convert", "train"]
    assert helpers.called[0][1] == f"hf download Qwen/Qwen3-0.6B --local-dir {tmp_path}/models/Qwen3-0.6B"
    assert helpers.called[1][1] == {
        "model_name": "Qwen3-0.6B",
        "megatron_model_type": "qwen3-0.6B",
        "num_gpus_per_node": 2,
        "dir_dst": str(tmp_path / "models"),
        "hf_checkpoint": str(tmp_path / "models/Qwen3-0.6B"),
        "megatron_path": "/default/Megatron",
    }
    train = helpers.called[2][1]
    assert train["train_args"] == made.train_args
    assert train["extra_env_vars"]["PYTHONPATH"] == "/default/Megatron:/checkout"
    assert (tmp_path / "run-env.toml").read_text() == f'[taskset]\nid = "{DEMO}"\n'


@pytest.mark.usefixtures("helpers")
def test_hooks_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--custom-rm-path names 'nowhere\.score'"):
        plan(tmp_path, "--custom-rm-path", "nowhere.score", check=True)


def test_a_taskset_in_a_folder_of_the_actors_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "launch_case_tasks.py").write_text(TASKSET)
    with pytest.raises(BadInput):
        plan(tmp_path, check=True, taskset="launch_case_tasks")
    assert plan(tmp_path, check=True, taskset="launch_case_tasks", pythonpath=(tmp_path / "tasks",)).problems == []


def test_preparing_can_be_skipped_where_everything_is_there(tmp_path: Path, helpers: Helpers) -> None:
    with pytest.raises(BadInput, match="There is no checkpoint"):
        module.launch(plan(tmp_path, skip_prepare=True))
    assert helpers.called == []
    for name in ("Qwen3-0.6B", "Qwen3-0.6B_torch_dist"):
        (tmp_path / "models" / name).mkdir(parents=True)
    module.launch(plan(tmp_path, skip_prepare=True))
    assert [name for name, _ in helpers.called] == ["train"]


@pytest.mark.skipif(REAL, reason="Miles is importable here, so a launch would go on")
def test_without_miles_only_a_dry_run_works(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match="only --dry-run works"):
        module.launch(plan(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not REAL, reason="needs the real Miles, which is not importable here")
def test_the_real_helpers_submit_the_command_with_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.command_helpers()
    commands: list[str] = []
    for name in ("exec_command_cpu", "exec_command_gpu"):
        monkeypatch.setattr(real, name, commands.append)
    monkeypatch.setattr(real, "check_has_nvlink", lambda: False)
    monkeypatch.setattr(real, "shell_safe_model_args", lambda name: f"--model-args-of {name}")
    for name, value in (("MILES_SCRIPT_EXTERNAL_RAY", "1"), ("MILES_SCRIPT_ENABLE_RAY_SUBMIT", "1")):
        monkeypatch.setenv(name, value)
    made = plan(tmp_path, env=(f"{LEGACY_VARIABLE}=1",))
    module.launch(made)
    words = shlex.split(commands[-1])
    told = next(word for word in words if word.startswith("--runtime-env-json="))
    variables = json.loads(told.partition("=")[2])["env_vars"]
    assert words[-len(made.words) :] == made.words
    assert variables["VERIFIERS_CONFIG"] == str(tmp_path / "run-env.toml")
    assert variables["ROLLTAPE_RUN"] == str(tmp_path / "run")
    assert variables[LEGACY_VARIABLE] == "1"


# -- the command line


def test_a_dry_run_prints_the_command_and_the_files_and_writes_nothing(tmp_path: Path) -> None:
    base = ["launch", "--taskset", DEMO, "--run", str(tmp_path / "run"), "--dry-run", "--no-check"]
    shown = CliRunner().invoke(app, [*base, "--", "--lr", "2e-6"])
    assert shown.exit_code == 0, shown.output
    for text in ("run-env.toml", "hf download Qwen/Qwen3-0.6B", "convert_checkpoint", "--lr 2e-6", "ROLLTAPE_RUN"):
        assert text in shown.output
    told = json.loads(CliRunner().invoke(app, [*base, "--json", "--", "--lr", "2e-6"]).stdout)
    assert told["command"][:2] == ["python3", "train.py"]
    assert told["command"][told["command"].index("--lr") + 1] == "2e-6"
    assert list(told["files"].values()) == [f'[taskset]\nid = "{DEMO}"\n']
    assert list(tmp_path.iterdir()) == []


def test_a_config_may_come_before_miles_arguments(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(f'[taskset]\nid = "{DEMO}"\n')
    words = ["launch", str(config), "--run", str(tmp_path / "run"), "--steps", "7", "--dry-run", "--json", "--no-check"]
    told = json.loads(CliRunner().invoke(app, [*words, "--", "--lr", "2e-6"]).stdout)
    assert told["variables"]["VERIFIERS_CONFIG"] == str(config)
    assert told["command"][told["command"].index("--num-rollout") + 1] == "7"


def test_what_is_refused_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rolltape.replay.cli import main

    words = [
        "rolltape",
        "launch",
        "--taskset",
        DEMO,
        "--run",
        str(tmp_path / "r"),
        "--dry-run",
        "--",
        "--prompt-data",
        "x",
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    assert "--prompt-data cannot be an extra argument" in capsys.readouterr().err
