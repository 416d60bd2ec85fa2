# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters in few bits: which, how well, through all layers, on every mesh; never in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.models import quantize as quantize_module
from jaxmoe.models.quantize import abstract_params, quantize_parameter, stored_bytes
from jaxmoe.models.transformer import Transformer
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.step import make_train_step
from pallas_kernels import QuantizedArray, dequantize, quantize
from sharding.products.quantized import flatten_matrix, quantized_einsum
from tests.support.meshes import EXECUTIONS, MESHES, mesh_of
from tests.support.models import FULL, WIDE, WIDE_LENGTH, tokens_for
from tests.support.tolerances import assert_close


def quantize_params(table, params, form):
    rows = table.tree(lambda row: row)
    return jax.tree.map(functools.partial(quantize_parameter, form=form), rows, params)


def is_quantized(node):
    return isinstance(node, QuantizedArray)


def turned_back(params):
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in every matrix of the small models."""
    monkeypatch.setattr(quantize_module, "LARGEST_BLOCK", 5)
    monkeypatch.setattr(quantize_module, "SMALLEST_BLOCK", 1)


@functools.cache
def values(model):
    """No parameter has the value of a fresh model."""
    params, rng = init_params(model, jax.random.key(0)), np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: 2.0 * leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), params
    )


def rounded_values(model, form):
    table = parameter_table(model)
    return jax.jit(lambda params: quantize_params(table, params, form))(values(model))


def logits_of(model, form, execution=None):
    execution = execution or ExecutionConfig()
    precision = dataclasses.replace(execution.precision, weights=form)
    execution = dataclasses.replace(execution, precision=precision)
    return jax.jit(
        lambda params, tokens: (
            Transformer(model, execution).apply({"params": params}, tokens).logits
        )
    )


def test_matrices_are_rounded_and_nothing_else(small_blocks):
    table = parameter_table(FULL)
    params = rounded_values(FULL, "w4a8")
    stored = jax.jit(turned_back)(params)
    rounded = {
        "/".join(step.key for step in path): leaf
        for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_quantized)
        if is_quantized(leaf)
    }
    attention = {
        f"{stack}/attention/{name}"
        for stack in ("dense_blocks_0", "moe_blocks_1")
        for name in "qkvo"
    }
    experts = {
        f"moe_blocks_1/moe/{owner}/{name}"
        for owner in ("experts", "shared")
        for name in ("gate_up", "down")
    }
    dense = {f"dense_blocks_0/feed_forward/{name}" for name in ("gate_up", "down")}
    paths = {row.path for row in table}
    assert attention | experts | dense <= paths
    assert set(rounded) == attention | experts | dense
    for path, leaf in rounded.items():
        value, found = (
            np.asarray(functools.reduce(lambda tree, name: tree[name], path.split("/"), tree))
            for tree in (values(FULL), stored)
        )
        assert leaf.shape == value.shape and leaf.num_blocks > 1, path
        assert np.abs(found - value).max() <= 0.5001 * np.asarray(leaf.scales).max(), path
    with pytest.raises(ValueError, match="weights='floating' is none of w8a8, w4a8"):
        quantize_params(table, values(FULL), "floating")


def test_block_sizes_divide_the_dimension():
    """128 inputs share a scale, or the next divisor; all of them where the divisor is too small."""
    row = next(row for row in parameter_table(WIDE) if row.path.endswith("experts/down"))
    for size, blocks in {64: 1, 128: 1, 192: 2, 256: 2, 384: 3, 131: 1}.items():
        value = jax.eval_shape(
            functools.partial(quantize_module.quantize_parameter, row, form="w4a8"),
            jax.ShapeDtypeStruct((2, 3, size, 8), jnp.float32),
        )
        assert value.scales.shape == (2, 3, blocks, 8), size


def test_bytes_are_those_of_the_bits():
    whole = quantize(jnp.ones((256, 10)), "int4", axis=-2, block_size=128)
    assert stored_bytes(whole) == 256 * 10 // 2 + 2 * 10 * 4
    assert stored_bytes({"a": jnp.ones((3, 2)), "b": jnp.ones(5, jnp.bfloat16)}) == 24 + 10


def by_hand(rows, activations):
    """Rows as a product sees them: a scale for each, the nearest integer."""
    if activations is None:
        return rows
    scales = np.abs(rows).max(axis=1, keepdims=True) / {"int8": 127, "int4": 7}[activations]
    return np.round(rows / scales) * scales


@pytest.mark.parametrize(
    ("subscripts", "x_shape", "shape", "axis", "activations"),
    [
        ("bsd,dnh->bsnh", (2, 3, 16), (16, 4, 6), -3, "int8"),
        ("bsnh,nhd->bsd", (2, 3, 4, 6), (4, 6, 10), -2, "int8"),
        ("bsnh,nhd->bsd", (2, 3, 4, 6), (4, 6, 10), -2, "int4"),
        ("bsnh,nhd->bsd", (2, 3, 4, 6), (4, 6, 10), -2, None),
    ],
)
def test_products_equal_those_of_what_is_stored(subscripts, x_shape, shape, axis, activations):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (x_shape, shape))
    given = {"activations": activations, "dtype": jnp.float32}

    @jax.jit
    def run(x, w):
        weight = quantize(w, "int4", axis=axis, block_size=2)
        return quantized_einsum(subscripts, x, weight, **given), dequantize(weight)

    out, stored = run(x, w)
    seen = by_hand(x.reshape(6, -1).astype(np.float64), activations)
    wanted = seen @ np.asarray(stored, np.float64).reshape(seen.shape[1], -1)
    assert_close(out, wanted.reshape(out.shape), kind="matmul")


@pytest.mark.parametrize("activations", ["int8", "int4"])
def test_experts_round_rows_before_each_product(activations):
    rng, sizes = np.random.default_rng(0), np.asarray([3, 0, 4], np.int32)
    rows = rng.standard_normal((9, 6)).astype(np.float32)
    rows[7:] = np.nan  # past the groups
    shapes = {"gate_up": (3, 6, 2, 4), "down": (3, 4, 6)}
    weights = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}

    @jax.jit
    def run(rows, weights):
        axes = {"gate_up": -3, "down": -2}
        held = {n: quantize(w, "int4", axis=axes[n], block_size=2) for n, w in weights.items()}
        out = apply_experts(held, rows, jnp.asarray(sizes), activations=activations)
        return out, {name: dequantize(weight) for name, weight in held.items()}

    out, stored = run(rows, weights)
    stored = {name: np.asarray(weight, np.float64) for name, weight in stored.items()}
    wanted, groups = np.zeros((9, 6)), np.repeat(np.arange(3), sizes)
    for row, group in enumerate(groups):
        seen = by_hand(rows[row : row + 1].astype(np.float64), activations)[0]
        gate, up = np.einsum("k,kcn->cn", seen, stored["gate_up"][group])
        hidden = gate / (1 + np.exp(-gate)) * up
        wanted[row] = by_hand(hidden[None], activations)[0] @ stored["down"][group]
    assert_close(out, wanted, kind="matmul")


def test_other_products_are_refused():
    x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 2, 2))
    given = {"activations": None, "dtype": jnp.float32}
    weight = jax.eval_shape(lambda w: quantize(w, "int4", axis=-3), w)
    with pytest.raises(ValueError, match="must be last in the first term"):
        quantized_einsum("bds,dnh->bsnh", x, weight, **given)
    with pytest.raises(ValueError, match="must have its scales along axis -2, not -3: quantize"):
        flatten_matrix(weight, 2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["w4a16", "w8a16"])
def test_weight_only_formats_equal_dequantised_weights(small_blocks, form):
    """Every kind of layer, scanned: the logits equal those of the dequantised weights."""
    params, (tokens, _) = (
        quantize_params(parameter_table(FULL), values(FULL), form),
        tokens_for(FULL),
    )
    logits = logits_of(FULL, form)(params, tokens)
    wanted = logits_of(FULL, "floating")(turned_back(params), tokens)
    assert_close(logits, wanted, kind="end_to_end")


# Every expert computes for every token: no token changes its experts by a hair.
ALL_EXPERTS = dataclasses.replace(FULL, moe=dataclasses.replace(FULL.moe, top_k=4))
# Root mean square of the error over that of the logits. A product with both factors in int8 is
# within 0.02, in e4m3 within 0.05 (weights alone in 4 bits: 0.2); three layers add up.
WORST = {"w8a8": 0.1, "w4a8": 0.1, "w8a16": 0.1, "fp8": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("form", WORST)
def test_quantised_logits_are_near_floating_ones(form):
    """Error of activations alone for w4a8 (against w4a16 weights), of both factors otherwise."""
    params = init_params(ALL_EXPERTS, jax.random.key(0))  # `values` is chaotic: errors double
    table = parameter_table(ALL_EXPERTS)
    rounded = jax.jit(lambda params: quantize_params(table, params, form))(params)
    tokens, _ = tokens_for(ALL_EXPERTS)
    logits = np.asarray(logits_of(ALL_EXPERTS, form)(rounded, tokens))
    floating = turned_back(rounded) if form == "w4a8" else params
    wanted = np.asarray(logits_of(ALL_EXPERTS, "floating")(floating, tokens))
    error = np.sqrt(np.mean((logits - wanted) ** 2) / np.mean(wanted**2))
    assert 0.0 < error < WORST[form], error


ON_MESHES = ("tensor4", "expert8_all_to_all", "data2_expert2_tensor2_all_to_all")
ON_MESHES += ("data2_expert4_least_loaded", "fold_expert4_tensor_all_gather")
ON_MESHES += ("seq2_tensor2_all_gather",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [("data2", "w4a16"), *((name, "w4a16") for name in ON_MESHES), ("tensor4", "w8a8")],
)
def test_every_mesh_gives_the_same_logits(small_blocks, name, form):
    execution = EXECUTIONS.get(name) or ExecutionConfig(mesh=MESHES[name])
    params = rounded_values(WIDE, form)
    tokens, _ = tokens_for(WIDE, length=WIDE_LENGTH)
    wanted = logits_of(WIDE, form)(params, tokens)
    mesh, rules = mesh_of(execution), execution.axis_rules
    table = parameter_table(WIDE, rules=rules)
    target = abstract_params(table, form, jnp.float32, rules, mesh)
    spread = jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), params, target)
    with jax.set_mesh(mesh):
        logits = logits_of(WIDE, form, execution)(spread, tokens)
    if form == "w4a16":
        assert_close(logits, wanted, kind="end_to_end")
    else:  # rows that are cut have a scale for each piece, and are nearer than half a step of 1/127
        error = np.sqrt(np.mean((np.asarray(logits) - wanted) ** 2) / np.mean(wanted**2))
        assert error < 0.05, error


def test_a_mesh_that_cuts_what_shares_a_scale_is_refused(small_blocks, monkeypatch):
    monkeypatch.setattr(quantize_module, "LARGEST_BLOCK", 4)
    execution = EXECUTIONS["tensor4"]
    with pytest.raises(ValueError) as error:
        abstract_params(
            parameter_table(WIDE), "w4a8", jnp.float32, execution.axis_rules, mesh_of(execution)
        )
    assert "5 blocks of 4 inputs share a scale each, and the mesh cuts the dimension" in str(
        error.value
    )
    assert "into 4: set mesh.tensor to a divisor of 5" in str(error.value)


def test_a_matrix_of_another_model_is_refused():
    params = jax.eval_shape(lambda: rounded_values(WIDE, "w4a16"))
    other = dataclasses.replace(WIDE, attention=dataclasses.replace(WIDE.attention, head_dim=8))
    tokens, _ = tokens_for(WIDE)
    with pytest.raises(
        ValueError, match="a quantised matrix .16, 12, 6. was given for .16, 12, 8."
    ):
        jax.eval_shape(logits_of(other, "w4a16"), params, tokens)


@pytest.mark.parametrize("field", [{"weights": "w4a8"}, {"cache": "int4"}])
def test_training_is_refused(field):
    execution = ExecutionConfig(precision=PrecisionPolicy(**field))
    (name, value), *_ = field.items()
    with pytest.raises(ValueError, match=f"precision.{name}='{value}' is for inference"):
        make_train_step(WIDE, optax.sgd(0.1), execution=execution)
