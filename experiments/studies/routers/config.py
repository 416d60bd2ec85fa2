# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the config of `routers`, its recipes, and the model of one method.

Every method gets the same layers, the same number of experts, and the same active FLOPs: where it
fixes another top_k, the width of an expert changes so that top_k * expert_dim stays. A schedule of
top_k counts with its last value, which it reaches at nine tenths of the steps.

To add a recipe: a function and a row of RECIPES in experiments/studies/routers/config.py
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from experiments.studies.study import StudyConfig
from jaxmoe.configs import closest
from jaxmoe.data import CorpusConfig, LanguageMixtureConfig, SourceKind
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig, Optimizer, ScheduleBase
from jaxmoe.routing import METHODS
from jaxmoe.run.config import TrainingConfig

ObjectiveName = Literal["autoregressive", "masked_diffusion"]

FREE_FIELDS = ("run", "methods", "trace")
"""Fields that may change when a directory is continued: further methods are added."""

_SHORT_MODEL = ModelConfig(
    vocab_size=256,
    num_layers=2,
    embed_dim=32,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=48),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutersConfig(StudyConfig):
    """Every routing method on the same data and budget."""

    methods: tuple[str, ...] = ()
    """Names in jaxmoe.routing.METHODS; all of them when empty."""
    baseline: str = "mixtral"
    """Method that the others are paired with."""
    seeds: int = 3
    """Trainings per method; training i of every method has the same initial values (router
    apart) and the same batches."""
    model: ModelConfig = _SHORT_MODEL
    """Model; a method replaces parts of model.moe."""
    corpus: SourceKind = CorpusConfig()
    """Text, for held-out bits per byte."""
    languages: LanguageMixtureConfig = LanguageMixtureConfig()
    """Disjoint languages, for excess bits and the mutual information of language and expert."""
    training: TrainingConfig = TrainingConfig(steps=100, batch_size=16, sequence_length=64)
    """Training of a method on either kind of data, for each seed."""
    optimizer: Optimizer = AdamWConfig(learning_rate=1e-2, weight_decay=0.1)
    """Optimiser of each training."""
    schedule: ScheduleBase = LinearConfig(warmup_steps=10, floor=0.05)
    """Learning rate by step."""
    timing_rounds: int = 5
    """Rounds in which a method's step is timed beside the baseline's."""
    trace: tuple[str, ...] = ()
    """Methods whose routing of the held-out text is written to traces/<method>.npz, from the
    first seed, for `jaxmoe place --trace`."""

    def __post_init__(self):
        StudyConfig.__post_init__(self)
        if self.timing_rounds < 1:
            raise ValueError(f"timing_rounds={self.timing_rounds} must be at least 1")
        names_asked = (
            ("methods", self.methods),
            ("baseline", (self.baseline,)),
            ("trace", self.trace),
        )
        for field, names in names_asked:
            for name in names:
                if name not in METHODS:
                    raise ValueError(
                        f"{field}: there is no method {name!r}{closest(name, METHODS)}\n"
                        f"methods: {', '.join(METHODS)}"
                    )
        for name in self.trace:
            traits = METHODS[name].router.traits
            if not traits.is_token_major:
                raise ValueError(
                    f"trace: in {name} experts choose tokens, or mix them, and a trace is of tokens"
                    " that choose experts: leave it out"
                )
            if name not in self.chosen:
                raise ValueError(f"trace: {name} is not among the methods: add it to methods")
        if self.training.batch_ramp is not None:
            raise ValueError(
                "training.batch_ramp: methods are compared on batches of one size; leave it out"
            )
        if self.model.moe is None:
            raise ValueError("model.moe=none has no router: give the model a mixture of experts")
        if objective_of(self.baseline) != "autoregressive":
            raise ValueError(
                f"baseline={self.baseline} does not fit both tables: a method stands in the"
                " autoregressive one only if no token decides about another; choose mixtral"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Methods of this comparison, the baseline first."""
        names = self.methods or tuple(METHODS)
        return (
            self.baseline,
            *(name for name in METHODS if name in names and name != self.baseline),
        )


def objective_of(name: str) -> ObjectiveName:
    """Return the objective that a method can be trained by, from the traits of its router."""
    traits = METHODS[name].router.traits
    return "masked_diffusion" if traits.sees_others or not traits.is_causal else "autoregressive"


def model_of(config: RoutersConfig, name: str, objective: ObjectiveName) -> ModelConfig:
    """Return the model of one method, at the baseline's active FLOPs.

    Raises:
        ValueError: The method's parts do not go together at these sizes.
    """
    moe = config.model.moe
    assert moe is not None
    method = METHODS[name].sized_for(
        steps=config.training.steps,
        rows_per_expert=config.training.sequence_length * moe.top_k / moe.num_experts,
    )
    parts = METHODS[name].parts() | {"router": method.router, "capacity": method.capacity}
    top_k = METHODS[name].router.traits.final_top_k or parts.get("top_k", moe.top_k)
    parts["expert_dim"] = max(1, round(moe.expert_dim * moe.top_k / top_k))
    changes: dict[str, Any] = {"moe": dataclasses.replace(moe, **parts)}
    if objective == "masked_diffusion":
        changes["vocab_size"] = config.model.vocab_size + 1  # the mask
        changes["attention"] = dataclasses.replace(config.model.attention, is_causal=False)
    return dataclasses.replace(config.model, **changes)


def short() -> RoutersConfig:
    """Every method, two layers of width 32, three seeds: 20 minutes on two cores."""
    return RoutersConfig()


def full() -> RoutersConfig:
    """Every method, four layers of width 128, five seeds: for a GPU."""
    return RoutersConfig(
        seeds=5,
        model=ModelConfig(
            vocab_size=256,
            num_layers=4,
            embed_dim=128,
            attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32),
            moe=MoEConfig(num_experts=16, top_k=2, expert_dim=192),
        ),
        training=TrainingConfig(steps=1000, batch_size=32, sequence_length=128),
        optimizer=AdamWConfig(learning_rate=4e-3, weight_decay=0.1),
        schedule=LinearConfig(warmup_steps=40, floor=0.05),
        evaluation_batches=32,
    )


RECIPES = {"short": short, "full": full}
