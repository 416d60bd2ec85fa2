# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Small models that compile in seconds and have every part.

Widths divide every mesh of tests/support/meshes.py, and no two dimensions that could be mistaken
for one another are equal.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.parameters import Group
from jaxmoe.routing import SqrtGateConfig
from jaxmoe.scaling import Parameterization

BATCH, LENGTH = 8, 6

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6)
MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=10)

TINY = ModelConfig(vocab_size=32, num_layers=2, embed_dim=16, attention=ATTENTION, moe=MOE)
"""Two MoE layers and nothing optional."""

FULL = ModelConfig(
    vocab_size=32,
    num_layers=3,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, is_gated=True),
    moe=MoEConfig(
        num_experts=4, top_k=2, expert_dim=10, num_shared_experts=1, gate=SqrtGateConfig()
    ),
    dense_layers=(0,),
    dense_dim=24,
    has_tied_embeddings=True,
)
"""A dense layer before two MoE layers, shared experts, SqrtGate, gated heads, tied embeddings."""


WIDE_LENGTH = 16
WIDE = ModelConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=12, num_kv_heads=4, head_dim=6, is_gated=True),
    moe=MoEConfig(
        num_experts=8, top_k=2, expert_dim=20, num_shared_experts=1, gate=SqrtGateConfig()
    ),
)
"""For meshes with 4 devices on the tensor axis or 8 on that of experts; sequences of
WIDE_LENGTH."""


def in_groups(rules: Parameterization, matrices: Group, head: Group) -> Parameterization:
    """The same parameterisation with its hidden matrices and its head in other optimiser groups."""
    stay = ("embedding", "norm", "router_residual", "router_noise")
    roles = tuple(
        (
            role,
            dataclasses.replace(
                hyper,
                group=head if role == "head" else hyper.group if role in stay else matrices,
            ),
        )
        for role, hyper in rules.roles
    )
    return dataclasses.replace(rules, roles=roles)


def tokens_for(
    model: ModelConfig, seed: int = 0, length: int = LENGTH
) -> tuple[jax.Array, jax.Array]:
    """Tokens and targets [BATCH length] of a model's vocabulary, uncommitted."""
    drawn = np.random.default_rng(seed).integers(model.vocab_size, size=(BATCH, length + 1))
    ids = jnp.asarray(drawn, jnp.int32)
    return ids[:, :-1], ids[:, 1:]
