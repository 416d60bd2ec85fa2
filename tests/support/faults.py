# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of steps and data for tests, injected into the real programs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.data import Loader
from jaxmoe.training import gradients as gradients_module
from jaxmoe.training.feed import LoaderFeed

# Added to one element of a gradient; added to the loss; times the whole gradient.
FAULTS = {
    "none": (0.0, 0.0, 1.0),
    "nan": (math.nan, 0.0, 1.0),
    "inf": (math.inf, 0.0, 1.0),
    "1e20": (1e20, 0.0, 1.0),
    "spike": (0.0, 0.0, 100.0),
    "loss": (0.0, math.nan, 1.0),
}


def fault_key(fault: str, at: int) -> jax.Array:
    """Return a random key of the state that encodes a fault and its step."""
    words = jnp.asarray([list(FAULTS).index(fault), at], jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def faulty_step(function, state, batch):
    """Return a jitted step with the fault that the state's key encodes."""
    compute = gradients_module.compute_gradients

    def faulty(step, state, *arguments, **options):
        gradients = compute(step, state, *arguments, **options)
        fault, at = jax.random.key_data(state.rng)
        values = jnp.asarray(list(FAULTS.values()), jnp.float32)
        row = jnp.where(state.step == at.astype(jnp.int32), fault, 0)
        element, loss, scale = values[row]
        grads = jax.tree.map(lambda g: g * scale, gradients.grads)
        experts = grads["moe_blocks_0"]["moe"]["experts"]
        experts["down"] = experts["down"].at[1, 2, 3, 4].add(element)
        return dataclasses.replace(gradients, grads=grads, loss=gradients.loss + loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients_module, "compute_gradients", faulty)
        function(state, batch)  # traced while the patch holds
    return function


@contextlib.contextmanager
def poisoned(is_bad) -> Iterator[None]:
    """NaN loss weights for the first row of every batch that contains a bad row."""
    read = Loader.batch

    def batch(self, step, **given):
        good = read(self, step, **given)
        first = self.first_row(step)
        numbers = range(first, first + len(good.tokens))
        if self.split != "train" or not any(map(is_bad, numbers)):
            return good
        weights = good.loss_weights.copy()
        weights[0, 0] = math.nan
        return dataclasses.replace(good, loss_weights=weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "batch", batch)
        yield


@contextlib.contextmanager
def read_batches(*, is_lost: bool = False) -> Iterator[dict[int, str]]:
    """Return a hash of the tokens of each step."""
    batches, seen = LoaderFeed.batches, {}

    def watched(self, first_step):
        with contextlib.closing(batches(self, 0 if is_lost else first_step)) as made:
            for step, batch in enumerate(made, first_step + 1):
                seen[step] = hashlib.sha256(np.asarray(batch.tokens).tobytes()).hexdigest()
                yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoaderFeed, "batches", watched)
        yield seen
