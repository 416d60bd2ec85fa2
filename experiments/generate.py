# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates text from a run.

python -m experiments.generate --run.directory runs/pretrain/tiny --prompt "def main("

Works for quantised runs too (experiments.checkpoint convert); `--cache int4` keeps keys and values
in 4 bits. `--run.mesh.data 1` loads the run on another number of devices than the training used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.process import start_process
from experiments.evaluate import FinishedRunConfig
from jaxmoe.errors import ConfigurationError
from jaxmoe.run import Run
from jaxmoe.run.reporting.samples import check_sampling
from sharding.sequence_parallel import CacheFormat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Run to sample from, and how."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run and checkpoint."""
    prompt: str = "def "
    """Text to continue."""
    length: int = 300
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the most likely token."""
    seed: int = 0
    """Seed of the sampling."""
    cache: CacheFormat = "compute"
    """Format of cached keys and values: the compute dtype, or 8 or 4 bits with scales."""

    def __post_init__(self):
        check_sampling(self.prompt, self.length, self.temperature)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "python -m experiments.generate"
    config = flags.parse_flags(GenerateConfig(), argv, prog, __doc__ or "")
    with flags.exit_on_bad_configuration():
        start_process()
    with flags.exit_on_bad_configuration(ConfigurationError):
        run = Run.open(config.run.directory, mesh=config.run.mesh, cache=config.cache)
        sample = run.generate(
            config.prompt,
            length=config.length,
            temperature=config.temperature,
            seed=config.seed,
            step=config.run.step,
        )
    if sample.precision:
        print(sample.precision)
    print(sample)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    run_command(main)
