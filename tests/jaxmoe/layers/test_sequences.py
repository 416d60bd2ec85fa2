# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose sequences are cut over devices: orders of tokens, training, refusals."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.sequences import check_rows, choose_form, current_order, lay_back, lay_out
from jaxmoe.models.transformer import Transformer
from jaxmoe.optim import adamw
from jaxmoe.routing import ROUTERS, CapacityConfig, SoftmaxGateConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, MoEMesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    AutoSequenceParallelConfig,
    RingConfig,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
)
from tests.support.meshes import mesh_of
from tests.support.models import BATCH, TINY, WIDE
from tests.support.tolerances import assert_close

LENGTH, STEPS = 16, 30
MODEL = dataclasses.replace(TINY, vocab_size=16)


def batch_of(step):
    """Rows of two documents each, in which every token decides the next."""
    rng = np.random.default_rng(step)
    start = rng.integers(16, size=(BATCH, 1))
    tokens = ((start + 3 * np.arange(LENGTH + 1)[None, :]) % 16).astype(np.int32)
    segments = np.ones((BATCH, LENGTH), np.int32)
    segments[:, 10:] = 2
    segments[0, 14:] = 0
    positions = np.broadcast_to(np.r_[0:10, 0:6].astype(np.int32), segments.shape).copy()
    weights = (segments != 0).astype(np.float32)
    weights[:, 9] = 0.0  # the next token is of another document
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_weights=weights,
        segment_ids=segments,
        positions=positions,
    )


def train(execution, steps=STEPS):
    """Losses of training, and of the held-out batch at its end."""
    is_cut = execution.mesh.seq > 1
    mesh = mesh_of(execution) if is_cut else None
    optimizer = adamw(1e-2, epsilon=1e-6)
    state = init_state(MODEL, optimizer, jax.random.key(0), execution=execution, mesh=mesh)
    step = make_train_step(MODEL, optimizer, execution=execution, accumulation=2)
    examine = make_eval_step(MODEL, execution=execution)
    found = []
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        for number in range(steps):
            rows = batch_of(number)
            state, metrics = step(state, rows if mesh is None else global_batch(rows, mesh))
            found.append((metrics.loss, metrics.load))
        rows = batch_of(STEPS)
        rows = rows if mesh is None else global_batch(rows, mesh)
        found.append(examine(state.params, state.router_state, rows))
    return jax.device_get(found)


@functools.cache
def trained_on_one_device():
    return train(ExecutionConfig())


FORMS = {
    "ring": RingConfig(),
    "token_ring": TokenRingConfig(layout="document_zigzag"),
    "all_gather": AllGatherKVConfig(),
}


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("form", FORMS)
def test_thirty_steps_with_rows_cut_in_four(form):
    """Losses follow those of one device, and so do the loads of the experts."""
    mesh = MeshConfig(data=2, seq=4)
    wanted = trained_on_one_device()
    assert wanted[-2][0] < 0.7 * wanted[0][0], "nothing was learnt"
    found = train(ExecutionConfig(mesh=mesh, sequence_parallel=FORMS[form]))
    losses, other = ([step[0] for step in steps[:-1]] for steps in (found, wanted))
    # Rounding grows with every step, and a token at the border of two experts may change sides.
    np.testing.assert_allclose(losses, other, rtol=2e-3)
    np.testing.assert_allclose(losses[:5], other[:5], rtol=1e-5)
    np.testing.assert_allclose(found[-1], wanted[-1], rtol=2e-3)


def on_mesh(form, **mesh):
    execution = ExecutionConfig(mesh=MeshConfig(**mesh), sequence_parallel=form)
    return execution, mesh_of(execution)


@pytest.mark.parametrize("form", [RingConfig(), RingConfig(layout="document_zigzag")])
def test_rows_are_laid_out_and_back(form):
    execution, mesh = on_mesh(form, data=2, seq=4)
    segments = jnp.asarray(batch_of(0).segment_ids)
    x = jnp.arange(BATCH * LENGTH * 3, dtype=jnp.float32).reshape(BATCH, LENGTH, 3)

    def both(x, segments):
        order = current_order(MODEL.context, execution, LENGTH, segments)
        whole = {"a": x[..., 0], "b": segments, "wide": x}
        laid = lay_out(whole, order, execution)
        return laid, lay_back(jnp.stack([laid["a"]] * 3, axis=-1), order, execution)

    with jax.set_mesh(mesh):
        laid, back = jax.jit(both)(x, segments)
    assert (np.asarray(laid["a"]) != np.asarray(x[..., 0])).any()
    np.testing.assert_array_equal(np.sort(laid["a"], axis=1), x[..., 0])
    np.testing.assert_array_equal(laid["wide"][..., 0], laid["a"])
    np.testing.assert_array_equal(laid["wide"][..., 2], laid["a"] + np.float32(2))
    np.testing.assert_array_equal(back, jnp.repeat(x[..., :1], 3, axis=-1))


