# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the config of `outer`, its recipes, and the run of one method.

    none     gradients of the whole batch in every step: the baseline
    alone    one worker on its share of the same batches, without exchange
    others   every method of jaxmoe.contrib.slow_links

To add a recipe: a function and a row of RECIPES in experiments/studies/outer/config.py
To fit a field of methods to a short run: a row of FITTED in experiments/studies/outer/config.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from experiments.studies.study import StudyConfig
from jaxmoe.configs import closest
from jaxmoe.data import MarkovConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, Optimizer, ScheduleBase
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.training.replicas import REPLICAS, ReplicasKind
from sharding.mesh import MeshConfig

BASELINE: Final = "none"
ALONE: Final = "alone"
METHODS: Final[tuple[str, ...]] = (
    BASELINE,
    ALONE,
    *(name for name in REPLICAS if name != BASELINE),
)
"""Rows of the table."""
FREE_FIELDS = ("run", "methods")
"""Fields that may change when a directory is continued: further methods are added."""

_SHORT_MODEL = ModelConfig(
    vocab_size=8,
    num_layers=2,
    embed_dim=32,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=64),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig(StudyConfig):
    """Every method of low-communication training at equal tokens."""

    methods: tuple[str, ...] = ()
    """Names in jaxmoe.training.replicas.REPLICAS, or alone: one worker without exchange. All when
    empty."""
    seeds: int = 3
    """Trainings per method; training i of every method has the same initial values and batches."""
    workers: int = 4
    """Workers that share a batch."""
    every: int = 30
    """Steps between two exchanges, for methods that do not exchange in every step; divides
    training.steps."""
    replica: int = 1
    """Size of the mesh axis replica: 1 trains all workers on one device, one after another;
    `workers` gives each a device."""
    model: ModelConfig = _SHORT_MODEL
    """Model."""
    data: MarkovConfig = MarkovConfig()
    """Language of exactly known entropy."""
    training: TrainingConfig = TrainingConfig(steps=300, batch_size=32, sequence_length=64)
    """Training of a method, for each seed; workers share batch_size."""
    optimizer: Optimizer = AdamWConfig(learning_rate=1e-2)
    """Optimiser of each worker."""
    schedule: ScheduleBase = LinearConfig(warmup_steps=20, floor=0.02)
    """Learning rate by step."""
    evaluation_batches: int = 256
    """Held-out batches, each of the rows of one worker."""

    def __post_init__(self):
        StudyConfig.__post_init__(self)
        if self.workers < 2:
            raise ValueError(f"workers={self.workers} must be at least 2")
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(
                    f"methods: there is no method {name!r}{closest(name, METHODS)}\n"
                    f"methods: {', '.join(METHODS)}"
                )
        if self.replica not in (1, self.workers):
            raise ValueError(
                f"replica={self.replica} must be workers={self.workers}, or 1 for one device"
            )
        steps = self.training.steps
        training = self.training
        if self.every < 1 or steps % self.every:
            raise ValueError(
                f"every={self.every} must divide training.steps={steps}, so that the last step ends"
                " with an exchange"
            )
        if training.batch_ramp is not None:
            raise ValueError(
                "training.batch_ramp: methods are compared on batches of one size; leave it out"
            )
        parts = self.workers * training.accumulation * self.replica
        if training.batch_size % parts:
            raise ValueError(
                f"training.batch_size={training.batch_size} must be divisible by the {self.workers}"
                f" workers times training.accumulation={training.accumulation} times"
                f" replica={self.replica}: choose a multiple of {parts}"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Methods of this comparison, the baseline first."""
        names = self.methods or METHODS
        return tuple(name for name in METHODS if name in names or name == BASELINE)

    @property
    def worker_rows(self) -> int:
        """Sequences of one worker in a batch."""
        return self.training.batch_size // self.workers


def _fragments(config: OuterConfig, default: int) -> int:
    """Return the largest number of fragments that divides the layers, at most the default."""
    layers = config.model.num_layers
    most = min(default, config.every)
    return max(number for number in range(1, max(most, 1) + 1) if layers % number == 0)


FITTED: Final[dict[str, Callable[[OuterConfig, Any], Any]]] = {
    "workers": lambda config, default: config.workers,
    "every": lambda config, default: config.every,
    "fragments": _fragments,
    "merging_every": lambda config, default: 5 * config.every,
    "merging_steps": lambda config, default: config.training.steps,
}
"""{field of a method: (config, default of the field) -> its value in the study}."""


def replicas_of(config: OuterConfig, name: str) -> ReplicasKind:
    """Return the config of one method, fitted to the length of the study.

    Args:
        config: Config of the study.
        name: Row of the table.

    Raises:
        ValueError: The method does not accept a value of the study.
    """
    cls = REPLICAS[BASELINE if name == ALONE else name]
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    return cls(
        **{key: fit(config, defaults[key]) for key, fit in FITTED.items() if key in defaults}
    )


def run_of(config: OuterConfig, name: str) -> PretrainConfig:
    """Return the training of one method as a run.

    Args:
        config: Config of the study.
        name: Row of the table.

    Raises:
        ValueError: The method does not accept a value of the study.
    """
    rows = config.worker_rows if name == ALONE else config.training.batch_size
    return PretrainConfig(
        model=config.model,
        data=config.data,
        training=dataclasses.replace(config.training, batch_size=rows),
        optimizer=config.optimizer,
        schedule=config.schedule,
        replicas=replicas_of(config, name),
        execution=ExecutionConfig(unroll=2, mesh=MeshConfig(replica=config.replica)),
        evaluation=EvaluationConfig(
            batches=config.evaluation_batches, batch_size=config.worker_rows
        ),
    )


def short() -> OuterConfig:
    """Every method, two layers of width 32, three seeds: 15 minutes on two cores."""
    return OuterConfig()


def full() -> OuterConfig:
    """Every method, four layers of width 128, eight workers, five seeds: for a GPU."""
    return OuterConfig(
        seeds=5,
        workers=8,
        every=50,
        model=ModelConfig(
            vocab_size=16,
            num_layers=4,
            embed_dim=128,
            attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32),
            moe=MoEConfig(num_experts=8, top_k=2, expert_dim=192),
        ),
        data=MarkovConfig(order=3, vocab_size=16),
        training=TrainingConfig(steps=2000, batch_size=128, sequence_length=128),
        optimizer=AdamWConfig(learning_rate=4e-3),
        schedule=LinearConfig(warmup_steps=100, floor=0.02),
    )


RECIPES = {"short": short, "full": full}
