# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch of conversations depends on its answers alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.data import ChatConfig, Loader
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import adamw
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.state import init_state
from tests.support.models import TINY

MODEL = dataclasses.replace(TINY, vocab_size=256, num_layers=1)


def test_targets_of_the_user_change_nothing_in_loss_and_gradients(tmp_path):
    records = [{"prompt": f"Say {n}", "completion": f"{n}!"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = ChatConfig(path=(str(tmp_path / "a.jsonl"),), cache=str(tmp_path / "cache")).build()
    batch = Loader(source, batch_size=2, sequence_length=80, seed=0).batch(0)
    is_answer = batch.loss_weights > 0
    assert 0 < is_answer.sum() < is_answer.size / 2

    @jax.jit
    def both(state, batch):
        _, summed, _ = batch_gradients(
            state,
            batch,
            model=MODEL,
            execution=ExecutionConfig(),
            objective=NextTokenConfig(),
            accumulation=1,
            accumulated_balance="two_pass",
        )
        return summed.loss, summed.grads

    state = init_state(MODEL, adamw(1e-2), jax.random.key(0), execution=ExecutionConfig())

    def with_targets(where):
        targets = np.where(where, (batch.targets + 1) % 256, batch.targets).astype(np.int32)
        changed = dataclasses.replace(batch, targets=targets)
        return jax.device_get(both(state, jax.tree.map(jnp.asarray, changed)))

    loss, grads = with_targets(np.zeros_like(is_answer))
    same_loss, same_grads = with_targets(~is_answer)
    jax.tree.map(np.testing.assert_array_equal, (loss, grads), (same_loss, same_grads))
    other_loss, _ = with_targets(is_answer & (np.cumsum(is_answer).reshape(is_answer.shape) == 1))
    assert np.any(np.asarray(loss) != np.asarray(other_loss))
