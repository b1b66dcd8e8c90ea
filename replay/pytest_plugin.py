"""A pytest plugin that replays recorded runs: `pytest --rolltape DIR`.

With `--rolltape` and no path, the runs are all that is tested: name a path for tests of other kinds beside them.

One test for each run, split and step: its rows go through the converter of today and `finish`, and the first field that is
not as it was fails the test with its exact place. Nothing is written, so workers may share the runs.

This module is imported in every test run of every project that has rolltape installed: it imports nothing but pytest and
the standard library until a run is given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from rolltape.replay.listing.folders import need_runs

if TYPE_CHECKING:
    from rolltape.replay.run import Run

INI = "rolltape_runs"
_AGAINST = "rolltape_against"
"""Property of a test: what its step was compared with, `approved` or `recorded`; pytest's XML report has it too."""


class _Runs:
    """The runs of a test session, by their real path."""

    def __init__(self, config: pytest.Config) -> None:
        given, configured = config.getoption("rolltape"), config.getini(INI)
        self.asked = _real(config.invocation_params.dir / name for name in given)
        """Of the command line: replayed whatever else is collected."""
        self.all = {**self.asked, **_real(Path(name) for name in configured)}
        """Also of the configuration: replayed where pytest comes upon their folders, or tests everything."""
        self.alone = bool(self.asked) and not _paths_given(config)


_RUNS = pytest.StashKey[_Runs]()


def _real(folders: Any) -> dict[Path, Path]:
    try:
        return {Path(os.path.realpath(run)): run for folder in folders for run in need_runs(folder)}
    except OSError as error:
        raise pytest.UsageError(f"--rolltape (or {INI}): {error}") from None


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and the setting."""
    group = parser.getgroup("rolltape", "replay of recorded runs")
    group.addoption(
        "--rolltape",
        action="append",
        default=[],
        metavar="DIR",
        help="replay the recorded run in DIR, or the runs below it, through today's converter; repeatable. Name a path to "
        "run tests of other kinds with it.",
    )
    parser.addini(INI, "folders of recorded runs that are replayed when they are collected", type="paths", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Find the runs; none where there should be some is a usage error."""
    config.addinivalue_line("markers", "rolltape: the replay of a step of a recorded run")
    config.stash[_RUNS] = runs = _Runs(config)
    if runs.alone:
        config.args = []  # nothing is looked for; the runs are added when that has been collected


