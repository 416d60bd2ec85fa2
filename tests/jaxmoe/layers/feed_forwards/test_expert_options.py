# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Options of a MoE layer against loops over experts: shared gate and width, activations, biases.

Values and gradients on one device, the same on eight devices with every dispatcher, matrices in few
bits and with low-rank additions, and models that train, decode and are counted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import (
    ClampedSwiGLUConfig,
    GeGLUConfig,
    MoEConfig,
    ReLUSquaredConfig,
    SwiGLUConfig,
)
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.feed_forwards.moe.experts import apply_experts
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.routing import SigmoidTopKConfig, SoftmaxGateConfig, SoftmaxTopKConfig
from jaxmoe.routing.routers.token_choice.topk import LogitBiasConfig
from jaxmoe.scaling.initialize import parameter_table
from pallas_kernels import dequantize, quantize
from sharding.products.low_rank import LowRank
from tests.support.dense_moe import choose
from tests.support.meshes import EXECUTIONS, mesh_of
from tests.support.models import WIDE, WIDE_LENGTH
from tests.support.tolerances import assert_close

SEQUENCES = 8
ON_ONE = ExecutionConfig()
MOE = dataclasses.replace(WIDE.moe, gate=MoEConfig().gate, num_shared_experts=0)
LLAMA_4 = dataclasses.replace(
    MOE, top_k=1, router=SigmoidTopKConfig(), gate=SoftmaxGateConfig(scales_input=True)
)
GPT_OSS = dataclasses.replace(
    MOE,
    activation=ClampedSwiGLUConfig(limit=1.0),
    options=MoEOptions(has_expert_bias=True),
    router=SoftmaxTopKConfig(softmax="after", logit_bias=LogitBiasConfig()),
    gate=SoftmaxGateConfig(),
)
NEMOTRON = dataclasses.replace(
    MOE, activation=ReLUSquaredConfig(), num_shared_experts=1, options=MoEOptions(shared_dim=12)
)
LAYERS = {
    "shared_dim": dataclasses.replace(MOE, num_shared_experts=2, options=MoEOptions(shared_dim=12)),
    "shared_gate": dataclasses.replace(
        MOE, num_shared_experts=1, options=MoEOptions(has_shared_gate=True)
    ),
    "shared_scale": dataclasses.replace(
        MOE, num_shared_experts=2, options=MoEOptions(shared_scale=0.5)
    ),
    "geglu": dataclasses.replace(MOE, activation=GeGLUConfig(), num_shared_experts=1),
    "relu_squared": NEMOTRON,
    "swiglu_bias": dataclasses.replace(MOE, options=MoEOptions(has_expert_bias=True)),
    "relu_squared_bias": dataclasses.replace(
        NEMOTRON, options=MoEOptions(shared_dim=12, has_expert_bias=True)
    ),
    "gpt_oss": GPT_OSS,
    "llama_4": LLAMA_4,
    "all": dataclasses.replace(
        GPT_OSS,
        num_shared_experts=1,
        options=MoEOptions(shared_dim=8, has_shared_gate=True, has_expert_bias=True),
        gate=SoftmaxGateConfig(scales_input=True),
    ),
}


def model_of(moe):
    return dataclasses.replace(WIDE, moe=moe, num_layers=1)


@functools.cache
def values_of(moe):
    """Parameters of which none is zero, and tokens [B S D]."""
    rng = np.random.default_rng(0)

    def value(row):
        fan = row.declaration.fan(0)
        return jnp.asarray(rng.standard_normal(row.shape) / np.sqrt(fan), jnp.float32)

    params = parameter_table(model_of(moe)).tree(value)["moe_blocks_0"]["moe"]
    x = rng.standard_normal((SEQUENCES, WIDE_LENGTH, WIDE.embed_dim))
    return jax.tree.map(lambda leaf: leaf[0], params), jnp.asarray(x, jnp.float32)


def layer_value(moe, execution, params, x):
    mask = jnp.ones(x.shape[:2], bool)
    mask = execution.placement.place(mask, ("act_batch", None))
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
    layer = MoELayer(moe, model_of(moe).context, execution, train=True)
    return layer.apply({"params": params}, x, routing)[0]


