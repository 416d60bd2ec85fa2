# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for every mixer and feed-forward of the catalogue: decoding, causality, meshes.

A new member has a row of `MIXERS` or `FEED_FORWARDS`, its smallest sizes that divide the meshes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.catalog import choice, names
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import LatentAttentionConfig, LayerConfig
from jaxmoe.models.transformer import Transformer
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device, values_of
from tests.support.models import TINY
from tests.support.tolerances import assert_close

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
LATENT = {"num_heads": 4, "latent_dim": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 8}
DELTA = {"num_heads": 4, "num_key_heads": 2, "head_dim": 6, "key_dim": 4, "chunk": 4}
LIGHTNING = {"num_heads": 4, "head_dim": 6, "chunk": 4}
MOE = {"num_experts": 4, "top_k": 2, "expert_dim": 10}

MIXERS: dict[str, dict[str, Any]] = {
    "grouped_query": HEADS | {"window": 4},
    "latent": LATENT,
    "mamba": {"inner_dim": 40, "state_dim": 4, "step_rank": 3, "chunk": 4},
    "mamba2": {"num_heads": 6, "head_dim": 8, "state_dim": 5, "num_groups": 2, "chunk": 4},
    "shared_keys": HEADS | {"leader_every": 2},
    "parallel_streams": HEADS | {"num_streams": 3, "prefix_length": 5},
    "short_convolution": {"num_channels": 16},
    "gated_delta": DELTA,
    "kimi_delta": DELTA | {"gate_rank": 3},
    "lightning": LIGHTNING,
    "rotary_lightning": LIGHTNING | {"rotary_dim": 4, "norm_groups": 2},
    "narrow_values": HEADS | {"value_dim": 4},
    "sparse_latent": {
        "latent": LatentAttentionConfig(**LATENT, query_latent_dim=8),
        "index_heads": 4,
        "index_dim": 8,
        "index_top_k": 3,
    },
    "scaled_latent": LATENT | {"query_latent_dim": 8},
    "expert_heads": HEADS | {"num_experts": 4, "top_k": 2},
    "gated_latent": LATENT,
}
"""Fields of the smallest of each."""

FEED_FORWARDS: dict[str, dict[str, Any]] = {
    "dense": {"hidden_dim": 24},
    "moe": MOE,
    "biased_moe": MOE,
    "none": {},
    "shortcut_dense": {"hidden_dim": 24},
    "ultra_mem": {
        "hidden_dim": 24,
        "num_keys": 8,
        "top_k": 3,
        "num_heads": 2,
        "key_dim": 6,
        "value_dim": 12,
    },
    "two_sizes": {"big_dim": 24, "small_dim": 8},
}
"""Fields of the smallest of each; one without routed experts is the first of two layers."""

IN_SHORT = {"mamba2"}
BATCH, LENGTH = 2, 9


def model_of(kind: str, name: str) -> Any:
    """Return a model with the member: a mixer in all layers, a dense feed-forward in the first."""
    if kind == "mixer":
        return dataclasses.replace(TINY, attention=choice(kind, name)(**MIXERS[name]))
    feed_forward = choice(kind, name)(**FEED_FORWARDS[name])
    if feed_forward.is_routed:  # all MoE layers share one
        return dataclasses.replace(TINY, moe=feed_forward)
    return dataclasses.replace(TINY, layers=(LayerConfig(feed_forward=feed_forward), LayerConfig()))


MEMBERS = [("mixer", name) for name in MIXERS] + [("feed_forward", name) for name in FEED_FORWARDS]
CASES = [
    pytest.param(
        *member, id="-".join(member), marks=() if member[1] in IN_SHORT else pytest.mark.slow
    )
    for member in MEMBERS
]


@pytest.mark.parametrize(("kind", "cases"), [("mixer", MIXERS), ("feed_forward", FEED_FORWARDS)])
def test_every_member_has_a_row(kind, cases):
    assert cases.keys() == set(names(kind))


@functools.cache
def _whole(model):
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (BATCH, LENGTH))
    tokens = jnp.asarray(tokens, jnp.int32)
    apply = jax.jit(lambda params, tokens: Transformer(model).apply({"params": params}, tokens))
    return tokens, apply, apply(values_of(model), tokens).logits


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_decoding_equals_the_whole(kind, name):
    """A prompt of four tokens in one call, then one token after the other."""
    model, execution = model_of(kind, name), ExecutionConfig()
    tokens, _, logits = _whole(model)

    @jax.jit
    def forward(params, tokens, first, cache):
        positions = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, tokens.shape)
        output = Transformer(model, execution).apply(
            {"params": params}, tokens, positions=positions, cache=cache
        )
        return output.logits, output.cache

    params = values_of(model)
    cache = initial_cache(model, execution, batch=BATCH, length=LENGTH)
    parts = []
    for first, end in ((0, 4), *((place, place + 1) for place in range(4, LENGTH))):
        place = jnp.asarray(first, jnp.int32)
        part, cache = forward(params, tokens[:, first:end], place, cache)
        parts.append(part)
    assert_close(jnp.concatenate(parts, axis=1), logits, "other_length")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_no_token_sees_a_later_one(kind, name):
    model = model_of(kind, name)
    tokens, apply, logits = _whole(model)
    changed = tokens.at[:, 5:].set((tokens[:, 5:] + 1) % model.vocab_size)
    others = apply(values_of(model), changed).logits
    assert_close(others[:, :5], logits[:, :5], "end_to_end")
    assert not np.allclose(others[:, 5:], logits[:, 5:])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_mesh_changes_nothing(kind, name):
    """Loss, statistics and gradients on four devices for data and two for tensors."""
    model = model_of(kind, name)
    result = on_mesh(model, "data4_tensor2", "fully_sharded")
    # Gradients behind norms over six features: 6e-5 of 2.8 was seen.
    assert_close(result, on_one_device(model), "other_length")
