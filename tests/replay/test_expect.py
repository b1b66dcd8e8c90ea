"""Expectations: their files, and what is held against them; stored conversion options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replay_build import Record, by_task, group, reply, said, trace, turn

from rolltape.replay import ConvertOptions, Expectations, Finding, check
from rolltape.replay.verification.expect import load_expectations
from rolltape.schema import Group, encode
from rolltape.schema.errors import BadInput


def test_every_expectation_is_read(tmp_path: Path) -> None:
    file = tmp_path / "expect.toml"
    file.write_text(
        """
        branches = 1
        group_size = 4
        sampled_tokens = [1, 4096]
        reward_names = ["correct", "fastest"]
        [group_reward_sum]
        fastest = 0.5
        correct = 4
        """
    )
    assert load_expectations(file) == Expectations(
        branches=1,
        group_size=4,
        sampled_tokens=(1, 4096),
        reward_names=("correct", "fastest"),
        group_reward_sum={"fastest": 0.5, "correct": 4.0},
    )


def test_an_empty_file_expects_nothing(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("")
    assert load_expectations(tmp_path / "e.toml") == Expectations()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("branches = ", "no TOML"),
        ("branches = 1\nbranches = 2", "no TOML"),
        ("brunches = 1", "'brunches' is no expectation; known are branches, group_size"),
        ("[expect]\nbranches = 1", "'expect' is no expectation"),
        ("branches = -1", "branches is -1; expected a whole number of 0 or more"),
        ("branches = true", "branches is True; expected a whole number"),
        ("group_size = 4.0", "group_size is 4.0; expected a whole number"),
        ("sampled_tokens = 5", "sampled_tokens is 5; expected two whole numbers"),
        ("sampled_tokens = [1, 2, 3]", "expected two whole numbers"),
        ("sampled_tokens = [5, 1]", "the least is above the most"),
        ("sampled_tokens = [1, '5']", "sampled_tokens is '5'; expected a whole number"),
        ("reward_names = 'ok'", "reward_names is 'ok'; expected a list of reward names"),
        ("reward_names = [1]", "expected a list of reward names"),
        ("group_reward_sum = 0.5", "group_reward_sum is 0.5; expected a table"),
        ("[group_reward_sum]\nfastest = '0.5'", "group_reward_sum.fastest is '0.5'; expected a number"),
        ("[group_reward_sum]\nfastest = true", "group_reward_sum.fastest is True; expected a number"),
    ],
)
def test_what_is_no_expectation_is_refused_with_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "expect.toml"
    file.write_text(text)
    with pytest.raises(BadInput) as refused:
        load_expectations(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert words in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# \xff\xe9")
    for name, words in (("none.toml", "no such file"), (".", "cannot be read"), ("latin.toml", "no TOML")):
        with pytest.raises(BadInput, match=words):
            load_expectations(tmp_path / name)


# -- expectations held against traces and groups


def expected(records: list[Record], groups: list[Group], **expect: Any) -> list[Finding]:
    found = check(encode(records), ConvertOptions(branch_policy="siblings", expect=Expectations(**expect)), groups)
    return [f for f in found if f.code.startswith("expected_")]


def test_an_expected_sum_is_held_against_every_group_by_name() -> None:
    records = [
        turn(id="a0", reward=0.5),
        turn(id="a1", reward=0.0),
        turn(id="b0", idx=1, reward=0.5),
        turn(id="b1", idx=1, reward=0.5),
        turn(id="c", idx=2, rewards={"other": 1.0}),
    ]
    found = expected(records, by_task(records), group_reward_sum={"ok": 0.5})
    assert [(f.group_index, f.expected, f.found) for f in found] == [(1, 0.5, 1.0), (2, 0.5, None)]
    assert "group 1" in found[0].message


def test_an_expected_sum_leaves_groups_with_a_failed_rollout_alone() -> None:
    records = [turn(id="a", reward=0.25), turn(id="b", reward=None, errors=["TaskError: no"])]
    assert expected(records, [group(records)], group_reward_sum={"ok": 0.5}) == []


def test_an_expected_sum_allows_for_rounding() -> None:
    records = [turn(id=str(i), reward=0.1) for i in range(10)]
    assert expected(records, [group(records)], group_reward_sum={"ok": 1.0}) == []
    assert len(expected(records, [group(records)], group_reward_sum={"ok": 1.001})) == 1


def test_expected_sizes_branches_tokens_and_names_are_held_against_sound_traces_only() -> None:
    records = [
        turn(id="good"),
        trace(said(None, [1]), reply(0, [2], [3]), said(0, [4], "edited"), reply(2, [5], [6]), id="forked"),
        turn(id="named", rewards={"ok": 1.0, "more": 0.0}),
        trace(id="failed", rewards={}, errors=["TaskError: no"]),
    ]
    found = expected(records, [group(records)], group_size=3, branches=1, sampled_tokens=(3, 10), reward_names=("ok",))
    assert [(f.code, f.trace_id) for f in found] == [
        ("expected_branches", "forked"),
        ("expected_sampled_tokens", "forked"),
        ("expected_rewards", "named"),
        ("expected_group_size", None),
    ]


# -- conversion options


def test_options_come_back_from_their_stored_form() -> None:
    options = ConvertOptions(
        branch_policy="siblings",
        min_group_size=2,
        strict=True,
        reward_key="ok",
        vocab_size=100,
        unscored="allow",
        expect=Expectations(branches=1, sampled_tokens=(1, 2), reward_names=("a",), group_reward_sum={"a": 0.5}),
    )
    assert ConvertOptions.from_dict(options.to_dict()) == options
    assert ConvertOptions.from_dict({}) == ConvertOptions()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"branch_policy": "all"}, "branch_policy 'all': expected 'reject' or 'siblings'"),
        ({"unscored": "zero"}, "unscored 'zero': expected 'refuse' or 'allow'"),
        ({"min_group_size": 0}, "min_group_size 0: expected 1 or more"),
        ({"brunch_policy": "reject"}, r"conversion options \['brunch_policy'\] are unknown here"),
    ],
)
def test_options_that_are_none_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        ConvertOptions.from_dict(given)
