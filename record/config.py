"""Reads the environment's TOML, and refuses before any episode what could only fail later."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolltape.record.problems import LEGACY_KEYS, problems_of, raised
from rolltape.record.versions import check_live
from rolltape.schema.errors import BadInput, RolltapeError

PLUGIN_GROUPS = {"taskset": "verifiers.v1.tasksets", "harness": "verifiers.v1.harnesses"}


def read_toml(path: str | Path) -> dict[str, Any]:
    """The mapping in a TOML file; raises BadInput where it is no TOML by its name or by its content."""
    file = Path(path)
    if file.suffix.lower() != ".toml":
        raise BadInput(f"{file} is not a .toml file; write the environment as Verifiers' EnvConfig in TOML.")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"There is no file {file}; expected a .toml file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} cannot be read: {error}.") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"{file} is no valid TOML: {error}.") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """What the TOML file `path` says, after every check that needs no import, so that a refusal takes no time.

    Raises BadInput where it is no TOML, a V0 environment, names no taskset, or names the codex harness.
    """
    data = read_toml(path)
    refuse_v0(data, path)
    _refuse_codex(data)
    return data


def load_config(path: str | Path) -> Any:
    """The Verifiers EnvConfig in the TOML file `path`. Its modules may lie beside it.

    Raises BadInput, UnsupportedVersion or MissingExtra with what was found and what to do.
    """
    check_live()
    data = read_config(path)
    _look_beside(Path(path), data)
    return env_config(data, path)


def _look_beside(file: Path, data: Mapping[str, Any]) -> None:
    """Make modules in the file's folder importable where it names one, behind everything that is installed."""
    folder = file.resolve().parent
    names = [name.partition(":")[0].partition(".")[0].replace("-", "_") for name in _named(data) if "/" not in name]
    beside = any((folder / f"{n}.py").is_file() or (folder / n / "__init__.py").is_file() for n in names if n)
    if beside and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _named(data: Mapping[str, Any]) -> Iterator[str]:
    """The plugins' ids, and the functions of the in-process harness."""
    for field in PLUGIN_GROUPS:
        plugin = data.get(field)
        if isinstance(plugin, Mapping):
            tools = plugin.get("tools")
            found = [plugin.get("id"), plugin.get("user"), *(tools if isinstance(tools, list) else ())]
            yield from (name for name in found if isinstance(name, str))


def refuse_v0(data: Mapping[str, Any], path: str | Path) -> None:
    """Raise BadInput for a V0 environment: `id` and `args` at the top level and no taskset."""
    taskset = data.get("taskset")
    if isinstance(taskset, Mapping) and taskset.get("id"):
        return
    legacy = [key for key in LEGACY_KEYS if key in data]
    if legacy:
        raise BadInput(
            f"{path} is a V0 environment (top-level {', '.join(legacy)}); rolltape runs V1 environments: "
            'name the taskset with [taskset] id = "…" and the harness with [harness] id = "…".'
        )
    raise BadInput(f'{path} names no taskset; write [taskset] id = "…" with the taskset\'s package.')


def env_config(data: Mapping[str, Any], path: str | Path = "the config") -> Any:
    """`data` as Verifiers' EnvConfig, with plugins resolved, also those inside packages (dotted ids)."""
    from pydantic import ValidationError
    from verifiers.v1 import EnvConfig

    _refuse_codex(data)
    for field in PLUGIN_GROUPS:
        if not isinstance(data.get(field, {}), Mapping):
            raise BadInput(f"{path}: {field} is {data[field]!r}; expected a table, such as [{field}] with an id in it.")
    _import_dotted(data)
    try:
        config = EnvConfig.model_validate(dict(data))
    except ValidationError as error:
        raise BadInput(f"{path} does not fit: {problems_of(error, data)}.") from error
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{path} names something that is not installed: {error} Install it, put its module beside the config, "
            "or set PYTHONPATH."
        ) from error
    except Exception as error:  # whatever a module of somebody else's raises
        raise BadInput(f"{path} names something that does not load: {raised(error)}.") from error
    if config.is_legacy:
        raise BadInput(f"{path} is a V0 environment; name a V1 taskset under [taskset].")
    return config


