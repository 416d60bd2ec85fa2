# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the tokens of requests that change their logits: biases, penalties, tokens left out.

    grammar         -inf for tokens that it does not allow
    bias            added to the logits of some tokens; -inf leaves a token out
    repetition      logits of tokens of prompt or answer: divided above 0, else multiplied
                    arXiv 1909.05858, section 4.1
    frequency       taken away for each time that a token stands in the answer
    presence        taken away once from each token of the answer

in this order, that of vLLM; temperature and filters follow (`jaxmoe/models/sampling.py`). A step
leaves its logits on the device, and this program draws from them again for the rows that ask for
it. The tokens of other requests are those that the step has drawn, and a step without such a
request does not run it. Penalties need nothing of the host: a token that the step before draws goes
into the history on the device. The mask of a grammar follows that token, which the host waits for
while the device computes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxmoe.models.sampling import Limits, choose_each
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.step import Work

MOST_BIASES = 512
"""Tokens of a row with a bias, those that may not end its answer yet included."""


class Adjustments(NamedTuple):
    """How the logits of N rows are changed; H tokens of a history, b biases."""

    history: Int[Any, "N H"]
    """Tokens of prompt and answer; V behind the last, and for one that is pending."""
    pending: Int[Any, " N"]
    """Place in the history of the token that the step before draws; H where all are known."""
    sources: Int[Any, " N"]
    """Row of that token in the step before."""
    num_prompt: Int[Any, " N"]
    """Tokens of the prompt among them."""
    presence: Float[Any, " N"]
    frequency: Float[Any, " N"]
    repetition: Float[Any, " N"]
    bias_ids: Int[Any, "N b"]
    """Tokens with a bias; V behind the last."""
    biases: Float[Any, "N b"]
    allowed: UInt[Any, "N W"]
    """Tokens that the grammar of each row allows, a bit each; W = ceil(V / 32)."""


