# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of the parameterisations' tables: classes of roles, initial values, multipliers.

    class        roles
    embedding    embedding
    head         head
    hidden       attention_in, attention_out, attention_gate, mlp_*, shared_*
    experts      expert_in, expert_out
    router       router, constant_mix, connection, memory_key
    vectors      norm, constant, state, connection_bias, memory_value, adapter
    zeros        router_residual, router_noise

The papers have rows for the first five and for norms. Choices of this library: the gate of the
attention heads is a hidden matrix (as in ArchScale); `constant_mix` of MoE++ is a small matrix of
logits, hence a router, and so are the keys of a memory; its `constant` vectors are looked up like
embeddings, and follow the gains, as do the values of a memory (deviation 1/sqrt(width));
rates, steps and convolutions of recurrent mixers (`state`) are numbers per channel, as gains are;
matrices that start at zero have no radius, and stay with AdamW; `connection` of hyper-connections
is a small matrix of logits as well, and `connection_bias` are their biases and factors; an adapter
brings its own numbers.

`router` of ForwardMultipliers multiplies the input of the router, which equals its logits if they
are linear in it.

To add a class: a keyword of `table_of` and its roles in ROLE_CLASSES of `jaxmoe/scaling/tables.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

from jaxmoe.declarations import ROLES, Role
from jaxmoe.models.config import ForwardMultipliers, ModelConfig
from jaxmoe.parameters import Group, Hyperparameters

RoleTable = tuple[tuple[Role, Hyperparameters], ...]
TokenScaling = Literal["all", "hidden"]
TiedEmbeddings = Literal["refuse", "adamw"]

ROLE_CLASSES: Final[dict[Role, str]] = {
    "embedding": "embedding",
    "attention_in": "hidden",
    "attention_out": "hidden",
    "attention_gate": "hidden",
    "mlp_in": "hidden",
    "mlp_out": "hidden",
    "shared_in": "hidden",
    "shared_out": "hidden",
    "expert_in": "experts",
    "expert_out": "experts",
    "router": "router",
    "router_residual": "zeros",
    "router_noise": "zeros",
    "constant": "vectors",
    "constant_mix": "router",
    "memory_key": "router",
    "memory_value": "vectors",
    "norm": "vectors",
    "state": "vectors",
    "connection": "router",
    "connection_bias": "vectors",
    "head": "head",
    "adapter": "vectors",
}

KAIMING: Final = Hyperparameters(init_std=1.0 / math.sqrt(3.0), distribution="uniform")
"""Uniform in +-1/sqrt(fan_in), as PyTorch draws for a linear layer."""
HEAD_STD: Final = 0.02
BASE_HEAD_DIM: Final = 128


def table_of(
    *,
    embedding: Hyperparameters,
    head: Hyperparameters,
    hidden: Hyperparameters,
    router: Hyperparameters,
    vectors: Hyperparameters,
    zeros: Hyperparameters,
) -> RoleTable:
    """Return the rows of all roles from one row per class.

    Args:
        embedding: Row for the token embedding.
        head: Row for the output matrix.
        hidden: Row for the matrices of a layer, routed experts included.
        router: Row for matrices that compute router logits.
        vectors: Row for gains and looked-up vectors.
        zeros: Row for matrices that start at zero.
    """
    rows = {
        "embedding": embedding,
        "head": head,
        "hidden": hidden,
        "experts": hidden,
        "router": router,
        "vectors": vectors,
        "zeros": zeros,
    }
    return tuple((role, rows[ROLE_CLASSES[role]]) for role in ROLES)


def sphere_table(
    model: ModelConfig, *, start: Hyperparameters, head_std: float, inner: float, outer: float
) -> RoleTable:
    """Return the rows for MuonH: matrices and head on spheres, AdamW without decay for the rest.

    Args:
        model: Model to train.
        start: Initial values of hidden matrices, experts and router.
        head_std: Standard deviation of the initial head.
        inner: Learning-rate multiplier of hidden matrices.
        outer: Learning-rate multiplier of embedding, head and vectors.
    """

    def row(start: Hyperparameters, rate: float, group: Group = "adamw") -> Hyperparameters:
        decay = 0.0 if group == "adamw" else 1.0
        return dataclasses.replace(
            start, learning_rate_multiplier=rate, weight_decay_multiplier=decay, group=group
        )

    return table_of(
        embedding=row(fixed_normal(embedding_std(model)), outer),
        head=row(fixed_normal(head_std), outer, "adamh"),
        hidden=row(start, inner, "muonh"),
        router=row(start, inner, "muonh"),
        vectors=row(Hyperparameters(), outer),
        zeros=row(Hyperparameters(), inner * zero_start_rate(model)),
    )


def fixed_normal(std: float) -> Hyperparameters:
    """Return normal initial values with a standard deviation independent of any size."""
    return Hyperparameters(init_std=std, fan_in_power=0.0)


def embedding_std(model: ModelConfig) -> float:
    """Return ArchScale's embedding std: 1e-4, and 0.02 if the embedding is tied to the head.

    1e-4 needs model.norm_epsilon 1e-5, as on the ladder: with it the first norm initially gives
    vectors of RMS 0.03, and with 1e-6 of 0.1.
    """
    return HEAD_STD if model.has_tied_embeddings else 1e-4


def attention_scale(model: ModelConfig, base_head_dim: int) -> float | None:
    """Return sqrt(H0) / H, or None (which means 1 / sqrt(H)) at the base width of a head."""
    head_dim = model.attention.head_dim
    return None if head_dim == base_head_dim else math.sqrt(base_head_dim) / head_dim


def zero_start_rate(model: ModelConfig) -> float:
    """Return the learning-rate multiplier for a zero-started matrix beside matrices on a sphere.

    AdamW moves every entry by the whole rate, the sphere a matrix of `KAIMING` by the rate times
    1 / sqrt(3 D) in the root mean square. A router under AdamW at the sphere's rate collapsed in a
    port of the method.
    """
    return 1.0 / math.sqrt(3.0 * model.embed_dim)


def with_multipliers(model: ModelConfig, multipliers: ForwardMultipliers, rule: str) -> ModelConfig:
    """Return the model with its forward multipliers filled in; idempotent.

    Args:
        model: Model with multipliers of 1, or these.
        multipliers: Multipliers of the parameterisation.
        rule: Name of the parameterisation, for the error.

    Raises:
        ValueError: The model has another value that would be lost.
    """
    default = ForwardMultipliers()
    for field in (field.name for field in dataclasses.fields(ForwardMultipliers)):
        current = getattr(model.forward_multipliers, field)
        ours = getattr(multipliers, field)
        if current not in (getattr(default, field), ours):
            raise ValueError(
                f"model.multipliers.{field}={current} would be overwritten: the parameterisation"
                f" {rule} sets it to {ours} for this model; leave model.multipliers.{field} at"
                f" {getattr(default, field)}, or take the parameterisation standard, which keeps it"
            )
    return dataclasses.replace(model, multipliers=multipliers)


def check_head_width(width: int) -> None:
    """Refuse a head width below 1 in the field `base_head_dim`."""
    if width < 1:
        raise ValueError(f"parameterization.base_head_dim={width} must be at least 1")
