# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Norm, SwiGLU, experts, embedding and head against a few lines of numpy or flax's own."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.dense import FeedForward
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.layers.norms import Norm, RmsNormConfig, rms_norm
from jaxmoe.models.config import ForwardMultipliers, ModelConfig, ModelOptions
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.models.transformer import Transformer
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params
from tests.support.tolerances import assert_close

BATCH, LENGTH, WIDTH, HIDDEN = 2, 5, 16, 12


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _silu(x):
    return x / (1.0 + np.exp(-x))


def test_rms_norm_equals_flax():
    x, gain, cotangent = _normal(0, 3, WIDTH), _normal(1, WIDTH), _normal(2, 3, WIDTH)

    def ours(x, gain):
        return jnp.sum(rms_norm(x, gain, 1e-3) * cotangent)

    def theirs(x, gain):
        with jax.numpy_rank_promotion("allow"):
            y = nn.RMSNorm(epsilon=1e-3).apply({"params": {"scale": gain}}, x)
        return jnp.sum(y * cotangent)

    pair = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, gain) for f in (ours, theirs))
    assert_close(*pair, kind="elementwise")


def test_rms_norm_is_computed_in_f32():
    """Squares of 1e3 in bfloat16 would lose the small features to rounding."""
    x = jnp.asarray([[1e3] + [1.0] * 15], jnp.bfloat16)
    y = rms_norm(x, jnp.ones((16,), jnp.float32), 1e-6)
    wide = np.asarray(x, np.float64)
    wanted = wide / np.sqrt((wide**2).mean() + 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=2**-8)


def test_rms_norm_of_zeros_is_zero():
    y, slope = jax.value_and_grad(lambda x: rms_norm(x, jnp.ones((4,)), 1e-6).sum())(jnp.zeros(4))
    assert y == 0.0 and bool(jnp.isfinite(slope).all())


def test_rms_norm_starts_with_gains_of_one():
    variables = Norm(WIDTH, 1e-6, RmsNormConfig()).init(jax.random.key(0), _normal(3, 2, WIDTH))
    np.testing.assert_array_equal(nn.meta.unbox(variables)["params"]["gain"], np.ones(WIDTH))


def test_swiglu_equals_numpy():
    x, cotangent = _normal(4, BATCH, LENGTH, WIDTH), _normal(5, BATCH, LENGTH, WIDTH)
    params = {"gate_up": _normal(6, WIDTH, 2, HIDDEN), "down": _normal(7, HIDDEN, WIDTH)}
    layer = FeedForward(WIDTH, HIDDEN, ExecutionConfig())
    out, _ = layer.apply({"params": params}, x)
    gate, up = np.moveaxis(np.asarray(params["gate_up"], np.float64), 1, 0)
    wide = np.asarray(x, np.float64)
    assert_close(out, (_silu(wide @ gate) * (wide @ up)) @ params["down"], kind="matmul")

    def ours(params, x):
        return jnp.sum(layer.apply({"params": params}, x)[0] * cotangent)

    def theirs(params, x):
        gate, up = x @ params["gate_up"][:, 0], x @ params["gate_up"][:, 1]
        return jnp.sum(((gate * jax.nn.sigmoid(gate) * up) @ params["down"]) * cotangent)

    grads = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (ours, theirs))
    assert_close(*grads, kind="matmul")


def test_experts_are_swiglus_on_their_own_rows():
    """Three experts, one of them without rows; rows past the groups give 0."""
    sizes = [3, 0, 2]
    rows = _normal(8, 6, WIDTH)
    weights = {"gate_up": _normal(9, 3, WIDTH, 2, HIDDEN), "down": _normal(10, 3, HIDDEN, WIDTH)}
    out = apply_experts(weights, rows, jnp.asarray(sizes, jnp.int32))
    wanted = np.zeros((6, WIDTH))
    for row, expert in enumerate(np.repeat(np.arange(3), sizes)):
        x = np.asarray(rows[row], np.float64)
        gate, up = np.moveaxis(np.asarray(weights["gate_up"][expert], np.float64), 1, 0)
        wanted[row] = (_silu(x @ gate) * (x @ up)) @ np.asarray(weights["down"][expert])
    assert_close(out, wanted, kind="matmul")


