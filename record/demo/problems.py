"""The word problems of the demo: how they are worded, their answers, and how to read one back from its text."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SYSTEM_PROMPT = (
    "You help at a market stall. Use the calculator for anything but the smallest sums. "
    "End each reply with a line that says Answer: and the number."
)

THINGS = ("plums", "pears", "apples", "eggs", "jalapeños")
NAMES = ("Zoë", "Ravi", "Mei", "Åsa", "Tom")

WORDINGS = {
    "boxes": "{name} sells {a} boxes of {b} {things} and {c} loose ones. How many {things} is that in all?",
    "bags": "{name} packs {a} {things} into bags of {b}. How many bags are full?",
    "walk": "{name} walks {a} metres to the stall {b} times a day, for {c} days. How many metres is that?",
    "count": "{name} has {a} {things}. Count them aloud from 1 on, one number a line. How many are there?",
}
"""Kind of problem to its wording."""

FOLLOW_UP = "Then {taken} of them are taken away. How many are left?"


@dataclass(frozen=True)
class Problem:
    """A first question with its answer, worked out from the numbers in it."""

    kind: str
    name: str
    things: str
    a: int
    b: int = 0
    c: int = 0

    @property
    def question(self) -> str:
        """The wording."""
        return WORDINGS[self.kind].format(name=self.name, things=self.things, a=self.a, b=self.b, c=self.c)

    @property
    def expression(self) -> str:
        """What to give the calculator."""
        forms = {"boxes": "{a} * {b} + {c}", "bags": "{a} // {b}", "walk": "{a} * {b} * {c}", "count": "{a}"}
        return forms[self.kind].format(a=self.a, b=self.b, c=self.c)

    @property
    def mistake(self) -> str:
        """A plausible wrong expression: the last number is forgotten."""
        forms = {"boxes": "{a} * {b}", "bags": "{a} - {b}", "walk": "{a} * {b}", "count": "{a} - 1"}
        return forms[self.kind].format(a=self.a, b=self.b)

    @property
    def answer(self) -> int:
        """The right answer."""
        answers = {"boxes": self.a * self.b + self.c, "walk": self.a * self.b * self.c, "count": self.a}
        return self.a // self.b if self.kind == "bags" else answers[self.kind]

    @property
    def wrong_answer(self) -> int:
        """The value of `mistake`."""
        answers = {"bags": self.a - self.b, "count": self.a - 1}
        return answers.get(self.kind, self.a * self.b)


def make_problem(kind: str, numbers: random.Random) -> Problem:
    """A problem of some kind with numbers drawn from a generator."""
    name, things = numbers.choice(NAMES), numbers.choice(THINGS)
    if kind == "bags":
        return Problem(kind, name, things, a=numbers.randint(60, 400), b=numbers.randint(3, 9))
    if kind == "count":
        return Problem(kind, name, things, a=numbers.randint(700, 900))
    return Problem(kind, name, things, a=numbers.randint(11, 48), b=numbers.randint(3, 9), c=numbers.randint(2, 9))


def read_problem(text: str) -> Problem | None:
    """The problem a text asks about, None if it asks about none."""
    for kind, wording in WORDINGS.items():
        found = re.fullmatch(_pattern(wording), text.strip())
        if found:
            parts = found.groupdict()
            numbers = {key: int(parts[key]) for key in ("a", "b", "c") if key in parts}
            return Problem(kind, parts["name"], parts.get("things", ""), **numbers)
    return None


def read_follow_up(text: str) -> int | None:
    """How many are taken away in a follow-up question, None for any other text."""
    found = re.fullmatch(_pattern(FOLLOW_UP), text.strip())
    return int(found["taken"]) if found else None


def read_answer(text: str) -> int | None:
    """The number in the last line of a reply, None if that line is no answer."""
    lines = text.strip().splitlines()
    found = re.fullmatch(r"Answer: (-?\d{1,12})", lines[-1].strip()) if lines else None
    return int(found[1]) if found else None


def _pattern(wording: str) -> str:
    """A wording as a regular expression with one group per field; a field used twice must hold the same text."""
    pattern, known = "", set[str]()
    for piece in re.split(r"(\{\w+\})", wording):
        field = piece[1:-1] if piece.startswith("{") else None
        if field is None:
            pattern += re.escape(piece)
        elif field in known:
            pattern += f"(?P={field})"
        else:
            pattern += rf"(?P<{field}>\w+)" if field in {"name", "things"} else rf"(?P<{field}>\d+)"
            known.add(field)
    return pattern