def no_adjustments(rows: int, length: int, vocab_size: int) -> Adjustments:
    """Return adjustments that change nothing, as host arrays.

    Args:
        rows: N.
        length: H, the longest sequence.
        vocab_size: V.
    """
    return Adjustments(
        history=np.full((rows, length), vocab_size, np.int32),
        pending=np.full(rows, length, np.int32),
        sources=np.zeros(rows, np.int32),
        num_prompt=np.zeros(rows, np.int32),
        presence=np.zeros(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        repetition=np.ones(rows, np.float32),
        bias_ids=np.full((rows, MOST_BIASES), vocab_size, np.int32),
        biases=np.zeros((rows, MOST_BIASES), np.float32),
        allowed=np.full((rows, -(-vocab_size // 32)), 2**32 - 1, np.uint32),
    )


def set_adjustments(
    adjustments: Any,
    row: int,
    work: Work,
    *,
    mask: np.ndarray | None = None,
    source: int = -1,
) -> None:
    """Write how the logits of a request are changed into its row, in place.

    Args:
        adjustments: Host arrays.
        row: Row of the work.
        work: Work that draws a token.
        mask: Tokens that its grammar allows, a bit of a uint32 each; None for all.
        source: Row in the step before that draws the last token of the work; -1 where it is known.
    """
    if mask is not None:
        width = min(len(mask), adjustments.allowed.shape[1])
        adjustments.allowed[row] = 0
        adjustments.allowed[row, :width] = mask[:width]
    sampling = work.sampling
    if sampling.has_penalties:
        count = len(work.history) - (source >= 0)
        adjustments.history[row, :count] = work.history[:count]
        adjustments.num_prompt[row] = len(work.history) - work.index
        if source >= 0:
            adjustments.pending[row] = count
            adjustments.sources[row] = source
    adjustments.presence[row] = sampling.presence_penalty
    adjustments.frequency[row] = sampling.frequency_penalty
    adjustments.repetition[row] = sampling.repetition_penalty
    biases = biases_of(sampling, work.index)
    adjustments.bias_ids[row, : len(biases)] = [token for token, _ in biases]
    adjustments.biases[row, : len(biases)] = [bias for _, bias in biases]


def biases_of(sampling: Sampling, index: int) -> Sequence[tuple[int, float]]:
    """Return tokens and their biases; ids that end a text have -inf before `min_tokens`.

    Args:
        sampling: How a request is drawn.
        index: Number of the token within the answer, from 0.
    """
    if index >= sampling.min_tokens:
        return sampling.logit_bias
    return (*sampling.logit_bias, *((token, -np.inf) for token in set(sampling.stop_ids)))


def adjust_logits(
    logits: Float[Array, "N V"], adjustments: Adjustments, drawn: Int[Array, " M"]
) -> Float[Array, "N V"]:
    """Return the changed logits of all rows.

    Args:
        logits: Logits of the next token.
        adjustments: Changes of each row.
        drawn: Tokens that the step before has drawn.
    """
    num_rows, size = logits.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    history = jnp.asarray(adjustments.history)
    history = history.at[rows[:, 0], adjustments.pending].set(
        drawn[adjustments.sources], mode="drop"
    )
    bits = jnp.arange(32, dtype=jnp.uint32)[None, None]
    is_allowed = (adjustments.allowed[:, :, None] >> bits) & 1
    is_allowed = is_allowed.reshape(num_rows, -1)[:, :size] > 0
    logits = jnp.where(is_allowed, logits, -jnp.inf)
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    answer = jnp.where(place >= adjustments.num_prompt[:, None], history, size)
    counts = jnp.zeros(logits.shape, jnp.float32).at[rows, answer].add(1.0, mode="drop")
    is_seen = jnp.zeros(logits.shape, bool).at[rows, history].set(True, mode="drop")
    logits = logits.at[rows, adjustments.bias_ids].add(adjustments.biases, mode="drop")
    repetition = adjustments.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(is_seen, repeated, logits)
    logits -= adjustments.frequency[:, None] * counts
    return logits - adjustments.presence[:, None] * (counts > 0).astype(jnp.float32)


def keys_of(seeds: Int[Array, " N"], indices: Int[Array, " N"]) -> Any:
    """Return the key of each row: `fold_in(key(seed), i)` for the i-th token of a request."""
    return jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))(
        seeds, indices
    )


def fill_rows(tokens: Int[Array, " N"], size: int) -> Int[Array, " M"]:
    """Return tokens up to the number that every step has, so that the next one can read them.

    Args:
        tokens: Tokens of a step.
        size: M, the rows of the largest step.
    """
    return jnp.pad(tokens, (0, size - len(tokens)))


@jax.jit
def draw_adjusted(
    logits: Float[Array, "N V"],
    seeds: Int[Array, " N"],
    indices: Int[Array, " N"],
    limits: Limits,
    adjustments: Adjustments,
    drawn: Int[Array, " M"],
    is_adjusted: Bool[Array, " N"],
    tokens: Int[Array, " M"],
) -> tuple[Int[Array, " M"], Float[Array, " N"]]:
    """Return the next tokens and their log-probabilities under the model.

    Args:
        logits: Logits of a step.
        seeds: Seed of each request.
        indices: Number of the token within each answer.
        limits: Temperatures and filters.
        adjustments: Changes of each row.
        drawn: Tokens that the step before has drawn.
        is_adjusted: Rows that are drawn again.
        tokens: Tokens of the step, which the other rows keep, and 0 behind them.
    """
    adjusted = adjust_logits(logits, adjustments, drawn)
    chosen = choose_each(adjusted, keys_of(seeds, indices), limits)
    chosen = jnp.where(is_adjusted, chosen, tokens[: len(chosen)])
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    logprobs = jnp.take_along_axis(logprobs, chosen[:, None], axis=-1)[:, 0]
    return fill_rows(chosen, len(tokens)), logprobs
