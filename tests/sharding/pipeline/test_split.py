# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Halves of a backward pass: the same results, no product twice, and weights' gradients late."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import MeshConfig, make_mesh
from sharding.pipeline.split import split

ROWS, WIDTH, LAYERS = 8, 4, 3


def layer(x, w):
    return x + jnp.tanh(x @ w["in"]) @ w["out"] * w["gain"][None]


def unrolled(x, w):
    for index in range(LAYERS):
        x = layer(x, jax.tree.map(lambda leaf, i=index: leaf[i], w))
    return x


def scanned(x, w):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def rematerialised(x, w):
    return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0]


def called(x, w):
    return jax.lax.scan(lambda x, w: (jax.jit(layer)(x, w), None), x, w)[0]


def shared(x, w):
    """All turns have the weights of the first layer: the loop carries their gradients."""
    w = jax.tree.map(lambda leaf: leaf[0], w)
    return jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=LAYERS)[0]


def composed(x, w):
    """The gradient that the second half of a call makes is an operand of later products."""

    def turn(x, w):
        return jax.jit(layer)(x, w | {"in": w["in"] @ w["out"]}), None

    return jax.lax.scan(turn, x, w)[0]


def in_regions(x, w):

    def turn(x, w):
        cut = jax.tree.map(lambda _: P(), w)
        region = jax.shard_map(layer, in_specs=(P("data"), cut), out_specs=P("data"))
        return region(x, w), None

    return jax.lax.scan(turn, x, w)[0]


def composed_in_regions(x, w):
    def turn(x, w):
        def region(x, w):
            return jax.jit(layer)(x, w | {"in": w["in"] @ w["out"]})

        cut = jax.tree.map(lambda _: P(), w)
        return jax.shard_map(region, in_specs=(P("data"), cut), out_specs=P("data"))(x, w), None

    return jax.lax.scan(turn, x, w)[0]


def in_branches(x, w):
    """A conditional is not split."""
    w = jax.tree.map(lambda leaf: leaf[0], w)
    return jax.lax.cond(jnp.sum(x) > 0, layer, lambda x, w: layer(2 * x, w), x, w)


@dataclasses.dataclass(frozen=True)
class Row:
    function: Callable
    late: tuple[str, ...] = ("in", "out")
    products: int = 2
    """Products of the second half for a layer."""


ROWS_OF_TABLE = {
    **{f.__name__: Row(f) for f in (unrolled, scanned, rematerialised, called, shared, in_regions)},
    "composed": Row(composed, products=4),
    "composed_in_regions": Row(composed_in_regions, products=4),
    "in_branches": Row(in_branches, late=(), products=0),
}


def backward(function):
    def run(w, x, d_out):
        _, pull_back = jax.vjp(function, x, w)
        d_x, d_w = pull_back(d_out)
        return d_w, d_x

    return run


def products(function, *arguments):
    """Number of products that a function executes, turns of loops counted."""

    def count(program):
        total = 0
        for equation in program.eqns:
            total += equation.primitive.name == "dot_general"
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    total += equation.params.get("length", 1) * count(inner)
        return total

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@functools.cache
def arrays():
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape) / 2, jnp.float32)

    square = (LAYERS, WIDTH, WIDTH)
    w = {"in": normal(*square), "out": normal(*square), "gain": normal(LAYERS, WIDTH)}
    return w, normal(ROWS, WIDTH), normal(ROWS, WIDTH)


def are_matrices(shapes):
    d_w, d_x = shapes
    return jax.tree.map(lambda x: x.ndim == 3, d_w), jax.tree.map(lambda _: False, d_x)


@pytest.mark.parametrize("row", ROWS_OF_TABLE.values(), ids=ROWS_OF_TABLE)
def test_halves_give_the_results_of_the_whole_without_a_product_twice(row):
    run, arguments = backward(row.function), arrays()
    mesh = contextlib.nullcontext()
    if row.function in (in_regions, composed_in_regions):
        mesh = jax.set_mesh(make_mesh(MeshConfig(data=8)))
    with mesh:
        if row.function in (in_regions, composed_in_regions):
            w, *rows = arguments
            arguments = (jax.reshard(w, P()), *(jax.reshard(x, P("data")) for x in rows))
        halves = split(run, arguments, is_kept=[True, False, False], is_late=are_matrices)

        def both(w, x, d_out):
            (d_w, d_x), handed = halves.early(w, x, d_out)
            late, _ = halves.late(handed, w)
            assert {name for name in d_w if d_w[name] is None} == set(row.late)
            assert {name for name in late if late[name] is not None} == set(row.late)
            return {name: late[name] if d_w[name] is None else d_w[name] for name in d_w}, d_x

        found, wanted = jax.jit(both)(*arguments), jax.jit(run)(*arguments)
        handed = halves.early(*arguments)[1]
        assert [jax.typeof(x) for x in handed] == [jax.typeof(x) for x in halves.handed]
        total = products(run, *arguments)
        assert products(both, *arguments) == total
        late = products(halves.late, halves.handed, arguments[0])
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, rtol=1e-5, atol=1e-5), found, wanted)
    assert late == row.products * LAYERS


def test_what_is_handed_over_is_the_inputs_and_gradients_of_products():
    """Activations before a product are computed in the first half, and constants not handed."""
    given = {"is_kept": [True, False, False], "is_late": are_matrices}
    halves = split(backward(scanned), arrays(), **given)
    assert sorted(x.shape for x in halves.handed) == [(LAYERS, ROWS, WIDTH)] * 4
