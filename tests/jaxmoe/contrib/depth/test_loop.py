# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loops over layers: against the same layers written out, caches, counts, connections, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.huggingface import to_huggingface
from jaxmoe.contrib.depth import halves
from jaxmoe.contrib.depth.hyper_connections import HyperResidualConfig
from jaxmoe.contrib.depth.loop import HyperloopConfig, LoopConfig
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.layers.records import Stream
from jaxmoe.layers.residual import LadderResidualConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.loop import run_scans
from jaxmoe.models.transformer import Transformer
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training import loss
from jaxmoe.training.pipeline import check_pipeline
from sharding import MeshConfig
from tests.jaxmoe.layers.test_mesh_invariance import loss_and_gradients, on_mesh, values_of
from tests.support.models import LENGTH, TINY, tokens_for
from tests.support.one_step import params_of
from tests.support.tolerances import assert_close

ONE = ExecutionConfig()
DENSE = dataclasses.replace(TINY, moe=None, dense_dim=24, num_layers=3)
AROUND = LoopConfig(first=1, last=2, times=2)
"""Two layers twice, behind a layer."""
CONNECTION = HyperloopConfig(streams=3)
LOOPED = dataclasses.replace(DENSE, loop=AROUND)
CONNECTED = dataclasses.replace(DENSE, loop=dataclasses.replace(AROUND, connection=CONNECTION))
ROUTED = dataclasses.replace(TINY, loop=LoopConfig(first=1, last=1, times=2))
"""A MoE layer, and another one twice."""


def batch_of(model):
    tokens, targets = tokens_for(model)
    return {"tokens": tokens, "targets": targets}


@functools.cache
def nll_gradients(model):
    """`(params, tokens) -> ((loss, statistics), gradients)` without the losses of balancers."""

    def nll(params, tokens):
        output = Transformer(model, ONE).apply({"params": params}, tokens)
        return jnp.mean(jax.nn.logsumexp(output.logits, axis=-1) ** 2), output.statistics

    return jax.jit(jax.value_and_grad(nll, has_aux=True))


@pytest.mark.slow
def test_a_loop_equals_its_layers_written_out():
    """Loss, statistics summed over turns, gradients of shared layers summed over turns."""
    # Of others both ways of adding lie up to 3e-5 of the largest gradient apart, of these 4e-6.
    params, tokens = values_of(ROUTED), tokens_for(ROUTED, seed=3)[0]
    one, two = params["moe_blocks_0"], params["moe_blocks_1"]
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b, b]), one, two)
    others = {name: part for name, part in params.items() if "blocks" not in name}
    (found, statistics), gradients = nll_gradients(ROUTED)(params, tokens)
    three = dataclasses.replace(TINY, num_layers=3)
    given = others | {"moe_blocks_0": joined}
    (wanted, of_three), written = nll_gradients(three)(given, tokens)
    assert_close(found, wanted, "end_to_end")

    def folded(x):
        return jnp.concatenate([x[:1], x[1:2] + x[2:]])

    assert_close(statistics, jax.tree.map(folded, of_three), "end_to_end")
    shared = jax.tree.map(lambda x: x[1:2] + x[2:], written["moe_blocks_0"])
    assert_close(gradients["moe_blocks_1"], shared, "end_to_end")
    assert abs(np.asarray(shared["attention"]["q"])).max() > 0


def test_one_turn_of_all_layers_is_bitwise_the_stack():
    model = dataclasses.replace(DENSE, loop=LoopConfig(first=0, last=2, times=1))
    params, tokens = values_of(DENSE), tokens_for(DENSE)[0]
    found, wanted = (nll_gradients(one)(params, tokens) for one in (model, DENSE))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def counted(times, connection=None):
    loop = LoopConfig(first=0, last=2, times=times, connection=connection)
    model = dataclasses.replace(DENSE, loop=loop)
    table = parameter_table(model)
    return sum(row.size for row in table), flops_per_token(model, table, 16)


def test_parameters_do_not_depend_on_the_turns_and_flops_do():
    (size, once), (same, thrice) = counted(1), counted(3)
    assert size == same
    head = 6 * DENSE.vocab_size * DENSE.embed_dim
    assert thrice - head == 3 * (once - head)
    width, n = DENSE.embed_dim, 4
    gates = n * width * 3 * n + 3 * n + 3 + width
    more, cost = counted(3, HyperloopConfig(streams=n))
    assert more == size + 3 * gates
    assert cost - thrice == 6 * 3 * (n * width * 3 * n + 3 * n * width)


@pytest.mark.parametrize("model", [CONNECTED, pytest.param(LOOPED, marks=pytest.mark.slow)])
def test_cached_hidden_states_equal_the_whole_forward(model):
    tokens, params = tokens_for(model)[0], init_params(model, jax.random.key(0))

    @jax.jit
    def one(tokens, position, cache):
        positions = jnp.broadcast_to(position, (tokens.shape[0], 1))
        given = {"positions": positions, "cache": cache}
        output = Transformer(model, ONE).apply({"params": params}, tokens, **given)
        return output.hidden[:, 0], output.cache

    cache, found = initial_cache(model, ONE, batch=tokens.shape[0], length=LENGTH), []
    assert jax.tree.leaves(cache["dense_blocks_1"])[0].shape[0] == 4, "an entry for each turn"
    for position in range(LENGTH):
        at = jnp.full((1, 1), position, jnp.int32)
        step, cache = one(tokens[:, position : position + 1], at, cache)
        found.append(step)
    whole = jax.jit(lambda p, t: Transformer(model, ONE).apply({"params": p}, t).hidden)
    assert_close(jnp.stack(found, axis=1), whole(params, tokens), "end_to_end")


