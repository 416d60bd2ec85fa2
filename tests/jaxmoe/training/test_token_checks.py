# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What is no batch of rows of ids, given to the model or to a training step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.data import Batch
from jaxmoe.models.token_checks import check_tokens
from jaxmoe.models.transformer import Transformer
from jaxmoe.optim import adamw
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.models import TINY

V = TINY.vocab_size
OUTSIDE = rf"\[row 1, position 2\] is {V}, outside the vocabulary of {V} \(ids 0 to {V - 1}\)"


def _ids(bad=None):
    ids = np.ones((2, 8), np.int32)
    if bad is not None:
        ids[1, 2] = bad
    return ids


def _batch(ids, targets=None):
    ones = jnp.ones(ids.shape, jnp.float32)
    return Batch(tokens=ids, targets=ids if targets is None else targets, loss_weights=ones)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2, 3]], r"tokens has type list, which must be an array of token ids \[B, S\]"),
        ("text", "tokens has type str, which must be an array"),
        (np.ones(8, np.int32), r"shape \(8,\), which must be .*: give tokens\[None, :\] for one"),
        (np.ones((1, 2, 3), np.int32), r"shape \(1, 2, 3\), which must be \[B, S\], rows of ids$"),
        (np.ones((2, 8), np.float32), "dtype float32, which must be an integer type"),
        (_ids(V), OUTSIDE),
        (jnp.asarray(_ids(V)), OUTSIDE),
        (_ids(-1), r"\[row 1, position 2\] is -1, outside"),
    ],
)
def test_tokens_that_are_no_rows_of_ids_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(tokens, V)


def test_ids_are_compared_outside_of_jit_only():
    check_tokens(_ids(V - 1), V)
    check_tokens(jnp.asarray(_ids(V)), V, has_ids=False)
    jax.jit(lambda tokens: check_tokens(tokens, V))(_ids(V))
    with pytest.raises(ValueError, match=OUTSIDE):
        Transformer(TINY).apply({"params": {}}, jnp.asarray(_ids(V)))


def test_a_step_refuses_what_is_no_batch():
    optimizer = adamw(1e-3)
    step = make_train_step(TINY, optimizer)
    state, ids = init_state(TINY, optimizer, jax.random.key(0)), jnp.asarray(_ids())
    for batch, message in (
        ((ids, ids), r"batch has type tuple, which must be a jaxmoe.data.Batch: give Batch\("),
        ({"tokens": ids}, "batch has type dict"),
        (_batch(jnp.asarray(_ids(V))), f"batch.tokens{OUTSIDE}"),
        (_batch(ids, targets=_ids(V)), f"batch.targets{OUTSIDE}"),
    ):
        with pytest.raises(ValueError, match=message):
            step(state, batch)
    with pytest.raises(ValueError, match="state has type dict: give that of init_state"):
        step(state.params, _batch(ids))
    state, metrics = step(state, _batch(ids))
    assert np.isfinite(metrics.loss)
    with pytest.raises(ValueError, match=f"batch.tokens{OUTSIDE}"):
        step(state, _batch(_ids(V)))  # numpy arrays at every call
