# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Feed`: where the batches of a run come from.

`LoaderFeed` reads them from data; a feed whose batches depend on the parameters in training makes
them in the step that its session returns. `jaxmoe.training.loop.Loop` asks for batches in
the order of the steps.

To add a feed: a class derived from `Feed`, a config derived from `FeedConfig` that builds it, and
its row under `feed` in `jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe.data import Batch, Loader, Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from sharding.distributed import global_batch

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
"""A training step, such as `make_train_step` returns; it donates its state."""


class Feed:
    """Batches of a run. All processes call the methods alike, in this order:

    check      once, before the run directory is taken
    batch      when a step is compiled
    session    around all steps of a loop; the step that it returns is taken on each batch
    batches    once in each loop; a loop after a rollback or on another mesh begins anew
    """

    def check(self) -> None:
        """Raise ValueError if the run cannot be trained on this feed."""

    def batch(self, step: int) -> Batch:
        """Return the batch after a number of steps, or one of its shapes, on the devices."""
        raise NotImplementedError

    def batches(self, first_step: int) -> Generator[Batch, None, None]:
        """Yield the batches after a number of steps in order, on the devices."""
        raise NotImplementedError

    def session(
        self,
        step_function: StepFunction,
        log: Callable[[int, Mapping[str, float]], None],
        first_state: Callable[[], TrainState],
    ) -> AbstractContextManager[StepFunction]:
        """Return the context of a loop, which has open what the batches are made with.

        Its value is the step of the run on a batch of `batches`: by default the training step. It
        raises EndRunError where there is no such batch, and the run ends in order.

        Args:
            step_function: Training step.
            log: Receives a step, from 1, and numbers of its own.
            first_state: Returns the state that the run began with.
        """
        del log, first_state
        return contextlib.nullcontext(step_function)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig(abc.ABC):
    """Base class of the configs of feeds: batches that a run makes itself, in place of its data."""

    name: ClassVar[str]
    """Name in the catalogue, in config files and on the command line."""

    @property
    def passes(self) -> int:
        """Passes of training over the rows of a step."""
        return 1

    @property
    def updates_per_pass(self) -> int:
        """Updates of the optimiser in each pass, each with an equal part of the rows."""
        return 1

    def check_run(self, config: Any) -> None:
        """Refuse a run that cannot be trained on these batches.

        Args:
            config: Run of which this is the feed, a `jaxmoe.run.config.PretrainConfig`.

        Raises:
            ValueError: Names the fields.
        """
        del config

    def check_batches(self, training: Any, batch_shards: int) -> None:
        """Refuse rows of a step that devices, micro-batches and updates do not divide.

        Args:
            training: `training` of the run: rows of a step, and its micro-batches.
            batch_shards: Devices that share a batch.

        Raises:
            ValueError: Names the fields.
        """
        del training, batch_shards

    @abc.abstractmethod
    def build(self, plan: Any, execution: ExecutionConfig, mesh: Mesh, source: Source) -> Feed:
        """Return the feed; nothing is opened yet.

        Args:
            plan: `jaxmoe.run.plan.RunPlan` of the run.
            execution: Execution with the mesh resolved.
            mesh: Devices.
            source: Data of the run, and its tokens.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderFeed(Feed):
    """Batches of a loader; rows are read ahead."""

    loader: Loader
    mesh: Mesh
    part: tuple[int, int]
    """Part of each batch that this process reads, and the number of parts."""
    last_step: int
    """Total number of steps."""

    def batch(self, step: int) -> Batch:
        """Return the batch after a number of steps."""
        index, count = self.part
        rows = self.loader.batch(step, process_index=index, process_count=count)
        return global_batch(rows, self.mesh)

    def batches(self, first_step: int) -> Generator[Batch, None, None]:
        """Yield the batches up to the last step."""
        index, count = self.part
        rows = self.loader.iterate(
            first_step, self.last_step, process_index=index, process_count=count
        )
        with contextlib.closing(rows):
            for batch in rows:
                yield global_batch(batch, self.mesh)

    def positions(self, batch: Batch) -> int:
        """Return the positions without padding.

        Of several processes each takes the rows of others for as full as its own: it counts alone.

        Args:
            batch: Rows on the devices.
        """
        if batch.segment_ids is None:
            return batch.tokens.size
        ids = jnp.asarray(batch.segment_ids)
        shards = {str(shard.index): shard.data for shard in ids.addressable_shards}  # no copies
        size = sum(shard.size for shard in shards.values())
        count = sum(np.count_nonzero(np.asarray(shard)) for shard in shards.values())
        return round(ids.size * count / size)
