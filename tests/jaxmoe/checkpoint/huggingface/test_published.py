# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of published models are read as they are, with the parameters that they are known for."""

import pytest

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
