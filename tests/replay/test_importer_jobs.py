"""Imports with several processes, and of files that change meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from replay_build import Record, turn

from rolltape.replay import open_run
from rolltape.replay.imports import jobs as import_jobs
from rolltape.replay.imports import lines as import_lines
from rolltape.replay.imports import sources as import_sources
from rolltape.replay.imports.importer import import_files
from rolltape.schema import decode
from rolltape.schema.errors import BadInput


def lines(*items: Record | bytes) -> bytes:
    """Records as JSON lines; bytes stand as they are."""
    return b"".join((i if isinstance(i, bytes) else json.dumps(i).encode()) + b"\n" for i in items)


SCRIPT = """
import json, multiprocessing, os, sys, time
from rolltape.replay.imports import jobs as import_jobs
from rolltape.replay.imports import sources as import_sources
from rolltape.replay.imports.importer import import_files

import_sources.BLOCK_BYTES = 40_000
if __name__ == "__mp_main__":
    if sys.argv[3] == "killed":
        import_jobs._take = lambda block: os.kill(os.getpid(), 9)
    if sys.argv[3] == "left alone":
        import_jobs._take = lambda block: os.kill(multiprocessing.parent_process().pid, 9) or time.sleep(300)
if __name__ == "__main__":
    try:
        print(json.dumps(import_files(sys.argv[1], sys.argv[2], jobs=2).to_dict()))
    except import_jobs.BrokenImport as error:
        sys.exit(str(error))
"""
"""Imports with two processes; what the other one does is its third argument."""


def two_processes(folder: Path, file: str, other: str = "takes blocks") -> subprocess.CompletedProcess[str]:
    """Import `file` into `folder / other`. Returns when every process has ended."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, folder / "script.py", folder / file, folder / other, other]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", ["traces.jsonl", "traces.jsonl.zst"])
def test_several_processes_give_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    records = [turn(id=f"{i}-{g}", idx=g, info={"text": "long " * 200}) for i in range(40) for g in range(5)]
    data = lines(*records[:50], b"{", *records[50:], records[0])
    (tmp_path / name).write_bytes(zstandard.compress(data) if name.endswith("zst") else data)
    monkeypatch.setattr(import_lines, "FLUSH_ROWS", 70)
    alone = import_files(tmp_path / name, tmp_path / "alone")
    ran = two_processes(tmp_path, name)
    assert ran.returncode == 0, ran.stderr
    both = json.loads(ran.stdout)
    assert {k: v for k, v in both.items() if k != "run"} == {k: v for k, v in alone.to_dict().items() if k != "run"}
    a, b = (open_run(tmp_path / name) for name in ("alone", "takes blocks"))
    assert json.dumps(decode(a.table())) == json.dumps(decode(b.table()))
    assert [g.trace_ids for g in a.groups()] == [g.trace_ids for g in b.groups()]
    assert [(c.part.step, c.file.rows) for c in a.commits()] == [(c.part.step, c.file.rows) for c in b.commits()]


def test_a_process_that_was_killed_ends_the_import_with_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(lines(*[turn(id=f"{i}") for i in range(200)]))
    ran = two_processes(tmp_path, "traces.jsonl", "killed")
    assert ran.returncode == 1
    assert ran.stderr.startswith("one of the import's processes ended before its work did, and nothing was imported")
    assert not (tmp_path / "killed").exists()


def test_processes_end_where_the_one_that_asks_them_was_killed(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(lines(*[turn(id=f"{i}") for i in range(200)]))
    ran = two_processes(tmp_path, "traces.jsonl", "left alone")
    assert ran.returncode == -9
    assert import_files(tmp_path / "traces.jsonl", tmp_path / "left alone").traces == 200


def test_large_files_are_read_by_a_process_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces.jsonl").write_bytes(lines(turn()))
    sources = import_sources.find_sources([tmp_path])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert import_jobs.jobs_for(sources) == 1
    monkeypatch.setattr(import_jobs, "PAYS_BYTES", 10)
    assert import_jobs.jobs_for(sources) == 3
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(300)))
    assert import_jobs.jobs_for(sources) == import_jobs.MOST_JOBS


@pytest.mark.parametrize("what", ["cut", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(import_sources, "BLOCK_BYTES", 3000)
    file = tmp_path / "traces.jsonl"
    data = lines(*[turn(id=str(i)) for i in range(20)])
    file.write_bytes(data)

    def told(*_: object) -> None:
        if what == "cut":
            file.write_bytes(data[:4000])
        if what == "replaced":
            (tmp_path / "new").write_bytes(data)
            (tmp_path / "new").replace(file)
        if what == "removed":
            file.unlink(missing_ok=True)

    with pytest.raises(BadInput, match=r"traces\.jsonl: (was replaced or cut|cannot be read \(No such file)"):
        import_files(file, tmp_path / "run", told=told)
    assert not (tmp_path / "run").exists()


def test_what_is_added_to_a_file_while_it_is_read_is_left_for_the_next_import(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_bytes(lines(turn(id="a")))

    def told(*_: object) -> None:
        with file.open("ab") as more:
            more.write(lines(turn(id="b")))

    assert import_files(file, tmp_path / "run", told=told).traces == 1
    again = import_files(file, tmp_path / "run")
    assert (again.traces, again.known, again.repeated) == (1, 1, 2)
