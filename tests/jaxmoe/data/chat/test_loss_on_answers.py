# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loss of a batch of conversations depends on its answers alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import init_params
from jaxmoe.data import ChatConfig, Loader
from jaxmoe.execution import ExecutionConfig
from jaxmoe.training.loss import forward_and_nll
from tests.support.models import TINY

MODEL = dataclasses.replace(TINY, vocab_size=256, num_layers=1)


def test_targets_of_the_user_change_nothing_in_the_loss(tmp_path):
    records = [{"prompt": f"Say {n}", "completion": f"{n}!"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = ChatConfig(path=(str(tmp_path / "a.jsonl"),), cache=str(tmp_path / "cache")).build()
    batch = Loader(source, batch_size=2, sequence_length=80, seed=0).batch(0)
    is_answer = batch.loss_weights > 0
    assert 0 < is_answer.sum() < is_answer.size / 2

    @jax.jit
    def loss_of(params, batch):
        return forward_and_nll(MODEL, ExecutionConfig(), params, batch)[0]

    params = init_params(MODEL, jax.random.key(0))

    def with_targets(where):
        targets = np.where(where, (batch.targets + 1) % 256, batch.targets).astype(np.int32)
        changed = dataclasses.replace(batch, targets=targets)
        return float(loss_of(params, jax.tree.map(jnp.asarray, changed)))

    loss = with_targets(np.zeros_like(is_answer))
    assert with_targets(~is_answer) == loss
    one_token = is_answer & (np.cumsum(is_answer).reshape(is_answer.shape) == 1)
    assert one_token.sum() == 1 and with_targets(one_token) != loss
