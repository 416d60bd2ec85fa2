# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every recipe fits its data and says how it is run."""

from __future__ import annotations

import pytest

from experiments.assembly import make_plan
from experiments.recipes import RECIPES
from jaxmoe.data import evaluation_batches


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