@pytest.mark.parametrize("is_tied", [False, True])
def test_head_equals_numpy(is_tied):
    multipliers = ForwardMultipliers(logits=0.25)
    model = ModelConfig(
        vocab_size=9, embed_dim=WIDTH, has_tied_embeddings=is_tied, multipliers=multipliers
    )
    params = {"embedding": {"weight": _normal(11, 9, WIDTH)}}
    if not is_tied:
        params["head"] = {"weight": _normal(12, WIDTH, 9)}
    matrix = params["embedding"]["weight"].T if is_tied else params["head"]["weight"]
    weight = head_weight(params, model)
    np.testing.assert_array_equal(weight, matrix)
    hidden = _normal(13, BATCH, LENGTH, WIDTH)
    wanted = 0.25 * np.asarray(hidden, np.float64) @ np.asarray(matrix, np.float64)
    assert_close(output_logits(hidden, weight, model, ExecutionConfig()), wanted, kind="matmul")
    bf16 = ExecutionConfig(precision=PrecisionPolicy(compute="bfloat16"))
    logits = output_logits(hidden, weight, model, bf16)
    assert logits.dtype == jnp.float32
    # Accumulated in f32: a bfloat16 result would be rounded, and all of its low bits zero.
    assert (np.asarray(logits).view(np.uint32) & 0xFFFF).any()


def test_softcapped_logits_and_their_gradient_equal_numpy():
    multipliers = ForwardMultipliers(logits=0.25)
    options = ModelOptions(logits_softcap=1.5)
    model = ModelConfig(vocab_size=9, embed_dim=WIDTH, multipliers=multipliers, options=options)
    hidden, weight = _normal(13, BATCH, LENGTH, WIDTH), _normal(12, WIDTH, 9)
    cotangent = _normal(14, BATCH, LENGTH, 9)

    def total(hidden):
        logits = output_logits(hidden, weight, model, ExecutionConfig())
        return jnp.sum(logits * cotangent), logits

    (_, logits), gradient = jax.value_and_grad(total, has_aux=True)(hidden)
    matrix = np.asarray(weight, np.float64)
    bounded = np.tanh(0.25 * np.asarray(hidden, np.float64) @ matrix / 1.5)
    assert_close(logits, 1.5 * bounded, kind="matmul")
    slope = np.asarray(cotangent, np.float64) * (1 - bounded**2)
    assert_close(gradient, 0.25 * slope @ matrix.T, kind="matmul")
    for bound in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="options.logits_softcap=.* must be a number above"):
            ModelOptions(logits_softcap=bound)


@pytest.mark.parametrize("is_tied", [False, True])
def test_biases_of_the_head_are_added_before_the_multiplier(is_tied):
    options = ModelOptions(has_head_bias=True)
    model = ModelConfig(
        num_layers=1,
        vocab_size=9,
        embed_dim=WIDTH,
        has_tied_embeddings=is_tied,
        multipliers=ForwardMultipliers(logits=0.25),
        options=options,
    )
    plain = dataclasses.replace(model, options=None)
    params = init_params(model, jax.random.key(0))
    assert set(params["head"]) == {"bias"} | ({"weight"} if not is_tied else set())
    assert not np.asarray(params["head"]["bias"]).any()
    bias = _normal(15, 9)
    tokens = jnp.asarray([[1, 2, 8, 0]], jnp.int32)
    params["head"]["bias"] = bias
    logits = Transformer(model).apply({"params": params}, tokens).logits
    params = {name: part for name, part in params.items() if name != "head" or not is_tied}
    if not is_tied:
        params["head"] = {"weight": params["head"]["weight"]}
    without = Transformer(plain).apply({"params": params}, tokens).logits
    assert_close(logits, np.asarray(without) + 0.25 * np.asarray(bias), kind="matmul")


def test_a_layer_computes_in_the_compute_dtype_and_keeps_f32_parameters():
    bf16 = ExecutionConfig(precision=PrecisionPolicy(compute="bfloat16"))
    layer = FeedForward(WIDTH, HIDDEN, bf16)
    x = _normal(14, BATCH, LENGTH, WIDTH)
    (out, _), variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


def test_precision_auto_is_f32_on_devices_of_the_cpu():
    assert PrecisionPolicy().compute_dtype == jnp.float32
    bf16 = dataclasses.replace(PrecisionPolicy(), compute="bfloat16")
    assert bf16.compute_dtype == jnp.bfloat16 and bf16.parameter_dtype == jnp.float32
