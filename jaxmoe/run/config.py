# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`PretrainConfig`: the configuration of a training run, as one tree.

    model data training                       what is computed, on which data, for how long
    optimizer schedule parameterization base  update rule and learning rates
    replicas                                  what workers exchange, and when
    execution                                 mesh, kernels and precision
    run evaluation checkpoint tracking        directory and outputs
    profile processes parts                   traces, timeouts and what else it does

To add a field: its config class in `jaxmoe/run/config.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from typing import Any, ClassVar, Literal

from jaxmoe import combinations
from jaxmoe.catalog import choice
from jaxmoe.checkpoint.damage import Verify
from jaxmoe.configs import check_choices
from jaxmoe.data import CorpusConfig, SourceKind
from jaxmoe.data.batch_sizes import BatchSizes
from jaxmoe.data.repacking import Assigner
from jaxmoe.execution import ExecutionConfig
from jaxmoe.field_docs import with_field_docs
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, Optimizer, ScheduleBase
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.scaling import HYPERP_BASE, BasePoint, ParameterizationBase, StandardConfig
from jaxmoe.tracking import TensorBoardConfig, TrackerBase
from jaxmoe.tracking.terminal import ConsoleKind
from jaxmoe.training import NextTokenConfig, Objective
from jaxmoe.training.balance import AccumulatedBalance
from jaxmoe.training.batch_ramp import BatchRampConfig
from jaxmoe.training.estimators import BackpropConfig, Gradients
from jaxmoe.training.estimators.skipping import Skipping
from jaxmoe.training.feed import FeedConfig
from jaxmoe.training.guard import GuardConfig
from jaxmoe.training.parts.average import Average
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.replicas import ReplicasKind, SynchronousConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """A trace of a few steps, for xprof or Perfetto."""

    steps: str = "10:13"
    """First and last traced step as a:b, both included, from 1."""

    def __post_init__(self):
        if re.fullmatch(r"\d{1,12}:\d{1,12}", self.steps) is None:
            raise ValueError(
                f"profile.steps={self.steps!r} must be two step numbers a:b, such as 10:13"
            )
        first, last = map(int, self.steps.split(":"))
        if not 1 <= first < last:
            raise ValueError(
                f"profile.steps={self.steps} must have 1 <= a < b: the first step is 1, and a"
                " trace needs two steps or more"
            )

    @property
    def range(self) -> tuple[int, int]:
        """First and last traced step."""
        first, last = map(int, self.steps.split(":"))
        return first, last


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPartConfig(abc.ABC):
    """Base class of the configs of run parts.

    A part changes nothing that a run resumed without it needs: no order of the data, and no state
    but that of `step_parts`, which a run goes on without.
    """

    name: ClassVar[str]
    """Name in the catalogue, in config files and on the command line."""

    @property
    def step_parts(self) -> tuple[StepPart, ...]:
        """What each step does for the part; none by default."""
        return ()

    @abc.abstractmethod
    def build(self, directory: Any, supervision: Any) -> Any:
        """Return the part for one start of a run, a `jaxmoe.run.parts.RunPart`.

        Args:
            directory: Directory of the run, which is not held yet:
                `jaxmoe.run.directory.RunDirectory`.
            supervision: Watchdog, signals and resources of this process:
                `jaxmoe.run.supervision.Supervision`.

        Raises:
            ValueError: The run cannot have this part.
        """


FREE_FIELDS = (
    "run",
    "execution",
    "checkpoint",
    "tracking",
    "profile",
    "processes",
    "parts",
    "data.cache",
    "training.guard",
)
"""Fields that may change when a run is resumed: none changes the loss of an accepted step beyond
rounding."""
EXTENSION_FIELDS = (
    "schedule",
    "evaluation",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.adamw_ratio",
    "training.steps",
    "training.clip",
    "training.accumulation",
    "training.accumulated_balance",
    "training.assign",
)
"""Fields that may change as well when a run is extended or branched: parameters, optimiser state
and data position keep their meaning. See `jaxmoe/run/provenance/lineage.py`."""
FIXED_FIELDS = ("execution.precision.matmul",)
"""Fields below those that may not change: they round to 8 bits."""


def _check_least(config: object, group: str, least: int, *fields: str) -> None:
    """Refuse fields below their least value."""
    for field in fields:
        if (value := getattr(config, field)) < least:
            rule = f"at least {least}" if least else "0 or more"
            raise ValueError(f"{group}.{field}={value} must be {rule}")


_TIMEOUTS = ProcessesConfig()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LockConfig:
    """Lease of the run directory, which one process at a time holds."""

    heartbeat: float = 10.0
    """Seconds between heartbeats of the lease; a holder that misses three counts as dead."""
    steal: bool = False
    """Take the directory from a process that still holds it; that process ends without saving."""

    def __post_init__(self):
        if not self.heartbeat > 0:
            raise ValueError(f"run.lock.heartbeat={self.heartbeat} must be above 0 seconds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Directory and name of the run."""

    directory: str | None = None
    """Run directory; runs/pretrain/<name> when None."""
    name: str | None = None
    """Name of the run; the recipe's when None. The same name continues the same run."""
    lock: LockConfig | None = None
    """Lease by which one process writes to the directory; None for one with the defaults."""

    @property
    def lease(self) -> LockConfig:
        """Lease by which one process writes to the directory."""
        return self.lock or LockConfig()


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Length of the run, size of its batches, and guard."""

    seed: int = 0
    """Seed of the initial values and the order of the data."""
    steps: int = 600
    """Total number of optimiser steps."""
    batch_size: int = 16
    """Sequences per step, over all devices and micro-batches."""
    sequence_length: int = 128
    """Tokens per sequence."""
    accumulation: int = 1
    """Micro-batches per step."""
    accumulated_balance: AccumulatedBalance = "buffer"
    """Balance loss over micro-batches: buffer uses the load seen so far; two_pass is exact, at the
    cost of one more forward pass."""
    batch_ramp: BatchRampConfig | None = None
    """Smaller batches in the first steps; None for the same size at every step."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    guard: GuardConfig | None = None
    """Steps that are refused, and rollbacks after them; None for the default ones."""
    objective: Objective = NextTokenConfig()
    """Training objective."""
    assign: Assigner | None = None
    """Choice of the level of each document, with data.packing levels; buckets when None."""
    skipping: Skipping | None = None
    """Layers that micro-batches leave out (SkipPipe); None for none."""
    gradients: Gradients = BackpropConfig()
    """How a step gets its gradient."""
    average: Average | None = None
    """Average that takes the place of the trained parameters after the last step; None for none."""

    def __post_init__(self):
        check_choices("training", self)
        _check_least(self, "training", 1, "steps", "batch_size", "accumulation")
        _check_least(self, "training", 2, "sequence_length")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"training.seed={self.seed} must lie in [0, 2^31)")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"training.clip={self.clip} must be above 0, or None not to clip")
        _ = self.batch_sizes  # raises for a ramp that does not fit

    @property
    def step_guard(self) -> GuardConfig:
        """Steps that are refused, and rollbacks after them."""
        return self.guard or GuardConfig()

    @property
    def batch_sizes(self) -> BatchSizes:
        """Number of sequences of each step."""
        if self.batch_ramp is None:
            return BatchSizes(((0, self.batch_size),))
        return self.batch_ramp.build(self.steps, self.batch_size)

    @property
    def step_gradients(self) -> Gradients:
        """How a step gets its gradient, with the layers that micro-batches leave out."""
        return self.gradients if self.skipping is None else self.skipping.gradients

    @property
    def step_parts(self) -> tuple[StepPart, ...]:
        """Parts of a step beside gradients, update and guard."""
        if self.average is None:
            return ()
        return (self.average.step_part(self.steps),)

    def step_options(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of `jaxmoe.training.step.Step` that the config decides.

        Args:
            **changes: Values that take the place of those of the config.
        """
        return {
            "accumulation": self.accumulation,
            "accumulated_balance": self.accumulated_balance,
            "clip": self.clip,
            "objective": self.objective,
            "gradients": self.step_gradients,
            "parts": self.step_parts,
            **changes,
        }

    @property
    def tokens(self) -> int:
        """Number of tokens of all steps."""
        return self.tokens_before(self.steps)

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens of all steps before one."""
        return self.batch_sizes.rows_before(step) * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out loss."""

    every: int = 100
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: int = 8
    """Number of held-out batches; the same ones every time."""
    batch_size: int | None = None
    """Sequences per held-out batch, over all devices; training.batch_size when None. It is not cut
    into micro-batches."""

    def __post_init__(self):
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"evaluation.batch_size={self.batch_size} must be at least 1, or None")
        _check_least(self, "evaluation", 0, "every")
        _check_least(self, "evaluation", 1, "batches")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitialConfig:
    """Run or model from which a new run begins."""

    path: str = ""
    """Run directory, or directory of checkpoints, or that of a Hugging Face model."""
    step: int | None = None
    """Step of the checkpoint; the newest valid one when None."""
    state: Literal["parameters", "all"] = "parameters"
    """What is taken: parameters (and router state, if it fits), or all: also the optimiser's state,
    the step and the data position, so that the new run is a branch that continues there; only the
    schedule, the learning rate, the number of steps, evaluation and the like may differ."""
    mapping: str | None = None
    """Python file with `RULES`, where names or layouts differ: see jaxmoe/checkpoint/mapping.py."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SafetyConfig:
    """Checks of checkpoints and replicas, and what follows from damage."""

    verify: Verify = "full"
    """Checks before a checkpoint is used: full (checksums of files and fingerprints of arrays),
    files, or off."""
    on_damage: Literal["previous", "stop"] = "previous"
    """Action on a damaged checkpoint: previous sets it aside and continues from the one before;
    stop ends with an error."""
    max_failed_saves: int = 5
    """Failed saves in a row after which the run ends (exit code 74); a failed save is repeated at
    the next step."""
    compare_replicas: int = 100
    """Steps between comparisons of replicated arrays over devices, which find a defective one; 0
    compares only at every save."""

    def __post_init__(self):
        _check_least(self, "checkpoint.safety", 0, "compare_replicas")
        _check_least(self, "checkpoint.safety", 1, "max_failed_saves")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints."""

    every: int = 200
    """Steps between checkpoints; 0 saves only at the end, and before the decay of schedule:wsd."""
    keep: int = 3
    """Number of newest checkpoints to keep; at least 2. The one before the decay of schedule:wsd is
    saved and kept as well, so that a longer run can branch there."""
    capture: Literal["lazy", "blocking"] = "lazy"
    """How a save before the last step takes the state: lazy copies it on the devices and lets
    training go on while the copy is transferred to the host and fingerprinted, which takes the
    memory of a second state until then (blocking, with a warning, where that does not fit);
    blocking waits for both."""
    safety: SafetyConfig | None = None
    """Checks of what is saved, and what follows from damage; None for the default ones: files and
    arrays are verified, and replicas compared."""
    initial: InitialConfig | None = None
    """Run or model from which a new run begins; None for initial values of its own. Ignored by a
    run that has checkpoints."""

    def __post_init__(self):
        if self.initial is not None and not self.initial.path:
            raise ValueError(
                "checkpoint.initial.path is missing: name the run or model from which the run"
                " begins"
            )
        _check_least(self, "checkpoint", 0, "every")
        if self.keep < 2:
            raise ValueError(
                f"checkpoint.keep={self.keep} must be at least 2: the last may be unfinished"
            )

    @property
    def safeguards(self) -> SafetyConfig:
        """Checks of what is saved, and what follows from damage."""
        return self.safety or SafetyConfig()

    @property
    def initial_path(self) -> str | None:
        """Run or model from which a new run begins; None for none."""
        return None if self.initial is None else self.initial.path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Progress output, trackers and samples."""

    print_every: int = 20
    """Steps between progress lines, and between the loads of layers and experts in trackers."""
    console: ConsoleKind = "auto"
    """Progress view: rich (live), plain (lines of key=value) or none; auto: rich on a terminal."""
    trackers: tuple[TrackerBase, ...] = (TensorBoardConfig(),)
    """Trackers beside metrics.jsonl; wandb and trackio need extras."""
    sample_length: int = 400
    """Tokens of text to generate at the end; 0 for none."""

    def __post_init__(self):
        _check_least(self, "tracking", 1, "print_every")
        _check_least(self, "tracking", 0, "sample_length")
        names = [tracker.name for tracker in self.trackers]
        if len(set(names)) < len(names):
            raise ValueError(f"tracking.trackers={', '.join(names)}: name each at most once")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """A pre-training run."""

    run: RunConfig = RunConfig()
    """Directory and name of the run."""
    model: ModelConfig = ModelConfig()
    """Model."""
    data: SourceKind = CorpusConfig()
    """Training and held-out data."""
    training: TrainingConfig = TrainingConfig()
    """Length of the run, size of its batches, and guard."""
    optimizer: Optimizer = AdamWConfig()
    """Optimiser."""
    schedule: ScheduleBase = LinearConfig()
    """Learning rate by step."""
    parameterization: ParameterizationBase = StandardConfig()
    """Initial scale, learning-rate multipliers and forward multipliers by role."""
    base: BasePoint = HYPERP_BASE
    """Sizes at which optimizer.learning_rate was tuned, for parameterisations that transfer it."""
    rl: FeedConfig | None = None
    """Answers of the model itself to train on, in place of the data; None for the data. See
    experiments.rl."""
    replicas: ReplicasKind = SynchronousConfig()
    """Training with workers that communicate rarely or briefly; none sums gradients in every step.
    """
    execution: ExecutionConfig = ExecutionConfig()
    """Mesh, kernels and precision."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Progress output, trackers and samples."""
    profile: ProfileConfig | None = None
    """Traced steps; None for no trace."""
    processes: ProcessesConfig | None = None
    """Order and timeouts of processes; None for the usual order and the default timeouts."""
    parts: tuple[RunPartConfig, ...] = ()
    """What else the run does; `--NAME.field value` adds NAME, and other packages add members."""

    @property
    def step_parts(self) -> tuple[StepPart, ...]:
        """Parts of a step beside gradients, update and guard."""
        repacked = self.assigner.step_parts if self.data.traits.packs_levels else ()
        of_parts = (step_part for part in self.parts for step_part in part.step_parts)
        return (*self.training.step_parts, *of_parts, *repacked)

    def part(self, name: str) -> RunPartConfig | None:
        """Return a part of the run.

        Args:
            name: Its name in the catalogue.

        Returns:
            The config of the part; None if the run does without.
        """
        return next((part for part in self.parts if part.name == name), None)

    @property
    def timeouts(self) -> ProcessesConfig:
        """Timeouts of processes."""
        return self.processes or _TIMEOUTS

    @property
    def process_order(self) -> tuple[int, ...]:
        """Processes in the order in which their devices fill the mesh; empty for the usual one."""
        return () if self.processes is None else self.processes.order

    @property
    def assigner(self) -> Assigner:
        """How the documents of a step are packed again, where data.packing says so."""
        return self.training.assign or choice("assign", "buckets")()

    @property
    def held_out_batch_size(self) -> int:
        """Number of sequences of a held-out batch."""
        return self.evaluation.batch_size or self.training.batch_size

    def __post_init__(self):
        check_choices("", self)
        self.training.objective.check(self.model)
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"parts={', '.join(names)}: name each at most once")
        combinations.check_config(self)
        if self.rl is not None:
            self.rl.check_run(self)
        if self.profile is not None and self.profile.range[1] > self.training.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} must end within the run of"
                f" training.steps={self.training.steps}"
            )
