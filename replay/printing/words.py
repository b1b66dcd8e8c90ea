"""Words and figures for people: short numbers, sparklines, and reasons that say the same but for their numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

_BARS = "▁▂▃▄▅▆▇█"
ROUNDING = 1e-12
"""Relative size of a difference that is none: totals are sums of parts, and hold their rounding."""
_NUMBER = re.compile(r"\b[0-9a-f]{16,}\b|[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
"""Ids and numbers: what differs between two messages that say the same."""
MISSING = "–"
"""Stands where there is no value: never 0, and never an empty cell that might be overlooked."""


def count(value: float | None) -> str:
    """A count in at most five characters: 812, 9,214, 30.0k, 1.2M."""
    if value is None:
        return MISSING
    if abs(value) < 9999.5:
        return f"{value:,.0f}"
    for unit in "kMGT":
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.1f}{unit}" if abs(value) < 99.95 else f"{value:.0f}{unit}"
    return f"{value:.0f}T"


def counted(number: int | None, what: str, many: str = "") -> str:
    """How many of something there are: 1 file, 3 files, 1,024 batches (`many`: its plural, unless it ends in s)."""
    return f"{MISSING if number is None else f'{number:,}'} {what if number == 1 else many or what + 's'}"


def size(value: float | None) -> str:
    """Bytes: 812 B, 30.0 kB, 1.2 MB."""
    if value is None:
        return MISSING
    if abs(value) < 1000:
        return f"{value:.0f} B"
    text = count(value) if abs(value) >= 9999.5 else f"{value / 1000:.1f}k"
    return f"{text[:-1]} {text[-1]}B"


def decimal(value: float | None, digits: int = 3) -> str:
    """A number with some decimals, in the same width also where it is very large or small."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    if value and not 10.0**-digits / 2 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def percent(part: float, whole: float) -> str:
    """A share in percent; nothing of nothing is no share."""
    if not whole:
        return MISSING
    share = 100 * part / whole
    return f"{share:.1f}%" if 0 < share < 10 else f"{share:.0f}%"


def moment(seconds: float | None) -> str:
    """Seconds since epoch as local date and time, to the minute; the year only where it is another one."""
    if seconds is None:
        return MISSING
    then = datetime.fromtimestamp(seconds)
    return f"{then:%m-%d %H:%M}" if then.year == datetime.now().year else f"{then:%Y-%m-%d}"


def duration(seconds: float | None) -> str:
    """A length of time: 1.7 ms, 12.3 s, 4 min 10 s, 3 h 20 min."""
    if seconds is None:
        return MISSING
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def numbers(values: Sequence[int], most: int = 5) -> str:
    """Whole numbers as ranges: 0–3, 7, 9–12; beyond `most` ranges the rest is counted."""
    ranges: list[list[int]] = []
    for value in sorted(set(values)):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    told = [str(a) if a == b else f"{a}–{b}" for a, b in ranges[:most]]
    rest = sum(b - a + 1 for a, b in ranges[most:])
    return ", ".join(told) + (f" and {rest} more" if rest else "")


def of_steps(steps: Sequence[int]) -> str:
    """`step 3`, or `steps 0–4, 9`."""
    return f"step{'s' if len(set(steps)) > 1 else ''} {numbers(steps)}"


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """A curve in one line, a character a value, or the mean of several where there are more than `width`.

    The lowest value has the lowest bar; values that differ by no more than rounding are level. A value that is missing or
    not finite leaves a gap.
    """
    points = [_mean(values[a:b]) for a, b in pieces(len(values), width)]
    known = [p for p in points if p is not None]
    if not known:
        return " " * len(points)
    low, high = min(known), max(known)
    level = not math.isfinite(high - low) or is_level(low, high)
    scale = 0.0 if level else (len(_BARS) - 1) / (high - low)
    middle = 0 if scale else len(_BARS) // 2 - 1
    return "".join(" " if p is None else _BARS[middle + round((p - low) * scale)] for p in points)


def is_level(low: float, high: float) -> bool:
    """Whether two finite values differ by no more than rounding."""
    return abs(high - low) <= ROUNDING * max(abs(low), abs(high))


def pieces(n: int, most: int) -> list[tuple[int, int]]:
    """`n` things in at most `most` stretches of nearly equal length: (begin, end) of each."""
    parts = min(n, most)
    return [(i * n // parts, (i + 1) * n // parts) for i in range(parts)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(known) / len(known) if known else None


@dataclass(frozen=True)
class Alike:
    """Messages that differ in nothing but numbers and ids."""

    count: int
    example: str
    """The most frequent of them."""
    variants: int
    """How many different messages they are."""

    def __str__(self) -> str:
        return self.line()

    def line(self, most: int | None = None) -> str:
        """Count and example in one line, cut to `most` characters, and how many different messages were counted."""
        others = f" ({self.variants:,} messages, numbers differ)" if self.variants > 1 else ""
        head = f"{self.count:,} x "
        room = None if most is None else max(most - len(head) - len(others), 20)
        return f"{head}{' '.join(self.example.split()) if room is None else shortened(self.example, room)}{others}"


def wording(message: str) -> str:
    """What a message says but for its numbers and ids."""
    return _NUMBER.sub("#", message)


def alike(messages: Mapping[str, int], most: int | None = None) -> list[Alike]:
    """Counted messages, those that differ in numbers only as one, the most frequent first."""
    kinds: dict[str, Counter[str]] = {}
    for message, times in messages.items():
        kinds.setdefault(wording(message), Counter())[message] += times
    merged = [Alike(kind.total(), kind.most_common(1)[0][0], len(kind)) for kind in kinds.values()]
    merged.sort(key=lambda a: -a.count)
    return merged if most is None else merged[:most]


def end_of(text: str, most: int) -> str:
    """The end of a name, which tells more than its beginning."""
    return text if len(text) <= most else "…" + text[len(text) - most + 1 :]


def shortened(text: str, most: int) -> str:
    """`text` in one line of at most `most` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1].rstrip() + "…"
