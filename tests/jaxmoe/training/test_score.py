# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of continuations and greedy ones: those of the whole row, whatever the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Transformer
from jaxmoe.models import decode
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.score import Scorer

LENGTH = 40
MODEL = ModelConfig(
    vocab_size=11,
    num_layers=1,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=6),
    moe=MoEConfig(num_experts=3, top_k=2, expert_dim=10),
)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return parameter_table(MODEL).tree(
        lambda row: jnp.asarray(rng.normal(size=row.shape) * 0.4, jnp.float32)
    )


def rows_of(lengths):
    rng = np.random.default_rng(1)
    return [
        (rng.integers(11, size=first).tolist(), rng.integers(11, size=second).tolist())
        for first, second in lengths
    ]


def by_itself(params, context, continuation):
    """A row alone: what was read is filled up behind, which causal attention does not see."""
    read = [*context, *continuation][-(LENGTH + 1) :]
    tokens = np.zeros((1, LENGTH + 1), np.int32)
    tokens[0, : len(read)] = read
    logits = apply(params, tokens)[0].astype(np.float64)
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    places = np.arange(len(read) - len(continuation), len(read))
    chosen = logits[places - 1, tokens[0, places]]
    return chosen.sum(), bool((logits[places - 1].argmax(-1) == tokens[0, places]).all())


@jax.jit
def _apply(params, tokens):
    return Transformer(MODEL).apply({"params": params}, tokens).logits


def apply(params, tokens):
    return np.asarray(_apply(params, jnp.asarray(tokens)))


def test_continuations_of_all_lengths(params):
    """In one shape and batches that are not full; long contexts lose their beginning."""
    requests = rows_of([(1, 1), (5, 3), (38, 2), (30, 30), (2, 39), (1, 2), (70, 4)])
    context = requests[1][0]
    top = int(
        apply(params, np.asarray([context + [0] * (LENGTH - 4)]))[0, len(context) - 1].argmax()
    )
    requests.append((context, [top]))
    scorer = Scorer(MODEL, params, max_length=LENGTH, batch_size=3)
    found = scorer.continuations(requests)
    assert scorer.num_truncated == 2  # 30 + 30 and 70 + 4
    for (log_prob, is_greedy), request in zip(found, requests, strict=True):
        wanted = by_itself(params, *request)
        np.testing.assert_allclose(log_prob, wanted[0], atol=1e-4)
        assert is_greedy == wanted[1]
    assert found[-1][1] and not all(is_greedy for _, is_greedy in found)


def test_what_cannot_be_asked_is_refused(params):
    scorer = Scorer(MODEL, params, max_length=LENGTH)
    with pytest.raises(ValueError, match="must have a token at least"):
        scorer.continuations([([], [1])])
    with pytest.raises(
        ValueError, match="a continuation of 41 tokens is longer than the max_length=40"
    ):
        scorer.continuations([([1], [1] * 41)])
    with pytest.raises(ValueError, match="fit together into max_length=40"):
        scorer.greedy([1], 40, lambda _: False)
    with pytest.raises(ValueError, match="max_length=1 must be at least 2"):
        Scorer(MODEL, params, max_length=1)


@pytest.mark.slow
def test_greedy_is_that_of_generate(params):
    """Reads in pieces, and stops where `is_done` returns true."""
    context = rows_of([(13, 1)])[0][0]
    wanted = decode.generate(
        MODEL,
        params,
        jnp.asarray([context], jnp.int32),
        num_tokens=6,
        key=jax.random.key(0),
        temperature=0.0,
    )
    scorer = Scorer(MODEL, params, max_length=LENGTH)
    written = scorer.greedy(context, 6, lambda _: False)
    assert written == np.asarray(wanted)[0].tolist()
    assert scorer.greedy(context, 6, lambda some: len(some) == 2) == written[:2]
    assert scorer.greedy([7] * 50 + context, 27, lambda some: True) == written[:1]
    assert scorer.num_truncated == 1
