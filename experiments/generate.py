# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Text from a run.

python -m experiments.generate --run.directory runs/pretrain/tiny --prompt "def main("

Of a run in few bits (experiments.checkpoint convert) too; --cache int4 keeps keys and values in 4.
On another number of devices than in training: --run.mesh.data 1.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import jax
import numpy as np

from experiments.cli import flags as cli
from experiments.cli.process import start_process
from experiments.evaluate import FinishedRunConfig
from jaxmoe.data import DataError
from jaxmoe.execution import ExecutionConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.load import describe_precision, load_run
from jaxmoe.run.samples import continue_rows
from sharding.sequence_parallel import CacheFormat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What to write."""

    run: FinishedRunConfig = FinishedRunConfig()
    """The run."""
    prompt: str = "def "
    """Text to continue."""
    length: int = 300
    """Tokens to write."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most likely token."""
    seed: int = 0
    """Of the sampling."""
    cache: CacheFormat = "compute"
    """Keys and values that are kept: in the compute dtype, or in 8 or 4 bits with scales."""

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length={self.length} must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if not self.prompt:
            raise ValueError("prompt is empty: give at least one character")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.generate"
    config = cli.parse_flags(GenerateConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
    with cli.exit_on_bad_configuration():
        assembly, state, _ = load_run(
            config.run.directory, config.run.step, config.run.mesh, config.cache
        )
        try:
            prompt = assembly.source.encode(config.prompt)
        except DataError as error:
            raise ValueError(f"prompt={config.prompt!r}: {error}") from error
    written = continue_rows(
        assembly.plan.model,
        assembly.source,
        jax.device_get(state.params),
        jax.device_get(state.router_state),
        np.asarray(prompt, np.int32)[None, :],
        config.length,
        temperature=config.temperature,
        seed=config.seed,
        execution=ExecutionConfig(
            precision=PrecisionPolicy(
                weights=assembly.execution.precision.weights, cache=config.cache
            )
        ),
    )
    if quantized := describe_precision(assembly):
        print(quantized)
    print(written)
    return int(cli.ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
