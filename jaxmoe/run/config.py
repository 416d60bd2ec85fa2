# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`PretrainConfig`: everything that decides a run, as one tree.

What is computed (`model`), from what (`data`), with what rule (`optimizer`, `schedule`,
`parameterization`), how long (`training`), where and how (`execution`), and what is kept of it.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from jaxmoe.checkpoint.manager import Verify
from jaxmoe.data import CorpusConfig, DataConfig
from jaxmoe.data.batch_sizes import BatchSizes
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, OptimizerConfig, ScheduleConfig
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.scaling import HYPERP_BASE, BasePoint, ParameterizationConfig, StandardConfig
from jaxmoe.tracking import TensorBoardConfig, TrackerConfig
from jaxmoe.tracking.terminal import ConsoleKind
from jaxmoe.training import NextTokenConfig, ObjectiveConfig
from jaxmoe.training.balance import AccumulatedBalance
from jaxmoe.training.batch_ramp import BatchRampConfig
from jaxmoe.training.guard import check_ratio

FREE_FIELDS = (
    *("run", "execution", "checkpoint", "tracking", "profile", "watch", "processes", "data.cache"),
    *("training.max_norm_ratio", "training.rollbacks"),
)
"""May change when a run is resumed: none of them changes the loss of a good step beyond rounding.
What is done about bad ones may be set anew where a run has diverged."""
FIXED_FIELDS = ("execution.precision.matmul",)
"""Among these, what may not: it rounds to 8 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where the run lives."""

    directory: str | None = None
    """Run directory; runs/pretrain/<name> when None."""
    name: str | None = None
    """Name of the run; the recipe's when None. The same name continues the same run."""
    lock_heartbeat: float = 10.0
    """Seconds between signs of life in the run directory; after three without one, a process of
    another host counts as dead."""
    steal_lock: bool = False
    """Take the directory from a process that still holds it, which then ends and saves nothing."""

    def __post_init__(self):
        if not self.lock_heartbeat > 0:
            raise ValueError(f"run.lock_heartbeat={self.lock_heartbeat} must be above 0 seconds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How long, on how much at a time."""

    seed: int = 0
    """Of the initial values and the order of the data."""
    steps: int = 600
    """Optimiser steps of the whole run."""
    batch_size: int = 16
    """Sequences of one step, over all devices and micro-batches."""
    sequence_length: int = 128
    """Tokens of one sequence."""
    accumulation: int = 1
    """Micro-batches of one step."""
    accumulated_balance: AccumulatedBalance = "buffer"
    """Balance loss of the global batch over micro-batches: with the load seen so far, or exactly,
    at the price of one more forward pass."""
    batch_ramp: BatchRampConfig | None = None
    """Smaller batches in the first steps; None: the same at every step."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    max_skipped: int = 5
    """Steps in a row that are refused before the run goes back, or ends as diverged."""
    max_norm_ratio: float | None = 30.0
    """Largest gradient norm, in medians of the last accepted steps, above which a step is refused
    like one that is not finite; None: none is. Comparisons of trials accept every finite step. The
    largest seen in healthy runs was 3 (next token) and 10 (masked diffusion, of small batches)."""
    rollbacks: int = 1
    """How often, in all, a run restores the last whole checkpoint after `max_skipped` refused steps
    and jumps their batches; after that it ends as diverged. 0: it ends at once."""
    objective: ObjectiveConfig = NextTokenConfig()
    """What is predicted from what."""

    def __post_init__(self):
        for field in ("steps", "batch_size", "accumulation", "max_skipped"):
            if getattr(self, field) < 1:
                raise ValueError(f"training.{field}={getattr(self, field)} must be at least 1")
        if self.rollbacks < 0:
            raise ValueError(f"training.rollbacks={self.rollbacks} must be 0 or more")
        check_ratio(self.max_norm_ratio, "training.max_norm_ratio")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"training.seed={self.seed} must lie in [0, 2^31)")
        if self.sequence_length < 2:
            raise ValueError(f"training.sequence_length={self.sequence_length} must be at least 2")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"training.clip={self.clip} must be above 0, or None not to clip")
        _ = self.batch_sizes  # a ramp that does not fit is refused here

    @property
    def batch_sizes(self) -> BatchSizes:
        """Sequences of each step."""
        if self.batch_ramp is None:
            return BatchSizes(((0, self.batch_size),))
        return self.batch_ramp.build(self.steps, self.batch_size)

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return self.tokens_before(self.steps)

    def tokens_before(self, step: int) -> int:
        """Of the steps before this one."""
        return self.batch_sizes.rows_before(step) * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out loss."""

    every: int = 100
    """Steps between evaluations; 0: only at the end."""
    batches: int = 8
    """Held-out batches; the same ones every time."""
    batch_size: int | None = None
    """Sequences of a held-out batch, over all devices; as in training when None. It is read whole:
    no more than a micro-batch fits where that fills a device."""

    def __post_init__(self):
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"evaluation.batch_size={self.batch_size} must be at least 1, or None")
        if self.every < 0 or self.batches < 1:
            raise ValueError(
                f"evaluation.every={self.every} must be 0 or more, and"
                f" evaluation.batches={self.batches} at least 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved."""

    every: int = 200
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Newest checkpoints that are kept; at least 2."""
    verify: Verify = "full"
    """What a start checks of the checkpoint: checksums of its files and fingerprints of its arrays,
    the files alone, or nothing."""
    on_damage: Literal["previous", "stop"] = "previous"
    """What a start does when the checkpoint is not what was written: it is set aside, and the one
    before it continues the run; or the run stops and says so."""

    max_failed_saves: int = 5
    """Saves in a row that may fail (a failed one is tried again at the next step) before the run
    ends, with exit code 74."""
    compare_replicas: int = 100
    """Steps between comparisons of what devices hold of the same arrays, which a defective one
    makes different; they are compared at every save as well. 0: only then."""
    snapshot_every: int = 0
    """Steps between snapshots in the hosts' memory, with parity: the processes that a supervisor
    starts again continue from there, though one host be lost. 0: none."""
    recompute: int = 0
    """Steps between steps that are computed twice and must give the same bits, which a chip that
    computes wrongly does not; the state is then in memory twice. 0: never."""
    initial: str | None = None
    """Another run, or a directory of checkpoints, whose parameters (and router state, where it
    fits) a new run begins with; its optimizer's state is left behind. A run that has checkpoints of
    its own continues from those."""
    initial_step: int | None = None
    """Its step; the newest that is whole when None."""
    initial_mapping: str | None = None
    """Python file with `RULES`, where names or layouts differ: see jaxmoe/checkpoint/mapping.py."""

    def __post_init__(self):
        for field in ("every", "compare_replicas", "snapshot_every", "recompute"):
            if getattr(self, field) < 0:
                raise ValueError(f"checkpoint.{field}={getattr(self, field)} must be 0 or more")
        if self.max_failed_saves < 1:
            raise ValueError(
                f"checkpoint.max_failed_saves={self.max_failed_saves} must be at least 1"
            )
        for field in ("initial_step", "initial_mapping"):
            if self.initial is None and getattr(self, field) is not None:
                raise ValueError(
                    f"checkpoint.{field}={getattr(self, field)} is of another run: name it with"
                    " --checkpoint.initial"
                )
        if self.keep < 2:
            raise ValueError(
                f"checkpoint.keep={self.keep} must be at least 2: the last may be unfinished"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """What is shown and written on the way."""

    print_every: int = 20
    """Steps between progress lines."""
    console: ConsoleKind = "auto"
    """rich: a live view; plain: a line of key=value; none: neither. auto: rich on a terminal."""
    trackers: tuple[TrackerConfig, ...] = (TensorBoardConfig(),)
    """Where the metrics go beside metrics.jsonl; wandb and trackio are extras."""
    sample_length: int = 400
    """Tokens of text generated at the end; 0: none."""

    def __post_init__(self):
        if self.print_every < 1:
            raise ValueError(f"tracking.print_every={self.print_every} must be at least 1")
        if self.sample_length < 0:
            raise ValueError(f"tracking.sample_length={self.sample_length} must be 0 or more")
        names = [tracker.name for tracker in self.trackers]
        if len(set(names)) < len(names):
            raise ValueError(f"tracking.trackers={', '.join(names)}: name each at most once")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """A trace of a few steps, for xprof or Perfetto."""

    steps: str | None = None
    """First and last traced step as a:b, both included, from 1; None: no trace."""

    def __post_init__(self):
        if self.steps is None:
            return
        if re.fullmatch(r"\d{1,12}:\d{1,12}", self.steps) is None:
            raise ValueError(
                f"profile.steps={self.steps!r} must be two step numbers a:b, such as 10:13"
            )
        first, last = map(int, self.steps.split(":"))
        if not 1 <= first < last:
            raise ValueError(
                f"profile.steps={self.steps} must have 1 <= a < b: the first step is 1, and one"
                " step alone is not worth much"
            )

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last traced step."""
        if self.steps is None:
            return None
        first, last = map(int, self.steps.split(":"))
        return first, last


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """How far the devices that share a batch agree; their losses are always compared."""

    gradients_every: int = 0
    """Steps between comparisons of the gradients of workers (the parts of the batch); each costs a
    backward pass for every worker. 0: never."""
    gradient_groups: int = 8
    """Most parts into which the batch is cut for it; neighboring workers are taken together."""

    def __post_init__(self):
        if self.gradients_every < 0:
            raise ValueError(f"watch.gradients_every={self.gradients_every} must be 0 or more")
        if self.gradient_groups < 2:
            raise ValueError(f"watch.gradient_groups={self.gradient_groups} must be at least 2")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """A pre-training run."""

    run: RunConfig = RunConfig()
    """Where the run lives."""
    model: ModelConfig = ModelConfig()
    """What is computed."""
    data: DataConfig = CorpusConfig()
    """What is read."""
    training: TrainingConfig = TrainingConfig()
    """How long, on how much at a time."""
    optimizer: OptimizerConfig = AdamWConfig()
    """The rule of the update."""
    schedule: ScheduleConfig = LinearConfig()
    """The learning rate by step."""
    parameterization: ParameterizationConfig = StandardConfig()
    """Initial scale, learning-rate multipliers and forward multipliers by role."""
    base: BasePoint = HYPERP_BASE
    """Where optimizer.learning_rate was tuned, for parameterisations that carry it from there."""
    execution: ExecutionConfig = ExecutionConfig()
    """Where and how."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved."""
    tracking: TrackingConfig = TrackingConfig()
    """What is shown."""
    profile: ProfileConfig = ProfileConfig()
    """Which steps are traced."""
    watch: WatchConfig = WatchConfig()
    """What is compared between devices."""
    processes: ProcessesConfig = ProcessesConfig()
    """How long anything may take before the run ends with the cause."""

    @property
    def held_out_batch_size(self) -> int:
        """Sequences of a held-out batch."""
        return self.evaluation.batch_size or self.training.batch_size

    def __post_init__(self):
        self.training.objective.check(self.model)
        if (traced := self.profile.range) and traced[1] > self.training.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} must end within the run of"
                f" training.steps={self.training.steps}"
            )
