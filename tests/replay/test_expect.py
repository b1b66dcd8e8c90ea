"""Expectations files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltape.replay import ConvertOptions, Expectations
from rolltape.replay.expect import load_expectations
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
