"""The rollout function that Miles makes and calls: `VerifiersRolloutFn`, and the same as a function.

    --rollout-function-path rolltape.record.miles.VerifiersRolloutFn --disable-rollout-global-dataset

or `.generate_rollout` where Miles wants a function (MILES_USE_LEGACY_ROLLOUT_V1=1, or no
MILES_EXPERIMENTAL_ROLLOUT_REFACTOR before that). VERIFIERS_CONFIG, ROLLTAPE_RUN and ROLLTAPE_CONFIG reach the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from rolltape.record.client import DEFAULT_POOL, RolloutClient
from rolltape.record.config import load_config, load_environment, load_tasks
from rolltape.record.inprocess.harness import close_client
from rolltape.record.live import calm_collector
from rolltape.record.miles.evaluation import EvalStep
from rolltape.record.miles.hooks import Hooks
from rolltape.record.miles.http import Gate, MilesSGLangTransport
from rolltape.record.miles.options import MilesOptions, eval_args
from rolltape.record.miles.parts import Parts
from rolltape.record.miles.room import Serving, at_exit, counters_before, recorder_for, repeated_eval, tell_memory
from rolltape.record.miles.training import TrainStep
from rolltape.record.recorder import Recorder
from rolltape.record.step import Counters
from rolltape.record.transport import RetryPolicy
from rolltape.record.versions import check_live
from rolltape.replay.miles import ROLLOUT_BASE
from rolltape.schema.errors import BadInput

logger = logging.getLogger(__name__)


class VerifiersRolloutFn(ROLLOUT_BASE):
    """Runs and records Verifiers episodes for Miles, training and evaluation.

    Made before the engines start. Raises BadInput for what cannot work, naming the option, and UnsupportedVersion or
    MissingExtra for packages. A call gives Miles' RolloutFnTrainOutput or RolloutFnEvalOutput.
    """

    def __init__(self, input: Any) -> None:
        versions = check_live()
        self.args = input.args
        self.data_source = getattr(input, "data_source", None)
        self.options = MilesOptions.from_args(input.args)
        environment = load_environment(load_config(self.options.config), self.options.config)
        hooks = Hooks(self.options)
        client, eval_client = _clients(self.options)
        self.parts = Parts(
            options=self.options,
            environment=environment,
            tasks=_tasks(environment, self.options),
            hooks=hooks,
            client=client,
            eval_client=eval_client,
            data_source=self.data_source,
            versions=versions,
        )
        self._serving = Serving(environment)
        self._counters: Counters | None = None
        self._next_step: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        tell_memory(self.options, environment)

    async def __call__(self, input: Any) -> Any:
        """Miles' output for one rollout id."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop
            at_exit(loop, self.close)
        await _configure_dumper(self.args)
        await self._serving.ready()
        await self.parts.warm()
        return await (self._evaluate(input) if input.evaluation else self._train(input.rollout_id))

    def save(self, rollout_id: int | None = None) -> None:
        """Nothing to save beside the checkpoint: every recorded step holds the counters to go on from."""

    def load(self, rollout_id: int | None = None) -> None:  # noqa: ARG002
        """Go on from what was recorded: the next call restores the counters of the step before it."""
        self._counters = None

    async def close(self) -> None:
        """End the environment's servers and the connections; the next call starts them again."""
        await self._serving.close()
        for client in (self.parts.client, self.parts.eval_client):
            await client.transport.close()
        await close_client()

    async def _train(self, step: int) -> Any:
        if self._counters is None or step != self._next_step:
            self._counters = await asyncio.to_thread(counters_before, self.options, step)
        recorder = await self._recorder("train", step, None)
        counters, self._counters = self._counters, None
        with calm_collector() as collect:
            output = await TrainStep(self.parts, recorder, step, counters).run()
            collect()
        self._counters, self._next_step = counters, step + 1
        return output

    async def _evaluate(self, input: Any) -> Any:
        if getattr(self.args, "group_rm", False):
            raise BadInput("--group-rm scores training only; an evaluation cannot be run with it.")
        if getattr(input, "generate_state", None) is not None or getattr(input, "hf_dir", None) is not None:
            raise BadInput("--eval-num-gpus (an evaluation on engines of its own) is not supported; leave it away.")
        step = input.rollout_id
        name = repeated_eval(self.options, self.options.own.get("eval_name") or self.parts.taskset, step)
        return await EvalStep(self.parts, await self._recorder("eval", step, name), step, name).run()

    async def _recorder(self, split: str, step: int, eval_name: str | None) -> Recorder:
        parts = self.parts
        recorder = await asyncio.to_thread(
            recorder_for, self.options, parts.taskset, split, step, eval_name, parts.versions
        )
        recorder.know(parts.environment.config)
        return recorder


def _tasks(environment: Any, options: MilesOptions) -> list[Any]:
    """The tasks in the order of the run. Raises BadInput where rewards compare rollouts and there is one per task."""
    from verifiers.v1.decorators import discover_decorated

    tasks = load_tasks(environment, rollouts=2)
    if getattr(options.args, "rollout_shuffle", False):
        random.Random(options.args.rollout_seed).shuffle(tasks)
    names = {function.__name__ for task in tasks for function in discover_decorated(task, "group_reward")}
    if names:
        options.check_group_rewards(sorted(names))
    return tasks


def _clients(options: MilesOptions) -> tuple[RolloutClient, RolloutClient]:
    """The clients of training and evaluation. They share the places at the engines, and differ in their limits."""
    rollouts, gate = options.rollouts(evaluation=False), Gate(options.capacity)
    retry = RetryPolicy(attempts=rollouts.request_attempts, seconds=rollouts.retry_seconds)

    def client(args: Namespace) -> RolloutClient:
        transport = MilesSGLangTransport(
            args,
            router_args=options.args,
            retry=retry,
            request_seconds=rollouts.request_seconds,
            gate=gate,
            http=options.http,
        )
        return RolloutClient(
            transport,
            model=rollouts.model,
            tokenizer=rollouts.tokenizer,
            renderer=options.renderer,
            pool_size=rollouts.renderer_pool or DEFAULT_POOL,
        )

    return client(options.args), client(eval_args(options.args))


async def _configure_dumper(args: Namespace) -> None:
    """Miles' switch for SGLang's dumper, where both can be imported."""
    with contextlib.suppress(ImportError):
        from miles.utils import dumper_utils

        await dumper_utils.configure_sglang(args)


_KEPT: list[tuple[Namespace, bool, VerifiersRolloutFn]] = []


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`VerifiersRolloutFn` as a function: one is kept for each arguments object, for training and for evaluation."""
    from miles.utils.async_utils import run

    function = next((kept for known, mode, kept in _KEPT if known is args and mode == evaluation), None)
    if function is None:
        function = VerifiersRolloutFn(SimpleNamespace(args=args, data_source=data_source))
        _KEPT.append((args, evaluation, function))
    return run(function(SimpleNamespace(rollout_id=rollout_id, evaluation=evaluation)))
