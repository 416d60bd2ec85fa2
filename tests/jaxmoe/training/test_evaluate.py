# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Held-out loss: the same number twice, weighted as asked, over batches of unequal weight."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.data.batch import Batch
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.evaluate import Evaluation, evaluate, make_eval_step
from tests.support.models import TINY, tokens_for
from tests.support.tolerances import assert_close


def _batch(seed: int, scale: float) -> Batch:
    """Weights from 0 to 2 `scale`, two documents in every row, padding at the end of the first."""
    tokens, targets = tokens_for(TINY, seed)
    weights = scale * np.random.default_rng(seed).integers(0, 3, tokens.shape)
    weights[0, 4:] = 0
    segment_ids = np.tile(np.array([1, 1, 1, 2, 2, 2], np.int32), (len(tokens), 1))
    segment_ids[0, 4:] = 0
    positions = np.tile(np.arange(3), (len(tokens), 2))
    return Batch(
        tokens=tokens,
        targets=targets,
        loss_weights=jnp.asarray(weights, jnp.float32),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions, jnp.int32),
    )


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return parameter_table(TINY).tree(
        lambda row: jnp.asarray(
            rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5, jnp.float32
        )
    )


@pytest.fixture(scope="module")
def eval_step():
    return make_eval_step(TINY)


BATCHES = [_batch(0, 1.0), _batch(1, 5.0), _batch(2, 0.25)]


def test_equals_the_mean_over_all_tokens(params, eval_step):
    @jax.jit
    def forward(batch):
        segments = {"positions": batch.positions, "segment_ids": batch.segment_ids}
        return Transformer(TINY).apply({"params": params}, batch.tokens, **segments).logits

    result = evaluate(eval_step, params, {}, BATCHES)
    nll, weight = 0.0, 0.0
    for batch in BATCHES:
        logits = forward(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            np.asarray(logits), np.asarray(batch.targets)
        )
        nll += float((np.asarray(losses, np.float64) * np.asarray(batch.loss_weights)).sum())
        weight += float(batch.loss_weights.sum())
    assert_close(result.nats_per_token, nll / weight, kind="end_to_end")
    assert result.num_tokens == round(weight)


def test_the_same_batches_give_the_same_bits(params, eval_step):
    results = [evaluate(eval_step, params, {}, BATCHES) for _ in range(2)]
    results.append(evaluate(make_eval_step(TINY), params, {}, iter(BATCHES)))
    assert results[0] == results[1] == results[2]


def test_weights_of_0_leave_tokens_out(params, eval_step):
    empty = _batch(3, 0.0)
    assert evaluate(eval_step, params, {}, [*BATCHES, empty]) == evaluate(
        eval_step, params, {}, BATCHES
    )


def test_nothing_to_evaluate_is_an_error(params, eval_step):
    for batches in ([], [_batch(3, 0.0)]):
        with pytest.raises(ValueError) as error:
            evaluate(eval_step, params, {}, batches)
        assert str(error.value) == (
            "there is nothing to evaluate: no held-out token has a loss weight"
        )


def test_bits_are_nats_over_the_log_of_2():
    assert Evaluation(nats_per_token=math.log(8.0), num_tokens=1).bits_per_token == 3.0
