# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: the mixing of the streams, the standard residual as a case, gradients, meshes.

The reference is a loop over layers in numpy for the streams, with the branches of the library.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.contrib.depth.hyper_connections import (
    HyperResidualConfig,
    connection_flops,
    mean_stream,
    mix,
    mixed_logits,
    spread,
    write_streams,
)
from jaxmoe.contrib.depth.loop import HyperloopConfig, LoopConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import ForwardMultipliers
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.sequence_parallel import AllGatherKVConfig, RingConfig
from tests.jaxmoe.layers.test_mesh_invariance import loss_and_gradients, on_mesh, values_of
from tests.support.meshes import mesh_of
from tests.support.models import FULL, LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

MIXINGS = ("sinkhorn", "permutations")
PLAIN = dataclasses.replace(
    TINY, moe=None, dense_dim=24, multipliers=ForwardMultipliers(residual=0.7)
)
ONE = ExecutionConfig()


def model_of(streams=3, mixing="sinkhorn", plain=PLAIN):
    residual = HyperResidualConfig(streams=streams, mixing=mixing)
    return dataclasses.replace(plain, residual=residual)


@functools.cache
def hidden_of(model):
    def hidden(params, tokens):
        return Transformer(model, ONE).apply({"params": params}, tokens, has_logits=False).hidden

    return jax.jit(hidden)


