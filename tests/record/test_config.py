"""What is refused before any episode, each with a sentence that says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from rolltape.record.config import load_config, load_environment, load_tasks, offered_tools, read_toml
from rolltape.record.options import LiveOptions
from rolltape.record.versions import REQUIREMENTS, check_live, check_package, check_python
from rolltape.schema.errors import BadInput, MissingExtra, UnsupportedVersion

TASKSET = """
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    tasks: int = 1

class Asked(vf.Task):
    @vf.METHOD
    async def better(self, traces) -> list[float]:
        return [0.0 for _ in traces]

class Asks(vf.Taskset[Asked, Config]):
    def load(self):
        return [Asked(vf.TaskData(idx=i, prompt="?"), self.config.task) for i in range(self.config.tasks)]

__all__ = ["Asks"]
"""

numbers = itertools.count()


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a taskset of one task with a group reward."""
    name = f"configured_{next(numbers)}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(TASKSET.replace("METHOD", "group_reward"))
    return name


def toml(tmp_path: Path, text: str, name: str = "env.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("{}", "env.json", "not a .toml file"),
        ("taskset: x", "env.toml", "no valid TOML"),
        ('id = "math"\n[args]\nx = 1', "env.toml", "V0 environment (top-level id, args)"),
        ("max_turns = 3", "env.toml", "names no taskset"),
        ('[taskset]\nid = "asked"\n[harness]\nid = "codex"', "env.toml", "codex harness speaks the Responses dialect"),
        ('[taskset]\nid = "no_such_taskset"', "env.toml", "no_such_taskset"),
        ('[taskset]\nid = "no.such.taskset"', "env.toml", "'no.such.taskset' is not installed"),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_a_sentence(tmp_path: Path, text: str, name: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(toml(tmp_path, text, name))
    assert says in str(caught.value)


def test_a_config_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="There is no file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot be read"):
        read_toml(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "max_turn = 3",
            "'max_turn' at the top level (did you mean 'max_turns'?), whose options are taskset, harness,",
        ),
        ("timeout.rolout = 3", "'rolout' in [timeout] (did you mean 'rollout'?), whose options are setup, rollout,"),
        ("retries.rollout.max = 3", "'max' in [retries.rollout], whose options are max_retries,"),
        ("taskset.task_count = 3", "'task_count' in [taskset], whose options are id, task, tasks."),
        ('harness.id = "rolltape.record.inprocess"\nharness.tool = []', "'tool' in [harness] (did you mean 'tools'?)"),
        (
            'harness.runtime.type = "docker"\nharness.runtime.imge = ""',
            "'imge' in [harness.runtime] (did you mean 'image'?)",
        ),
    ],
)
def test_an_unknown_option_is_named_with_its_table_and_what_the_table_knows(
    tmp_path: Path, taskset: str, text: str, says: str
) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(toml(tmp_path, f'taskset.id = "{taskset}"\n{text}'))
    assert f"env.toml does not fit: there is no option {says}" in str(caught.value)


def test_every_table_with_a_problem_is_named(tmp_path: Path, taskset: str) -> None:
    text = f'taskset.id = "{taskset}"\ntaskset.tasks = "x"\nharness.runtime.type = "foo"'
    with pytest.raises(BadInput, match=r"tasks in \[taskset\]: .*integer.*; runtime in \[harness\]: Input tag 'foo'"):
        load_config(toml(tmp_path, text))
    with pytest.raises(BadInput, match=r"env.toml: harness is 5; expected a table"):
        load_config(toml(tmp_path, f'harness = 5\ntaskset.id = "{taskset}"'))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'tools = ["json:dumpz"]',
            "[harness] tools: There is no 'json:dumpz': json has no 'dumpz' (did you mean 'dump",
        ),
        ('tools = ["no_module:f"]', "[harness] tools: There is no 'no_module:f' (No module named 'no_module')"),
        ('tools = ["os.path:join"]', "[harness] tools: The tool 'join' takes *p"),
        ('tools = ["faulty_tools:f"]', "[harness] tools: 'faulty_tools:f' does not load: ZeroDivisionError"),
        ('user = "json:ask"', "[harness] user: There is no 'json:ask'"),
    ],
)
def test_a_function_of_the_config_that_is_not_there_is_refused_with_the_environment(
    tmp_path: Path, taskset: str, text: str, says: str
) -> None:
    (tmp_path / "faulty_tools.py").write_text("1 / 0")
    path = toml(tmp_path, f'[taskset]\nid = "{taskset}"\n[harness]\nid = "rolltape.record.inprocess"\n{text}')
    with pytest.raises(BadInput) as caught:
        load_environment(load_config(path), path)
    assert str(caught.value).startswith(f"{path}: {says}")


