# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two tiny masked-diffusion models that are served, and what their answers must be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.contrib.diffusion.config import DiffusionSizes
from jaxmoe.contrib.diffusion.diffuse import diffuse
from jaxmoe.contrib.diffusion.executor import DiffusionExecutor
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.routing import ExpertChoiceConfig, RouterZConfig, SoftmaxGateConfig
from tests.support.serving import params

VOCAB, LONGEST = 29, 8
# Tokens choose; or experts choose among the tokens of a row, fewer while most of it is masked; or
# among those of all rows, which are therefore computed one after the other.
POINTWISE = ModelConfig(
    vocab_size=VOCAB,
    num_layers=1,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, is_causal=False),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
)
CHOICE = dataclasses.replace(
    POINTWISE,
    moe=MoEConfig(
        num_experts=4,
        top_k=2,
        expert_dim=8,
        router=ExpertChoiceConfig(schedule="linear_reverse"),
        gate=SoftmaxGateConfig(),
        balancers=(RouterZConfig(),),
    ),
)
MIXED = dataclasses.replace(
    POINTWISE,
    moe=dataclasses.replace(CHOICE.moe, router=ExpertChoiceConfig(scope="batch")),
)
SIZES = DiffusionSizes(rows=3, lengths=(LONGEST,), budget=4)


@functools.cache
def executor(model=POINTWISE):
    """The executor of the session; it holds no rows."""
    return DiffusionExecutor(model, params(model), config=SIZES)


def alone(model, prompt, sampling, num_steps):
    """The answer that `diffuse` gives to one request."""
    count = min(sampling.max_tokens, LONGEST - len(prompt))
    row = np.pad(np.asarray(prompt, np.int32), (0, count))[None]
    law = SamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k or None)
    filled = diffuse(
        model,
        params(model),
        jnp.asarray(row),
        jnp.arange(len(row[0]))[None] < len(prompt),
        num_steps=num_steps,
        keys=jax.random.key(sampling.seed)[None],
        sampling=law,
    )
    return np.asarray(filled)[0, len(prompt) :].tolist()