def load_environment(config: Any, path: str | Path = "the config") -> Any:
    """The Verifiers Environment of a config that was read from `path`.

    Raises BadInput for a harness and a taskset that do not go together, and for functions of the in-process harness
    that are not there.
    """
    from verifiers.v1.env import Environment

    try:
        return Environment(config)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except RolltapeError:
        raise
    except Exception as error:
        raise BadInput(
            f"The environment {config.env_id!r} cannot be set up: {error} (change [harness] or [taskset])."
        ) from error


def load_tasks(environment: Any, *, rollouts: int) -> list[Any]:
    """The tasks of an environment.

    Raises BadInput where loading fails, where there are none, and where a task compares its rollouts
    (`@group_reward`) and `rollouts` is below two.
    """
    from verifiers.v1.decorators import discover_decorated

    taskset = environment.config.taskset.id
    try:
        tasks = list(environment.taskset.load())
    except Exception as error:
        raise BadInput(f"The taskset {taskset!r} could not load its tasks: {type(error).__name__}: {error}") from error
    if not tasks:
        raise BadInput(f"The taskset {taskset!r} loads no task; check its settings under [taskset].")
    grouped = next((task for task in tasks if discover_decorated(task, "group_reward")), None)
    if grouped is not None and rollouts < 2:
        names = ", ".join(fn.__name__ for fn in discover_decorated(grouped, "group_reward"))
        raise BadInput(
            f"The taskset {taskset!r} compares the rollouts of a task (@group_reward {names}); "
            f"{rollouts} rollout per task leaves nothing to compare: set --rollouts 2 or more."
        )
    return tasks


def offered_tools(environment: Any, tasks: Iterable[Any]) -> str | None:
    """A tool that the model will be offered, and by whom, as far as that is known before an episode; None where none is."""
    from verifiers.v1.harnesses.default import DefaultHarness

    from rolltape.record.inprocess import InProcessHarness

    harness = environment.harness
    if isinstance(harness, DefaultHarness):
        return f"the harness {harness.config.id!r} offers bash"
    for task in tasks:
        if servers := type(task).tools:
            return f"the taskset {environment.config.env_id!r} offers the tools of {servers[0].__name__}"
        names: Sequence[str] = ()
        if isinstance(harness, InProcessHarness):
            with suppress(Exception):  # what a harness of somebody else's raises is said of the episode
                names = list(harness.tools(task.data))
        if names:
            return f"the harness {harness.config.id!r} offers {names[0]}"
    return None


def _refuse_codex(data: Mapping[str, Any]) -> None:
    harness = data.get("harness")
    if isinstance(harness, Mapping) and harness.get("id") == "codex":
        raise BadInput(
            "The codex harness speaks the Responses dialect, which cannot be turned into training tokens; "
            "use a harness that speaks chat completions, such as null, default or rolltape.record.inprocess."
        )


def _import_dotted(data: Mapping[str, Any]) -> None:
    """Make ids with dots loadable: Verifiers 0.2.0 looks for a plugin inside its own package first, and that look-up
    raises for a dotted id instead of going on to the id itself. So the module is put where it looks, as taskset and as
    harness, for a taskset that bundles its harness is looked up as both."""
    for field in PLUGIN_GROUPS:
        plugin = data.get(field)
        name = plugin.get("id") if isinstance(plugin, Mapping) else None
        if not isinstance(name, str) or "." not in name or "/" in name:
            continue
        module = name.replace("-", "_")
        try:
            found = importlib.import_module(module)
            for group in PLUGIN_GROUPS.values():
                sys.modules.setdefault(f"{group}.{module}", found)
        except ModuleNotFoundError as error:
            raise BadInput(
                f"The {field} {name!r} is not installed ({error}); install its package, put it beside the config, "
                "or set PYTHONPATH."
            ) from error
        except Exception as error:
            raise BadInput(f"The {field} {name!r} does not load: {raised(error)}.") from error
