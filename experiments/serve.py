# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a run or a Hugging Face model over HTTP, as OpenAI's clients speak (extra `serve`).

    jaxmoe serve runs/pretrain/tiny --port 8000
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def main("}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

    jaxmoe serve --engine.instances 2 engine.dispatch:llumnix      # two instances

Routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/models, /tokenize,
/detokenize, /health, /metrics (Prometheus), /reshard, and / (a page to chat with and to watch the
load). Several instances answer behind one address, and /metrics has the numbers of each.

    jaxmoe serve --engine.instances 2 engine.scaling:slo --engine.scaling.tpot 0.1
    jaxmoe serve engine.scaling:elastic_experts --engine.scaling.tpot 0.1
    curl http://127.0.0.1:8000/reshard -d '{"expert": 4}'

let instances join and drain by the rate of requests, spread the experts over twice or half the
devices, and do that at once; answers go on. `engine.retention:swap_groups` keeps the pages of
preempted requests in host memory instead of computing them again.

    jaxmoe serve BASE --adapters sql=RUN1 chat=RUN2

serves a model and LoRA runs of it together: a request names `BASE:sql`, `BASE:chat` or the model.

A run trained by masked diffusion fills in all tokens of an answer at once, in any order; they are
sent from left to right. `--engine.steps_per_token 0.5` fills in two at a step on average.

Until the first request can be answered, the port answers 503.

With the environment variable JAXMOE_API_KEY every request must bring that key. Ctrl-C, SIGTERM or
a terminal that is closed (SIGHUP) lets the answers end that have begun, for at most `--drain`
seconds; a second signal, other than SIGHUP, ends the server at once.

Exit codes: 0 after draining; 2 for a configuration that cannot be served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
from collections.abc import Callable, Sequence

import jax

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.following import client, say_next
from experiments.cli.model import RUN, value_of, with_about, with_model
from experiments.cli.output import announce, write
from experiments.cli.process import end_at_once, start_process
from experiments.evaluate import FinishedRunConfig
from jaxmoe.catalog import choice
from jaxmoe.checkpoint.huggingface.hub import model_directory
from jaxmoe.data.chat import TemplateName
from jaxmoe.optional import require
from jaxmoe.run.provenance.saved import Ends
from jaxmoe.run.serving import (
    SamplingDefaults,
    ServedCheckpoint,
    ServerConfig,
    default_server,
)
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.app import Endpoint, EndpointConfig
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.server import (
    StartingPort,
    close_connections,
    make_server,
    tell_accept_errors,
)
from jaxmoe.serve.metrics import EngineMetrics
from jaxmoe.serve.requests import PoolingType

_KEY = "JAXMOE_API_KEY"
_FIRST_FIELDS = (
    "run.directory",
    "host",
    "port",
    "name",
    "adapters",
    "template",
    "engine.max_sequences",
    "engine.max_length",
    "engine.pages",
    "engine.instances",
)
"""Fields that `--help` shows first."""
_LAST = 0.5
"""Seconds for the last events to leave, after the answers have ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Model to serve, and where."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run and checkpoint; its mesh has the axes tensor and expert, or is one device."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this host, which needs JAXMOE_API_KEY."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    name: str | None = None
    """Name of the model in requests; that of the run when None."""
    adapters: tuple[str, ...] = ()
    """LoRA runs of the model, NAME=DIRECTORY each; requests name them as model:NAME."""
    template: TemplateName | None = None
    """How turns of a chat are written; that of the training data, or of the tokenizer, when
    None."""
    eos: Ends = "auto"
    """Whether the end-of-text token ends a text: stop, ignore, or auto, which stops for Hugging
    Face models, runs that began from one, and those imported without data of their own."""
    sampling: SamplingDefaults = "model"
    """Defaults of the sampling: those of the model's generation_config.json, or plain for those of
    OpenAI's API."""
    tool_parser: str = "auto"
    """How calls of tools are written: hermes, mistral,
    llama3_json, deepseek_v3, deepseek_v31, none, or auto by the marks of the chat template."""
    reasoning_parser: str = "none"
    """How reasoning is told apart: think_tags or none."""
    pooling_type: PoolingType = "last"
    """Embeddings: the last hidden state, or the mean of all."""
    engine: ServerConfig = dataclasses.field(default_factory=default_server)
    """Sizes of the engine."""
    has_priority: bool = False
    """Whether requests may go before others by `priority` where JAXMOE_API_KEY is not set."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may ask, such as http://localhost:3000; * for all."""
    max_body: int = 2**20
    """Bytes of a request at most."""
    drain: float = 30.0
    """Seconds for the answers that have begun, after a signal."""
    every: float = 10.0
    """Seconds between two lines about the load; 0 prints none."""
    to: str | None = None
    """Directory for summary.json, written at the end; none when None."""

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port} must be from 0 to 65535")
        for field in ("drain", "every"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}={getattr(self, field)} must be 0 or more")
        self.adapter_directories()
        if self.tool_parser not in ("auto", "none"):
            choice("tool_parser", self.tool_parser)
        choice("reasoning_parser", self.reasoning_parser)
        if self.max_body < 1:
            raise ValueError(f"max_body={self.max_body} must be at least 1")

    def adapter_directories(self) -> dict[str, str]:
        """Return the directories of the adapters by name.

        Raises:
            ValueError: One has no name or no directory, or a name is given twice.
        """
        directories = dict[str, str]()
        for text in self.adapters:
            name, _, directory = text.partition("=")
            if not re.fullmatch(r"[\w.-]+", name) or not directory or name in directories:
                raise ValueError(
                    f"adapters={text} must be NAME=DIRECTORY, each name once: sql=runs/finetune/sql"
                )
            directories[name] = directory
        return directories


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe serve"
    arguments = with_model(argv)
    directory = value_of(RUN, arguments) or FinishedRunConfig().directory
    start = ServeConfig(run=FinishedRunConfig(directory=directory))  # as --help shows it
    config = flags.parse_flags(
        start, arguments, prog, with_about(__doc__), first_fields=_FIRST_FIELDS
    )
    announce(f"serving {config.run.directory}: reading the checkpoint, compiling ...")
    with flags.exit_on_bad_configuration():
        for module in ("starlette", "uvicorn", "prometheus_client"):
            require(module, "serve")
        listening = _listen(config)
        start_process()
    with listening:
        with flags.exit_on_bad_configuration(), StartingPort(listening):
            served = _open(config)
        with served.engine:
            write(_header(config, served))
            endpoint = Endpoint(
                served,
                EndpointConfig(
                    max_body=config.max_body,
                    origins=config.origins,
                    key=os.environ.get(_KEY, ""),
                ),
            )
            asyncio.run(_serve(config, endpoint, served, listening))
    if config.to is not None:
        _write_summary(pathlib.Path(config.to), served.engine)
    return int(ExitCode.DONE)


