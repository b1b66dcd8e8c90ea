"""Every option of a live run, in one place: the command line, `run_live` and the recorded settings read it here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rolltape.record.secrets import MASK, Secrets
from rolltape.record.writing.store import StoreOptions
from rolltape.replay.tokenizer import vocabulary_size
from rolltape.schema.errors import BadInput
from rolltape.schema.paths import check_name
from rolltape.schema.storage import AnyPath

FSYNC = ("always", "interval", "never")
BRANCH_POLICIES = ("reject", "siblings")


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """What to run, on which engine, how to sample, and what to do with what comes out. Lengths are in tokens."""

    config: str | Path
    """The environment: Verifiers' EnvConfig as TOML."""
    run: str | AnyPath
    """The run: its folder, or a URL such as s3://bucket/run."""
    engine: str
    """Address of an SGLang server or router."""
    model: str
    """The engine's model: an id or a checkpoint folder."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; None takes the model's."""

    rollouts: int = 4
    """Rollouts per task."""
    groups: int = 4
    """Tasks per training step; evaluation takes every task."""
    steps: int = 1
    """Steps to record; with `resume`, so many more."""
    resume: bool = False
    """Go on with the run that is in the folder, after its last step."""
    concurrency: int = 64
    """Rollouts at once."""
    eval: bool = False
    """Record evaluation steps instead of training steps."""
    eval_name: str | None = None
    """Name of the evaluation; None takes the taskset's."""
    shuffle: bool = False
    seed: int = 0
    """Of the shuffle, and of the rollouts where `deterministic` is set."""
    deterministic: bool = False
    """Send a sampling seed per rollout, for engines that sample deterministically."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response: int | None = 4096
    """Sampled tokens per model turn."""
    max_context: int | None = None
    """Prompt and reply together."""
    max_prompt: int | None = None
    """The first prompt of a rollout."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    renderer: str | None = None
    """A renderer's name; None chooses by the model."""
    enable_thinking: bool | None = None
    thinking_retention: str | None = None
    renderer_pool: int | None = None
    """Tokenizers loaded; None takes one per core, within bounds."""

    branch_policy: str = "reject"
    min_group_size: int | None = None

    writer: str = "main"
    """Name of this writer, one of its own for each process that records into the folder."""
    state: str | Path | None = None
    """Of a run in an object store: the folder on this machine below which its journal is kept; None takes ROLLTAPE_STATE."""
    journal: bool = StoreOptions.journal
    """Whether a trace is written when its try ends; without, it is kept in memory until its step ends."""
    fsync: str = StoreOptions.fsync
    """When the journal is synced to disk: `always`, `interval` or `never`."""
    fsync_seconds: float = StoreOptions.fsync_seconds
    """The interval."""
    ack_seconds: float = StoreOptions.ack_seconds
    """Longest wait for a trace to reach the journal before its Sample goes on without."""
    commit_seconds: float = StoreOptions.commit_seconds
    """Longest wait for a step to be committed before the next begins."""
    queue_bytes: int = StoreOptions.queue_bytes
    """Memory for what cannot be written at the moment; beyond it traces are lost."""
    mask: tuple[str, ...] = ()
    """Regular expressions over names and texts that are masked beside the built-in rules."""
    strict: bool = False
    """Stop at the first finding or recording failure instead of counting it."""

    request_attempts: int = 6
    """Tries of one engine request, the first included."""
    retry_seconds: float = 60.0
    """No new try of an engine request starts later than this."""
    request_seconds: float | None = 1800.0
    """Wait for one reply; None waits for ever."""
    rollout_retries: int | None = None
    """Retries of a whole rollout; None takes the environment's `retries.rollout.max_retries`."""
    max_failed_groups: int = 16
    """Task groups that may fail one after the other before the run gives up."""
    routing_key: bool = False
    """Send the trace id as a routing key, for routers that keep a rollout on one worker."""
    lora: str | None = None
    """Adapter to sample with."""

    def __post_init__(self) -> None:
        """Raise BadInput for values no run can have."""
        for name in ("rollouts", "groups", "steps", "concurrency", "request_attempts", "max_failed_groups"):
            self._at_least(name, 1)
        for name in ("fsync_seconds", "ack_seconds", "commit_seconds"):
            self._at_least(name, 0)
        self._at_least("queue_bytes", 1)
        check_name(self.writer, "writer")
        if self.fsync not in FSYNC:
            raise BadInput(f"fsync is {self.fsync!r}; expected {', '.join(FSYNC[:-1])} or {FSYNC[-1]}.")
        Secrets(self.mask)
        for name in ("max_response", "max_context", "max_prompt", "min_group_size", "renderer_pool"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        if self.rollout_retries is not None:
            self._at_least("rollout_retries", 0)
        if self.branch_policy not in BRANCH_POLICIES:
            raise BadInput(f"branch_policy is {self.branch_policy!r}; expected {' or '.join(BRANCH_POLICIES)}.")
        if self.min_group_size is not None and self.min_group_size > self.rollouts:
            raise BadInput(
                f"min_group_size is {self.min_group_size}, a task has {self.rollouts} rollouts: no group reaches it."
            )
        if self.eval_name is not None and not self.eval:
            raise BadInput(
                f"eval_name is {self.eval_name!r}, but training is recorded; set eval (--eval), or leave it out."
            )
        if self.temperature < 0:
            raise BadInput(f"temperature is {self.temperature}; expected 0 or more.")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p}; expected above 0 and at most 1.")
        if self.max_response is None and self.max_context is None:
            raise BadInput("Nothing limits the length of a reply; set max_response (--max-response) or max_context.")
        if not self.engine.startswith(("http://", "https://")):
            raise BadInput(f"The engine is {self.engine!r}; expected an address such as http://127.0.0.1:30000.")

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise BadInput(f"{name} is {getattr(self, name)}; expected {least} or more.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in fields(cls))

    def sampling(self) -> dict[str, Any]:
        """The sampling settings as Verifiers' SamplingConfig takes them; recorded with every trace."""
        settings: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.max_response is not None:
            settings["max_tokens"] = self.max_response
        return settings

    def store(self) -> StoreOptions:
        """How the recorder keeps rows until their step is committed."""
        names = ("journal", "fsync", "fsync_seconds", "ack_seconds", "commit_seconds", "queue_bytes")
        return StoreOptions(**{name: getattr(self, name) for name in names})

    def conversion(self) -> dict[str, Any]:
        """The options that decide what a trace is converted into."""
        return {
            "branch_policy": self.branch_policy,
            "min_group_size": self.min_group_size,
            "strict": self.strict,
            "vocab_size": vocabulary_size(self.model, self.tokenizer or self.model),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, one per option. Patterns of secrets are left out: they may spell one."""
        paths = {"config": str(self.config), "run": str(self.run), "state": self.state and str(self.state)}
        values = {**{f.name: getattr(self, f.name) for f in fields(self)}, **paths}
        return values | {
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "mask": [MASK] * len(self.mask),
        }
