# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Texts of models that are not causal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import init_params
from jaxmoe.contrib.diffusion.diffuse import diffuse
from jaxmoe.generation.text import GenerationConfig, LoadedModel, continue_texts
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.sampling import SamplingConfig

MODEL = ModelConfig(
    vocab_size=12,
    num_layers=1,
    embed_dim=16,
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=16, is_causal=False),
    moe=MoEConfig(num_experts=2, top_k=1, expert_dim=8),
)


class Numbers:
    """Token ids as text."""

    def encode(self, text):
        return np.array(text.split(), np.int32)

    def decode(self, tokens):
        return " ".join(map(str, np.asarray(tokens).tolist()))


@pytest.mark.slow
@pytest.mark.vertical("diffusion")
def test_masked_diffusion_fills_in_after_prompts_of_one_length():
    params, seen = init_params(MODEL, jax.random.key(0)), []
    loaded = LoadedModel(config=MODEL, params=params)
    prompts = [np.array([1, 2], np.int32), np.array([3, 4], np.int32)]
    given = GenerationConfig(length=3, sampling=SamplingConfig(temperature=0.8), seed=5)
    found = continue_texts(loaded, Numbers(), prompts, given)
    rows = jnp.pad(jnp.asarray(np.stack(prompts)), ((0, 0), (0, 3)))
    wanted = diffuse(
        MODEL,
        params,
        rows,
        jnp.arange(5)[None, :] < jnp.full((2, 1), 2),
        num_steps=6,
        keys=jnp.stack([jax.random.key(5), jax.random.key(6)]),
        sampling=SamplingConfig(temperature=0.8),
    )
    assert [sample.token_ids for sample in found] == [tuple(row) for row in wanted[:, 2:].tolist()]
    assert [sample.prompt for sample in found] == ["1 2", "3 4"]
    (one,) = continue_texts(loaded, Numbers(), prompts[:1], given, on_sample=seen.append)
    assert seen[-1] == one
    with pytest.raises(ValueError, match="continues prompts of one length together"):
        continue_texts(loaded, Numbers(), [prompts[0], prompts[1][:1]], given)
    first = GenerationConfig(length=3, sampling=SamplingConfig(top_k=1), seed=5)
    likely = GenerationConfig(length=3, sampling=SamplingConfig(temperature=0.0), seed=5)
    two = [continue_texts(loaded, Numbers(), prompts, one) for one in (first, likely)]
    assert two[0] == two[1]
