# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every recipe fits its data and says how it is run."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.recipes import RECIPES
from jaxmoe.data import evaluation_batches
from jaxmoe.models.presets import ladder_tokens
from jaxmoe.run.plan import make_plan


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_data(name):
    config = RECIPES[name]()
    plan = make_plan(config)
    source = config.data.build(config.training.seed)
    assert source.vocab_size <= plan.model.vocab_size
    assert config.training.batch_size % config.training.accumulation == 0
    evaluation_batches(  # too little held-out data is an error here
        source,
        batch_size=config.held_out_batch_size,
        sequence_length=config.training.sequence_length,
        num_batches=config.evaluation.batches,
    ).close()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_how_it_is_run(name):
    text = RECIPES[name].__doc__
    assert text.splitlines()[0].endswith(".")
    command = "python -m experiments.pretrain" + ("" if name == "tiny" else f" {name}")
    assert command in [line.strip() for line in text.splitlines()]


RUNGS = {"d8": 0.01400, "d12": 0.00828, "d16": 0.00559, "d20": 0.00410, "d24": 0.00317}


@pytest.mark.parametrize("name", RUNGS)
def test_one_learning_rate_gives_every_rung_its_own(name):
    """0.014 is carried to the paper's rates; 2^21 tokens a step, 50 per parameter."""
    plan = make_plan(RECIPES[name]())
    training, eta0 = plan.config.training, plan.config.optimizer.learning_rate
    rates = {
        eta0 * row.hyper.learning_rate_multiplier
        for row in plan.table
        if row.hyper.group in ("muonh", "adamh")
    }
    assert eta0 == 0.014 and {round(rate, 5) for rate in rates} == {RUNGS[name]}
    assert training.batch_size * training.sequence_length == 2**21
    tokens = ladder_tokens(plan.model.num_layers)
    assert 0 <= training.tokens - tokens < 2**21
    assert plan.model.multipliers.residual == (2 * plan.model.num_layers) ** -0.5


def test_hyperp_is_its_own_base_point():
    """At the sizes of the recipe the rate is the one given; elsewhere the laws carry it."""
    config = RECIPES["hyperp"]()
    groups = {row.hyper.group for row in make_plan(config).table}
    assert groups == {"muonh", "adamh", "adamw"}
    assert {row.hyper.learning_rate_multiplier for row in make_plan(config).table} == {1.0}
    longer = dataclasses.replace(config.training, steps=4 * config.training.steps)
    carried = make_plan(dataclasses.replace(config, training=longer)).table
    factors = {row.hyper.learning_rate_multiplier for row in carried}
    assert list(factors) == [pytest.approx(4**-0.32)]
