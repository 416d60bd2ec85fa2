# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Small models, a batch, and two training steps of them as hashes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from tests.support.hashes.digests import (
    digest_of_collectives,
    digest_of_record,
    digest_of_tree,
    parts_of_state,
)

VOCAB, BATCH, LENGTH = 32, 8, 16


def fitting(config_class: type, values: dict[str, Any]) -> Any:
    """Return a config with those of the values that it has a field for."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in values.items() if name in names})


@functools.cache
def tiny_model() -> Any:
    """Return a model of two layers: a dense one and one with experts."""
    from jaxmoe import AttentionConfig, ModelConfig

    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "embed_dim": 16, "dense_dim": 24}
    return ModelConfig(attention=attention, moe=tiny_moe(), dense_layers=(0,), **sizes)


def tiny_moe(**fields: Any) -> Any:
    """Return four experts with a choice of parts."""
    from jaxmoe import MoEConfig

    return MoEConfig(num_experts=4, top_k=2, expert_dim=12, **fields)


def with_parts(**fields: Any) -> Any:
    """Return the model with these parts of its MoE layer; not causal where the router is not."""
    model, moe = tiny_model(), tiny_moe(**fields)
    attention = dataclasses.replace(model.attention, is_causal=moe.router.traits.is_causal)
    return dataclasses.replace(model, moe=moe, attention=attention, dense_layers=(), num_layers=1)


def batch(length: int = LENGTH, rows: int = BATCH, segments: bool = True) -> Any:
    """Return rows with two documents each and some padding."""
    from jaxmoe.data.batch import Batch

    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, length)).astype(np.int32)
    ids = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape).copy()
    if segments:
        ids[:, length // 2 :] = 2
        ids[3, -length // 4 :] = 0
        positions[:, length // 2 :] -= length // 2
    return Batch(
        tokens=tokens,
        targets=np.roll(tokens, -1, 1),
        loss_weights=(ids != 0).astype(np.float32),
        segment_ids=ids,
        positions=positions,
    )


def recording_optimizer() -> Any:
    """Return gradient descent whose state is the gradient of the last step, to the bit."""
    import optax

    return optax.chain(optax.trace(decay=0.0), optax.sgd(0.1))


def two_steps(model: Any, **options: Any) -> dict[str, str]:
    """Return the hashes of two training steps; arguments as of `train_twice`."""
    return train_twice(model, **options)[0]


def train_twice(
    model: Any,
    *,
    optimizer: Any = None,
    execution: Any = None,
    rows: Any = None,
    state_fields: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, str], Any]:
    """Return the hashes of the initial values and of two training steps, and the state after them.

    Args:
        model: What is trained.
        optimizer: An optax transformation; one that records the gradients when None.
        execution: With a mesh of the eight devices or fewer; one device when None.
        rows: The batch of both steps.
        state_fields: Further arguments of `init_state`.
        options: Further arguments of `make_train_step`.
    """
    import jax

    from jaxmoe import init_state, make_train_step
    from sharding.distributed import global_batch

    records = optimizer is None
    optimizer = recording_optimizer() if optimizer is None else optimizer
    rows = batch() if rows is None else rows
    mesh = None if execution is None else mesh_of(execution)
    fields = {"execution": execution, "mesh": mesh, **(state_fields or {})}
    state = init_state(model, optimizer, jax.random.key(0), **fields)
    options = {"clip": None, **options} if records else options
    step = make_train_step(model, optimizer, execution=execution, **options)
    parts = {"initial values": digest_of_tree(state.params)}
    losses = []
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        placed = rows if mesh is None else global_batch(rows, mesh)
        if mesh is not None:
            found = digest_of_collectives(step.lower(state, placed).compile().as_text())
            parts |= {"collectives": found} if found else {}
        for number in range(2):
            state, metrics = step(state, placed)
            losses.append([metrics.loss, dict(metrics.losses), metrics.grad_norm])
            if records and number == 0:
                parts["gradients"] = digest_of_tree(jax.tree.leaves(state.opt_state))
        parts["loss"] = digest_of_tree(losses)
        if metrics.load is not None:
            parts["load"] = digest_of_tree([metrics.load])
    return parts | parts_of_state(state), state


def mesh_of(execution: Any) -> Any:
    """Return the mesh of an execution, on the first of the devices; None for a single one."""
    import math

    import jax

    from sharding import make_mesh

    number = math.prod(execution.mesh.sizes)
    if number == 1:
        return None
    return make_mesh(execution.mesh, jax.devices()[:number], fold=execution.mesh_fold)


def parameter_rows(model: Any, parameterization: Any = None) -> dict[str, str]:
    """Return the hash of the table of parameters: path, shape, scale, rate and layout."""
    from jaxmoe import parameter_table

    table = parameter_table(model, parameterization)
    facts = [
        [row.path, row.shape, row.init_std, row.hyper.learning_rate_multiplier, str(row.spec)]
        for row in table
    ]
    return {"table": digest_of_record(facts)}
