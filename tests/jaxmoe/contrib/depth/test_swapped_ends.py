# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a lost stage costs with the ends swapped in half of the micro-batches (CheckFree+)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.depth.skipping import PartialBackprop, SkippingConfig
from jaxmoe.contrib.survival.neighbours import sources_of
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.optim import adamw
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of

STEPS, STAGES, SYMBOLS, LENGTH = 120, 4, 8, 32
MODEL = ModelConfig(
    vocab_size=SYMBOLS,
    num_layers=STAGES,
    embed_dim=32,
    dense_dim=64,
    moe=None,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
)
EXECUTION = ExecutionConfig(mesh=MeshConfig(stage=STAGES))
SWAPPED = SkippingConfig(groups=STAGES, ratio=0.0, order="swapped_ends")
CHANCES = np.random.default_rng(0).dirichlet(np.full(SYMBOLS, 0.15), (SYMBOLS, SYMBOLS))


def rows(seed, number):
    """Sequences of a chain in which a symbol depends on the two before it."""
    rng = np.random.default_rng(seed)
    symbols = np.zeros((number, LENGTH + 1), np.int32)
    symbols[:, :2] = rng.integers(0, SYMBOLS, (number, 2))
    for place in range(2, LENGTH + 1):
        sums = np.cumsum(CHANCES[symbols[:, place - 2], symbols[:, place - 1]], axis=1)
        symbols[:, place] = np.sum(rng.random((number, 1)) > sums, axis=1).clip(0, SYMBOLS - 1)
    ones = np.ones((number, LENGTH), np.float32)
    return Batch(tokens=symbols[:, :-1], targets=symbols[:, 1:], loss_weights=ones)


@jax.jit
def held_out_loss(params):
    """Nats of a token, with the layers in their order."""
    batch = rows(10**6, 64)
    logits = forward(MODEL, ExecutionConfig(), params, jnp.asarray(batch.tokens)).logits
    assert logits is not None
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, batch.targets[..., None], -1))


def trained(skipping):
    """Parameters after training in a pipeline of four stages."""
    optimizer, mesh = adamw(5e-3), mesh_of(EXECUTION)
    state = init_state(MODEL, optimizer, jax.random.key(0), execution=EXECUTION, mesh=mesh)
    step = make_train_step(
        MODEL,
        optimizer,
        execution=EXECUTION,
        accumulation=STAGES,
        gradients=None if skipping is None else PartialBackprop(skipping=skipping),
    )
    with jax.set_mesh(mesh):
        for number in range(STEPS):
            state, _ = step(state, global_batch(rows(number, 32), mesh))
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state.params)


def without_stage(params, stage):
    """Parameters with the layer of a lost stage made of its neighbours."""
    sources = sources_of({stage}, np.zeros(STAGES))[stage]

    def replaced(leaf):
        return leaf.at[stage].set(sum(weight * leaf[source] for source, weight in sources))

    return params | {"dense_blocks_0": jax.tree.map(replaced, params["dense_blocks_0"])}


@pytest.mark.slow
def test_a_copy_of_the_second_stage_costs_less_in_place_of_the_first():
    """The copy costs 0.22 nats in place of 1.62; the swaps cost 0.07 where no stage is lost."""
    intact, lost = {}, {}
    for name, skipping in {"ascending": None, "swapped": SWAPPED}.items():
        params = trained(skipping)
        intact[name] = float(held_out_loss(params))
        lost[name] = float(held_out_loss(without_stage(params, 0)))
    assert lost["ascending"] - intact["ascending"] > 1.0
    assert lost["swapped"] - intact["swapped"] < 0.5
    assert lost["swapped"] < lost["ascending"] - 0.5
    assert 0.0 < intact["swapped"] - intact["ascending"] < 0.2
