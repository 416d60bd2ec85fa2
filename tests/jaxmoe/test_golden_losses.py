# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of two training steps of tiny models equal those recorded before layers were composed.

tests/golden/losses.json holds the losses as hexadecimal floats, of one CPU; hosts may round
differently.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxmoe.data.batch import Batch
from jaxmoe.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import adamw
from jaxmoe.routing import METHODS, ROUTERS, CapacityConfig, SqrtGateConfig
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.source_tree import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "losses.json").read_text())
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=12)
PLAIN = ModelConfig(
    vocab_size=32, num_layers=2, embed_dim=16, attention=ATTENTION, moe=MOE, dense_dim=24
)
LATENT = LatentAttentionConfig(
    num_heads=4, latent_dim=16, query_latent_dim=12, nope_dim=8, rope_dim=4, value_dim=8
)
GATED = dataclasses.replace(ATTENTION, window=4, is_gated=True, softcap=5.0, qk_norm="full")


def with_moe(**changes):
    return dataclasses.replace(PLAIN, moe=dataclasses.replace(MOE, **changes))


MODELS = {
    "latent_dense_first": lambda: dataclasses.replace(
        PLAIN, attention=LATENT, num_layers=3, dense_layers=(0,)
    ),
    "zero_computation": lambda: with_moe(**METHODS["moe_plus_plus"].parts()),
    "plain": lambda: PLAIN,
    "window_gate_tied": lambda: dataclasses.replace(
        PLAIN, attention=GATED, has_tied_embeddings=True
    ),
    "dense": lambda: dataclasses.replace(PLAIN, moe=None),
    "shared_sqrt": lambda: with_moe(num_shared_experts=1, gate=SqrtGateConfig()),
    "capacity": lambda: with_moe(capacity=CapacityConfig()),
    "router_cosine_topk": lambda: with_moe(router=ROUTERS["cosine_topk"]()),
    "router_kmeans": lambda: with_moe(router=ROUTERS["kmeans"]()),
    "router_noisy_topk": lambda: with_moe(router=ROUTERS["noisy_topk"]()),
}
FAST = ("latent_dense_first", "zero_computation")


def batch():
    tokens = np.random.default_rng(0).integers(0, 32, (8, 16)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[:, 8:] = 2
    segments[3, 12:] = 0  # padding
    return Batch(
        tokens=tokens,
        targets=np.roll(tokens, -1, 1),
        loss_weights=(segments != 0).astype(np.float32),
        segment_ids=segments,
        positions=np.broadcast_to(np.r_[0:8, 0:8].astype(np.int32), tokens.shape).copy(),
    )


@pytest.mark.filterwarnings("ignore::jaxmoe.routing.composition.RoutingWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS],
)
def test_losses_equal_the_recorded_ones(name):
    model, optimizer = MODELS[name](), adamw(1e-2)
    state = init_state(model, optimizer, jax.random.key(0))
    step = make_train_step(model, optimizer)
    for wanted in GOLDEN[name]:
        state, metrics = step(state, batch())
        found = [metrics.loss, *(loss for _, loss in sorted(metrics.losses.items()))]
        np.testing.assert_allclose(found, [float.fromhex(x) for x in wanted], rtol=1e-5)


def test_every_recorded_model_is_checked():
    assert set(GOLDEN) == set(MODELS)
