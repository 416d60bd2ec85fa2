# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the path of a sequence from its prompt: a small network beside each layer.

    logits_l = mean over windows of  W2 gelu(W1 w + b1) + b2      w the window's hidden state / rms
    loss     = mean of weight_c (1 - p_c)^2 (-log p_c)            c the choice of the found path
    weight_c = (1 - .999) / (1 - .999^n_c), scaled to mean 1      n_c number of choices c

The hidden states are those along the found path (teacher forcing); the model is not trained. AdamW
at 1e-3 with weight decay .01 for 25 epochs, as in Dr.LLM (arXiv 2510.12773), and a linear warm-up.
Division by the root mean square is a choice made here.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int, Key

from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.contrib.layerwise.layer_paths.rows import REPEAT, RoutedRows, run_rows
from jaxmoe.data import Batch

HIDDEN: Final = 128
"""Hidden units of each network."""
CHOICES: Final = REPEAT + 1
_BATCH = 16
_RATE = 1e-3
_DECAY = 0.01
_BETA = 0.999
_GAMMA = 2.0


@struct.dataclass
class PathRouter:
    """Weights of the networks of all layers."""

    w1: Float[Array, "layers D 128"]
    b1: Float[Array, "layers 128"]
    w2: Float[Array, "layers 128 3"]
    b2: Float[Array, "layers 3"]


def new_router(key: Key[Array, ""], layers: int, width: int) -> PathRouter:
    """Return networks whose logits are 0.

    Args:
        key: PRNG key.
        layers: Layers that a token passes through.
        width: D.
    """
    draws = jax.random.normal(key, (layers, width, HIDDEN), jnp.float32)
    return PathRouter(
        w1=draws * width**-0.5,
        b1=jnp.zeros((layers, HIDDEN), jnp.float32),
        w2=jnp.zeros((layers, HIDDEN, CHOICES), jnp.float32),
        b2=jnp.zeros((layers, CHOICES), jnp.float32),
    )


def path_logits(
    router: PathRouter, windows: Float[Array, "B layers 8 D"]
) -> Float[Array, "B layers 3"]:
    """Return the logits of the choices of every layer.

    Args:
        router: Networks.
        windows: Mean hidden states of the windows of the prompts.
    """
    mean = jnp.mean(jnp.square(windows), axis=-1, keepdims=True)
    x = windows * jax.lax.rsqrt(mean + 1e-6)
    options = {"preferred_element_type": jnp.float32}
    hidden = jnp.einsum("blwd,ldh->blwh", x, router.w1, **options)
    hidden = jax.nn.gelu(hidden + router.b1[None, :, None])
    logits = jnp.einsum("blwh,lhc->blwc", hidden, router.w2, **options)
    return jnp.mean(logits, axis=2) + router.b2[None]


def class_weights(labels: Int[np.ndarray, " *rows"]) -> Float[np.ndarray, " 3"]:
    """Return the weight of each choice by its effective number of samples (arXiv 1901.05555).

    Args:
        labels: Choices.
    """
    counts = np.maximum(np.bincount(np.ravel(labels), minlength=CHOICES), 1)
    weights = (1.0 - _BETA) / (1.0 - _BETA**counts)
    return (weights / weights.mean()).astype(np.float32)


def focal_loss(
    logits: Float[Array, "*rows 3"],
    labels: Int[Array, " *rows"],
    weights: Float[Array, " 3"],
    gamma: float = _GAMMA,
) -> Float[Array, ""]:
    """Return the mean focal loss (arXiv 1708.02002); gamma 0 and weights 1 give the cross-entropy.

    Args:
        logits: Logits of the choices.
        labels: Choices to learn.
        weights: Weight of each choice.
        gamma: Exponent of 1 - p.
    """
    chosen = jax.nn.one_hot(labels, CHOICES, dtype=jnp.float32)
    log_p = jnp.sum(jax.nn.log_softmax(logits, axis=-1) * chosen, axis=-1)
    weight = jnp.sum(chosen * jnp.reshape(weights, (1,) * labels.ndim + (-1,)), axis=-1)
    return -jnp.mean(weight * (1.0 - jnp.exp(log_p)) ** gamma * log_p)


def train_router(
    windows: Float[np.ndarray, "n layers 8 D"],
    paths: Int[np.ndarray, "n layers"],
    *,
    epochs: int = 25,
    seed: int = 0,
) -> tuple[PathRouter, list[float]]:
    """Return trained networks, and the mean loss of each epoch.

    Args:
        windows: Windows of the prompts, before each layer of their paths.
        paths: Paths to learn.
        epochs: Passes over the sequences.
        seed: Seed of initial weights and of the order.
    """
    number, layers, _, width = windows.shape
    router: Any = new_router(jax.random.key(seed), layers, width)
    size = min(_BATCH, number)
    steps = epochs * (number // size)
    schedule = optax.warmup_constant_schedule(0.0, _RATE, max(steps // 10, 1))
    optimizer = optax.adamw(schedule, weight_decay=_DECAY)
    weights = jnp.asarray(class_weights(paths))

    @jax.jit
    def step(router: Any, state: Any, windows: Array, labels: Array) -> Any:
        def loss_of(router):
            return focal_loss(path_logits(router, windows), labels, weights)

        loss, gradient = jax.value_and_grad(loss_of)(router)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, router)
            return optax.apply_updates(router, updates), state, loss

    state = optimizer.init(router)
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(epochs):
        order = rng.permutation(number)
        epoch_losses = []
        for start in range(0, number - size + 1, size):
            rows = order[start : start + size]
            labels = paths[rows].astype(np.int32)
            router, state, loss = step(router, state, windows[rows], labels)
            epoch_losses.append(loss)
        losses.append(float(np.mean(jax.device_get(epoch_losses))))
    return router, losses


def route_rows(chain: Chain, batch: Batch, router: PathRouter) -> RoutedRows:
    """Return the results of the paths that a router chooses from the prompts.

    Args:
        chain: Causal model on one device.
        batch: Sequences.
        router: Networks.
    """

    def choose(layer: int, windows: Array) -> np.ndarray:
        layer_router = jax.tree.map(lambda x: x[layer : layer + 1], router)
        return np.asarray(jnp.argmax(path_logits(layer_router, windows[:, None])[:, 0], axis=-1))

    return run_rows(chain, batch, choose)
