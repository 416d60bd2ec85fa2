# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models and formats of pages that are served: tokens of one whole forward pass, or `generate`."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.norms import LayerNormConfig
from jaxmoe.models.config import DenseConfig, LatentAttentionConfig, LayerConfig
from jaxmoe.models.decode import generate
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import GATES, MoEPlusPlusConfig
from jaxmoe.serve import Sampling
from jaxmoe.serve.device.executor import ModelExecutor
from tests.support.model_options import model_fields
from tests.support.serving import MODEL, PLAIN, SIZES, check_answers, params, serve

PROMPT = (3, 1, 4, 1, 5, 9, 2)
REQUESTS = {
    id_: (PROMPT[: 2 + id_], Sampling(max_tokens=6, temperature=float(id_ > 0), seed=id_))
    for id_ in range(4)
}
ARRIVALS = {0: 0, 1: 0, 2: 2, 3: 5}

LATENT = dataclasses.replace(
    MODEL,
    attention=LatentAttentionConfig(num_heads=4, latent_dim=8, nope_dim=4, rope_dim=4, value_dim=4),
)
CARRIED = dataclasses.replace(
    MODEL,
    num_layers=3,
    moe=dataclasses.replace(MODEL.moe, router=MoEPlusPlusConfig(), gate=GATES["softmax"]()),
)
ALTERNATING = dataclasses.replace(
    MODEL,
    num_layers=4,
    dense_layers=(),
    layers=(
        LayerConfig(),
        LayerConfig(
            mixer=dataclasses.replace(MODEL.attention, window=None, positions="none"),
            feed_forward=DenseConfig(hidden_dim=12),
        ),
    ),
)
"""Window layers with rotary positions and full ones without, whose feed-forwards are dense."""


def few_bits(form):
    return ExecutionConfig(precision=PrecisionPolicy(cache=form))


CASES = {
    "latent": (LATENT, PLAIN),
    "alternating": (ALTERNATING, PLAIN),
    "biased_head": (dataclasses.replace(MODEL, **model_fields(has_head_bias=True)), PLAIN),
    "softcapped": (dataclasses.replace(MODEL, **model_fields(logits_softcap=2.0)), PLAIN),
    "norms_after": (
        dataclasses.replace(
            MODEL, **model_fields(norm_place="after", norm=LayerNormConfig(has_bias=True))
        ),
        PLAIN,
    ),
    "int8": (MODEL, few_bits("int8")),
    "carried_logits": (CARRIED, PLAIN),
    "int4": (MODEL, few_bits("int4")),
}


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_whole_pass(name):
    model, execution = CASES[name]
    served = ModelExecutor(model, params(model), config=SIZES, execution=execution)
    found = serve(REQUESTS, ARRIVALS, run=served.run)
    check_answers(REQUESTS, found.answers, model, execution)


@pytest.mark.slow
def test_tokens_are_those_of_generate():
    """Requests with the sampling of `generate` for a batch of one, with its filters."""
    drawn = Sampling(max_tokens=6, temperature=0.8, seed=7, top_k=9, top_p=0.9, min_p=0.02)
    given = {0: (PROMPT, drawn), 1: (PROMPT[:3], Sampling(max_tokens=6, temperature=0.0))}
    found = serve(given, {0: 0, 1: 1})
    for id_, (prompt, sampling) in given.items():
        tokens = generate(
            MODEL,
            params(),
            [list(prompt)],
            num_tokens=sampling.max_tokens,
            key=jax.random.key(sampling.seed),
            temperature=sampling.temperature,
            top_k=sampling.top_k or None,
            top_p=sampling.top_p,
            min_p=sampling.min_p or None,
        )
        np.testing.assert_array_equal(tokens[0], found.answers[id_])
