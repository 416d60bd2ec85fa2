# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The three surroundings, and operations that must agree in all of them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding import axes as ax
from sharding.constrain import Placement, surroundings, without_mesh
from sharding.products.tensor_parallel import look_up
from sharding.rules import FULLY_SHARDED
from sharding.state_layouts import STATE_LAYOUTS
from tests.support.meshes import LAYOUTS, mesh_named
from tests.support.tolerances import assert_close

BATCH = (ax.REPLICA, ax.DATA, ax.EXPERT)
AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual


def user_mesh(*types):
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=types)


def test_surroundings_none_auto_explicit():
    assert surroundings() == "none"
    with jax.set_mesh(user_mesh(AUTO, AUTO)):
        assert surroundings() == "auto"
    with jax.set_mesh(mesh_named("data8")):
        assert surroundings() == "explicit"
        with without_mesh():
            assert surroundings() == "none"


@pytest.mark.parametrize("types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=["auto", "explicit"])
def test_inside_a_shard_map_arrays_are_local(types):
    spec = PartitionSpec(None, None)
    seen = []

    def body(x):
        seen.append(surroundings())
        return x

    with jax.set_mesh(user_mesh(*types)):
        jax.eval_shape(jax.shard_map(body, in_specs=spec, out_specs=spec), jnp.zeros((4, 2)))
    assert set(seen) == {"none"}


@pytest.mark.parametrize("types", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_other_meshes_raise(types):
    text = (
        f"the current mesh has axes ('fsdp', 'tp') of types {tuple(t.name for t in types)}: jaxmoe"
        " needs either a mesh from sharding.make_mesh(MeshConfig(...)), or one whose axes are all"
        " Auto"
    )
    with jax.set_mesh(user_mesh(*types)):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            Placement(FULLY_SHARDED).place(jnp.zeros((4, 2)), (None, None))


def einsum(placement, x, w):
    axes = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_MLP)
    return placement.einsum("bsd,df->bsf", x, w, axes=axes)


def rows(placement, x, w):
    ids = jnp.asarray(jnp.abs(x[:, :, 0]) * 4.0, jnp.int32) % 16
    return look_up(w, ids, placement)


def place(placement, x, w):
    whole = placement.place(x, (None, None, None)) * 2.0
    axes = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)
    return placement.place(whole, axes) * placement.place(w, (None, None))[:6][None]


def region(placement, x, w):
    """Every device sees its rows and the whole of w; the total over the batch is summed there."""

    def body(x, given, *, batch_axes):
        y = jnp.sin(x) @ given["w"]
        total = jnp.sum(y * y)
        return y, jax.lax.psum(total, batch_axes) if batch_axes else total

    rows = (ax.ACT_BATCH, None, None)
    run = placement.region(
        body, in_axes=(rows, {"w": (None, None), "absent": {}}), out_axes=(rows, ())
    )
    y, total = run(x, {"w": w, "absent": {}})
    return placement.place(y / jnp.sqrt(total), (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED))


OPERATIONS = {function.__name__: function for function in (einsum, rows, place, region)}
RESULTS = dict.fromkeys(OPERATIONS, PartitionSpec(BATCH, (ax.SEQ, ax.TENSOR), None))
RESULTS["einsum"] = PartitionSpec(BATCH, ax.SEQ, ax.TENSOR)


def value_and_gradients(operation, placement):
    def run(x, w):
        result, back = jax.vjp(lambda x, w: OPERATIONS[operation](placement, x, w), x, w)
        return result, back(jnp.cos(result))

    return jax.jit(run)


@pytest.fixture(scope="module")
def arrays():
    x, w = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (8, 6, 16)), jax.random.normal(w, (16, 16))


