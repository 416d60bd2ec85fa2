# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the held-out loss of a run, bitwise the number that training logged.

    jaxmoe evaluate runs/pretrain/tiny [--routing detailed]

    jaxmoe evaluate OLMoE-1B-7B-0924 --data.path 'docs/**/*.md'

`--data.path` evaluates on other text than the run's own, in its tokens; a Hugging Face model has
no data of its own. `--cache int4` rounds keys and values like a 4-bit cache; the loss is then that
of decoding with one. `--cache_pages 16` adds the loss of the second half of each row, decoded while
each token reads 16 pages of the cache beside the first and the latest, and with the whole cache.
`--run.mesh.data 1` evaluates on another number of devices than the training
used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.following import after_evaluation, say_next
from experiments.cli.model import with_about, with_model
from experiments.cli.output import announce, say
from experiments.cli.process import start_process
from jaxmoe.data import SourceKind
from jaxmoe.errors import ConfigurationError
from jaxmoe.run import Run
from jaxmoe.run.measures import details_of
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import (
    WHOLE_CACHE,
    CacheFormat,
    CacheReading,
    PageSelectionConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRunConfig:
    """Trained run and checkpoint."""

    directory: str = "runs/pretrain/tiny"
    """Run directory; or directory, or name on the hub, of a Hugging Face model."""
    step: int | None = None
    """Step of the checkpoint; the newest when None."""
    mesh: MeshConfig | None = None
    """Mesh to use; the one of the training when None."""
    initial: str | None = None
    """Model that an adapter was trained on, where it has moved; the one that the run names when
    None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Run to evaluate, and how."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run and checkpoint."""
    routing: Literal["none", "detailed"] = "none"
    """Table of what the routers do with the held-out tokens, layer by layer; with feed-forwards of
    two sizes, the best choice for each budget."""
    cache: CacheFormat = "compute"
    """Format that keys and values are rounded to; compute does not round."""
    cache_pages: int | None = None
    """Pages of keys and values with the largest scores that a decoded token reads, beside the
    first and the latest; all when None. It changes its loss."""
    reading: CacheReading = WHOLE_CACHE
    """Part of the cache that a decoded token reads: whole, or pages with their size, score and
    eviction; --cache_pages is the short form."""
    data: SourceKind | None = None
    """Data to evaluate on, all of it where it is files; the run's held-out data when None."""
    sequence_length: int | None = None
    """Tokens of a held-out sequence; when None those of a training row, 128 for an imported
    model."""
    batches: int | None = None
    """Number of held-out batches; that of the run when None."""

    def __post_init__(self):
        part_of_cache(self.reading, self.cache_pages)


def part_of_cache(reading: CacheReading, pages: int | None) -> CacheReading:
    """Return the part of the cache that is read, with the number of pages of `--cache_pages`.

    Args:
        reading: Choice of `--reading`.
        pages: Number of pages with the largest scores; that of `reading` when None.

    Raises:
        ValueError: The reading selects something other than a number of pages.
    """
    if pages is None:
        return reading
    if not reading.selects:
        return PageSelectionConfig(kept=pages)
    if "kept" not in {field.name for field in dataclasses.fields(reading)}:
        raise ValueError(
            f"reading:{reading.name} reads no number of pages (cache_pages={pages}): leave it out"
        )
    selection: Any = reading
    return dataclasses.replace(selection, kept=pages)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe evaluate"
    config = flags.parse_flags(EvaluateConfig(), with_model(argv), prog, with_about(__doc__))
    details = decoded = None
    reading = part_of_cache(config.reading, config.cache_pages)
    announce(f"evaluating {config.run.directory}: reading the checkpoint, compiling ...")
    with flags.exit_on_bad_configuration():
        start_process()
    with flags.exit_on_bad_configuration(ConfigurationError):
        run = Run.open(
            config.run.directory,
            mesh=config.run.mesh,
            cache=config.cache,
            data=config.data,
            sequence_length=config.sequence_length,
            batches=config.batches,
            initial=config.run.initial,
        )
        result = run.evaluate(step=config.run.step)
        if config.routing == "detailed":
            with run.restore(config.run.step) as loaded:
                details = details_of(loaded.assembly.plan.model).rows(loaded.assembly, loaded.state)
        if reading.selects:
            decoded = run.measure_reading(reading, step=config.run.step)
    per_byte = ""
    if result.bits_per_byte is not None:
        per_byte = f" eval/bits_per_byte={result.bits_per_byte!r}"
    say(
        f"step={result.step} tokens={result.num_tokens}"
        f" eval/bits_per_token={result.bits_per_token!r}{per_byte}"
        + (f" {result.precision}" if result.precision else "")
    )
    if decoded is not None:
        say(str(decoded))
    if details is not None:
        say(format_router_details(details))
    say_next(after_evaluation(run.config, config.run.directory))
    return int(ExitCode.DONE)


def format_router_details(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `Details` as a table."""
    if not rows:
        return "no MoE layer: there is no router to look at"
    names = list(rows[0])
    lines = ["".join(f"{name:>11}" for name in names)]
    for row in rows:
        cells = (row[name] for name in names)
        lines.append("".join(f"{c:>11}" if isinstance(c, int) else f"{c:>11.4g}" for c in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
