# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the config of `transfer`, its recipes, and the run of each arm at each point.

A cell is an arm at a point, as the config of a `pretrain` run. Learning rate and seed of a trial
are arguments of the cell's program. Without a base point, the smallest point of the sweep is the
base point.

To add a recipe: a function and a row of RECIPES in experiments/studies/transfer/config.py
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar, Literal

from experiments.studies.study import StudyConfig
from experiments.studies.transfer.arms import ARMS, DEFAULT_ARMS, Arm, own_arm
from experiments.studies.transfer.axes import AXES, AxisSetting
from jaxmoe.configs import closest, fingerprint
from jaxmoe.data import CorpusConfig, SourceKind
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import Optimizer
from jaxmoe.routing import METHODS
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.run.plan import RunPlan, make_plan
from jaxmoe.scaling import BasePoint, ParameterizationBase

FREE_FIELDS = ("run", "arms", "points", "rates", "extend", "seeds")
"""Fields that may change when a directory is continued: further trials are added."""
FEWEST_RATES = 3
MOST_RATES = 15
SPACING = 2.0
"""Ratio of neighbouring rates of a grid that is given as a count."""
OWN = "own"
"""Name of the arm that --parameterization and --optimizer define."""

# Few experts: Muon's update costs as much for an expert with few tokens as for any other.
_MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=64, **METHODS["hyperp"].parts())
_MODEL = ModelConfig(
    vocab_size=256,
    num_layers=4,
    embed_dim=64,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=32),
    moe=_MOE,
    dense_dim=128,
    norm_epsilon=1e-5,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig(StudyConfig):
    """Learning rates at several sizes."""

    most_seeds: ClassVar[int] = 16

    axis: str = "width"
    """Quantity that grows: width, depth, tokens, batch, granularity, sparsity or balance."""
    points: tuple[float, ...] = ()
    """Values of the axis, at least two (tokens: multiples of training.steps); chosen by the
    model when empty."""
    arms: tuple[str, ...] = ()
    """Named pairs of parameterisation and optimiser. When empty: the arm of parameterization and
    optimizer if either is given, else standard and hyperp_bounded."""
    rates: tuple[float, ...] = (5.0,)
    """Number of rates, a factor of two apart around the arm's own; or at least three rates."""
    extend: int = 2
    """Further rates to try where the best is the first or the last, or where the largest point
    lacks the smallest one's best."""
    seeds: int = 3
    """Trials at each rate; trial i of every point has the same key and order of data."""
    budget: float | None = None
    """Minutes for all trials on this machine. Sets training.steps once, from the measured time
    of a step at each point; None leaves training.steps as given."""
    check: Literal["coordinates"] | None = None
    """Check to run instead of a sweep: do activations and their changes keep their size?"""
    check_steps: int = 4
    """Steps of the check."""
    model: ModelConfig = _MODEL
    """Model; the axis changes a part of it."""
    data: SourceKind = CorpusConfig()
    """Data; the held-out loss is in bits per byte of text, or per token."""
    training: TrainingConfig = TrainingConfig(steps=150, batch_size=16, sequence_length=64)
    """Training of each trial."""
    parameterization: ParameterizationBase | None = None
    """Parameterisation of an arm of your own."""
    optimizer: Optimizer | None = None
    """Optimiser of an arm of your own; its learning_rate is the centre of the rates."""
    base: BasePoint = BasePoint()
    """Size at which a learning rate applies unchanged; missing numbers are those of the smallest
    point."""

    def __post_init__(self):
        if self.axis not in AXES:
            raise ValueError(
                f"axis: there is no axis {self.axis!r}{closest(self.axis, AXES)}\n"
                f"axes: {', '.join(AXES)}"
            )
        for name in self.arms:
            if name not in ARMS:
                raise ValueError(
                    f"arms: there is no arm {name!r}{closest(name, ARMS)}\narms: {', '.join(ARMS)}"
                )
        if len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms={', '.join(self.arms)}: name each at most once")
        self._check_points()
        _check_rates(self.rates)
        StudyConfig.__post_init__(self)
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise ValueError(
                f"budget={self.budget:g} minutes must be above 0 and finite, or None to keep"
                " training.steps as they are"
            )
        for field, least in (("extend", 0), ("check_steps", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {least}")

    def _check_points(self) -> None:
        points = self.points
        axis = AXES[self.axis]
        if len(points) == 1:
            raise ValueError(
                f"points={points[0]:g}: one point has nothing to transfer to; give two or more"
            )
        _check_finite("points", points)
        if any(not value > 0 for value in points) or len(set(points)) < len(points):
            raise ValueError(f"points={_spell(points)}: they must differ, and all be above 0")
        if axis.is_whole and any(value != int(value) for value in points):
            raise ValueError(
                f"points={_spell(points)}: the axis {self.axis} ({axis.label}) has whole numbers"
            )

    @property
    def chosen_points(self) -> tuple[float, ...]:
        """Values of the axis, rising."""
        setting = AxisSetting(model=self.model, training=self.training)
        return tuple(sorted(self.points or AXES[self.axis].points(setting)))

    @property
    def chosen_arms(self) -> dict[str, Arm]:
        """Arms of the sweep by name, one of your own first."""
        arms = {}
        if self.parameterization is not None or self.optimizer is not None:
            arms[OWN] = own_arm(self.parameterization, self.optimizer)
        return arms | {name: ARMS[name] for name in self.arms or (() if arms else DEFAULT_ARMS)}

    def rates_of(self, arm: Arm) -> tuple[float, ...]:
        """Return the rates of an arm before any extension, rising."""
        if len(self.rates) > 1:
            return tuple(sorted(self.rates))
        (number,) = map(int, self.rates)
        steps = range(-(number // 2), number - number // 2)
        return tuple(arm.optimizer.learning_rate * SPACING**step for step in steps)


def _spell(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _check_finite(field: str, values: tuple[float, ...]) -> None:
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{field}={_spell(values)}: they must be finite")


def _check_rates(rates: tuple[float, ...]) -> None:
    _check_finite("rates", rates)
    if not rates:
        raise ValueError("rates: give how many (5), or the rates themselves (0.002 0.004 0.008)")
    is_count = len(rates) == 1
    number = rates[0] if is_count else len(rates)
    if number >= FEWEST_RATES and number != int(number):
        raise ValueError(f"rates={_spell(rates)}: one number alone is how many, a whole number")
    if number < FEWEST_RATES:
        raise ValueError(
            f"rates={_spell(rates)}: fewer than {FEWEST_RATES} rates have no optimum between"
            " them; give how many (5), or three or more rates (0.002 0.004 0.008)"
        )
    if number > MOST_RATES:
        raise ValueError(f"rates={_spell(rates)}: at most {MOST_RATES} rates")
    if not is_count and (min(rates) <= 0 or len(set(rates)) < len(rates)):
        raise ValueError(f"rates={_spell(rates)}: they must differ, and all be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """An arm at a point."""

    arm: str
    value: float
    config: PretrainConfig

    @functools.cached_property
    def plan(self) -> RunPlan:
        """Model, parameter table and optimiser."""
        try:
            return make_plan(self.config)
        except ValueError as error:
            raise ValueError(f"arm {self.arm} at {self.value:g}: {error}") from error

    @property
    def rule(self) -> Optimizer:
        """Optimiser with a learning rate of 1."""
        return dataclasses.replace(self.config.optimizer, learning_rate=1.0)

    @functools.cached_property
    def digest(self) -> str:
        """Fingerprint of everything but rate and seed; a record with another digest is outdated."""
        training = self.with_seed(0)
        return fingerprint(dataclasses.replace(self.config, training=training, optimizer=self.rule))

    def with_seed(self, seed: int) -> TrainingConfig:
        """Return the training config of one seed."""
        return dataclasses.replace(self.config.training, seed=seed)


def cells_of(config: TransferConfig) -> tuple[Cell, ...]:
    """Return every arm at every point, validated; no device is used.

    Raises:
        ValueError: Sizes that do not divide, or an arm that does not fit the model.
    """
    axis = AXES[config.axis]
    points = config.chosen_points
    start = AxisSetting(model=config.model, training=config.training)
    settings = {value: axis.apply(start, value) for value in points}
    base = _base_of(config, settings[points[0]])
    cells = tuple(
        Cell(
            arm=name,
            value=value,
            config=PretrainConfig(
                model=setting.model,
                data=config.data,
                training=setting.training,
                optimizer=arm.optimizer,
                schedule=config.schedule,
                parameterization=arm.parameterization,
                base=base,
                evaluation=EvaluationConfig(every=0, batches=config.evaluation_batches),
            ),
        )
        for name, arm in config.chosen_arms.items()
        for value, setting in settings.items()
    )
    for cell in cells:
        _ = cell.plan
    return cells


def _base_of(config: TransferConfig, smallest: AxisSetting) -> BasePoint:
    """Return the base point; numbers that are not given are those of the smallest point."""
    training = smallest.training
    batch_tokens = training.batch_size * training.sequence_length
    values = {
        "num_layers": smallest.model.num_layers,
        "embed_dim": smallest.model.embed_dim,
        "tokens": training.steps * batch_tokens,
        "batch_tokens": batch_tokens,
    }
    missing = {field: v for field, v in values.items() if getattr(config.base, field) is None}
    return dataclasses.replace(config.base, **missing)


def short() -> TransferConfig:
    """Within 30 minutes on two cores: depth 4, widths 64, 128, 256, 5 rates, 3 seeds."""
    return TransferConfig(budget=30.0)


def quick() -> TransferConfig:
    """Within 6 minutes, to see the command at work: depth 2, widths 32 and 128, one seed."""
    model = dataclasses.replace(
        _MODEL,
        num_layers=2,
        embed_dim=32,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
        moe=dataclasses.replace(_MOE, expert_dim=32),
    )
    return TransferConfig(budget=6.0, seeds=1, model=model, points=(32.0, 128.0))


def full() -> TransferConfig:
    """For a GPU: depth 8, widths 128 to 1024, 7 rates, 5 seeds, 2000 steps."""
    return TransferConfig(
        points=(128.0, 256.0, 512.0, 1024.0),
        rates=(7.0,),
        seeds=5,
        model=ModelConfig(
            vocab_size=256,
            num_layers=8,
            embed_dim=128,
            attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=64),
            moe=MoEConfig(num_experts=16, top_k=4, expert_dim=128, **METHODS["hyperp"].parts()),
            dense_dim=512,
            norm_epsilon=1e-5,
        ),
        training=TrainingConfig(steps=2000, batch_size=32, sequence_length=256),
        evaluation_batches=32,
    )


RECIPES = {"short": short, "quick": quick, "full": full}
