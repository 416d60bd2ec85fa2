# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Held-out loss of a run, the same number that training logged.

    python -m experiments.evaluate --run.directory runs/pretrain/tiny [--routing detailed]

With --cache int4 the keys and values are rounded as those of a cache in 4 bits would be, and the
loss is that of decoding with one. On another number of devices than in training: --run.mesh.data 1.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

import jax

from experiments.cli import flags as cli
from experiments.cli.process import start_process
from jaxmoe.run import router_details
from jaxmoe.run.load import describe_precision, load_run
from jaxmoe.training.evaluate import evaluate, make_eval_step
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import CacheFormat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRunConfig:
    """Which run, at which step."""

    directory: str = "runs/pretrain/tiny"
    """Run directory."""
    step: int | None = None
    """Of the checkpoint; the newest when None."""
    mesh: MeshConfig | None = None
    """Devices to use; as in training when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What to evaluate."""

    run: FinishedRunConfig = FinishedRunConfig()
    """The run."""
    routing: Literal["none", "detailed"] = "none"
    """Whether to print, layer by layer, what the routers do with the held-out tokens."""
    cache: CacheFormat = "compute"
    """What keys and values are rounded to; compute: they are not."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.evaluate"
    config = cli.parse_flags(EvaluateConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
    with cli.exit_on_bad_configuration():
        assembly, state, step = load_run(
            config.run.directory, config.run.step, config.run.mesh, config.cache
        )
    with jax.set_mesh(assembly.mesh):
        eval_step = make_eval_step(
            assembly.plan.model,
            execution=assembly.execution,
            objective=assembly.plan.config.training.objective,
        )
        result = evaluate(eval_step, state.params, state.router_state, assembly.held_out())
        details = None
        if config.routing == "detailed":
            details = router_details.router_details(assembly, state)
    bytes_per_token = assembly.source.bytes_per_token
    per_byte = ""
    if bytes_per_token is not None:
        per_byte = f" eval/bits_per_byte={result.bits_per_token / bytes_per_token!r}"
    quantized = describe_precision(assembly)
    print(
        f"step={step} tokens={result.num_tokens}"
        f" eval/bits_per_token={result.bits_per_token!r}{per_byte}"
        + (f" {quantized}" if quantized else "")
    )
    if details is not None:
        print(router_details.in_words(details))
    return int(cli.ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
