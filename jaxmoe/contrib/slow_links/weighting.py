# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the workers' messages in a mean, from what the workers did since the last exchange.

    result = sum(w x) / sum(w)

    tokens          w = loss weights that the worker has trained on
    participation   w = 1 / estimated rate of the worker's participation; 0 if it was absent

A worker is absent from a round if it refused all its steps. Its estimated rate is the inverse of
the mean number of rounds between two participations, where a pause counts as ended after 50 rounds
(FedAU, arXiv 2306.03401; not compared with its code). The weight in a round follows from the rounds
before it. FedAU divides by the number of workers; here the weights of a round are normalised, as
those of tokens are, so that an exchange with one absent worker is not a shorter step.

A worker of weight 0 sends nothing that counts: its codec keeps its state. If all weights are 0, the
pseudo-gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Weights = Literal["equal", "tokens", "participation"]

LONGEST_PAUSE: Final = 50
"""Rounds after which a pause of a worker counts as ended."""


class Weighting(NamedTuple):
    """How weights follow from the steps of the workers. All arrays have a leading [R]."""

    init: Callable[[], Any]
    """State of one worker before the first step: scalars."""
    add: Callable[[Any, Float[Array, " R"], Bool[Array, " R"]], Any]
    """(states, tokens of a step, whether each worker refused it) -> states."""
    close: Callable[[Any], tuple[Float[Array, " R"], Any]]
    """States at an exchange -> (weights, states of the next round)."""


class Participation(NamedTuple):
    """What is known of the rounds of the workers."""

    is_present: Bool[Array, " R"]
    """Whether a worker took a step in this round."""
    pause: Float[Array, " R"]
    """Rounds since its last participation."""
    pauses: Float[Array, " R"]
    """Number of pauses so far."""
    mean: Float[Array, " R"]
    """Mean rounds of a pause, 1 before the first has ended."""


def weighting_of(weights: Weights) -> Weighting | None:
    """Return how weights are made; None for equal weights."""
    return {"equal": None, "tokens": by_tokens(), "participation": by_participation()}[weights]


def by_tokens() -> Weighting:
    """Return weights that are the tokens since the last exchange."""
    return Weighting(
        init=lambda: jnp.zeros((), jnp.float32),
        add=lambda state, tokens, is_refused: (
            state + jnp.where(is_refused, 0.0, tokens).astype(jnp.float32)
        ),
        close=lambda state: (state, jnp.zeros_like(state)),
    )


def by_participation() -> Weighting:
    """Return weights that are the mean rounds between two participations."""

    def init() -> Participation:
        zero = jnp.zeros((), jnp.float32)
        unit = jnp.ones((), jnp.float32)
        return Participation(jnp.zeros((), bool), zero, zero, unit)

    def add(state: Participation, tokens: Array, is_refused: Array) -> Participation:
        del tokens
        return state._replace(is_present=state.is_present | ~is_refused)

    def close(state: Participation) -> tuple[Array, Participation]:
        weights = jnp.where(state.is_present, state.mean, 0.0)
        pause = state.pause + 1.0
        is_over = state.is_present | (pause >= LONGEST_PAUSE)
        mean = (state.pauses * state.mean + pause) / (state.pauses + 1.0)
        return weights, Participation(
            is_present=jnp.zeros_like(state.is_present),
            pause=jnp.where(is_over, 0.0, pause),
            pauses=state.pauses + is_over.astype(jnp.float32),
            mean=jnp.where(is_over, mean, state.mean),
        )

    return Weighting(init=init, add=add, close=close)


def factors_of(weights: Float[Array, " R"], otherwise: float) -> Float[Array, " R"]:
    """Return weights with the mean 1.

    Args:
        weights: Weights of all workers.
        otherwise: Factor of each worker if all weights are 0.
    """
    total = jnp.sum(weights)
    scaled = weights * (len(weights) / jnp.where(total > 0.0, total, 1.0))
    return jnp.where(total > 0.0, scaled, jnp.full_like(weights, otherwise))