def test_rows_keep_their_order_without_a_mesh():
    execution = ExecutionConfig(mesh=MeshConfig(seq=4), sequence_parallel=RingConfig())
    assert current_order(MODEL.context, execution, LENGTH) is None


@pytest.mark.slow
def test_logits_come_in_the_order_of_the_tokens():
    execution, mesh = on_mesh(RingConfig(), data=2, seq=4)
    params, tokens = init_params(MODEL, jax.random.key(0)), batch_of(0).tokens

    def logits(execution):
        return jax.jit(
            lambda params, tokens: Transformer(MODEL, execution).apply({"params": params}, tokens)
        )

    wanted = logits(ExecutionConfig())(params, tokens).logits
    with jax.set_mesh(mesh):
        found = logits(execution)(
            jax.device_put(params, NamedSharding(mesh, PartitionSpec())), tokens
        )
    assert_close(found.logits, wanted, "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_sees_the_same_tokens(name):
    """In zigzag order: outputs and statistics of the whole batch are those of one device."""
    config = ROUTERS[name]()
    attention = dataclasses.replace(MODEL.attention, is_causal=config.traits.is_causal)
    # The gates of a softmax suit every router, also those that define their own.
    moe = dataclasses.replace(TINY.moe, router=config, balancers=(), gate=SoftmaxGateConfig())
    model = dataclasses.replace(MODEL, attention=attention, moe=moe)
    execution, mesh = on_mesh(RingConfig(), data=2, seq=2)

    def route(execution):
        def run(params, tokens):
            output = Transformer(model, execution).apply(
                {"params": params}, tokens, train=True, key=jax.random.key(3), has_logits=False
            )
            return output.hidden, output.statistics

        return jax.jit(run)

    # With seed 1 rounding decides an assignment of base_layer, also without a permutation.
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda x: 2.0 * x + 0.1 * rng.standard_normal(x.shape).astype(np.float32),
        init_params(model, jax.random.key(0)),
    )
    tokens = rng.integers(MODEL.vocab_size, size=(BATCH, LENGTH)).astype(np.int32)
    wanted = route(ExecutionConfig())(params, tokens)
    table = parameter_table(model, rules=execution.axis_rules)
    spread = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        found = route(execution)(spread, global_batch(tokens, mesh))
    assert_close(found, wanted, "end_to_end")


REFUSALS = {
    "heads": (
        {},
        UlyssesConfig(),
        "execution.sequence_parallel 'ulysses' exchanges heads, and the 12 query and 4 key heads of"
        " a device (attention.num_heads=12, attention.num_kv_heads=4, mesh.tensor=1) must be"
        " divisible by mesh.seq=8: set mesh.seq to 1, 2, 4, or execution.sequence_parallel to ring"
        " or all_gather",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_sequences_that_a_form_cannot_cut_are_refused(name):
    changes, form, text = REFUSALS[name]
    execution = ExecutionConfig(mesh=MeshConfig(seq=8), sequence_parallel=form)
    with pytest.raises(ValueError) as error:
        check_rows(dataclasses.replace(WIDE, **changes).context, execution, 64, {"seq": 8})
    assert str(error.value) == text


def test_usp_without_matching_fold_is_refused():
    with pytest.raises(ValueError) as error:
        ExecutionConfig(mesh=MeshConfig(seq=4), sequence_parallel=UlyssesRingConfig())
    assert str(error.value) == (
        "execution.sequence_parallel.ulysses=2 exchanges heads within pieces of mesh.seq, and"
        " execution.fold.seq_inner=None is their size: set execution.fold.seq_inner to"
        " execution.sequence_parallel.ulysses"
    )


def test_auto_keeps_the_order_where_a_capacity_needs_it():
    moe = dataclasses.replace(WIDE.moe, capacity=CapacityConfig())
    model = dataclasses.replace(WIDE, moe=moe)
    execution = ExecutionConfig(
        mesh=MeshConfig(seq=8), sequence_parallel=AutoSequenceParallelConfig()
    )
    assert check_rows(model.context, execution, 64, {"seq": 8}).layout == "contiguous"
    assert check_rows(WIDE.context, execution, 64, {"seq": 8}).layout == "zigzag"
    assert choose_form(WIDE.context, execution, 64, {"seq": 8}).reason.startswith(
        "ring: mesh.seq=8 does not"
    )


def test_a_ring_needs_its_axis_in_one_piece():
    execution = ExecutionConfig(
        mesh=MeshConfig(seq=4, tensor=2), fold=MoEMesh(expert=4), sequence_parallel=RingConfig()
    )
    text = "execution.fold cuts mesh.seq into seq_0=2 x seq_1=2, and"
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
    with jax.set_mesh(mesh_of(execution)), pytest.raises(ValueError, match=text):
        jax.eval_shape(
            lambda: Transformer(WIDE, execution).init(jax.random.key(0), tokens, has_logits=False)
        )
