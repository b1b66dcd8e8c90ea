"""--branch-policy: traces with several branches, converted otherwise than as they were recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_build import TRACES, group, put_run, put_step, reply, said, trace, turn

from rolltape.replay import ConvertOptions, convert, flatten, open_run
from rolltape.replay.exports.samples import write_samples

Cli = Callable[..., tuple[int, str, str]]
FORK = (said(None, [1]), reply(0, [2], [3, 4]), said(1, [5]), reply(2, [], [6]), said(0, [7]), reply(4, [], [8]))


@pytest.fixture
def imported(tmp_path: Path, rolltape: Cli) -> Path:
    """Traces with several branches, of an evaluation that was imported."""
    rolltape("import", TRACES / "0.2.0" / "multi_branch_compaction.jsonl", "--run", tmp_path / "run")
    return tmp_path / "run"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_import_of_branches_gives_no_sample_by_default_and_every_branch_on_request(
    imported: Path, tmp_path: Path, rolltape: Cli
) -> None:
    code, out, _ = rolltape("convert", imported, "--out", tmp_path / "none.jsonl")
    assert code == 0
    assert "none.jsonl: 0 samples: no trace of this step gives one (" in out
    assert f"`rolltape verify {imported}`" in out
    code, out, err = rolltape("convert", imported, "--out", tmp_path / "all.jsonl", "--branch-policy", "siblings")
    run = open_run(imported)
    conversion = convert(run.table(), run.groups(), ConvertOptions(branch_policy="siblings"))
    expected = [sample.to_dict() for group in conversion.groups for sample in flatten(group)]
    assert (code, err) == (0, "")
    assert lines(tmp_path / "all.jsonl") == json.loads(json.dumps(expected))
    assert len(expected) > run.table().num_rows


def test_export_of_samples_takes_it_too_and_other_formats_refuse_it(
    imported: Path, tmp_path: Path, rolltape: Cli
) -> None:
    rolltape("convert", imported, "--out", tmp_path / "a.jsonl", "--branch-policy", "siblings")
    words = ("export", imported, "--branch-policy", "siblings", "--out")
    assert rolltape(*words, tmp_path / "b.jsonl", "--format", "samples")[0] == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    code, _, err = rolltape(*words, tmp_path / "c.parquet", "--format", "hf")
    assert code == 2
    assert err.startswith("Error: --branch-policy says how Samples are made; --format hf writes none.")


def test_verify_converts_an_import_with_it_and_finds_no_branches(imported: Path, rolltape: Cli) -> None:
    code, out, _ = rolltape("verify", imported)
    assert code == 1
    assert "error branches" in out
    assert "--branch-policy siblings" in out
    code, out, _ = rolltape("verify", imported, "--branch-policy", "siblings")
    assert (code, out.splitlines()[-1]) == (0, "clean")
    assert rolltape("verify", imported, "--branch-policy", "both")[0] == 2


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A recorded step: a group whose one trace forks, and one that trained with another reward."""
    put_run(tmp_path / "live")
    records = [trace(*FORK, id="fork"), turn(id="beside", idx=0), *(turn(id=f"ok{i}", idx=1) for i in range(2))]
    put_step(tmp_path / "live", 0, records, groups=[group(records[:2], 0), group(records[2:], 1)])
    return tmp_path / "live"


def test_a_recorded_step_under_another_policy_is_not_what_trained_and_says_so(
    trained: Path, tmp_path: Path, rolltape: Cli
) -> None:
    [as_it_was] = write_samples(open_run(trained), str(tmp_path / "a.jsonl"))
    assert (as_it_was.samples, as_it_was.warnings) == (2, ())
    assert dict(as_it_was.left_out) == {"failed_check": 1, "incomplete_group": 1}
    code, out, err = rolltape("convert", trained, "--out", tmp_path / "b.jsonl", "--branch-policy", "siblings")
    assert (code, out) == (0, f"{tmp_path / 'b.jsonl'}: 5 samples\n")
    assert err.startswith(
        "converted with branch policy siblings, but recorded with reject: not the batches that trained"
    )
    code, _, err = rolltape("convert", trained, "--out", tmp_path / "c.jsonl", "--branch-policy", "reject")
    assert (code, err) == (0, "")
    assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_verify_compares_no_digest_of_another_policy(trained: Path, rolltape: Cli) -> None:
    assert json.loads(rolltape("verify", trained, "--json")[1])["digests"] == 1
    code, out, _ = rolltape("verify", trained, "--branch-policy", "siblings", "--json")
    found = json.loads(out)
    assert (code, found["findings"], found["digests"], found["samples"]) == (0, [], 0, 5)
    assert found["not_compared"] == 1
    out = rolltape("verify", trained, "--branch-policy", "siblings")[1]
    assert "5 Samples; 1 batch not compared, being of another branch policy" in " ".join(out.split())