def test_tools_may_lie_beside_the_config(tmp_path: Path) -> None:
    name = f"tools_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text("def add(a: int) -> int:\n    return a\n")
    text = (
        f'[taskset]\nid = "rolltape.record.demo"\n[harness]\nid = "rolltape.record.inprocess"\ntools = ["{name}:add"]'
    )
    assert load_environment(load_config(toml(tmp_path, text))).harness.tools(None).keys() == {"add"}


def test_a_good_config_is_loaded_with_its_plugins(tmp_path: Path, taskset: str) -> None:
    text = f'[taskset]\nid = "{taskset}"\ntasks = 3\n[harness]\nid = "rolltape.record.inprocess"\nmax_turns = 4'
    config = load_config(toml(tmp_path, text))
    assert config.taskset.tasks == 3
    assert config.harness.max_turns == 4
    assert len(load_tasks(load_environment(config), rollouts=2)) == 3


def test_a_dotted_taskset_runs_with_the_harness_it_bundles(tmp_path: Path) -> None:
    plain = load_config(toml(tmp_path, '[taskset]\nid = "rolltape.record.demo"'))
    assert (plain.harness.id, type(load_environment(plain).harness).__name__) == (
        "rolltape.record.demo",
        "StallHarness",
    )
    set_up = load_config(toml(tmp_path, '[taskset]\nid = "rolltape.record.demo"\n[harness]\nmax_turns = 4'))
    assert (set_up.harness.id, set_up.harness.max_turns) == ("rolltape.record.demo", 4)
    other = '[taskset]\nid = "rolltape.record.demo"\n[harness]\nid = "rolltape.record.inprocess"'
    assert type(load_environment(load_config(toml(tmp_path, other))).harness).__name__ == "InProcessHarness"


@pytest.mark.parametrize(
    ("harness", "offered"),
    [
        ('id = "null"', None),
        ('id = "default"', "the harness 'default' offers bash"),
        ('id = "rolltape.record.inprocess"', None),
        (
            'id = "rolltape.record.inprocess"\ntools = ["textwrap:indent"]',
            "the harness 'rolltape.record.inprocess' offers indent",
        ),
    ],
)
def test_tools_that_will_be_offered_are_known_before_an_episode(
    tmp_path: Path, taskset: str, harness: str, offered: str | None
) -> None:
    environment = load_environment(load_config(toml(tmp_path, f'[taskset]\nid = "{taskset}"\n[harness]\n{harness}')))
    assert offered_tools(environment, load_tasks(environment, rollouts=2)) == offered


def test_tool_servers_of_tasks_are_known_before_an_episode(tmp_path: Path, taskset: str) -> None:
    source = (tmp_path / f"{taskset}.py").read_text()
    served = source.replace(
        "class Asked(vf.Task):", "class Find(vf.Toolset): ...\n\nclass Asked(vf.Task):\n    tools = (Find,)"
    )
    (tmp_path / f"{taskset}_served.py").write_text(served)
    text = f'[taskset]\nid = "{taskset}_served"\n[harness]\nid = "null"'
    environment = load_environment(load_config(toml(tmp_path, text)))
    offered = offered_tools(environment, load_tasks(environment, rollouts=2))
    assert offered == f"the taskset '{taskset}_served' offers the tools of Find"


def test_tasks_with_group_rewards_need_two_rollouts(tmp_path: Path, taskset: str) -> None:
    config = load_config(toml(tmp_path, f'[taskset]\nid = "{taskset}"\n[harness]\nid = "null"'))
    with pytest.raises(BadInput, match=r"@group_reward better.*--rollouts 2"):
        load_tasks(load_environment(config), rollouts=1)


@pytest.mark.parametrize("name", ["broken_tasks", "broken.tasks"])
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:", r"SyntaxError: invalid syntax \(tasks.py, line 1\)|SyntaxError: .*\(broken_tasks.py, line 1\)"),
        ("\nnowhere", r"NameError: name 'nowhere' is not defined \(.*tasks.py, line 2\)"),
    ],
)
def test_a_module_that_raises_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, says: str
) -> None:
    module = tmp_path / f"{name.replace('.', '/')}.py"
    module.parent.mkdir(exist_ok=True)
    module.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "env.toml"
    config.write_text(f'[taskset]\nid = "{name}"\n', encoding="utf-8")
    with pytest.raises(BadInput, match=says):
        load_config(config)


