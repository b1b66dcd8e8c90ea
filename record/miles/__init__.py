"""rolltape under Miles: the rollout function, and the names Miles users know."""

from rolltape.record.miles.hooks import check_reward_spread
from rolltape.record.miles.http import MilesSGLangTransport
from rolltape.record.miles.options import MilesOptions
from rolltape.record.miles.parts import RolloutsStopped
from rolltape.record.miles.rollout import VerifiersRolloutFn, generate_rollout
from rolltape.record.miles.samples import trace_to_sample, trace_to_samples

__all__ = [
    "MilesOptions",
    "MilesSGLangTransport",
    "RolloutsStopped",
    "VerifiersRolloutFn",
    "check_reward_spread",
    "generate_rollout",
    "trace_to_sample",
    "trace_to_samples",
]
