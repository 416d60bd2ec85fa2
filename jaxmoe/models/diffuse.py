# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Samples masked diffusion models: positions start masked, except given ones, and are filled in.

    for i = N, ..., 1:  each masked position is filled with probability 1/i, from softmax(logits)

This is the reverse process of the linear schedule from t = i/N to s = (i-1)/N, where a mask is
removed with probability (t - s) / t; the last step fills the rest. Positions filled in one step do
not see one another: with more steps the samples are closer to the model's own distribution, until
steps seldom fill more than one. Filled and given positions never change.

Source: MDLM (arXiv 2406.07524, section 3.2 and eq. 6). The objective is
`jaxmoe/training/masked_diffusion.py`; generation from left to right is `decode.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import only_predicted
from jaxmoe.models.transformer import forward

Denoiser = Callable[[Int[Array, "B S"], Float[Array, "B S"]], Float[Array, "B S V"]]
"""Function (tokens, masked share of the row) -> logits, -inf for the mask token."""


def diffuse(
    model: ModelConfig,
    params: Any,
    tokens: Int[Array, "B S"],
    is_given: Bool[Array, "B S"],
    *,
    num_steps: int,
    key: Key[Array, ""],
    temperature: float = 1.0,
    router_state: Any = None,
    execution: ExecutionConfig | None = None,
) -> Int[Array, "B S"]:
    """Fill the positions of rows that are not given.

    Args:
        model: Config of a model trained by masked diffusion; its last id is the mask.
        params: Its parameters, on one device.
        tokens: Rows of the wanted length; only given positions are read.
        is_given: True for the tokens of a prompt, anywhere; all False samples whole rows.
        num_steps: Passes through the model.
        key: PRNG key of the sampling.
        temperature: Divisor of the logits; 0 takes the most likely token.
        router_state: State of the routers, stacked over MoE layers; fresh when None.
        execution: How the model is computed.

    Returns:
        The filled rows.

    Raises:
        ValueError: A causal model, num_steps below 1, a negative temperature, or arrays of two
            shapes.
    """
    if model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=True: this model sees only the tokens before a gap, and"
            " cannot fill it: write with jaxmoe.models.decode.generate"
        )
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1")
    if not temperature >= 0.0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or above")
    if tokens.shape != is_given.shape:
        raise ValueError(f"tokens {tokens.shape} and is_given {is_given.shape} must be one shape")
    run = _compiled(model, execution or ExecutionConfig(), num_steps, temperature == 0.0)
    return run(params, tokens, is_given, router_state, key, jnp.float32(temperature))


def ancestral(
    denoise: Denoiser,
    tokens: Int[Array, "B S"],
    is_given: Bool[Array, "B S"],
    *,
    mask_token: int,
    num_steps: int,
    key: Key[Array, ""],
    temperature: Float[Array, ""] | None = None,
) -> Int[Array, "B S"]:
    """Run the reverse process with any denoiser.

    Args:
        denoise: Denoiser.
        tokens: Rows; only given positions are read.
        is_given: True for the tokens of a prompt.
        mask_token: Id of the mask.
        num_steps: Number of steps (N).
        key: PRNG key of the sampling.
        temperature: Divisor of the logits; None takes the most likely token.

    Returns:
        The filled rows.
    """

    def body(tokens: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        steps_left, key = given
        of_positions, of_tokens = jax.random.split(key)
        is_masked = tokens == mask_token
        ratio = is_masked.mean(axis=1, keepdims=True, dtype=jnp.float32)
        logits = denoise(tokens, jnp.broadcast_to(ratio, tokens.shape))
        if temperature is None:
            drawn = jnp.argmax(logits, axis=-1)
        else:
            drawn = jax.random.categorical(of_tokens, logits / temperature, axis=-1)
        # Below 1/i, and always below 1: the last step leaves no mask.
        noise = jax.random.uniform(of_positions, tokens.shape, jnp.float32)
        is_filled = is_masked & (noise * steps_left < 1.0)
        return jnp.where(is_filled, drawn.astype(tokens.dtype), tokens), None

    start = jnp.where(is_given, tokens, jnp.asarray(mask_token, tokens.dtype))
    steps_left = jnp.arange(num_steps, 0, -1).astype(jnp.float32)
    filled, _ = jax.lax.scan(body, start, (steps_left, jax.random.split(key, num_steps)))
    return filled


@functools.lru_cache(maxsize=8)
def _compiled(model: ModelConfig, execution: ExecutionConfig, num_steps: int, is_greedy: bool):
    """Return the jitted sampler of one model."""
    mask_token = model.vocab_size - 1

    def run(
        params: Any, tokens: Array, is_given: Array, router_state: Any, key: Array, temperature
    ) -> Array:
        def denoise(tokens: Array, ratio: Array) -> Array:
            output = forward(
                model,
                execution,
                params,
                tokens,
                router_state=router_state,
                context={"mask_ratio": ratio},
            )
            assert output.logits is not None  # asked for by default
            return only_predicted(output.logits, mask_token)

        return ancestral(
            denoise,
            tokens,
            is_given,
            mask_token=mask_token,
            num_steps=num_steps,
            key=key,
            temperature=None if is_greedy else temperature,
        )

    return jax.jit(run)