def pytest_report_header(config: pytest.Config) -> str | None:
    """How many runs are replayed, and by which converter."""
    if not (runs := _replayed(config)):
        return None
    from rolltape.replay.options import CONVERTER_VERSION
    from rolltape.replay.printing.words import counted

    return f"rolltape: {counted(len(runs), 'recorded run')}, version {CONVERTER_VERSION} of the converter"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many steps passed without having been compared with approved Samples."""
    passed = terminalreporter.stats.get("passed", ())
    if unapproved := sum(dict(report.user_properties).get(_AGAINST) == "recorded" for report in passed):
        from rolltape.replay.printing.words import counted

        terminalreporter.write_line(
            f"rolltape: {counted(unapproved, 'step')} compared with recorded digests, for no Samples were approved "
            "(`rolltape approve`)"
        )


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A run that is to be replayed is collected as such."""
    runs = parent.config.stash[_RUNS]
    real = Path(os.path.realpath(path)) if runs.all else path
    if real not in runs.all:
        return None
    return RecordedRun.from_parent(parent, path=path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Runs that lie in no collected folder: those of the command line, and where everything is tested, the configured ones."""
    runs = session.config.stash[_RUNS]
    # asked of the items: pytest makes nodes of the folders beside those that it is given, and collects nothing of them
    collected = {Path(os.path.realpath(item.path)) for item in items if isinstance(item, _RolltapeItem)}
    for real, path in (runs.all if _whole(session.config) else runs.asked).items():
        if real not in collected:
            items.extend(session.genitems(RecordedRun.from_parent(session, path=path)))


def _replayed(config: pytest.Config) -> list[Path]:
    """The runs that are replayed: those of the command line, and of the configured ones those that it comes upon."""
    runs = config.stash[_RUNS]
    if _whole(config):
        return list(runs.all)
    looked = [Path(os.path.realpath(config.invocation_params.dir / str(arg).partition("::")[0])) for arg in config.args]
    return [real for real in runs.all if real in runs.asked or any(real.is_relative_to(place) for place in looked)]


def _whole(config: pytest.Config) -> bool:
    """Whether the whole project is tested: pytest was started at its root without a path and without --rolltape."""
    anything = not config.stash[_RUNS].alone and not _paths_given(config)
    return anything and config.invocation_params.dir == config.rootpath


def _paths_given(config: pytest.Config) -> bool:
    """Whether tests are named on the command line."""
    source = getattr(config, "args_source", None)  # not before pytest 7.2
    return source is None or bool(source.name == "ARGS")


class RecordedRun(pytest.File):
    """A run: a test for each of its steps."""

    def collect(self) -> Iterator[pytest.Item]:
        """Steps that were recorded, those missing between them, and those that were approved and are gone."""
        from rolltape.replay.run import open_run
        from rolltape.schema.errors import RolltapeError

        try:
            run = open_run(self.path)
            steps = _steps(run)
        except (RolltapeError, OSError) as error:
            yield _Unreadable.from_parent(self, name="run", why=str(error))
            return
        if not steps:
            yield _Unreadable.from_parent(self, name="run", why=f"{self.path} holds no step, so nothing is replayed.")
        for split, step in steps:
            yield ReplayedStep.from_parent(self, name=f"{split}-{step}", run=run, split=split, step=step)


class _RolltapeItem(pytest.Item):
    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.add_marker("rolltape")

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where and what."""
        return self.path, None, f"replay of {self.path.name}, {self.name}"


class _Unreadable(_RolltapeItem):
    """Stands for a run that cannot be opened: fails with the reason, and lets other tests run."""

    def __init__(self, *, why: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.why = why

    def runtest(self) -> None:
        """Fail."""
        _fail(self.why)


class ReplayedStep(_RolltapeItem):
    """One step of a run, all writers of it."""

    def __init__(self, *, run: Run, split: str, step: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.run, self.split, self.step = run, split, step

    def runtest(self) -> None:
        """Replay; fail at the first difference, skip an evaluation with which nothing can be compared."""
        from rolltape.replay.replayed import replay
        from rolltape.schema.errors import RolltapeError

        try:
            self._need_recorded()
            verdicts = [v for part in replay(self.run, self.split, self.step) for v in part.verdicts()]
        except RolltapeError as error:
            _fail(str(error))
        for verdict in verdicts:
            if verdict.state == "differs" or (verdict.state == "unknown" and self.split == "train"):
                _fail(verdict.message)
        if against := {verdict.against for verdict in verdicts if verdict.against}:
            self.user_properties.append((_AGAINST, max(against)))  # `recorded` where anything was
        for verdict in verdicts:
            if verdict.state == "unknown":
                pytest.skip(_short(verdict.message))

    def _need_recorded(self) -> None:
        """Fail where the step is not in the run."""
        if any((p.split, p.step) == (self.split, self.step) for p in _parts(self.run)):
            return
        where = f"{self.run.paths.root}, step {self.step} of {self.split}"
        if any((p.split, p.step) == (self.split, self.step) for p in _approved(self.run)):
            _fail(
                f"{where}: its Samples were approved, but the recording holds it no more; restore it, or approve again."
            )
        _fail(f"{where}: not recorded, but later steps are; its commit is missing. Restore it from a copy.")


def _parts(run: Run) -> set[Any]:
    return {commit.part for commit in run.all_commits} | {part for part, _ in run.broken}


def _approved(run: Run) -> set[Any]:
    from rolltape.replay.verification.expected import approved_parts, read_sums

    return approved_parts(run.paths, read_sums(run.paths))


def _steps(run: Run) -> Sequence[tuple[str, int]]:
    """(split, step) of what is to be replayed, and of what is missing."""
    newest = run.newest(_parts(run))
    found = {(part.split, part.step) for part in newest}
    trained = [step for split, step in found if split == "train"]
    gaps = {("train", step) for step in range(min(trained), max(trained))} if trained else set()
    gone = {(part.split, part.step) for part in _approved(run) - _parts(run)}
    return sorted(found | gaps | gone, key=lambda place: (place[0] != "train", place))


def _short(message: str) -> str:
    """`message` as a terminal takes it, its paths as people type them."""
    from rolltape.replay.printing.console import printable

    return printable(message.replace(f"{Path.cwd()}{os.sep}", ""))


def _fail(message: str) -> NoReturn:
    raise pytest.fail.Exception(_short(message), pytrace=False) from None


# -- for tests that people write


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `rolltape_run` is run once for each run."""
    if "rolltape_run" not in metafunc.fixturenames:
        return
    runs = list(metafunc.config.stash[_RUNS].all.values())
    root = metafunc.config.rootpath
    names = [path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path) for path in runs]
    none = pytest.param(None, marks=pytest.mark.skip(reason=f"no recorded run: give --rolltape DIR, or set {INI}"))
    metafunc.parametrize("rolltape_run", runs or [none], ids=names or ["none"], indirect=True, scope="session")


@pytest.fixture(scope="session")
def rolltape_run(request: pytest.FixtureRequest) -> Run:
    """A recorded run (`rolltape.replay.Run`); the test runs once for each one given by --rolltape or `rolltape_runs`.

    With --rolltape, name the path of such tests, for without a path only the runs are replayed.
    """
    from rolltape.replay.run import open_run
    from rolltape.schema.errors import RolltapeError

    try:
        return open_run(request.param)
    except RolltapeError as error:
        _fail(str(error))
