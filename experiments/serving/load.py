# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends a workload to an endpoint over HTTP, and reports latency and goodput.

    jaxmoe serving load --url http://127.0.0.1:8000
    jaxmoe serving load workload:gamma --workload.rate 4 --requests 200 \\
        --slo.ttft 1 --slo.tpot 0.1
    jaxmoe serving load workload:file --workload.path BurstGPT_1.csv

Any endpoint with OpenAI's completions will do; a key comes from JAXMOE_API_KEY. Prompts are random
token ids below `--vocab`, or letters. Later turns of a session repeat the answer of the workload,
not that of the server. Prints requests per second within the SLO, and medians and 99% quantiles:

    ttft         seconds until the first part of the answer
    tpot         mean seconds per further token
    e2e          seconds until the last token

Writes summary.json. Exit codes: 0 done; 2 wrong flags, or no server at the address; 69 no request
was answered.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.studies.study import StudyRunConfig
from jaxmoe.contrib.serving_lab.client import Client
from jaxmoe.contrib.serving_lab.load import LoadReport, report_load, send_load
from jaxmoe.contrib.serving_lab.simulation import Workload
from jaxmoe.contrib.serving_lab.simulation.workload import GammaConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.serve.requests import LatencyObjective

_KEY = "JAXMOE_API_KEY"
_MAX_LENGTH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Config of `serving load`."""

    run: StudyRunConfig = StudyRunConfig()
    """Run directory and name."""
    url: str = "http://127.0.0.1:8000"
    """Address of the server, with or without /v1."""
    model: str | None = None
    """Name of the model; the first that the server lists when None."""
    workload: Workload = GammaConfig()
    """Requests over time."""
    requests: int | None = None
    """Number of requests; that of the workload when None."""
    slo: LatencyObjective = LatencyObjective(ttft=1.0, tpot=0.1)
    """Promised latency."""
    vocab: int = 256
    """Prompts are token ids below this number; 0 sends text, a letter for each token."""
    max_length: int | None = None
    """Tokens of a request at most, longer ones are cut; what the server tells, or 2048, when
    None."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    connections: int = 256
    """Requests in flight at most; further ones wait, and their waiting counts."""
    timeout: float = 600.0
    """Seconds without a byte after which a request has failed."""

    def __post_init__(self) -> None:
        if self.vocab < 0 or self.vocab == 1:
            raise ValueError(f"vocab={self.vocab} must be 0 (text) or at least 2")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"requests={self.requests} must be at least 1")
        if self.max_length is not None and self.max_length < 3:
            raise ValueError(f"max_length={self.max_length} must be at least 3")
        if self.connections < 1:
            raise ValueError(f"connections={self.connections} must be at least 1")
        for field in ("timeout", "slo.ttft", "slo.tpot", "slo.deadline"):
            group, _, name = field.rpartition(".")
            value = getattr(self.slo if group else self, name)
            if not value > 0:
                raise ValueError(f"{field}={value} must be more than 0 seconds")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 or more")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe serving load"
    config = cli.parse_flags(LoadConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process(needs_devices=False)
        directory = RunDirectory(
            config.run.directory or f"runs/serving/{config.run.name or 'load'}"
        )
        directory.check_free_of_runs()
        client = Client(config.url, key=os.environ.get(_KEY, ""), timeout=config.timeout)
        model = client.model()
        name = config.model or str(model.get("id", ""))
        workload = config.workload
        if config.requests is not None:
            workload = dataclasses.replace(workload, requests=config.requests)
        length = config.max_length or model.get("max_model_len")
        arrivals = workload.arrivals(
            config.slo, length if isinstance(length, int) and length > 2 else _MAX_LENGTH
        )
    if not arrivals:
        cli.fail(f"max_length={length} leaves no request of the workload: shorten its prompts")
    say(f"{len(arrivals)} requests of workload {workload.name} to {name} at {config.url}")
    started = time.monotonic()
    fields = {"model": name, "temperature": config.temperature}
    sent = send_load(client, arrivals, fields, vocab=config.vocab, connections=config.connections)
    report = report_load(sent)
    with cli.exit_on_bad_configuration():
        directory.write_summary(
            {"status": "done" if report.measures else "failed"}
            | {"url": config.url, "model": name, "workload": dataclasses.asdict(workload)}
            | dataclasses.asdict(report)
            | {"wall_seconds": time.monotonic() - started}
        )
    say("\n".join(lines(report)))
    return int(cli.ExitCode.DONE if report.measures else cli.ExitCode.LOST)


def lines(report: LoadReport) -> list[str]:
    """Return what is printed on a run.

    Args:
        report: Its numbers.
    """
    text_lines = [f"{report.requests} requests, {report.failed} failed"]
    if (got := report.measures) is not None:
        text_lines[0] += (
            f", {got.seconds:.1f} s   goodput {got.goodput:.2f}/s of"
            f" {got.finished / got.seconds:.2f}/s ({got.within:.1%} within SLO)"
        )
        share = report.cached_tokens / max(report.prompt_tokens, 1)
        text_lines += [
            f"ttft p50 {got.ttft_p50:.3f} p99 {got.ttft_p99:.3f}   tpot p50 {got.tpot_p50:.4f} p99"
            f" {got.tpot_p99:.4f}   e2e p50 {got.total_p50:.2f} p99 {got.total_p99:.2f}",
            f"{report.prompt_tokens} prompt tokens ({share:.0%} from cache),"
            f" {report.written_tokens} written, {got.tokens_per_second:.0f} tokens/s",
        ]
    text_lines += [f"failed {number} x: {reason}" for reason, number in report.failures.items()]
    return text_lines
