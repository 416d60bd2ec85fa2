# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every recipe fits its data and says how it is run."""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest

from experiments import describe
from experiments.plan.__main__ import main as plan_command
from experiments.plan.config import step_plan
from experiments.recipes import RECIPES, published
from jaxmoe.data import evaluation_batches
from jaxmoe.execution import Remat
from jaxmoe.models.presets import ladder_tokens
from jaxmoe.planning.hardware import parse_topology
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.run.plan import make_plan
from sharding.mesh import MeshConfig


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
    command = "jaxmoe pretrain" + ("" if name == "tiny" else f" {name}")
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


MACHINES = {
    "olmoe_1b_7b": 2,
    "deepseek_v2_lite": 4,
    "qwen3_30b_a3b": 8,
    "glm_4_5_air": 32,
    "gpt_oss_120b": 32,
    "minimax_m2": 64,
    "qwen3_235b_a22b": 64,
}
"""Accelerators of 140 GB that recipes name which do not compute all again."""


def test_recipes_that_keep_more_are_in_the_table():
    keeping = {name for name in RECIPES if "accelerators of 140 GB" in str(RECIPES[name].__doc__)}
    keeping = {name for name in keeping if RECIPES[name]().execution.remat != "full"}
    assert keeping == MACHINES.keys()
    words = {1: "One", 2: "Two", 4: "Four", 8: "Eight"}
    for name, number in MACHINES.items():
        text = f"{words.get(number, number)} accelerators of 140 GB"
        assert text in str(RECIPES[name].__doc__)


def _planned_memory(name: str, remat: Remat) -> float:
    """Return the bytes of one device, whose micro-batch is one sequence."""
    config = RECIPES[name]()
    number = MACHINES[name]
    batch = max(config.training.batch_size, number)
    training = dataclasses.replace(config.training, batch_size=batch, accumulation=batch // number)
    execution = dataclasses.replace(config.execution, mesh=MeshConfig(data=number), remat=remat)
    config = dataclasses.replace(config, training=training, execution=execution)
    plan = step_plan(config, parse_topology(f"gpu:h200:{number}"), execution.mesh)
    return estimate_memory(plan, "gpu").total


@pytest.mark.parametrize(
    "name",
    [x if x == "qwen3_30b_a3b" else pytest.param(x, marks=pytest.mark.slow) for x in MACHINES],
)
def test_what_a_recipe_keeps_fits_the_accelerators_that_it_names(name):
    """In closed form; to keep more products would not fit, or there are none."""
    remat = RECIPES[name]().execution.remat
    limit = 0.9 * 140e9
    assert _planned_memory(name, remat) <= limit
    order = typing.get_args(Remat)
    assert _planned_memory(name, order[order.index(remat) - 1]) > limit or remat == "dots"


PUBLISHED = [name for name in RECIPES if hasattr(published, name)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_is_described(name, capsys):
    describe.main([name])
    output = capsys.readouterr().out
    table = make_plan(RECIPES[name]()).table
    assert re.search(rf"^parameters +{table.total:,} total", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_a_published_recipe_has_a_plan_for_the_accelerators_that_it_names(name, tmp_path, capsys):
    topology = f"gpu:h200:{MACHINES[name]}"
    batch = str(max(RECIPES[name]().training.batch_size, MACHINES[name]))
    words = [name, "--topology", topology, "--training.batch_size", batch, "--compiles", "0"]
    assert plan_command([*words, "--run.directory", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "predicted step" in output and "flags for pretrain" in output


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
