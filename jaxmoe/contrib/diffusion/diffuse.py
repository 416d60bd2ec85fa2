# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Samples masked diffusion models: positions start masked, except given ones, and are filled in.

    for i = N, ..., 1:  each masked position is filled with probability 1/i, from softmax(logits)

This is the reverse process of the linear schedule from t = i/N to s = (i-1)/N, where a mask is
removed with probability (t - s) / t; the last step fills the rest. Positions filled in one step do
not see one another: with more steps the samples are closer to the model's own distribution, until
steps seldom fill more than one. Filled and given positions never change.

Noise belongs to a row, a step and a position, and which positions are filled is drawn before the
logits. A row's result depends neither on the other rows nor on how many logits are computed at a
time: only positions that are filled meet the head, `budget` of them at a time, and [B S V] logits
never exist. Rows may stand at different steps; `jaxmoe/contrib/diffusion` serves them so.

Source: MDLM (arXiv 2406.07524, section 3.2 and eq. 6). The objective is
`jaxmoe/contrib/diffusion/masked_diffusion.py`; generation from left to right is `decode.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, only_predicted, output_logits
from jaxmoe.models.sampling import Limits, SamplingConfig, choose_each
from jaxmoe.models.transformer import forward

BUDGET = 64
"""Positions whose logits are computed at a time: a few more than a step seldom fills, as those that
are lacking are computed in vain."""

Denoiser = Callable[[Int[Array, "B S"], Float[Array, "B S"]], tuple[Float[Array, "B S D"], Any]]
"""Function (tokens, masked share of the row) -> hidden states, and what else is returned of it."""
Head = Callable[[Float[Array, "Q D"]], Float[Array, "Q V"]]
"""Function of hidden states -> logits, -inf for the mask token."""


class NoisyRows(NamedTuple):
    """Rows of the reverse process, each at a step of its own."""

    tokens: Int[Any, "B S"]
    """Ids; the mask where nothing is filled in so far."""
    is_real: Bool[Any, "B S"]
    """False for padding after a row."""
    keys: Any
    """PRNG key of each row [B]."""
    done: Int[Any, " B"]
    """Steps that each row has passed."""
    num_steps: Int[Any, " B"]
    """Steps of each row (N)."""
    limits: Limits
    """Temperatures and filters [B]."""


class Filled(NamedTuple):
    """What a step has done to each row."""

    tokens: Int[Any, "B S"]
    """Rows with further positions filled in."""
    logprobs: Float[Any, "B S"]
    """Log-probability of the tokens filled in, before temperature and filters; 0 elsewhere."""
    about: Any
    """What the denoiser has returned beside hidden states."""


def diffuse(
    model: ModelConfig,
    params: Any,
    tokens: Int[Array, "B S"],
    is_given: Bool[Array, "B S"],
    *,
    num_steps: int,
    keys: Key[Array, " B"],
    sampling: SamplingConfig | None = None,
    router_state: Any = None,
    execution: ExecutionConfig | None = None,
    budget: int = BUDGET,
) -> Int[Array, "B S"]:
    """Fill the positions of rows that are not given; each row as if alone, up to rounding.

    Args:
        model: Config of a model trained by masked diffusion; its last id is the mask.
        params: Its parameters, on one device.
        tokens: Rows of the wanted length; only given positions are read.
        is_given: True for the tokens of a prompt, anywhere; all False samples whole rows.
        num_steps: Passes through the model.
        keys: PRNG key of each row.
        sampling: Temperature and filters; those of `SamplingConfig` when None.
        router_state: State of the routers, stacked over MoE layers; fresh when None.
        execution: How the model is computed.
        budget: Positions whose logits are computed at a time; it changes no token.

    Returns:
        The filled rows.

    Raises:
        ValueError: A causal model, num_steps or budget below 1, or arrays of two shapes.
    """
    if model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=True: this model sees only the tokens before a gap, and"
            " cannot fill it: write with jaxmoe.models.decode.generate"
        )
    for name, value in (("num_steps", num_steps), ("budget", budget)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if tokens.shape != is_given.shape or keys.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens {tokens.shape} and is_given {is_given.shape} must be one shape, with a key for"
            f" each row: keys {keys.shape}"
        )
    run = _compile(model, execution or ExecutionConfig(), budget)
    limits = (sampling or SamplingConfig()).limits(model.vocab_size)
    return run(params, tokens, is_given, router_state, keys, jnp.int32(num_steps), limits)


def ancestral(
    denoise: Denoiser,
    head: Head,
    tokens: Int[Array, "B S"],
    is_given: Bool[Array, "B S"],
    *,
    mask_token: int,
    num_steps: Int[Array, ""],
    keys: Key[Array, " B"],
    limits: Limits,
    budget: int = BUDGET,
) -> Int[Array, "B S"]:
    """Run the reverse process with any denoiser.

    Args:
        denoise: Denoiser.
        head: Logits of its hidden states.
        tokens: Rows; only given positions are read.
        is_given: True for the tokens of a prompt.
        mask_token: Id of the mask.
        num_steps: Number of steps (N).
        keys: PRNG key of each row.
        limits: Temperature and filters, the same for all rows.
        budget: Positions whose logits are computed at a time.

    Returns:
        The filled rows.
    """
    batch = tokens.shape[:1]
    rows = NoisyRows(
        tokens=jnp.where(is_given, tokens, jnp.asarray(mask_token, tokens.dtype)),
        is_real=jnp.ones(tokens.shape, bool),
        keys=keys,
        done=jnp.zeros(batch, jnp.int32),
        num_steps=jnp.broadcast_to(num_steps, batch),
        limits=Limits(*(jnp.broadcast_to(limit, batch) for limit in limits)),
    )

    def body(step: Array, tokens: Array) -> Array:
        now = rows._replace(tokens=tokens, done=jnp.broadcast_to(step, batch))
        options = {"mask_token": mask_token, "budget": budget}
        return reverse_step(denoise, head, now, **options).tokens

    return jax.lax.fori_loop(0, num_steps, body, rows.tokens)


def reverse_step(
    denoise: Denoiser, head: Head, rows: NoisyRows, *, mask_token: int, budget: int
) -> Filled:
    """Run one step of each row.

    Args:
        denoise: Denoiser.
        head: Logits of its hidden states.
        rows: Rows, none of which has passed all of its steps.
        mask_token: Id of the mask.
        budget: Positions whose logits are computed at a time (Q).
    """
    is_masked = rows.is_real & (rows.tokens == mask_token)
    masked, real = (x.sum(1, keepdims=True, dtype=jnp.float32) for x in (is_masked, rows.is_real))
    ratio = jnp.broadcast_to(masked / jnp.maximum(real, 1.0), rows.tokens.shape)
    keys = _position_keys(rows)
    noise = jax.vmap(jax.vmap(jax.random.uniform))(keys[:, :, 0])
    # Below 1/i, and always below 1: the last step leaves no mask.
    steps_left = (rows.num_steps - rows.done)[:, None].astype(jnp.float32)
    is_filled = is_masked & (noise * steps_left < 1.0)
    hidden, logits = denoise(rows.tokens, ratio)
    tokens, logprobs = _fill(head, hidden, rows, is_filled, keys[:, :, 1], budget)
    return Filled(tokens, logprobs, logits)


def make_denoiser(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    router_state: Any,
    is_real: Bool[Array, "B S"] | None = None,
) -> tuple[Denoiser, Head]:
    """Return a model as a denoiser, which returns the tokens of each expert too, and its head.

    Args:
        model: Config of the model.
        execution: How it is computed.
        params: Its parameters.
        router_state: State of the routers.
        is_real: False for padding after a row; None: there is none.
    """

    def of_rows(tokens: Array, ratio: Array, is_real: Array | None) -> tuple[Array, Any]:
        output = forward(
            model,
            execution,
            params,
            tokens,
            segment_ids=None if is_real is None else is_real.astype(jnp.int32),
            router_state=router_state,
            context={"mask_ratio": ratio},
            has_logits=False,
        )
        counts = None if output.statistics is None else output.statistics.counts
        return output.hidden, counts

    def denoise(tokens: Array, ratio: Array) -> tuple[Array, Any]:
        if all(_is_rowwise(kind.feed_forward) for kind in model.kinds):
            return of_rows(tokens, ratio, is_real)
        results = jax.lax.map(
            lambda row: of_rows(*jax.tree.map(lambda array: array[None], row)),
            (tokens, ratio, is_real),
        )
        return results[0][:, 0], jax.tree.map(lambda counts: counts.sum(0), results[1])

    def head(hidden: Array) -> Array:
        logits = output_logits(hidden[None], head_weight(params, model), model, execution)
        return only_predicted(logits, model.vocab_size - 1)[0]

    return denoise, head


def _is_rowwise(feed_forward: Any) -> bool:
    """Return whether what a token computes depends on no other row of the batch."""
    return not feed_forward.is_routed or feed_forward.router.traits.is_rowwise


def _position_keys(rows: NoisyRows) -> Any:
    """Return two keys of each position at its step [B S 2]: whether it is filled, and with what."""

    def of_row(key: Any, done: Array) -> Any:
        of_step = jax.random.fold_in(key, done)
        places = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(of_step, places)
        return jax.vmap(jax.random.split)(keys)

    return jax.vmap(of_row)(rows.keys, rows.done)


def _fill(
    head: Head,
    hidden: Float[Array, "B S D"],
    rows: NoisyRows,
    is_filled: Bool[Array, "B S"],
    keys: Any,
    budget: int,
) -> tuple[Int[Array, "B S"], Float[Array, "B S"]]:
    """Return the tokens with some positions drawn anew, and the log-probabilities of these."""
    length = is_filled.shape[1]
    size = is_filled.size
    budget = min(budget, size)
    num_padded = -(-size // budget) * budget
    (places,) = jnp.nonzero(is_filled.reshape(-1), size=num_padded, fill_value=size)
    places = places.astype(jnp.int32)
    states = hidden.reshape(size, -1)
    keys = keys.reshape(-1)

    def chunk(i: Array, result: tuple[Array, Array]) -> tuple[Array, Array]:
        at = jax.lax.dynamic_slice(places, (i * budget,), (budget,))
        read = jnp.minimum(at, size - 1)  # what lies behind the last one is drawn, and dropped
        logits = head(states[read])
        limits = Limits(*(jnp.asarray(limit)[read // length] for limit in rows.limits))
        drawn = choose_each(logits, keys[read], limits)
        log_probs = jnp.take_along_axis(
            jax.nn.log_softmax(logits, axis=-1), drawn[:, None], axis=-1
        )
        tokens = result[0].at[at].set(drawn.astype(result[0].dtype), mode="drop")
        return tokens, result[1].at[at].set(log_probs[:, 0], mode="drop")

    number = is_filled.sum(dtype=jnp.int32)
    start = rows.tokens.reshape(-1), jnp.zeros(size, jnp.float32)
    tokens, logprobs = jax.lax.fori_loop(0, (number + budget - 1) // budget, chunk, start)
    return tokens.reshape(is_filled.shape), logprobs.reshape(is_filled.shape)


@functools.lru_cache(maxsize=8)
def _compile(model: ModelConfig, execution: ExecutionConfig, budget: int) -> Any:
    """Return the jitted sampler of one model."""

    def run(
        params: Any,
        tokens: Array,
        is_given: Array,
        router_state: Any,
        keys: Any,
        num_steps: Array,
        limits: Limits,
    ) -> Array:
        return ancestral(
            *make_denoiser(model, execution, params, router_state),
            tokens,
            is_given,
            mask_token=model.vocab_size - 1,
            num_steps=num_steps,
            keys=keys,
            limits=limits,
            budget=budget,
        )

    return jax.jit(run)