@pytest.mark.rows(8)
@pytest.mark.parametrize(("mesh", "rules"), LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_on_every_mesh_equal_one_device(operation, mesh, rules, arrays):
    placement = Placement(STATE_LAYOUTS[rules].parameters)
    wanted = value_and_gradients(operation, placement)(*arrays)
    specs = [placement.rules.resolve(axes) for axes in ((ax.ACT_BATCH, ax.ACT_SEQ, None),)]
    specs.append(
        placement.rules.resolve((ax.VOCAB, ax.EMBED) if operation == "rows" else (ax.EMBED, ax.MLP))
    )
    mesh = mesh_named(mesh)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        result, gradients = value_and_gradients(operation, placement)(*placed)
    assert_close((result, gradients), wanted, "matmul")
    assert result.sharding.spec == RESULTS[operation]
    assert [gradient.sharding.spec for gradient in gradients] == specs


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_in_an_auto_mesh_equal_one_device(operation, arrays):
    placement = Placement(FULLY_SHARDED)
    wanted = value_and_gradients(operation, placement)(*arrays)
    mesh = user_mesh(AUTO, AUTO)
    specs = [PartitionSpec("fsdp"), PartitionSpec("fsdp", "tp")]
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        result = value_and_gradients(operation, placement)(*placed)
    assert_close(result, wanted, "matmul")


def test_einsum_accumulates_and_returns_the_dtype_asked_for():
    placement = Placement(FULLY_SHARDED)
    x, w = jnp.ones((1, 1, 512), jnp.bfloat16), jnp.full((512, 1), 1.0 + 2**-7, jnp.bfloat16)
    axes = (ax.ACT_BATCH, ax.ACT_SEQ, None)
    assert placement.einsum("bsd,df->bsf", x, w, axes=axes).dtype == jnp.bfloat16
    wide = placement.einsum("bsd,df->bsf", x, w, axes=axes, dtype=jnp.float32)
    assert wide.dtype == jnp.float32 and wide.item() == 516.0  # bfloat16 would round to 516 or 512


def test_look_up_has_the_gradient_of_a_gather():
    table, ids = jnp.ones((4, 2)), jnp.asarray([[1, 1, 3]], jnp.int32)
    placement = Placement(FULLY_SHARDED)
    gradient = jax.grad(lambda t: look_up(t, ids, placement).sum())(table)
    assert gradient[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def test_gradients_of_a_frequent_id_are_added_up_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    table, ids = jnp.ones((4, 2), jnp.bfloat16), jnp.ones((1, 1000), jnp.int32)
    placement = Placement(FULLY_SHARDED)
    gradient = jax.grad(lambda t: look_up(t, ids, placement).astype(jnp.float32).sum())(table)
    assert gradient.dtype == jnp.bfloat16
    assert gradient[:, 0].tolist() == [0.0, 1000.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("subscripts", "dtype"),
    [("bsd,dnh->bsnh", None), ("bsnh,nhd->bsd", jnp.float32), ("bsd,dcf->bscf", None)],
)
def test_einsum_has_the_gradients_of_jnp(subscripts, dtype):
    """The gradients written by hand against those that jax derives, in bfloat16."""
    sizes = {"b": 2, "s": 3, "d": 8, "n": 2, "h": 4, "c": 2, "f": 4}
    shapes = [[sizes[letter] for letter in term] for term in subscripts.split("->")[0].split(",")]
    keys = jax.random.split(jax.random.key(1))
    x, w = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    placement = Placement(FULLY_SHARDED)
    axes = (None,) * len(subscripts.split("->")[1])

    def ours(x, w):
        return placement.einsum(subscripts, x, w, axes=axes, dtype=dtype)

    def theirs(x, w):
        return jnp.einsum(subscripts, x, w, preferred_element_type=dtype or x.dtype)

    out, pull = jax.vjp(ours, x, w)
    wanted, wanted_pull = jax.vjp(theirs, x, w)
    cotangent = jnp.cos(wanted)
    gradients, wanted_gradients = pull(cotangent), wanted_pull(cotangent)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]
    assert_close((out, gradients), (wanted, wanted_gradients), "matmul", "bfloat16")


@pytest.mark.parametrize("check_vma", [True, False])
def test_einsum_in_a_shard_map_sums_the_gradient_of_a_whole_weight(check_vma, arrays):
    placement = Placement(FULLY_SHARDED)
    rows = PartitionSpec("fsdp")

    def product(x, w):
        return placement.einsum("bsd,df->bsf", x, w, axes=(ax.ACT_BATCH, ax.ACT_SEQ, None))

    def value_and_gradients(function, *arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(jnp.cos(out))

    wanted = value_and_gradients(product, *arrays)
    with jax.set_mesh(user_mesh(AUTO, AUTO)):
        spread = jax.shard_map(
            product, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=check_vma
        )
        result = jax.jit(lambda *arrays: value_and_gradients(spread, *arrays))(*arrays)
    assert_close(result, wanted, "matmul")
