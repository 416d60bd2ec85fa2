# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the config of `gates`: two gates along two axes, and the model at each point.

    top_k        the same experts throughout, K of them per token: active parameters grow with K
    granularity  experts of width dense_dim / K, K of K * sparsity per token: active parameters
                 stay fixed

To add a recipe: a function and a row of RECIPES in experiments/studies/gates/config.py
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from experiments.cli.flags import without_advice
from experiments.studies.study import StudyConfig
from jaxmoe.data import CorpusConfig, SourceKind
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, Optimizer, ScheduleBase
from jaxmoe.routing import GATES, LoadBalanceConfig
from jaxmoe.run.config import TrainingConfig
from jaxmoe.scaling import HYPERP_BASE, BasePoint, ParameterizationBase, StandardConfig

Axis = Literal["top_k", "granularity"]
Gate = Literal["sqrt", "renormalized"]

AXES: Final[tuple[Axis, ...]] = ("top_k", "granularity")
COMPARED: Final[tuple[Gate, ...]] = ("sqrt", "renormalized")
FREE_FIELDS = ("run", "axes", "top_ks", "trained_top_ks")
"""Fields that may change when a directory is continued: further points are added."""

_SHORT_MODEL = ModelConfig(
    vocab_size=256,
    num_layers=2,
    embed_dim=64,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=32),
    moe=MoEConfig(
        num_experts=128, top_k=2, expert_dim=32, balancers=(LoadBalanceConfig(coefficient=0.1),)
    ),
)
"""HyperP's coefficient without a z-loss, which would change the size of the router logits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatesConfig(StudyConfig):
    """SqrtGate against softmax gates over top_k and granularity."""

    most_seeds: ClassVar[int] = 1000

    axes: tuple[Axis, ...] = AXES
    """Quantities that change with top_k: the number of active experts alone, or their width as
    well."""
    top_ks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Points that are measured at initialisation; the first is the reference of the others."""
    trained_top_ks: tuple[int, ...] = (1, 4, 16, 64)
    """Points that are trained as well."""
    initial_seeds: int = 32
    """Initial values over which a point is measured, on the first held-out batch."""
    seeds: int = 1
    """Trainings per point; both gates have the same initial values and batches."""
    model: ModelConfig = _SHORT_MODEL
    """Model; gate and top_k are replaced, and on the axis granularity the experts."""
    dense_dim: int = 256
    """Width of an expert times K, on the axis granularity."""
    sparsity: int = 4
    """Experts over active experts, on the axis granularity."""
    data: SourceKind = CorpusConfig()
    """Training and held-out data."""
    training: TrainingConfig = TrainingConfig(steps=300, batch_size=8, sequence_length=32)
    """Training of each point."""
    optimizer: Optimizer = AdamWConfig(learning_rate=4e-3)
    """Optimiser of each training."""
    schedule: ScheduleBase = LinearConfig(warmup_steps=20)
    """Learning rate by step."""
    parameterization: ParameterizationBase = StandardConfig()
    """Initial scale and learning rate by role."""
    base: BasePoint = HYPERP_BASE
    """Size at which the learning rate was tuned, for parameterisations that transfer it."""
    evaluation_batches: int = 4
    """Held-out batches on which a trained model is measured."""

    def __post_init__(self):
        if self.model.moe is None or not self.model.num_moe_layers:
            raise ValueError("model.moe=none has no gate: give the model a mixture of experts")
        StudyConfig.__post_init__(self)
        if not 2 <= self.initial_seeds <= self.most_seeds:
            raise ValueError(
                f"initial_seeds={self.initial_seeds} must lie between 2 and {self.most_seeds}"
            )
        self._check_points(self.model.moe)

    def _check_points(self, moe: MoEConfig) -> None:
        if not self.top_ks or not self.axes:
            raise ValueError("top_ks and axes must name at least one point")
        if list(self.top_ks) != sorted({*self.top_ks} - {0}) or self.top_ks[0] < 1:
            raise ValueError(f"top_ks={self.top_ks} must be whole numbers from 1 on that rise")
        if strangers := sorted({*self.trained_top_ks} - {*self.top_ks}):
            raise ValueError(
                f"trained_top_ks={self.trained_top_ks}: {strangers[0]} is not among"
                f" top_ks={self.top_ks}: give --trained_top_ks some of them"
            )
        if "top_k" in self.axes and self.top_ks[-1] > moe.num_experts:
            raise ValueError(
                f"top_ks={self.top_ks}: {self.top_ks[-1]} exceeds"
                f" model.moe.num_experts={moe.num_experts}: lower it, or give more experts"
            )
        if self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity} must be at least 1")
        for top_k in self.top_ks if "granularity" in self.axes else ():
            if self.dense_dim < 1 or self.dense_dim % top_k:
                raise ValueError(
                    f"dense_dim={self.dense_dim} must be a multiple of every one of"
                    f" top_ks={self.top_ks}: {top_k} does not divide it"
                )


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Point:
    """One model of the comparison."""

    axis: Axis
    gate: Gate
    top_k: int


def points_of(config: GatesConfig) -> tuple[Point, ...]:
    """Return every point, both gates of a model side by side; with one expert the gates are
    equal."""
    return tuple(
        Point(axis, gate, top_k)
        for axis in AXES
        if axis in config.axes
        for top_k in config.top_ks
        for gate in COMPARED
        if top_k > 1 or gate == "sqrt"
    )


@without_advice()
def model_of(config: GatesConfig, point: Point) -> ModelConfig:
    """Return the model of one point."""
    moe = config.model.moe
    assert moe is not None
    moe = dataclasses.replace(moe, top_k=point.top_k, gate=GATES[point.gate]())
    if point.axis == "granularity":
        width = config.dense_dim // point.top_k
        number = config.sparsity * point.top_k
        moe = dataclasses.replace(moe, num_experts=number, expert_dim=width)
    return dataclasses.replace(config.model, moe=moe)


def short() -> GatesConfig:
    """Two layers of width 64, one training of a point: about ten minutes on two cores."""
    return GatesConfig()


def full() -> GatesConfig:
    """Four layers of width 256, three trainings of 2000 steps at every point: for a GPU."""
    top_ks = GatesConfig().top_ks
    moe = MoEConfig(
        num_experts=128, top_k=2, expert_dim=256, balancers=(LoadBalanceConfig(coefficient=0.1),)
    )
    return GatesConfig(
        seeds=3,
        trained_top_ks=top_ks,
        model=ModelConfig(
            vocab_size=256,
            num_layers=4,
            embed_dim=256,
            attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=64),
            moe=moe,
        ),
        dense_dim=1024,
        sparsity=8,
        training=TrainingConfig(steps=2000, batch_size=32, sequence_length=256),
        optimizer=AdamWConfig(learning_rate=2e-3),
        schedule=LinearConfig(warmup_steps=50),
        evaluation_batches=16,
    )


RECIPES = {"short": short, "full": full}
