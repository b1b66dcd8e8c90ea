"""The words of single findings: nothing said twice, no None, no Python value, and one of a thing in the singular."""

from __future__ import annotations

from replay_build import group, reply, said, trace, turn

from rolltape.replay import ConvertOptions, Finding, check
from rolltape.replay.options import Expectations
from rolltape.schema import encode


def found(code: str, table: object, **rest: object) -> Finding:
    [finding] = [f for f in check(table, **rest) if f.code == code]  # type: ignore[arg-type]
    return finding


def test_lists_that_do_not_fit_name_their_node_once_and_their_lengths() -> None:
    torn = reply(0, [3], [4, 5], mask=[False, True])
    text = found("lists", encode([trace(said(None, [1, 2]), torn)])).text(short=True)
    assert text.count("node 1") == 1
    assert "mask 2" in text
    assert "{" not in text


def test_a_parent_of_a_negative_index_is_called_that() -> None:
    table = encode([trace(said(None, [1]), reply(-3, [3], [4]))])
    assert found("parent", table).message.startswith("node 1 names a node of a negative index as its parent")


def test_branches_whose_fork_is_not_known_name_no_node() -> None:
    table = encode([trace(said(None, [1]), reply(0, [3], [4]), said(7, [5]), reply(0, [3], [6]))])
    assert "None" not in found("branches", table).message


def test_one_branch_is_one() -> None:
    options = ConvertOptions(expect=Expectations(branches=2))
    assert found("expected_branches", encode([turn()]), options=options).message == "1 branch; 2 expected"


def test_a_reward_that_nobody_scored_adds_up_to_nothing() -> None:
    scored, not_scored = turn(), turn(rewards={})
    message = found("group_reward_sum", encode([not_scored]), groups=[group([scored])]).message
    assert message.endswith(
        "has no sum over 0 scored traces, but of the live traces it added up to 1.0 over 1 scored trace"
    )
    options = ConvertOptions(expect=Expectations(group_reward_sum={"ok": 2.0}))
    message = found(
        "expected_group_reward_sum", encode([not_scored]), options=options, groups=[group([not_scored])]
    ).message
    assert message == "reward 'ok' has no sum over 0 scored traces of group 0; 2.0 is expected"