@functools.cache
def gradients_of(moe, execution=ON_ONE):
    """`(params, x, cotangent) -> (y, gradients)`, jitted."""

    @jax.jit
    def run(params, x, cotangent):
        y, back = jax.vjp(functools.partial(layer_value, moe, execution), params, x)
        return y, back(cotangent.astype(y.dtype))

    return run


def cotangent_of(x):
    return jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), jnp.float32)


def hidden_units(moe, x, gate_up, bias=0.0):
    projected = jnp.einsum("td,dcf->tcf", x, gate_up) + bias
    return moe.activation(lambda part: projected[:, part])


def dense_layer(moe, chosen, params, x):
    """The layer with every expert computed for every token; `chosen [T E]` has no gradient."""
    rows = x.reshape(-1, x.shape[-1])
    router = params["router"]
    logits = rows @ router["weight"] + router.get("bias", jnp.zeros(chosen.shape[1]))[None]
    if isinstance(moe.router, SigmoidTopKConfig):
        gates = jnp.where(chosen, jax.nn.sigmoid(logits), 0.0)
    else:
        gates = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=-1)
    experts, routed = params["experts"], jnp.zeros_like(rows)
    for expert in range(moe.num_experts):
        gate = gates[:, expert, None]
        inputs = gate * rows if moe.gate.scales_input else rows
        bias, down_bias = 0.0, 0.0
        if moe.extras.has_expert_bias:
            bias = experts["gate_up_bias"][expert][None]
            down_bias = experts["down_bias"][expert][None]
        hidden = hidden_units(moe, inputs, experts["gate_up"][expert], bias)
        output = hidden @ experts["down"][expert] + down_bias
        is_chosen = chosen[:, expert, None].astype(np.float32)
        routed += (is_chosen if moe.gate.scales_input else gate) * output
    if "shared" in params:
        shared = hidden_units(moe, rows, params["shared"]["gate_up"]) @ params["shared"]["down"]
        if moe.extras.has_shared_gate:
            shared *= jax.nn.sigmoid(rows @ params["shared_gate"]["weight"])
        shared *= moe.extras.shared_scale
        routed += shared
    return routed.reshape(x.shape)


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_equal_a_loop_over_experts(name):
    moe = LAYERS[name]
    params, x = values_of(moe)
    logits = np.asarray(x).reshape(-1, x.shape[-1]) @ np.asarray(params["router"]["weight"])
    logits += np.asarray(params["router"].get("bias", 0.0))
    chosen = choose(logits, moe.top_k, np.ones(len(logits), bool))

    @jax.jit
    def by_loops(params, x, cotangent):
        y, back = jax.vjp(functools.partial(dense_layer, moe, chosen), params, x)
        return y, back(cotangent)

    cotangent = cotangent_of(x)
    wanted = by_loops(params, x, cotangent)
    assert_close(gradients_of(moe)(params, x, cotangent), wanted, "end_to_end")
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(wanted[1]))


MESHES = [
    "data2_expert2_tensor2",
    "expert8_all_gather",
    "data2_expert4_chunks",
    "fold_expert2_tensor2_all_to_all",
    "fold_expert4_tensor_all_gather",
    "data2_expert4_least_loaded",
    "seq2_expert2_tensor2_ulysses",
    "tensor4_ring_of_products",
]
IN_SHORT = {
    ("all", "data2_expert2_tensor2"),
    ("relu_squared_bias", "fold_expert2_tensor2_all_to_all"),
}
ON_MESHES = [
    pytest.param(name, mesh, marks=() if (name, mesh) in IN_SHORT else pytest.mark.slow)
    for name in ("all", "relu_squared_bias", "llama_4")
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "mesh"), ON_MESHES)
def test_eight_devices_equal_one(name, mesh):
    """Value and gradients with each dispatcher, experts cut by their hidden units too."""
    moe, execution = LAYERS[name], EXECUTIONS[mesh]
    params, x = values_of(moe)
    wanted = gradients_of(moe)(params, x, cotangent_of(x))
    with jax.set_mesh(devices := mesh_of(execution)):
        table = parameter_table(model_of(moe), rules=execution.state_layout.parameters)
        specs = table.tree(lambda row: row.spec)["moe_blocks_0"]["moe"]
        placed = jax.tree.map(
            lambda leaf, spec: jax.device_put(leaf, NamedSharding(devices, type(spec)(*spec[1:]))),
            params,
            specs,
        )
        tokens = execution.placement.spec(("act_batch", "act_seq", None))
        rows = [jax.device_put(a, NamedSharding(devices, tokens)) for a in (x, cotangent_of(x))]
        result = gradients_of(moe, execution)(placed, *rows)
    assert_close(result, wanted, "end_to_end")


