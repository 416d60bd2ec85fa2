# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts: answers depend on parameters, seed and step alone, and stand where they are predicted.

One engine serves all tests of this file.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxmoe.contrib.rl.batches import RolloutSample, batch_of
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.feed import Learner
from jaxmoe.contrib.rl.objective import PolicyGradientConfig
from jaxmoe.contrib.rl.rollouts import Rollouts
from jaxmoe.data.batch import validate_batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training.loss import token_log_probs
from tests.support.models import TINY

LENGTH, SEED = 12, 3
CONFIG = RolloutsConfig(group=2, prompts=2, max_tokens=4, page_size=2)
MODEL = dataclasses.replace(TINY, vocab_size=256)


class Text:
    """Bytes after a separator, as the sources of files encode a prompt."""

    def encode(self, text):
        return np.asarray([0, *text.encode()], np.int32)

    def decode(self, tokens):
        return bytes(int(token) for token in tokens).decode(errors="replace")


def sample(prompt, answer, reward):
    return RolloutSample(
        prompt=tuple(prompt),
        answer=tuple(answer),
        log_probs=tuple(-0.5 - i for i in range(len(answer))),
        text="",
        reward=reward,
    )


def test_answers_are_weighted_where_they_are_predicted():
    samples = [sample([5, 6, 7], [8, 9], 1.0), sample([5, 6, 7], [4], 0.0)]
    objective = PolicyGradientConfig(advantage="dr_grpo", aggregation="token")
    batch = batch_of(samples, objective, group=2, length=5, longest=3)
    validate_batch(batch, 256)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 0], [5, 6, 7, 0, 0]])
    np.testing.assert_array_equal(batch.targets, [[6, 7, 8, 9, 0], [6, 7, 4, 0, 0]])
    np.testing.assert_array_equal(batch.loss_weights, [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(
        batch.extra["advantages"], [[0, 0, 0.5, 0.5, 0], [0, 0, -0.5, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.extra["old_log_probs"], [[0, 0, -0.5, -1.5, 0], [0, 0, -0.5, 0, 0]]
    )


def test_updates_have_each_prompt_once_a_pass_and_the_weights_of_their_own_answers():
    """Groups stay together, other arrays stay with their rows, and one update has all in order."""
    samples = [sample([5], [6] * (1 + row % 3), row % 2) for row in range(12)]
    objective = PolicyGradientConfig(aggregation="token")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))

    def learner(**changed):
        config = RolloutsConfig(group=2, prompts=6, max_tokens=3, **changed)
        return Learner(
            config=config,
            objective=objective,
            model=MODEL,
            execution=ExecutionConfig(),
            mesh=mesh,
            length=5,
            seed=SEED,
        )

    whole = learner().batch(samples)
    rows = np.arange(12, dtype=np.float32)[:, None] * np.ones((1, 5), np.float32)
    whole = dataclasses.replace(whole, extra=whole.extra | {"row": rows})
    cut = learner(epochs=2, minibatches=3)
    assert cut.config.passes * cut.config.updates_per_pass == 6
    updates = list(cut.updates(samples, whole, (SEED, 7)))
    orders = [update.extra["row"][:, 0].astype(int).tolist() for update in updates]
    passes = [sum(orders[:3], []), sum(orders[3:], [])]
    assert [sorted(order) for order in passes] == [list(range(12))] * 2 and passes[0] != passes[1]
    for order, update in zip(orders, updates, strict=True):
        assert [first // 2 for first in order[::2]] == [second // 2 for second in order[1::2]]
        own = cut.batch([samples[row] for row in order])
        np.testing.assert_array_equal(update.loss_weights, own.loss_weights)
        np.testing.assert_array_equal(update.tokens, whole.tokens[order])
        for name in own.extra:
            np.testing.assert_array_equal(update.extra[name], own.extra[name])
    (alone,) = learner(epochs=1).updates(samples, whole, (SEED, 7))
    jax.tree.map(np.testing.assert_array_equal, alone, whole)


def test_a_row_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="training.sequence_length=3 must be at least 4"):
        batch_of(
            [sample([1, 2], [3, 4, 5], 1.0)] * 2,
            PolicyGradientConfig(),
            group=2,
            length=3,
            longest=3,
        )


def test_settings_of_rollouts_are_checked():
    wrong: Any = {"group": 1, "prompts": 0, "page_size": 0}
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=rf"rl\.{field}={value}"):
            RolloutsConfig(**{field: value})
    with pytest.raises(ValueError, match=r"rl\.prompts=16 must be divisible by rl\.minibatches=3"):
        RolloutsConfig(minibatches=3)
    with pytest.raises(ValueError, match=r"rl\.stop holds an empty text"):
        RolloutsConfig(stop=("\n", ""))
    with pytest.raises(ValueError, match=r"rl\.staleness=1 draws answers by earlier parameters"):
        RolloutsConfig(staleness=1)
    with pytest.raises(ValueError, match=r"rl\.truncation=2.0 compares trainer and engine"):
        RolloutsConfig(truncation=2.0, old="engine")


@pytest.fixture(scope="module")
def drawn():
    """Parameters of two models, and the answers of some steps."""
    rollouts = Rollouts(CONFIG, MODEL, ExecutionConfig(), Text(), length=LENGTH, seed=SEED)
    one, two = (init_params(MODEL, jax.random.key(number)) for number in range(2))
    order = {"first": (7, one), "later": (8, one), "other": (7, two), "again": (7, one)}
    found = {}
    with contextlib.closing(rollouts):
        for name, (step, params) in order.items():
            rollouts.draw(step, params, None)
            found[name], lag = rollouts.take()
            assert lag == 0
    return one, found


@pytest.mark.slow
def test_answers_depend_on_parameters_and_step_alone(drawn):
    _, found = drawn
    assert found["again"] == found["first"]
    assert found["first"] != found["later"]
    assert [one.prompt for one in found["first"]] == [one.prompt for one in found["other"]]
    assert found["first"] != found["other"]
    first, second = found["first"][:2]
    assert first.prompt == second.prompt and first.answer != second.answer


@pytest.mark.slow
def test_log_probs_of_the_engine_are_those_of_the_trainer(drawn):
    params, found = drawn
    objective = PolicyGradientConfig()
    batch = batch_of(found["first"], objective, group=2, length=LENGTH, longest=4)
    batch = jax.tree.map(jax.numpy.asarray, batch)
    log_probs = token_log_probs(MODEL, ExecutionConfig(), params, batch, objective=objective)
    is_read = np.asarray(batch.loss_weights) > 0
    assert is_read.sum() == sum(len(one.answer) for one in found["first"])
    np.testing.assert_allclose(
        np.asarray(log_probs)[is_read],
        np.asarray(batch.extra["old_log_probs"])[is_read],
        rtol=1e-4,
        atol=1e-5,
    )
