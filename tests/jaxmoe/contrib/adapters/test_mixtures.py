# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of low-rank additions against one merged matrix for each token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.contrib.adapters.mixtures import FactorMembers, Gates
from jaxmoe.execution import ExecutionConfig
from sharding import MeshConfig
from sharding import axes as ax
from sharding.products.collective import RingProductsConfig
from sharding.products.low_rank import LowRank
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream
from tests.support.meshes import mesh_of
from tests.support.tolerances import assert_close

B, S, D, N, H, COUNT, RANK = 4, 8, 8, 4, 2, 3, 2
MIXES = {"together": 1, "apart": 1, "apart, 4 splits": 4, "members": 1}
PLAIN = ExecutionConfig()
SPLIT = ExecutionConfig(mesh=MeshConfig(data=2, tensor=2))
HEADS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)


def mix_of(name, values):
    if name == "members":
        return FactorMembers(ids=jnp.argmax(values[:, :, 0], axis=-1).astype(jnp.int32))
    return Gates(values=values, is_paired=name == "together")


def values_of(name):
    """Activations, gates and the parts of two matrices, into heads and out of them."""
    shapes = {
        "x": (B, S, D),
        "gates": (B, S, MIXES[name], COUNT),
        "in": {"weight": (D, N, H), "down": (D, COUNT, RANK), "up": (COUNT, RANK, N, H)},
        "out": {"weight": (N, H, D), "down": (N, H, COUNT, RANK), "up": (COUNT, RANK, D)},
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def matrix_of(parts, mix):
    return LowRank(**parts, scale=jnp.float32(0.5), mix=mix)


def fast(name, execution, given):
    """The library's products, into heads and back."""
    placement, mix = execution.placement, mix_of(name, given["gates"])
    into, out = (matrix_of(given[key], mix).mixed_by(mix) for key in ("in", "out"))
    form = execution.tensor_products
    first = Product("bsd,dnh->bsnh", into, (None, ax.HEADS, None), HEADS)
    heads = out_of_stream(given["x"], {"q": first}, placement, form=form)["q"]
    last = Product("bsnh,nhd->bsd", out, (ax.HEADS, None, None), HEADS)
    return into_stream(jnp.tanh(heads), last, placement, form=form)


def merged(name, parts, values, x):
    """Rows [B S I] times a matrix of its own for each token."""
    mix = mix_of(name, values)
    inputs = parts["down"].ndim - 2
    down = parts["down"].reshape(-1, COUNT, RANK)
    up = parts["up"].reshape(COUNT, RANK, -1)
    if name == "members":
        weights = jax.nn.one_hot(mix.ids, COUNT)
        added = jnp.einsum("bsn,inr,nro->bsio", weights, down, up)
    elif name == "together":
        added = jnp.einsum("bsn,inr,nro->bsio", values[:, :, 0], down, up)
    else:
        first, last = (
            jnp.repeat(values, size // values.shape[2], axis=2)
            for size in (down.shape[0], up.shape[-1])
        )
        added = jnp.einsum("bsin,inr,bsom,mro->bsio", first, down, last, up)
    weight = parts["weight"].reshape(down.shape[0], -1)
    y = jnp.einsum("bsi,bsio->bso", x.reshape(B, S, -1), weight[None, None] + 0.5 * added)
    return y.reshape(B, S, *parts["weight"].shape[inputs:])


def slow(name, given):
    """One merged matrix for each token."""
    heads = merged(name, given["in"], given["gates"], given["x"])
    return merged(name, given["out"], given["gates"], jnp.tanh(heads))


def value_and_gradient(function, given):
    return jax.value_and_grad(lambda given: jnp.sum(jnp.sin(function(given))))(given)


@pytest.mark.parametrize(
    "execution", [PLAIN, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=["one", "data2_tensor2"]
)
@pytest.mark.parametrize("name", MIXES)
def test_a_mixture_equals_a_merged_matrix_for_each_token(name, execution):
    given = values_of(name)
    wanted = jax.jit(functools.partial(value_and_gradient, functools.partial(slow, name)))(given)
    run = functools.partial(value_and_gradient, functools.partial(fast, name, execution))
    if execution is PLAIN:
        found = jax.jit(run)(given)
    else:
        with jax.set_mesh(mesh_of(execution)):
            found = jax.jit(run)(given)
    assert_close(found, wanted, "end_to_end")


def test_a_product_in_parts_of_its_rows_is_refused():
    execution = dataclasses.replace(SPLIT, tensor_products=RingProductsConfig())
    given = values_of("together")
    with (
        jax.set_mesh(mesh_of(execution)),
        pytest.raises(ValueError, match="tensor_products to whole"),
    ):
        jax.eval_shape(functools.partial(fast, "together", execution), given)


def test_splits_that_do_not_divide_are_refused():
    gates = Gates(values=jnp.ones((B, S, 3, COUNT)), is_paired=False)
    with pytest.raises(ValueError, match="cannot be split into 3 equal parts"):
        gates.for_matrix((D,), (N, H))
