# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generation with drafts: the same tokens as without, in fewer passes of the model."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmoe.catalog import choice
from jaxmoe.contrib.multi_token_prediction.config import MultiTokenModulesConfig
from jaxmoe.contrib.multi_token_prediction.drafts import DraftPrograms, DraftReport
from jaxmoe.models.config import AttentionConfig, LayerConfig, ModelConfig, ModelOptions, MoEConfig
from jaxmoe.models.decode import stream
from jaxmoe.models.sampling import SamplingConfig
from tests.support.one_step import params_of

FEW = 5  # tokens, so that many guesses are right by chance


def model_of(depth: int, **fields) -> ModelConfig:
    """Two small layers, the last one with experts."""
    return ModelConfig(
        vocab_size=FEW,
        num_layers=2,
        embed_dim=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
        options=ModelOptions(predictor=MultiTokenModulesConfig(depth=depth)),
        **fields,
    )


PROMPTS = [[1, 2, 3, 0, 4, 1, 2], [3], [0, 2]]


def written(model, params, *, num_tokens=30, at_once=16, programs=None, eos_ids=(), **sampling):
    parts = stream(
        model,
        params,
        PROMPTS,
        num_tokens=num_tokens,
        key=jax.random.key(3),
        sampling=SamplingConfig(**sampling),
        eos_ids=eos_ids,
        at_once=at_once,
        programs=programs,
    )
    return np.concatenate([*parts], axis=1)


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (1, {"temperature": 0.0}),
        pytest.param(2, {"temperature": 1.0}, marks=pytest.mark.slow),
        pytest.param(3, {"temperature": 0.7, "top_k": 4, "top_p": 0.95}, marks=pytest.mark.slow),
        pytest.param(2, {"temperature": 1.0, "eos_ids": (4,)}, marks=pytest.mark.slow),
        pytest.param(2, {"temperature": 0.0, "eos_ids": (1,)}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_drafts(depth, options):
    model = model_of(depth)
    if depth == 1:  # which compiles in seconds
        model = dataclasses.replace(model, num_layers=1, moe=None, dense_dim=24)
    params = params_of(model)
    programs = DraftPrograms()
    plain = written(model, params, **options)
    drafted = written(model, params, programs=programs, **options)
    np.testing.assert_array_equal(drafted, plain)
    report = programs.report
    print(report)
    assert 0 < report.num_accepted < report.num_drafts == depth * report.num_passes
    if "eos_ids" not in options:  # a pass gives a token, and every accepted draft one more, for
        rows = len(PROMPTS)  # which the last pass of each of the two parts may have no room
        assert rows * 29 <= report.num_passes + report.num_accepted <= rows * 29 + 2 * rows
    programs.close()
    assert programs.report == report


def test_the_report_counts_what_was_accepted():
    report = DraftReport(num_passes=10, num_drafts=20, num_accepted=5)
    assert str(report) == "5 of 20 drafted tokens accepted (25.0%), 10 passes of the model"
    assert DraftReport(0, 0, 0).acceptance == 0.0


def test_models_that_cannot_draft_are_refused():
    plain = dataclasses.replace(model_of(1), options=None)
    with pytest.raises(ValueError, match="model.options.predictor is not set: generate without"):
        written(plain, params_of(plain), programs=DraftPrograms())
    mamba = LayerConfig(mixer=choice("mixer", "mamba")())
    model = model_of(1, layers=(mamba, LayerConfig()))
    with pytest.raises(ValueError, match="the state of mamba cannot go back"):
        written(model, params_of(model), programs=DraftPrograms())
