# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of published models are read as they are, with the parameters that they are known for."""

import dataclasses

import pytest

from experiments.recipes import RECIPES, published
from jaxmoe.checkpoint.huggingface.describe import check_described
from jaxmoe.checkpoint.huggingface.families.own import family_of
from jaxmoe.checkpoint.huggingface.family import text_fields
from jaxmoe.checkpoint.huggingface.validation import check_fields
from jaxmoe.scaling.initialize import parameter_table
from tests.support.published_configs import PUBLISHED
from tests.support.published_patterns import PATTERNS

MODELS = PUBLISHED | PATTERNS


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_has_the_parameters_of_its_model(name):
    billions, config = MODELS[name]
    config = text_fields(config)
    check_fields(config)
    total = parameter_table(family_of(config).model(config)).total
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_written_as_the_same_model(name):
    config = text_fields(MODELS[name][1])
    family = family_of(config)
    model = family.model(config)
    again = family.model(family.fields(model) | {"model_type": family.name})
    check_described(model, again, family.name)


RECIPE = {
    "deepseek-v2-lite": "deepseek_v2_lite",
    "deepseek-v3": "deepseek_v3",
    "glm-4.5-air": "glm_4_5_air",
    "gpt-oss-120b": "gpt_oss_120b",
    "gpt-oss-20b": "gpt_oss_20b",
    "minimax-m2": "minimax_m2",
    "qwen3-235b-a22b": "qwen3_235b_a22b",
    "qwen3-next-80b": "qwen3_next_80b_a3b",
}


@pytest.mark.parametrize("name", RECIPE)
def test_a_recipe_has_the_model_of_its_published_config(name):
    """All but the balance losses, which recipes take from the papers where there are some."""
    config = PUBLISHED[name][1]
    model, recipe = family_of(config).model(config), RECIPES[RECIPE[name]]().model
    moe = dataclasses.replace(model.moe, balancers=recipe.moe.balancers)
    assert dataclasses.replace(model, moe=moe) == recipe


def test_recipes_state_total_and_active_parameters():
    for name, recipe in RECIPES.items():
        model = recipe().model
        lines = [line for line in _TABLE if line.split()[:1] == [name]]
        if lines:
            table = parameter_table(model)
            active = table.active(model.moe.top_k, model.moe.num_experts)
            stated = [float(word) for word in lines[0].split()[1:3]]
            assert stated == [float(f"{number:.3g}") for number in (table.total, active)], name
    assert sum(line.split()[:1] == [name] for name in RECIPES for line in _TABLE) == 11


_TABLE = published.__doc__.splitlines()
