# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Dispersion of workers whose seeds or shuffles are out of step (the cases of arXiv 2602.14462).

Eight workers that should do the same: the same rows with the same noise on their tokens, which
stands for dropout. Of none, one, four or all of them the noise has a seed of its own, or the rows
have an order of their own. The mean loss hardly moves; the dispersion shows it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.telemetry.gradients import (
    COSINE,
    NORM_STD,
    gradient_scalars,
    make_gradient_probe,
)
from jaxmoe.data import Loader, MarkovConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.training.parts.worker_losses import LOSS_STD, loss_scalars
from jaxmoe.training.state import TrainState
from tests.support.models import TINY
from tests.support.one_step import SGD, params_of

WORKERS, ROWS, LENGTH, BATCHES = 8, 4, 16, 4
MODEL = dataclasses.replace(TINY, num_layers=1)
LANGUAGE = MarkovConfig(order=1, vocab_size=MODEL.vocab_size)


def rows_of(worker, step, kind, number):
    """Rows of one worker, of which the last `number` workers are out of step."""
    own = 1 + worker if worker >= WORKERS - number else 0
    order, noise = (own, 0) if kind == "shuffles" else (0, own)
    source = LANGUAGE.build(order)
    rows = Loader(source, batch_size=ROWS, sequence_length=LENGTH, seed=order).batch(step)
    rng = np.random.default_rng((noise, step))
    is_noise = rng.random(rows.tokens.shape) < 0.2
    drawn = rng.integers(MODEL.vocab_size, size=rows.tokens.shape, dtype=np.int32)
    return dataclasses.replace(rows, tokens=np.where(is_noise, drawn, rows.tokens))


@pytest.mark.slow
def test_desynchronised_seeds_and_shuffles_raise_dispersion_and_lower_cosine():
    probe = make_gradient_probe(MODEL, workers=WORKERS)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params_of(MODEL),
        opt_state=SGD.init(params_of(MODEL)),
        router_state=initial_router_state(MODEL),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )

    def measured(kind, number):
        """Mean loss, its deviation, that of the gradient's norm, and the cosine; over batches."""
        table = []
        for step in range(BATCHES):
            parts = [rows_of(worker, step, kind, number) for worker in range(WORKERS)]
            batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
            found = jax.device_get(probe(state, batch))
            scalars = loss_scalars(found.loss) | gradient_scalars(found)
            table.append((found.loss.mean(), *(scalars[n] for n in (LOSS_STD, NORM_STD, COSINE))))
        return np.mean(table, axis=0)

    same = measured("seeds", 0)
    np.testing.assert_allclose(same[1:], (0.0, 0.0, 1.0), atol=1e-5)
    lines = [f"none out of step: {same}"]
    for kind in ("seeds", "shuffles"):
        before = same
        for number in (1, 4, WORKERS):
            found = measured(kind, number)
            lines.append(f"{kind} of {number}: {found}")
            if number == 1:
                assert abs(found[0] / same[0] - 1) < 0.02, "the mean loss shows nothing"
            assert found[1] > 1e-2 and found[2] > 1e-2
            assert found[3] < before[3] - 1e-2, "cosines fall with every worker more"
            before = found
    print("mean loss, loss std, norm std, cosine\n" + "\n".join(lines))
