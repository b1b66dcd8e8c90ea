"""Means and deviations without rounding noise: of exact sums, and of values that are all equal that value and 0."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from rolltape.replay.rollouts import Floats, Ints
from rolltape.schema.records import exact_sum

_WHOLE = 2.0**53
"""Sums of whole numbers up to here are exact in any order."""


def mean_of(values: Floats) -> float:
    """The mean of finite `values` [m], at least one. Infinite where no float holds their sum."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low
    mean = exact_sum(values.tolist()) / len(values)
    return min(max(mean, low), high) if math.isfinite(mean) else mean


def deviation_of(values: Floats, mean: float) -> float:
    """The standard deviation of finite `values` [m] about their `mean`, of the population."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = (values - mean) ** 2
    return math.sqrt(exact_sum(squares.tolist()) / len(values))


def means_by(group: Ints, values: Floats, size: int) -> tuple[Ints, Floats]:
    """([size] number of values, [size] their mean) by group: `group` [m] of each of the finite `values` [m]. NaN of none."""
    n = np.bincount(group, minlength=size)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if bool((values == np.rint(values)).all()) and float(np.abs(values).sum()) < _WHOLE:
            return n, np.bincount(group, values, minlength=size) / n
    order = np.argsort(group, kind="stable")
    ends, ordered = np.cumsum(n).tolist(), values[order]
    means = [mean_of(ordered[begin:end]) if end > begin else np.nan for begin, end in pairwise([0, *ends])]
    return n, np.array(means, np.float64)