def _listen(config: ServeConfig) -> socket.socket:
    """Return a socket that listens; before the model is read, so that a taken port costs nothing.

    Raises:
        ValueError: The address cannot be used, or is open to others without a key.
    """
    if config.host not in ("127.0.0.1", "localhost", "::1") and not os.environ.get(_KEY):
        raise ValueError(
            f"host={config.host} is open to other hosts: set a key in the environment variable"
            f" {_KEY}, or listen on 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise ValueError(
            f"host={config.host} port={config.port} cannot be listened on"
            f" ({error.strerror or error}): choose another port, or 0 for a free one"
        ) from error


def _open(config: ServeConfig) -> Served:
    """Read the checkpoint and start the engine."""
    path = model_directory(config.run.directory, "run.directory")
    if jax.process_count() > 1:
        raise ValueError("serve runs in one process: start it on one host")
    checkpoint = ServedCheckpoint(
        path=path,
        step=config.run.step,
        mesh=config.run.mesh,
        initial=config.run.initial,
        name=config.name,
        template=config.template,
        eos=config.eos,
        sampling=config.sampling,
        adapters=config.adapter_directories(),
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        pooling_type=config.pooling_type,
    )
    served = config.engine.open(checkpoint)
    has_key = bool(os.environ.get(_KEY))
    return dataclasses.replace(served, takes_priority=has_key or config.has_priority)


