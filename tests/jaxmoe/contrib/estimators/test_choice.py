# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Estimators in the config of a run: refusals, costs in words, and older configs."""

import dataclasses

import pytest

from jaxmoe.configs import from_json, to_json
from jaxmoe.contrib.estimators.evolution import EvolutionConfig
from jaxmoe.contrib.estimators.seed_pool import SeedPoolConfig
from jaxmoe.contrib.estimators.spsa import SPSAConfig
from jaxmoe.contrib.estimators.surrogate import SurrogateConfig
from jaxmoe.optim import AdamWConfig, MuonHConfig, SGDConfig
from jaxmoe.run.config import PretrainConfig, TrainingConfig
from jaxmoe.run.plan import make_plan
from jaxmoe.training.estimators import BackpropConfig
from tests.support.estimators import step_of
from tests.support.models import TINY


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (BackpropConfig(), None),
        (
            SPSAConfig(directions=8, payload="byte"),
            "zeroth order: 2 x 8 passes a step, 12 bytes a worker and step",
        ),
        (SPSAConfig(directions=8), "zeroth order: 2 x 8 passes a step, 32 bytes a worker and step"),
        (
            SeedPoolConfig(),
            "zeroth order: 2 x 1 passes a step; 4096 sums of 16384 bytes are the difference to the"
            " initial parameters",
        ),
        (
            EvolutionConfig(population=8),
            "evolution: 8 passes a step, perturbations of rank 1, 32 bytes a step",
        ),
        (
            SurrogateConfig(features=64),
            "zeroth order: 2 x 8 passes a step, 256 bytes a worker and step (weights of 64"
            " features)",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_cost_of_a_step_in_words(config, text):
    assert config.describe(step_of(TINY)) == text


def test_flops_count_the_passes_of_the_estimator():
    training = TrainingConfig(gradients=SPSAConfig(directions=6), clip=None)
    backward, passes = PretrainConfig(), PretrainConfig(training=training, optimizer=SGDConfig())
    ratio = make_plan(passes).flops_per_token / make_plan(backward).flops_per_token
    assert ratio == pytest.approx(4.0)


@pytest.mark.parametrize("gradients", [SPSAConfig(), SeedPoolConfig()])
def test_methods_of_gradient_descent_refuse_what_leaves_signs(gradients):
    training = TrainingConfig(gradients=gradients, clip=None)
    for optimizer in (AdamWConfig(), MuonHConfig()):
        message = f"optimizer:{optimizer.name} divides a gradient by its size"
        with pytest.raises(ValueError, match=rf"{message}.* choose optimizer:sgd"):
            PretrainConfig(training=training, optimizer=optimizer)
    limited = dataclasses.replace(training, clip=1.0)
    with pytest.raises(ValueError, match=r"training.clip=1.0 .* set training.clip to None"):
        PretrainConfig(training=limited, optimizer=SGDConfig())
    assert PretrainConfig(training=training, optimizer=SGDConfig()).optimizer == SGDConfig()


def test_an_estimator_is_saved_and_backpropagation_is_the_default():
    assert to_json(PretrainConfig())["training"]["gradients"] == {"kind": "backprop"}
    changed = dataclasses.replace(
        PretrainConfig(),
        training=TrainingConfig(gradients=SeedPoolConfig(seeds=3), clip=None),
        optimizer=SGDConfig(),
    )
    assert from_json(PretrainConfig, to_json(changed)) == changed
