"""`rolltape engine`: the demo engine by itself."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.record.engine.faults import Fault, Faults
from rolltape.replay.tokenizer import HELP, file_of, located
from rolltape.schema.errors import install

if TYPE_CHECKING:
    from rolltape.record.engine.server import DemoEngine

_FAULT_HELP = (
    "Make something go wrong: NAME=PROBABILITY or NAME=PROBABILITY:TIMES; may be repeated. "
    f"Names: {', '.join(fault.label for fault in Fault)}."
)


def engine(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 30000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"{HELP}, a byte-level one; without it, the one made in code.")
    ] = None,
    write_tokenizer: Annotated[
        Path | None, typer.Option(help="Write the tokenizer made in code into this folder first, and use it.")
    ] = None,
    fault: Annotated[list[str] | None, typer.Option(help=_FAULT_HELP)] = None,
    latency: Annotated[float, typer.Option(min=0, help="Seconds that the latency fault waits.")] = 0.05,
    jitter: Annotated[float, typer.Option(min=0, help="Up to so many seconds are added to the latency.")] = 0.0,
) -> None:
    """Start a small engine that speaks SGLang's /generate and knows the demo's tasks, until Ctrl-C.

    It samples ids from a known distribution and tells their true log-probs; with --fault it fails as real ones do.
    For example:

        rolltape engine
        rolltape engine --port 0 --fault http_503=0.1 --fault latency=0.5
    """
    try:
        from rolltape.record.demo.policy import DemoPolicy
        from rolltape.record.engine import tokenizer as made
        from rolltape.record.engine.server import DemoEngine
    except ImportError as error:
        typer.echo(f"The engine needs {error.name}, which is not installed: {install('live')}.", err=True)
        raise typer.Exit(2) from error

    folder = None if tokenizer is None else Path(file_of(located(tokenizer))).parent
    if write_tokenizer is not None:
        folder = made.write_tokenizer(write_tokenizer)
    faults = Faults.of(fault or [], latency=latency, jitter=jitter, seed=seed)
    server = DemoEngine(tokenizer_dir=folder, seed=seed, faults=faults, host=host, port=port, policy=DemoPolicy())
    try:
        asyncio.run(_serve(server))
    except OSError as error:
        typer.echo(f"{host}:{port} cannot be listened on: {error.strerror or error}. Choose another --port.", err=True)
        raise typer.Exit(2) from error


async def _serve(server: DemoEngine) -> None:
    """Serve until Ctrl-C or a termination signal."""
    ended = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, ended.set)
    async with server:
        body = {
            "input_ids": server.model.vocabulary.encode("How many"),
            "sampling_params": {"max_new_tokens": 8},
            "return_logprob": True,
        }
        typer.echo(f"Demo engine at {server.url}; Ctrl-C ends it. Try:")
        typer.echo(f"  curl {server.url}/generate -d '{json.dumps(body)}'")
        await ended.wait()
    typer.echo(f"Ended after {server.requests['/generate']} requests to /generate.")