class Around(nn.Module):
    """The loop of CONNECTED around a block that adds tanh x, and a first layer that adds 1."""

    @nn.compact
    def __call__(self, x):
        def call(scan, flow, turn):
            x = flow.x + (jnp.tanh(flow.x) if scan.is_looped else 1.0)
            return dataclasses.replace(flow, x=x), {}

        return run_scans(
            CONNECTED.scans, call, Stream(x=x), CONNECTED.loop, CONNECTED.context, ONE
        )[0].x


def test_connections_of_a_loop_equal_the_formula():
    x = jax.random.normal(jax.random.key(0), (2, 3, DENSE.embed_dim))
    params = jax.tree.map(
        lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape),
        nn.meta.unbox(Around().init(jax.random.key(1), x)["params"]),
    )
    found = Around().apply({"params": params}, x)
    streams = np.repeat(np.asarray(x, np.float64)[:, :, None] + 1.0, 3, axis=2)
    start = np.concatenate([np.full(3, -np.log(2)), np.zeros(3), np.full(3, 8.0)])
    for turn in range(2):
        own = jax.tree.map(np.asarray, params[f"loop_{turn}"])
        size = np.sqrt((streams**2).mean((2, 3)) + DENSE.norm_epsilon)
        logits = np.einsum("bsnd,ndm->bsm", streams, own["weight"]) / size[..., None]
        logits = logits * np.repeat(own["scale"] + 0.01, 3) + own["bias"] + start
        pre, post, res = np.split(logits, 3, axis=-1)
        pre, post, res = (1 / (1 + np.exp(-v)) for v in (pre, post, res))
        read = np.einsum("bsn,bsnd->bsd", pre, streams) + own["position"]
        streams = res[..., None] * streams + 2 * post[..., None] * np.tanh(read)[:, :, None]
    assert_close(found, streams.mean(2).astype(np.float32), "end_to_end")


@pytest.mark.slow
def test_a_new_connection_without_its_matrix_is_nearly_the_plain_loop():
    params, tokens = init_params(CONNECTED, jax.random.key(0)), tokens_for(CONNECTED)[0]
    zeroed = {
        name: part | {"weight": part["weight"] * 0} if name.startswith("loop_") else part
        for name, part in params.items()
    }
    plain = {name: part for name, part in params.items() if not name.startswith("loop_")}
    found = Transformer(CONNECTED, ONE).apply({"params": zeroed}, tokens).hidden
    wanted = Transformer(LOOPED, ONE).apply({"params": plain}, tokens).hidden
    assert abs(np.asarray(found - wanted)).max() < 0.01
    _, gradients = nll_gradients(CONNECTED)(params, tokens)
    for name in ("loop_0", "loop_1"):
        for key, gradient in gradients[name].items():
            assert float(jnp.abs(gradient).max()) > 0, (name, key)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "model"), [("data4_tensor2", CONNECTED), ("data2", ROUTED)])
def test_loss_and_gradients_equal_on_every_mesh(mesh, model):
    wanted = loss_and_gradients(model, ONE)(values_of(model), batch_of(model))
    assert_close(on_mesh(model, mesh, "fully_sharded"), wanted, "end_to_end")


HYPER = dataclasses.replace(DENSE, residual=HyperResidualConfig(streams=2, mixing="permutations"))


@pytest.mark.slow
@pytest.mark.parametrize("model", [CONNECTED, HYPER], ids=["loop", "hyper"])
@pytest.mark.parametrize(
    "fields",
    [{"halves": 2}, {"remat": "full", "offload": OffloadConfig(parameters="host")}],
    ids=["halves", "streamed"],
)
def test_halves_and_streamed_layers_change_nothing(model, fields, monkeypatch):
    monkeypatch.setattr(halves, "LEAST_TOKENS", 1)
    batch, execution = batch_of(model), ExecutionConfig(**fields)
    found = loss_and_gradients.__wrapped__(model, execution)(values_of(model), batch)
    assert_close(found, loss_and_gradients(model, ONE)(values_of(model), batch), "end_to_end")


def test_loops_that_cannot_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="model.loop.last=1 must be at least model.loop.first=2"):
        LoopConfig(first=2, last=1)
    with pytest.raises(ValueError, match=r"model.loop.times=0"):
        LoopConfig(first=0, last=1, times=0)
    with pytest.raises(ValueError, match=r"model.loop.last=3 must be at most 2"):
        dataclasses.replace(DENSE, loop=LoopConfig(first=1, last=3))
    with pytest.raises(ValueError, match=r"model.residual:ladder passes several arrays"):
        dataclasses.replace(CONNECTED, residual=LadderResidualConfig())
    with pytest.raises(ValueError, match=r"execution.mesh.stage=2 passes every micro-batch"):
        check_pipeline(LOOPED, ExecutionConfig(mesh=MeshConfig(stage=2)), 4)
    params = parameter_table(LOOPED).tree(lambda row: np.zeros(row.shape, np.float32))
    with pytest.raises(CheckpointError, match="loop"):
        to_huggingface(LOOPED, params, tmp_path / "out", family="jaxmoe")
    with pytest.raises(CheckpointError):
        to_huggingface(LOOPED, params, tmp_path / "out")


def test_matrices_that_are_used_twice_are_rounded_where_they_are_used():
    model = dataclasses.replace(TINY, loop=LoopConfig(times=2))
    params = jax.eval_shape(lambda: params_of(TINY))
    execution = ExecutionConfig(precision=PrecisionPolicy(compute="bfloat16"))
    rounded = jax.eval_shape(lambda x: loss._with_rounded_experts(model, execution, x), params)
    assert rounded == params
