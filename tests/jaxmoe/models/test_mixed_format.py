# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The format w4ax: products against numpy, blocks, meshes, restored shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.models import quantize as quantize_module
from jaxmoe.models.quantize import (
    abstract_params,
    channels_shape,
    dequantize_parameter,
    mixed_block_size,
    quantize_parameter,
)
from jaxmoe.models.transformer import Transformer
from jaxmoe.precision import MixedConfig, PrecisionPolicy
from jaxmoe.scaling.initialize import init_params, parameter_table
from pallas_kernels import MixedArray
from sharding.products.quantized import quantized_einsum
from tests.support.meshes import EXECUTIONS, MESHES, mesh_of
from tests.support.models import FULL, WIDE, WIDE_LENGTH, tokens_for
from tests.support.tolerances import assert_close

HALF = MixedConfig(wide_fraction=0.5)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in every matrix of the small models."""
    monkeypatch.setattr(quantize_module, "LARGEST_BLOCK", 5)
    monkeypatch.setattr(quantize_module, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(quantize_module, "LEAST_BLOCKS", 4)


def row_of(model, suffix):
    return next(row for row in parameter_table(model) if row.path.endswith(suffix))


def measurement(row, seed=0):
    """A measurement of a parameter, in no order."""
    shape = channels_shape(row)
    if shape is None:
        return None
    values = np.broadcast_to(1.0 + np.arange(shape[-1], dtype=np.float32), shape)
    return jnp.asarray(np.random.default_rng(seed).permuted(values, axis=-1))


def mixed_params(model, params, mixed=HALF, form="w4ax"):
    def one(row, value):
        return quantize_parameter(row, value, form, mixed, measurement(row))

    rows = parameter_table(model).tree(lambda row: row)
    return jax.jit(lambda params: jax.tree.map(one, rows, params))(params)


def turned_back(params):
    def is_mixed(node):
        return isinstance(node, MixedArray)

    return jax.jit(lambda p: jax.tree.map(dequantize_parameter, p, is_leaf=is_mixed))(params)


def rounded_by_hand(rows, largest, block, num_wide):
    """Rows as the product sees them: blocks of the sorted channels, 8 bits first and then 4."""
    seen, order = np.zeros_like(rows), np.argsort(-np.asarray(largest), kind="stable")
    for index in range(len(order) // block):
        channels = order[index * block : (index + 1) * block]
        top = 127 if index < num_wide else 7
        scales = np.abs(rows[:, channels]).max(axis=1, keepdims=True) / top
        seen[:, channels] = np.round(rows[:, channels] / scales) * scales
    return seen


@pytest.mark.parametrize(
    ("suffix", "subscripts", "x_shape", "block"),
    [
        ("attention/q", "bsd,dnh->bsnh", (2, 3, 16), 4),
        ("attention/o", "bsnh,nhd->bsd", (2, 3, 4, 6), 3),
        ("feed_forward/gate_up", "bsd,dcf->bscf", (2, 3, 16), 4),
    ],
)
def test_products_equal_sorted_blocks_in_numpy(small_blocks, suffix, subscripts, x_shape, block):
    row, rng = row_of(FULL, suffix), np.random.default_rng(1)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (x_shape, row.shape[1:]))
    largest = measurement(row)

    @jax.jit
    def run(x, w):
        stored = quantize_parameter(row, w[None], "w4ax", HALF, largest)
        one = jax.tree.map(lambda leaf: leaf[0], stored)  # what a scan over layers passes
        given = {"activations": None, "dtype": jnp.float32}
        return quantized_einsum(subscripts, x, one, **given), dequantize_parameter(stored)[0]

    out, stored = run(x, w)
    rows = x.reshape(6, -1).astype(np.float64)
    blocks = rows.shape[1] // block
    seen = rounded_by_hand(rows, largest[0], block, -(-blocks // 2))
    assert 0.01 < np.abs(seen - rows).max() < 0.5
    wanted = seen @ np.asarray(stored, np.float64).reshape(rows.shape[1], -1)
    assert_close(out, wanted.reshape(out.shape), kind="matmul")
    # Half a step of 4 bits, of a block of sorted inputs.
    assert 0.0 < np.abs(stored - w).max() <= np.abs(w).max() / 14 * 1.001


def test_experts_have_their_own_order(small_blocks):
    rng, sizes = np.random.default_rng(0), np.asarray([3, 0, 2, 4], np.int32)
    rows = rng.standard_normal((11, 16)).astype(np.float32)
    rows[9:] = np.nan  # past the groups
    table = {name: row_of(FULL, f"experts/{name}") for name in ("gate_up", "down")}
    largest = {name: measurement(row)[0] for name, row in table.items()}
    values = {n: rng.standard_normal(r.shape[1:]).astype(np.float32) for n, r in table.items()}

    @jax.jit
    def run(rows, values):
        held = {
            name: quantize_parameter(table[name], value[None], "w4ax", HALF, largest[name][None])
            for name, value in values.items()
        }
        one = jax.tree.map(lambda leaf: leaf[0], held)
        out = apply_experts(one, rows, jnp.asarray(sizes))
        return out, {name: dequantize_parameter(weight)[0] for name, weight in held.items()}

    out, stored = run(rows, values)
    stored = {name: np.asarray(weight, np.float64) for name, weight in stored.items()}
    wanted = np.zeros((11, 16))
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        given = rows[row : row + 1].astype(np.float64)
        seen = rounded_by_hand(given, largest["gate_up"][group], 4, 2)[0]
        gate, up = np.einsum("k,kcn->cn", seen, stored["gate_up"][group])
        hidden = (gate / (1 + np.exp(-gate)) * up)[None]
        wanted[row] = (
            rounded_by_hand(hidden, largest["down"][group], 2, 3)[0] @ (stored["down"][group])
        )
    assert_close(out, wanted, kind="matmul")


def test_shares_and_blocks():
    assert [MixedConfig(wide_fraction=f).num_wide(8) for f in (0.0, 0.1, 0.125, 0.5, 1.0)] == [
        0,
        1,
        1,
        4,
        8,
    ]
    row = row_of(WIDE, "experts/down")

    def block_of(size, **fields):
        given = dataclasses.replace(
            row,
            declaration=dataclasses.replace(row.declaration, shape=(*row.shape[:2], size, 16)),
        )
        return mixed_block_size(given, MixedConfig(**fields))

    # At most an eighth of the inputs and 128; not below 16, unless it is all of them.
    assert [block_of(size) for size in (64, 256, 1024, 4096, 192, 8, 131)] == [
        16,
        32,
        128,
        128,
        24,
        None,
        None,
    ]
    assert block_of(192, block_size=64) == 64 and block_of(32, block_size=128) == 32
    with pytest.raises(ValueError) as error:
        block_of(192, block_size=40)
    assert "mixed.block_size=40 must divide the 192 inputs of moe_blocks_0/moe/experts/down" in str(
        error.value
    )
    assert "choose 16 or 24 or 32 or 48 or 64 or 96 or 192, or leave it out" in str(error.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"wide_fraction": 1.5}, "mixed.wide_fraction=1.5 must be between 0"),
        ({"wide_fraction": float("nan")}, "mixed.wide_fraction=nan must be between 0"),
        ({"block_size": 0}, "mixed.block_size=0 must be at least 1"),
        ({"batches": 0}, "mixed.batches=0 must be at least 1"),
    ],
)
def test_bad_mixed_fields_are_refused(field, message):
    with pytest.raises(ValueError, match=message):
        MixedConfig(**field)


def test_mixed_fields_need_the_format():
    assert PrecisionPolicy(weights="w4ax", mixed=HALF).activations is None
    with pytest.raises(ValueError, match="mixed .* changes nothing with .*weights=w4a8"):
        ExecutionConfig(precision=PrecisionPolicy(weights="w4a8", mixed=HALF))
    row = row_of(WIDE, "attention/q")
    with pytest.raises(ValueError, match="attention/q: w4ax needs a measurement"):
        quantize_parameter(row, jnp.ones(row.shape), "w4ax")


def logits_of(model, form, execution=None):
    execution = execution or ExecutionConfig()
    precision = dataclasses.replace(execution.precision, weights=form)
    execution = dataclasses.replace(execution, precision=precision)
    return jax.jit(
        lambda params, tokens: (
            Transformer(model, execution).apply({"params": params}, tokens).logits
        )
    )


def relative_error(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    return np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))


@pytest.mark.slow
def test_more_wide_blocks_are_nearer_to_floating_activations(small_blocks):
    """All layers, scanned: the error of activations alone, in 8 bits, mixed and in 4."""
    model = dataclasses.replace(FULL, moe=dataclasses.replace(FULL.moe, top_k=4))
    params, (tokens, _) = init_params(model, jax.random.key(0)), tokens_for(model)
    floating, errors = logits_of(model, "floating"), []
    for fraction in (1.0, 0.5, 0.0):
        stored = mixed_params(model, params, MixedConfig(wide_fraction=fraction))
        wanted = floating(turned_back(stored), tokens)
        errors.append(relative_error(logits_of(model, "w4ax")(stored, tokens), wanted))
    assert 0.0 < errors[0] < 0.05 < errors[1] < errors[2] < 0.6, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expert8_all_to_all", "data2_expert4_least_loaded"])
def test_meshes_give_the_same_logits(small_blocks, name):
    execution = EXECUTIONS.get(name) or ExecutionConfig(mesh=MESHES[name])
    params = mixed_params(WIDE, init_params(WIDE, jax.random.key(0)))
    tokens, _ = tokens_for(WIDE, length=WIDE_LENGTH)
    wanted = logits_of(WIDE, "w4ax")(params, tokens)
    mesh, rules = mesh_of(execution), execution.axis_rules
    table = parameter_table(WIDE, rules=rules)
    target = abstract_params(table, "w4ax", jnp.float32, rules, mesh, HALF)
    assert jax.tree.structure(target) == jax.tree.structure(params)
    spread = jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), params, target)
    assert jax.tree.map(jnp.shape, spread) == jax.tree.map(lambda at: at.shape, target)
    with jax.set_mesh(mesh):
        logits = logits_of(WIDE, "w4ax", execution)(spread, tokens)
    assert relative_error(logits, wanted) < 0.02  # ties of rounding, turned by a hair


def test_mesh_that_cuts_sorted_inputs_is_refused():
    execution = EXECUTIONS["tensor4"]
    given = (jnp.float32, execution.axis_rules, mesh_of(execution))
    with pytest.raises(ValueError) as error:
        abstract_params(parameter_table(WIDE), "w4ax", *given)
    assert "attention/o is in w4ax, whose inputs are sorted over the whole matrix" in str(
        error.value
    )
    assert "mesh.tensor=4 cuts its dimension 'heads': set mesh.tensor to 1" in str(error.value)
