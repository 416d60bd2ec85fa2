# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler of masked diffusion: a row's tokens depend on neither other rows nor the budget."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.diffusion.diffuse import _compile, diffuse
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.sampling import SamplingConfig
from tests.support.diffusion import CHOICE, MIXED, POINTWISE, VOCAB
from tests.support.serving import params

ROWS, LENGTH, STEPS = 3, 8, 3
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB - 1, (ROWS, LENGTH)), jnp.int32)
IS_GIVEN = jnp.arange(LENGTH)[None] < jnp.asarray([[0], [2], [5]])
KEYS = jax.random.split(jax.random.key(3), ROWS)


def filled(model, rows=slice(None), **given):
    arrays = TOKENS[rows], IS_GIVEN[rows]
    given = {"num_steps": STEPS, "keys": KEYS[rows], **given}
    return np.asarray(diffuse(model, params(model), *arrays, **given))


@pytest.mark.parametrize(
    "model",
    [POINTWISE, *(pytest.param(one, marks=pytest.mark.slow) for one in (CHOICE, MIXED))],
    ids=["pointwise", "choice", "mixed"],
)
def test_rows_together_equal_each_row_alone_with_its_key(model):
    together = filled(model)
    given = np.asarray(IS_GIVEN)
    assert (together[given] == np.asarray(TOKENS)[given]).all() and together.max() < VOCAB - 1
    for row in range(ROWS):
        alone = filled(model, slice(row, row + 1))
        assert (alone[0] == together[row]).all()
    other = filled(model, keys=KEYS[::-1])
    assert (other != together).any()


def test_with_a_budget_logits_are_never_larger_and_tokens_the_same():
    """Every array with the vocabulary among its dimensions, in the compiled program."""
    budget, width = 2, POINTWISE.embed_dim
    limits = SamplingConfig().limits(VOCAB)
    run = _compile(POINTWISE, ExecutionConfig(), budget)
    given = params(POINTWISE), TOKENS, IS_GIVEN, None, KEYS, jnp.int32(STEPS), limits
    program = run.lower(*given).compile()
    assert (np.asarray(program(*given)) == filled(POINTWISE)).all()
    found = re.findall(r"\w\[([\d,]+)\]", program.as_text())
    wide = {shape for one in found if VOCAB in (shape := tuple(map(int, one.split(","))))}
    weights = {(VOCAB, width), (width, VOCAB)}
    assert (width, VOCAB) in wide and any(budget in shape for shape in wide)
    assert all(np.prod(shape) <= budget * VOCAB for shape in wide - weights), wide


@pytest.mark.slow
def test_tokens_are_the_same_with_any_logit_budget():
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.5, top_p=0.9)):
        wanted = filled(POINTWISE, sampling=sampling)
        for budget in (1, 5, 24):
            assert (filled(POINTWISE, budget=budget, sampling=sampling) == wanted).all()