def connections(params):
    """Paths and values of the parameters that the residual brings."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path): x for path, x in flat if "_residual'" in str(path)}


def without_connections(params):
    """Parameters of the same model with the standard residual."""
    return {
        name: {key: x for key, x in part.items() if not key.endswith("_residual")}
        for name, part in params.items()
    }


def without_matrices(params):
    """The same parameters with W = 0 in every connection."""

    def zeroed(path, x):
        return x * 0 if "_residual'" in str(path) and "weight" in str(path) else x

    return jax.tree_util.tree_map_with_path(zeroed, params)


def matrices(mixing, streams, size=1.0):
    logits = size * jax.random.normal(jax.random.key(1), (50, mixed_logits(streams, mixing)))
    return np.asarray(mix(logits, streams, mixing), np.float64)


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_rows_and_columns_of_the_mixing_sum_to_one(mixing, streams):
    found = matrices(mixing, streams)
    assert (found >= 0).all()
    rows, columns = (abs(found.sum(axis) - 1).max() for axis in (-1, -2))
    assert columns < 1e-6
    assert rows < (1e-6 if mixing == "permutations" else 1e-3)


def test_twenty_sinkhorn_steps_do_not_converge_for_large_logits_and_permutations_do():
    rows = {mixing: abs(matrices(mixing, 4, 8.0).sum(-1) - 1).max() for mixing in MIXINGS}
    assert rows["permutations"] < 1e-6 and rows["sinkhorn"] > 1e-3


@pytest.mark.parametrize("mixing", MIXINGS)
def test_mixing_keeps_the_mean_of_the_streams(mixing):
    x = jax.random.normal(jax.random.key(2), (1, 50, 4, 8))
    res = jnp.asarray(matrices(mixing, 4), jnp.float32)[None]
    mixed = write_streams(x, jnp.zeros((1, 50, 8)), jnp.zeros((1, 50, 4)), res)
    assert_close(mean_stream(mixed), mean_stream(x), "matmul")
    assert abs(np.asarray(mixed - x)).max() > 0.1


def test_permutations_are_a_weighted_sum_of_all_permutation_matrices():
    logits = jax.random.normal(jax.random.key(3), (6,))
    weights = np.exp(logits) / np.exp(logits).sum()
    wanted = sum(
        weight * np.eye(3)[list(order)]
        for weight, order in zip(weights, itertools.permutations(range(3)), strict=True)
    )
    assert_close(mix(logits, 3, "permutations"), wanted.astype(np.float32), "matmul")


SLOW_SINKHORN = [pytest.param("sinkhorn", marks=pytest.mark.slow), "permutations"]


@pytest.mark.parametrize("mixing", SLOW_SINKHORN)
def test_one_stream_is_bitwise_the_standard_residual(mixing):
    # With a multiplier the compiler may add and multiply in one rounding.
    plain = dataclasses.replace(PLAIN, multipliers=ForwardMultipliers())
    model = model_of(1, mixing, plain)
    params = init_params(model, jax.random.key(0))
    tokens = tokens_for(model)[0]
    wanted = hidden_of(plain)(without_connections(params), tokens)
    found = hidden_of(model)(without_matrices(params), tokens)
    np.testing.assert_array_equal(found, wanted)
    assert (np.asarray(hidden_of(model)(params, tokens)) != np.asarray(wanted)).any()


@pytest.mark.slow
@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_new_model_without_its_matrices_is_the_standard_residual(mixing):
    model = model_of(4, mixing)
    params, tokens = init_params(model, jax.random.key(0)), tokens_for(model)[0]
    wanted = hidden_of(PLAIN)(without_connections(params), tokens)
    assert_close(hidden_of(model)(without_matrices(params), tokens), wanted, "end_to_end")


def reference(model, params, tokens):
    """Hidden states by a loop over the halves, with maps written out for one token at a time."""
    from tests.jaxmoe.layers import test_residual as branches

    n, residual = model.residual.streams, model.residual
    x = np.repeat(np.asarray(params["embedding"]["weight"])[tokens][:, :, None], n, axis=2)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    def maps(own, token):
        count = mixed_logits(n, residual.mixing)
        flat = token.reshape(-1)
        z = flat / np.sqrt(np.mean(flat**2) + model.norm_epsilon)
        logits = z @ np.asarray(own["weight"], np.float64).reshape(flat.size, -1)
        away = np.full(count, -8.0)
        away[:: (n + 1) if residual.mixing == "sinkhorn" else count] = 0.0
        start = np.concatenate([np.full(n, -np.log(n - 1)), np.zeros(n), away])
        scale = np.repeat(np.asarray(own["scale"]) + 0.01, [n, n, count])
        logits = scale * logits + np.asarray(own["bias"]) + start
        res = logits[2 * n :]
        if residual.mixing == "permutations":
            weights = np.exp(res) / np.exp(res).sum()
            orders = itertools.permutations(range(n))
            res = sum(w * np.eye(n)[list(o)] for w, o in zip(weights, orders, strict=True))
        else:
            res = np.exp(res.reshape(n, n))
            for _ in range(20):
                res = res / res.sum(1, keepdims=True)
                res = res / res.sum(0, keepdims=True)
        return sigmoid(logits[:n]), 2 * sigmoid(logits[n : 2 * n]), res

    layers = branches.branches(params, tokens, model)
    own = [
        jax.tree.map(lambda w, i=place: w[i], params[stack.path])
        for stack in model.stacks
        for place in range(stack.num_layers)
    ]
    for layer, held in zip(layers, own, strict=True):
        for half, branch in (("mixer", layer.mix), ("feed_forward", layer.feed)):
            of = [[maps(held[f"{half}_residual"], token) for token in row] for row in x]
            pre, post, res = (np.stack([[m[i] for m in row] for row in of]) for i in range(3))
            read = np.einsum("bsn,bsnd->bsd", pre, x)
            y = 0.7 * np.asarray(branch(jnp.asarray(read, jnp.float32)), np.float64)
            x = np.einsum("bsij,bsjd->bsid", res, x) + post[..., None] * y[:, :, None]
    last = x.mean(2)
    last = last / np.sqrt((last**2).mean(-1, keepdims=True) + model.norm_epsilon)
    return (last * np.asarray(params["final_norm"]["gain"])).astype(np.float32)


@pytest.mark.parametrize(
    "mixing", ["sinkhorn", pytest.param("permutations", marks=pytest.mark.slow)]
)
def test_hidden_states_equal_a_loop_over_halves(mixing):
    model = model_of(3, mixing)
    tokens, params = tokens_for(model)[0][:2], values_of(model)
    found = hidden_of(model)(params, tokens)
    assert_close(found, reference(model, params, np.asarray(tokens)), "end_to_end")


def test_every_parameter_of_a_new_model_has_a_gradient():
    model = model_of(3)
    tokens, targets = tokens_for(model)
    params = init_params(model, jax.random.key(0))
    _, gradients = loss_and_gradients(model, ONE)(params, {"tokens": tokens, "targets": targets})
    for path, gradient in connections(gradients).items():
        assert float(jnp.abs(gradient).max()) > 0, path


def test_cached_logits_equal_the_whole_forward():
    model = model_of(3)
    tokens, params = tokens_for(model)[0], values_of(model)

    @jax.jit
    def one(tokens, position, cache):
        positions = jnp.broadcast_to(position, (tokens.shape[0], 1))
        given = {"positions": positions, "cache": cache}
        output = Transformer(model, ONE).apply({"params": params}, tokens, **given)
        return output.hidden[:, 0], output.cache

    cache, found = initial_cache(model, ONE, batch=tokens.shape[0], length=LENGTH), []
    for position in range(LENGTH):
        at = jnp.full((1, 1), position, jnp.int32)
        step, cache = one(tokens[:, position : position + 1], at, cache)
        found.append(step)
    assert_close(jnp.stack(found, axis=1), hidden_of(model)(params, tokens), "end_to_end")


MESH_CASES = [
    pytest.param("data4_tensor2", "fully_sharded", "permutations", marks=pytest.mark.slow),
    pytest.param("replica2_data2_expert2", "fully_sharded", "sinkhorn", marks=pytest.mark.slow),
    pytest.param("data8", "zero2", "sinkhorn", marks=pytest.mark.large),
]


@pytest.mark.parametrize(("mesh", "rules", "mixing"), MESH_CASES)
def test_loss_and_gradients_equal_on_every_mesh(mesh, rules, mixing):
    model = model_of(3, mixing, FULL)
    tokens, targets = tokens_for(model)
    batch = {"tokens": tokens, "targets": targets}
    wanted = loss_and_gradients(model, ONE)(values_of(model), batch)
    assert_close(on_mesh(model, mesh, rules), wanted, "end_to_end")


LOOP = dataclasses.replace(PLAIN, loop=LoopConfig(times=2, connection=HyperloopConfig(streams=2)))
CUT = {
    "tensor": {
        "mesh": MeshConfig(data=2, seq=2, tensor=2),
        "sequence_parallel": AllGatherKVConfig(),
    },
    "ring": {
        "mesh": MeshConfig(data=4, seq=2),
        "sequence_parallel": RingConfig(),
        "remat": "full",
    },
}


@pytest.mark.large
@pytest.mark.parametrize("fields", CUT.values(), ids=CUT)
@pytest.mark.parametrize("model", [model_of(2), LOOP], ids=["hyper", "hyperloop"])
def test_streams_that_are_cut_by_positions_change_nothing(model, fields):
    # The moved values of the other tests enlarge the rounding of a ring tenfold.
    values = init_params(model, jax.random.key(0))
    tokens, targets = tokens_for(model, length=8)
    wanted = loss_and_gradients(model, ONE)(values, {"tokens": tokens, "targets": targets})
    execution = ExecutionConfig(**fields)
    mesh, table = mesh_of(execution), parameter_table(model, rules=execution.axis_rules)
    places = table.tree(lambda row: NamedSharding(mesh, row.spec))
    batch = {"tokens": np.asarray(tokens), "targets": np.asarray(targets)}
    with jax.set_mesh(mesh):
        params = jax.device_put(values, places)
        found = loss_and_gradients(model, execution)(params, global_batch(batch, mesh))
    assert_close(found, wanted, "end_to_end")


def test_flops_count_reading_mixing_and_writing():
    model, length, n, width = model_of(3), 16, 3, PLAIN.embed_dim
    costs = [flops_per_token(one, parameter_table(one), length) for one in (PLAIN, model)]
    products = n * width * (2 * n + n * n)  # of the streams with the matrix
    around = (n * n + 2 * n) * width
    assert costs[1] - costs[0] == 6 * 2 * PLAIN.num_layers * (products + around)
    assert connection_flops(3, width, "diagonal") == 6 * 3 * n * width


def test_streams_begin_as_copies_and_end_as_their_mean():
    x = jax.random.normal(jax.random.key(0), (1, 2, 4))
    np.testing.assert_array_equal(mean_stream(spread(x, 4)), x)


def test_too_many_streams_are_refused():
    with pytest.raises(ValueError, match=r"model.residual.streams=5 has 120 permutations"):
        HyperResidualConfig(streams=5, mixing="permutations")
    with pytest.raises(ValueError, match=r"streams=0 must be at least 1"):
        HyperResidualConfig(streams=0)
