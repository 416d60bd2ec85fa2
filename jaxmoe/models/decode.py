# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates text with a cache: the prompt in one pass, then one token at a time.

On a mesh every device that shares a row (seq, tensor) computes all its new tokens and holds a part
of the cache: the slots are cut over `seq`, the heads over `tensor`. The tokens equal those of one
device. A prompt is therefore computed `seq` times, except its attention, and experts are gathered
to the tokens with any dispatcher.

Weights (`jaxmoe.models.quantize`) and the cache (`execution.precision.cache`) may be quantised on
any mesh.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.cache import Cache, cache_length, initial_cache
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from sharding import axes as ax


def generate(
    model: ModelConfig,
    params: Any,
    prompt: Int[Array, "B S"],
    *,
    num_tokens: int,
    key: Key[Array, ""],
    temperature: float = 1.0,
    router_state: Any = None,
    execution: ExecutionConfig | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continue prompts of one length.

    Args:
        model: Config of the model.
        params: Its parameters, on one device or laid out on the current mesh.
        prompt: Tokens, at least one per row.
        num_tokens: Number of tokens to generate.
        key: PRNG key of the sampling.
        temperature: Divisor of the logits; 0 takes the most likely token.
        router_state: State of the routers, stacked over MoE layers; fresh when None.
        execution: How the model is computed.

    Returns:
        The generated tokens.

    Raises:
        ValueError: An empty prompt, num_tokens below 1, a negative temperature, or a model that is
            not causal.
    """
    if not model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=False: this model fills gaps from both sides, and cannot"
            " write from left to right: sample it with jaxmoe.models.diffuse"
        )
    if prompt.shape[1] < 1 or num_tokens < 1:
        raise ValueError("generation needs a prompt of at least one token, and a token to generate")
    if not temperature >= 0.0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or above")
    execution = WholeRowsConfig.of(execution or ExecutionConfig())
    if execution.placement.mesh_axes(ax.ACT_BATCH):
        sizes = jax.sharding.get_abstract_mesh().shape
        execution.axis_rules.check_divides("prompt", prompt.shape, (ax.ACT_BATCH, None), sizes)
    run = _compiled(model, execution, num_tokens, temperature == 0.0)
    return run(params, prompt, router_state, key, jnp.float32(temperature))


@functools.lru_cache(maxsize=8)
def _compiled(model: ModelConfig, execution: ExecutionConfig, num_tokens: int, is_greedy: bool):
    """Return the jitted generator for one model and length."""

    def decode(params: Any, tokens: Array, cache: Cache, router_state: Any) -> tuple[Any, Any]:
        batch, length = tokens.shape
        positions = cache_length(cache) + jnp.arange(length, dtype=jnp.int32)[None, :]
        output = forward(
            model,
            execution,
            params,
            tokens,
            positions=jnp.broadcast_to(positions, (batch, length)),
            router_state=router_state,
            cache=cache,
        )
        assert output.logits is not None  # asked for by default
        # Whole on every device, so that all of them draw the same tokens as one device.
        return execution.placement.place(output.logits[:, -1], (None, None)), output.cache

    def choose(logits: Array, key: Array, temperature: Array) -> Array:
        if is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)

    def run(params: Any, prompt: Array, router_state: Any, key: Array, temperature: Array) -> Array:
        batch, length = prompt.shape
        cache = initial_cache(model, execution, batch=batch, length=length + num_tokens)
        logits, cache = decode(params, prompt, cache, router_state)
        keys = jax.random.split(key, num_tokens)
        token = choose(logits, keys[0], temperature)

        def body(carry: tuple[Array, Cache], key: Array) -> tuple[Any, Array]:
            token, cache = carry
            logits, cache = decode(params, token[:, None], cache, router_state)
            new = choose(logits, key, temperature)
            return (new, cache), new

        _, rest = jax.lax.scan(body, (token, cache), keys[1:])
        return jnp.concatenate([token[:, None], rest.T], axis=1)

    return jax.jit(run)