def _header(config: ServeConfig, served: Served) -> str:
    talks = "chat and completions" if served.chat else "completions (no chat template)"
    return (
        f"jaxmoe serve  {served.name}  {config.run.directory} on {jax.device_count()} x"
        f" {jax.default_backend()}\n"
        f"{served.engine.config.describe(served.engine.facts)}\n"
        f"memory   {served.pool_bytes / 1e6:.4g} MB of pages in all; compiled in"
        f" {served.compile_seconds:.0f} s\n"
        f"{config.engine.describe()}"
        f"{_calls(config, served)}"
        f"routes   {talks}"
    )


def _calls(config: ServeConfig, served: Served) -> str:
    """Return a line about calls and reasoning; empty without conversations."""
    if served.chat is None:
        return ""
    parser = served.tool_parser
    if parser is None:
        why = "" if config.tool_parser == "none" else " (no parser fits the chat template)"
        calls = f"none{why}"
    else:
        why = " (by the chat template)" if config.tool_parser == "auto" else ""
        calls = f"{parser.name}{why}"
    return f"tools    {calls}; reasoning {served.reasoning.name}\n"


async def _serve(
    config: ServeConfig, endpoint: Endpoint, served: Served, listening: socket.socket
) -> None:
    """Answer until a signal has drained the server."""
    server = make_server(endpoint)
    loop = asyncio.get_running_loop()
    drains = list[asyncio.Task[None]]()
    tell_accept_errors(loop)

    async def drain() -> None:
        end = loop.time() + config.drain
        write(f"draining: at most {config.drain:g} s for the answers that have begun")
        if not await endpoint.drain(config.drain):
            write("ended before all answers were whole")
            served.engine.cancel_all()
        server.should_exit = True
        await asyncio.sleep(max(end - loop.time(), _LAST))
        write("ended before all clients had read their answers")
        close_connections(server)

    heed_signals(loop, lambda: drains.append(asyncio.create_task(drain())))
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    write(f"ready at {address}")
    say_next(client(address, talks=served.chat is not None, reads_text=_reads_text(served)))
    watch = asyncio.create_task(_watch(served, config.every))
    try:
        await server.serve(sockets=[listening])
    finally:
        watch.cancel()


def _reads_text(served: Served) -> bool:
    """Return whether the tokens of a model stand for text, and not for numbers."""
    try:
        served.codec.encode("def main(")
    except ValueError:
        return False
    return True


def heed_signals(loop: asyncio.AbstractEventLoop, drain: Callable[[], object]) -> None:
    """Drain at the first signal, and end the process at a second one.

    SIGHUP comes when a terminal is closed, often twice: it is never the second signal, and a server
    that was started to ignore it (nohup) still does.

    Args:
        loop: Loop of the server.
        drain: Called once, in the loop.
    """
    seen = list[int]()

    def stop(number: int) -> None:
        seen.append(number)
        if len(seen) == 1:
            drain()
        elif number != signal.SIGHUP:
            end_at_once(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, stop, number)


async def _watch(served: Served, every: float) -> None:
    """Print a line about the load from time to time, while there is any."""
    steps = 0
    while every:
        await asyncio.sleep(every)
        metrics = served.engine.metrics
        if metrics.num_steps != steps:
            write(_line(metrics))
        steps = metrics.num_steps


def _line(metrics: EngineMetrics) -> str:
    def middle(values: tuple[float, ...]) -> str:
        return f"{sorted(values)[len(values) // 2]:.3f}" if values else "-"

    return (
        f"running={metrics.num_running} waiting={metrics.num_waiting}"
        f" pages={metrics.page_use:.0%} hits={metrics.hit_rate:.0%}"
        f" tokens/s={metrics.tokens_per_second:.0f}"
        f" ttft_p50={middle(metrics.ttft)} tpot_p50={middle(metrics.tpot)}"
    )


def _write_summary(directory: pathlib.Path, engine: Engine) -> None:
    values = {"status": "done"} | dataclasses.asdict(engine.metrics)
    values["instances"] = [dataclasses.asdict(instance) for instance in engine.instance_metrics]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
