# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products beside permutes against one collective and one product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.planning.hlo import collectives
from sharding import MeshConfig
from sharding import axes as ax
from sharding.mesh import make_mesh
from sharding.products.collective import RingProductsConfig, WholeProductsConfig
from sharding.products.tensor_parallel import Product, into_stream, out_of_stream
from tests.support.meshes import mesh_of
from tests.support.tolerances import assert_close
from tests.support.tpus import described_tpus

FORMS = {"whole": WholeProductsConfig(), "ring": RingProductsConfig()}
EXECUTION = ExecutionConfig(mesh=MeshConfig(data=2, tensor=4))
BATCH, LENGTH, WIDTH, HEADS, HEAD, HIDDEN = 2, 8, 12, 4, 3, 20
SHAPES = {
    "x": (BATCH, LENGTH, WIDTH),
    "heads": (WIDTH, HEADS, HEAD),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "out": (HEADS, HEAD, WIDTH),
}
STREAM = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)


def sublayers(given, form):
    """Two products of one gathered input, and two that are scattered."""
    placement = EXECUTION.placement
    of_heads = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_HEADS, None)
    of_hidden = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_MLP)
    products = {
        "heads": Product("bsd,dnh->bsnh", given["heads"], (None, ax.HEADS, None), of_heads),
        "up": Product("bsd,df->bsf", given["up"], (None, ax.MLP), of_hidden),
    }
    found = out_of_stream(placement.place(given["x"], STREAM), products, placement, form=form)
    out = Product("bsnh,nhd->bsd", given["out"], (ax.HEADS, None, None), of_heads)
    down = Product("bsf,fd->bsd", given["down"], (ax.MLP, None), of_hidden)
    y = into_stream(jnp.tanh(found["heads"]), out, placement, form=form)
    return y + into_stream(jnp.tanh(found["up"]), down, placement, form=form)


def number(given, form):
    y = sublayers(given, form)
    weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    return jnp.sum(y * EXECUTION.placement.place(weights, STREAM)), y


@functools.cache
def program(name):
    with jax.set_mesh(mesh_of(EXECUTION)):
        function = jax.value_and_grad(functools.partial(number, form=FORMS[name]), has_aux=True)
        shapes = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
        return jax.jit(function).lower(shapes)


def test_rings_have_the_values_and_gradients_of_the_whole_form():
    rng = np.random.default_rng(0)
    given = {key: rng.standard_normal(shape, np.float32) for key, shape in SHAPES.items()}
    with jax.set_mesh(mesh_of(EXECUTION)):
        ring, whole = (program(name).compile()(given) for name in ("ring", "whole"))
    assert_close(ring, whole, "matmul")


def test_rings_send_as_many_bytes_as_the_whole_form():
    """One gather and two scatters forward, one scatter and two gathers backward."""
    kinds = {"whole": ("all-gather", "reduce-scatter"), "ring": ("collective-permute",)}
    sent = {}
    for name in FORMS:
        found = [
            one for one in collectives(program(name).as_text("hlo")) if one.kind in kinds[name]
        ]
        sent[name] = sum(one.wire_bytes * one.trip_count for one in found)
        assert len(found) == {"whole": 6, "ring": 6 * 3}[name]
    assert sent["ring"] == sent["whole"] > 0


def overlapped(text):
    """Products between the start and the end of each permute of a scheduled program."""
    open_: dict[str, int] = {}
    found = []
    products = [head.split()[0] for head in _heads(text, ("convolution(", "dot("))]
    for line in text.splitlines():
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if "collective-permute-start(" in rest:
            open_[name] = 0
        elif "collective-permute-done(" in rest:
            found.append(open_.pop(next(key for key in open_ if f"{key})" in rest)))
        elif "convolution(" in rest or any(f"calls={one}," in rest for one in products):
            open_ = {key: count + 1 for key, count in open_.items()}
    return found


def _heads(text, words):
    """Heads of the computations that have one of some words."""
    head = ""
    for line in text.splitlines():
        if line.startswith("%") and line.endswith("{"):
            head = line
        elif head and any(word in line for word in words):
            yield head
            head = ""


@pytest.mark.large
def test_each_permute_has_a_product_beside_it_on_a_tpu(monkeypatch):
    mesh = make_mesh(EXECUTION.mesh, described_tpus(monkeypatch, "v5e:2x4"))
    sizes = {"x": (8, 2048, 1024), "heads": (1024, 16, 64), "up": (1024, 4096)}
    sizes |= {"down": (4096, 1024), "out": (16, 64, 1024)}
    axes = {"x": STREAM, "heads": (None, ax.HEADS, None), "up": (None, ax.MLP)}
    axes |= {"down": (ax.MLP, None), "out": (ax.HEADS, None, None)}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        given = {
            key: jax.ShapeDtypeStruct(
                shape,
                jnp.bfloat16,
                sharding=NamedSharding(mesh, EXECUTION.placement.spec(axes[key])),
            )
            for key, shape in sizes.items()
        }
        run = jax.value_and_grad(functools.partial(number, form=FORMS["ring"]), has_aux=True)
        text = jax.jit(run).trace(given).lower().compile().as_text()
    found = overlapped(text)
    # Both gradients of y travel in one ring, and the first permute of all finds no weight loaded.
    assert len(found) == 5 * 3 and min(found[1:]) >= 1, found