GROUPS, WIDTH, HIDDEN, SIZES = 3, 16, 12, (9, 0, 6)
ACTIVATIONS = {
    "swiglu": SwiGLUConfig(),
    "clamped_swiglu": ClampedSwiGLUConfig(limit=1.0),
    "relu_squared": ReLUSquaredConfig(),
}


def expert_arrays(activation, seed=0):
    """Matrices and biases of three experts, and rows of which the last five have no expert."""
    rng, parts = np.random.default_rng(seed), activation.num_projections
    shapes = {
        "gate_up": (GROUPS, WIDTH, parts, HIDDEN),
        "down": (GROUPS, HIDDEN, WIDTH),
        "gate_up_bias": (GROUPS, parts, HIDDEN),
        "down_bias": (GROUPS, WIDTH),
    }
    weights = {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()
    }
    rows = jnp.asarray(rng.standard_normal((20, WIDTH)), jnp.float32).at[15:].set(jnp.nan)
    gates = jnp.asarray(rng.uniform(0.2, 1.0, 20), jnp.float32).at[15:].set(jnp.nan)
    return weights, rows, jnp.asarray(SIZES, jnp.int32), gates


def by_rows(weights, rows, gates, activation):
    """The outputs [R D], one row after the other."""
    outputs = np.zeros(rows.shape)
    for row, expert in enumerate(np.repeat(np.arange(GROUPS), SIZES)):
        one = {name: np.asarray(array[expert], np.float64) for name, array in weights.items()}
        projected = np.einsum("d,dcf->cf", np.asarray(rows[row], np.float64), one["gate_up"])
        biased = jnp.asarray(projected + one["gate_up_bias"], jnp.float32)
        hidden = activation(lambda part, biased=biased: biased[part])
        outputs[row] = float(gates[row]) * (np.asarray(hidden) @ one["down"] + one["down_bias"])
    return outputs


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", ["floating", "int8", "int4"])
def test_experts_with_biases_equal_their_rows(name, form):
    """Matrices as they are or in few bits; rows past the groups, which hold NaN, give 0."""
    activation = ACTIVATIONS[name]
    weights, rows, sizes, gates = expert_arrays(activation)
    stored = dict(weights)
    if form != "floating":
        for matrix, axis in (("gate_up", -3), ("down", -2)):
            weights[matrix] = quantize(weights[matrix], form, axis=axis, block_size=4)
            stored[matrix] = dequantize(weights[matrix])
    outputs = apply_experts(weights, rows, sizes, gates, activation=activation)
    assert_close(outputs, by_rows(stored, rows, gates, activation), "matmul")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_unread_rows_have_no_gradient(name):
    """NaN past the groups reaches neither a gradient of the weights nor one of other rows."""
    activation = ACTIVATIONS[name]
    weights, rows, sizes, gates = expert_arrays(activation)

    def loss(weights, rows, gates, scales_input):
        outputs = apply_experts(
            weights, rows, sizes, gates, activation=activation, scales_input=scales_input
        )
        return jnp.sum(outputs**2)

    for scales_input in (False, True):
        gradients = jax.grad(loss, argnums=(0, 1, 2))(weights, rows, gates, scales_input)
        of_weights, of_rows, of_gates = gradients
        for leaf in (*jax.tree.leaves(of_weights), of_rows[:15], of_gates):
            assert bool(jnp.isfinite(leaf).all())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_low_rank_additions_equal_their_sum(name):
    activation = ACTIVATIONS[name]
    weights, rows, sizes, gates = expert_arrays(activation)
    rng, merged = np.random.default_rng(5), dict(weights)
    for matrix in ("gate_up", "down"):
        groups, inputs, *outputs = weights[matrix].shape
        down, up = (
            jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)
            for shape in ((groups, inputs, 2), (groups, 2, *outputs))
        )
        weights[matrix] = LowRank(weight=merged[matrix], down=down, up=up, scale=jnp.float32(0.5))
        merged[matrix] = weights[matrix].merge()
    outputs = apply_experts(weights, rows, sizes, gates, activation=activation)
    assert_close(outputs, by_rows(merged, rows, gates, activation), "end_to_end")
