"""What the steps of one rollout function share, and how the tries of a step are judged."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltape.record.client import RolloutClient
from rolltape.record.episode import EpisodeRunner, GroupRun, StepPlace, Stop, Try
from rolltape.record.miles.hooks import Hooks
from rolltape.record.miles.options import MilesOptions
from rolltape.record.progress import Quiet
from rolltape.record.recorder import Recorder
from rolltape.record.step import Fate
from rolltape.schema.errors import RolltapeError
from rolltape.schema.records import Outcome


class RolloutsStopped(RolltapeError, RuntimeError):
    """Rollouts that cannot succeed: the message says which error came last."""


@dataclass
class Parts:
    """Everything a step needs, made once."""

    options: MilesOptions
    environment: Any
    tasks: list[Any]
    hooks: Hooks
    client: RolloutClient
    eval_client: RolloutClient
    data_source: Any
    versions: dict[str, str]
    semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=dict)

    @property
    def taskset(self) -> str:
        """The environment's id."""
        return str(self.environment.config.env_id)

    def runner(self, recorder: Recorder, stop: Stop, *, evaluation: bool) -> EpisodeRunner:
        """What runs the groups of one step. Training and evaluation share the episodes that may run at once."""
        import verifiers.v1 as vf
        from verifiers.v1.clients import ModelContext

        options = self.options.rollouts(evaluation=evaluation)
        client = self.eval_client if evaluation else self.client
        sampling = vf.SamplingConfig.model_validate(options.sampling())
        loop = asyncio.get_running_loop()
        return EpisodeRunner(
            environment=self.environment,
            context=ModelContext(model=options.model, client=client, sampling=sampling),
            transport=client.transport,
            recorder=recorder,
            options=options,
            progress=Quiet(),
            stop=stop,
            semaphore=self.semaphores.setdefault(loop, asyncio.Semaphore(options.concurrency)),
            versions=self.versions,
            renderer=client.settings.to_dict()
            | ({"chat_template": dict(options.chat_template)} if options.chat_template else {}),
        )

    async def warm(self) -> None:
        """Load the tokenizers once, for both clients."""
        await self.client.warm(self.options.rollouts(evaluation=False).chat_template or None)
        self.eval_client._pool = self.client._pool


def fate_of(run: GroupRun, entry: Try, place: StepPlace, *, taken: str | None = None) -> Fate:
    """What became of one recorded try. `taken` says why its group was not handed over, where conversion did not."""
    if entry.retried:
        return "retried", entry.error
    if entry.cancelled:
        return "cancelled", "it still ran when the step had enough"
    if entry.error is not None:
        return "error", entry.error
    if taken is not None:
        return "leftover", taken
    if not run.scored:
        return "incomplete_group", run.failure
    return ("eval", None) if place.split == "eval" else ("emitted", None)


def outcomes_of(fates: Mapping[str, Fate], changes: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
    """The outcome records: what became of each trace, and what hooks changed."""
    return [
        Outcome(trace_id=trace, disposition=fate, reason=reason, **changes.get(trace, {}))
        for trace, (fate, reason) in fates.items()
    ]


@dataclass
class TraceFacts:
    """What metrics count of the traces that ended."""

    rewards: list[float] = field(default_factory=list)
    errors: int = 0
    truncated: int = 0
    turns: int = 0
    traces: int = 0

    def add(self, table: Any) -> None:
        """Count the rows of a table of traces."""
        for row in table.select(["reward", "error_types", "is_truncated", "num_turns"]).to_pylist():
            self.traces += 1
            self.errors += bool(row["error_types"])
            self.truncated += bool(row["is_truncated"])
            self.turns += row["num_turns"] or 0
            if row["reward"] is not None and math.isfinite(row["reward"]):
                self.rewards.append(row["reward"])

    def metrics(self) -> dict[str, float]:
        """Under the names of Miles' own Verifiers adapter."""
        if not self.traces:
            return {}
        return {
            "verifiers/reward_mean": sum(self.rewards) / len(self.rewards) if self.rewards else 0.0,
            "verifiers/error_rate": self.errors / self.traces,
            "verifiers/truncated_rate": self.truncated / self.traces,
            "verifiers/num_turns_mean": self.turns / self.traces,
        }


def recording_metrics(recorder: Recorder) -> dict[str, float]:
    """How recording goes."""
    status = recorder.status
    return {
        "rolltape/not_durable": float(status.not_durable),
        "rolltape/pending_steps": float(status.pending_steps),
        "rolltape/lost_rows": float(status.lost),
    }
