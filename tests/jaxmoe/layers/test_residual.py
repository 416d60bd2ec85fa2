# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Residuals: layers in a plain loop, decoding, and what a half waits for."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.huggingface import to_huggingface
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.block import Block
from jaxmoe.layers.carry import initial_carry
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerInputs, RoutingInputs, Stream, TokenInputs
from jaxmoe.layers.residual import LadderResidualConfig, StandardResidualConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import AttentionConfig, ForwardMultipliers, ModelConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.planning.hlo.text import parse_module
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig
from tests.support.meshes import mesh_of
from tests.support.models import FULL, LENGTH, tokens_for
from tests.support.tolerances import assert_close

RESIDUALS = {
    "standard": StandardResidualConfig(),
    "ladder": LadderResidualConfig(),
}
MULTIPLIER = 0.7
MODEL = dataclasses.replace(
    FULL, residual=LadderResidualConfig(), multipliers=ForwardMultipliers(residual=MULTIPLIER)
)


def values():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: 2.0 * w + 0.1 * rng.standard_normal(w.shape).astype(np.float32),
        init_params(MODEL, jax.random.key(0)),
    )


def branches(params, tokens, model=MODEL):
    """Each layer's mixer and feed-forward as functions of their input [B S D], in order."""
    mask, execution = jnp.ones(tokens.shape, bool), ExecutionConfig()
    about, segments = TokenInputs(token_mask=mask), mask.astype(jnp.int32)
    for stack in model.stacks:
        for place in range(stack.num_layers):
            own = jax.tree.map(lambda w, i=place: w[i], params[stack.path])
            mixer, feed_forward = stack.kind.mixer, stack.kind.feed_forward
            name, fed = mixer.module_name, feed_forward.module_name
            routing = RoutingInputs(token_mask=mask, segment_ids=segments, router_state={})

            def mix(x, own=own, mixer=mixer, name=name):
                module = mixer.build(model.context, execution)
                normed = rms_norm(x, own[f"{name}_norm"]["gain"], model.norm_epsilon)
                return module.apply({"params": own[name]}, normed, about, None)[0]

            def feed(x, own=own, feed_forward=feed_forward, name=fed, routing=routing):
                module = feed_forward.build(model.context, execution, train=False)
                normed = rms_norm(x, own["feed_forward_norm"]["gain"], model.norm_epsilon)
                return module.apply({"params": own[name]}, normed, routing)[0]

            yield SimpleNamespace(mix=mix, feed=feed)


def looped(params, tokens):
    """Hidden states of a ladder: the input of half i has the outputs of halves 0 to i - 2."""
    inputs, outputs = params["embedding"]["weight"][tokens], []
    for layer in branches(params, tokens):
        for branch in (layer.mix, layer.feed):
            x = inputs + sum(outputs[:-1], jnp.zeros_like(inputs))
            outputs.append(MULTIPLIER * branch(x))
    x = inputs + sum(outputs, jnp.zeros_like(inputs))
    return rms_norm(x, params["final_norm"]["gain"], MODEL.norm_epsilon)


def hidden(params, tokens):
    return Transformer(MODEL).apply({"params": params}, tokens).hidden


def test_a_ladder_equals_a_loop_over_its_halves():
    tokens, params = tokens_for(MODEL)[0], values()
    results = []
    for function in (hidden, looped):

        def total(params, function=function):
            found = function(params, tokens)
            return jnp.sum(found * jnp.cos(jnp.arange(found.size).reshape(found.shape))), found

        results.append(jax.jit(jax.value_and_grad(total, has_aux=True))(params))
    assert_close(*results, "end_to_end")


def test_cached_logits_of_a_ladder_equal_the_whole_forward():
    tokens, params, execution = tokens_for(MODEL)[0], values(), ExecutionConfig()

    @jax.jit
    def one(tokens, position, cache):
        positions = jnp.broadcast_to(position, (tokens.shape[0], 1))
        given = {"positions": positions, "cache": cache}
        output = Transformer(MODEL, execution).apply({"params": params}, tokens, **given)
        return output.hidden[:, 0], output.cache

    cache, found = initial_cache(MODEL, execution, batch=tokens.shape[0], length=LENGTH), []
    for position in range(LENGTH):
        at = jnp.full((1, 1), position, jnp.int32)
        step, cache = one(tokens[:, position : position + 1], at, cache)
        found.append(step)
    assert_close(jnp.stack(found, axis=1), jax.jit(hidden)(params, tokens), "end_to_end")


DENSE = ModelConfig(
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6),
    moe=None,
    dense_dim=24,
    num_layers=1,
)


def products_behind_sums(residual, halves):
    """Matrix products that wait for the reduce-scatter or all-reduce of the first half."""
    model = dataclasses.replace(DENSE, residual=residual)
    execution = ExecutionConfig(mesh=MeshConfig(tensor=2))
    mesh = mesh_of(execution)
    (stack,) = model.stacks
    block = Block(stack.kind.mixer, stack.kind.feed_forward, model.context, execution, train=False)
    layer = LayerInputs(router_state={}, key=None, stack_layer=jnp.int32(0), moe_layer=jnp.int32(0))
    place = execution.placement.place

    def run(params, x):
        carry = initial_carry(residual.carries(model.context, execution), (2, 8), execution)
        x = place(x, ("act_batch", "act_seq", "act_embed"))
        about = TokenInputs(token_mask=place(jnp.ones((2, 8), bool), ("act_batch", "act_seq")))
        stream = Stream(x=x, carry=carry)
        stream, about = residual.enter(stream, about, model.context, execution)
        for half in halves:
            stream, _ = block.apply({"params": params}, stream, layer, about, method=half)
        return stream

    with jax.set_mesh(mesh):
        params = init_params(model, jax.random.key(0), mesh=mesh)[stack.path]
        params = jax.tree.map(lambda w: w[0], params)
        lowered = jax.jit(run).lower(params, jnp.ones((2, 8, 16)))
    return waiting_products(lowered.compile().as_text())


def waiting_products(text):
    """Products of a compiled program that have the first sum of partial products behind them."""
    module = parse_module(text)

    def has_product(name, called):
        return any(
            one.opcode == "dot"
            or any(has_product(name, c) for c in module.computations if c in one.attributes)
            for one in module.computations[called].values()
        )

    entry = module.computations[module.entry]
    sums = [n for n, one in entry.items() if one.opcode in ("reduce-scatter", "all-reduce")]
    assert len(sums) == 2, "one sum for each half"
    reached, found = {sums[0]}, 0
    for name, one in entry.items():  # in the order of a schedule: operands come first
        if name == sums[0] or not reached.intersection(one.operands):
            continue
        reached.add(name)
        called = one.attribute("calls") or one.attribute("to_apply")
        found += one.opcode == "dot" or bool(called and has_product(name, called))
    return found


@pytest.mark.parametrize("halves", [("mix", "feed"), ("feed", "mix")], ids=str)
def test_no_product_of_a_half_waits_for_the_sum_of_the_half_before(halves):
    counts = {name: products_behind_sums(one, halves) for name, one in RESIDUALS.items()}
    assert counts["standard"] > 0 and counts["ladder"] == 0, counts


def test_hugging_face_refuses_a_ladder(tmp_path):
    params = parameter_table(MODEL).tree(lambda row: np.zeros(row.shape, np.float32))
    with pytest.raises(CheckpointError, match="model.residual"):
        to_huggingface(MODEL, params, tmp_path / "out", family="jaxmoe")
    with pytest.raises(CheckpointError, match="residual"):
        to_huggingface(MODEL, params, tmp_path / "out")