def test_a_taskset_without_tasks_is_refused(tmp_path: Path, taskset: str) -> None:
    config = load_config(toml(tmp_path, f'[taskset]\nid = "{taskset}"\ntasks = 0\n[harness]\nid = "null"'))
    with pytest.raises(BadInput, match="loads no task"):
        load_tasks(load_environment(config), rollouts=2)


def test_a_taskset_that_needs_tool_servers_does_not_fit_a_harness_without_them(tmp_path: Path, taskset: str) -> None:
    source = (tmp_path / f"{taskset}.py").read_text()
    with_tools = source.replace(
        "class Asked(vf.Task):", "class Tools(vf.Toolset):\n    pass\n\nclass Asked(vf.Task):\n    tools = (Tools,)\n"
    )
    (tmp_path / f"{taskset}_tools.py").write_text(with_tools)
    text = f'[taskset]\nid = "{taskset}_tools"\n[harness]\nid = "rolltape.record.inprocess"'
    with pytest.raises(BadInput, match=r"does not support MCP tools.*change \[harness\]"):
        load_environment(load_config(toml(tmp_path, text)))


# What is installed


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that these packages have these versions; None is not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if (found := versions[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_what_is_installed_here_will_do() -> None:
    assert check_live()["verifiers"] == "0.2.0"


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        ("verifiers", "0.2.1", "openai>=2.9, while SGLang pins openai 2.6.1 or 2.8.0"),
        ("verifiers", "0.2.1.dev3", "openai>=2.9"),
        ("verifiers", "0.10.0", "verifiers>=0.2.0,<0.2.1"),
        ("verifiers", "0.1.14", "verifiers>=0.2.0,<0.2.1"),
        ("renderers", "0.1.11", "removed RendererPool and client._maybe_offload"),
        ("renderers", "0.1.13.dev1", "removed RendererPool"),
        ("renderers", "0.1.7", "renderers>=0.1.8,<0.1.11"),
        ("mcp", "2.0.0", "mcp 2 removed mcp.server.fastmcp"),
        ("verifiers", "main", "no version number"),
    ],
)
def test_a_version_that_does_not_work_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, says: str
) -> None:
    installed(monkeypatch, **{package: version})
    with pytest.raises(UnsupportedVersion) as caught:
        check_live()
    assert says in str(caught.value)
    assert "pip install 'rolltape[live]'" in str(caught.value)


@pytest.mark.parametrize("version", ["0.1.8", "0.1.9", "0.1.10", "0.1.10.post1"])
def test_versions_in_the_range_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, renderers=version)
    assert check_live()["renderers"] == version


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.package)
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, requirement: Any) -> None:
    installed(monkeypatch, **{requirement.package: None})
    with pytest.raises(MissingExtra, match=r"pip install 'rolltape\[live\]'"):
        check_package(requirement)


def test_a_package_whose_files_are_gone_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match="verifiers is not installed"):
        check_live()


def test_python_below_3_11_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match=r"Python 3\.10\.12; live rollouts need Python 3\.11"):
        check_python((3, 10, 12))
    check_python((3, 11, 0))


# Options


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollouts": 0}, "rollouts is 0; expected 1 or more"),
        ({"groups": 0}, "groups is 0"),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"max_response": 0}, "max_response is 0"),
        ({"max_response": None}, "--max-response"),
        ({"branch_policy": "both"}, "reject or siblings"),
        ({"min_group_size": 9}, "no group reaches it"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"eval_name": "aime"}, "eval_name is 'aime', but training is recorded"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"engine": "localhost:30000"}, "http://127.0.0.1:30000"),
    ],
)
def test_options_no_run_can_have_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        LiveOptions(**{"config": "e.toml", "run": "r", "engine": "http://e", "model": "m", **changes})
    assert says in str(caught.value)


def test_an_unknown_option_of_ours_is_refused() -> None:
    with pytest.raises(TypeError, match="rollout_count"):
        LiveOptions(config="e.toml", run="r", engine="http://e", model="m", rollout_count=3)  # type: ignore[call-arg]
