# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The feed of answers keeps what every feed promises."""

import dataclasses
import gc
import weakref
from unittest import mock

import jax
import numpy as np
import pytest

from jaxmoe.adapters import LoraConfig, SwitchLoraConfig
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.feed import Learner, RolloutFeed
from jaxmoe.contrib.rl.objective import PolicyGradientConfig
from jaxmoe.data import CorpusConfig
from jaxmoe.data.synthetic import MarkovConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState
from tests.jaxmoe.training.test_feed import (  # noqa: F401
    STEPS,
    one_device,
    test_a_later_step_has_the_same_batch_wherever_a_loop_begins,
    test_a_session_may_end_without_a_step_and_another_follow,
    test_the_batch_that_is_compiled_for_has_the_shapes_of_all,
)
from tests.support.models import TINY


@pytest.fixture
def feed():
    return _feed()


def _learner(*, model=TINY, beta=0.0):
    return Learner(
        config=RolloutsConfig(group=2, prompts=2, max_tokens=3),
        objective=PolicyGradientConfig(beta=beta),
        model=model,
        execution=ExecutionConfig(),
        mesh=one_device(),
        length=6,
        seed=0,
    )


def _feed(directory=None, *, model=TINY, beta=0.0):
    learner = _learner(model=model, beta=beta)
    source = MarkovConfig().build()
    return RolloutFeed(learner, source, every=2, last_step=STEPS, directory=directory)


@pytest.mark.parametrize("adapter", [LoraConfig(), SwitchLoraConfig()], ids=["lora", "switch"])
def test_the_reference_holds_no_frozen_parameter(monkeypatch, adapter):
    """They are those of the model in training; an adapter that moves them has a copy. Nothing else
    of the first state is held."""
    monkeypatch.setattr("jaxmoe.contrib.rl.feed.Rollouts", mock.MagicMock(return_value=mock.Mock()))
    model = dataclasses.replace(TINY, adapter=adapter)
    table = parameter_table(model)
    params = table.tree(lambda row: np.zeros(row.shape, np.float32))
    arrays = [
        (row, weakref.ref(leaf)) for row, leaf in zip(table, jax.tree.leaves(params), strict=True)
    ]
    optimizer_state = np.zeros(3)
    moments = weakref.ref(optimizer_state)
    states = [mock.Mock(spec=TrainState, params=params, router_state=(), opt_state=optimizer_state)]
    del params, optimizer_state
    feed = _feed(model=model, beta=0.1)
    with feed.session(mock.Mock(), lambda step, measures: None, states.pop):
        gc.collect()
        alive = {row.path for row, array in arrays if array() is not None}
        assert moments() is None
    rows = table if adapter.moves_base else table.trained_rows
    assert alive == {row.path for row in rows}


def test_answers_end_where_a_text_of_the_model_does(tmp_path, monkeypatch):
    """The ids that a run keeps of the model that it began with end answers as well."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    seen = []

    class Rollouts:
        def __init__(self, *arguments, ends, **options):
            del arguments, options
            seen.append(ends)

        def close(self):
            pass

    monkeypatch.setattr("jaxmoe.contrib.rl.feed.Rollouts", Rollouts)
    for directory in (None, str(tmp_path)):
        with _feed(directory).session(mock.Mock(), lambda step, measures: None, lambda: None):
            pass
    assert seen == [(), (3, 5)]


def test_prompts_of_the_first_step_that_leave_no_room_are_refused_before_it():
    learner = dataclasses.replace(_learner(), model=dataclasses.replace(TINY, vocab_size=256))
    source = CorpusConfig().build()
    feed = RolloutFeed(learner, source, every=2, last_step=STEPS)
    feed.check()
    feed = RolloutFeed(dataclasses.replace(learner, length=5), source, every=2, last_step=STEPS)
    with pytest.raises(ValueError, match="sequence_length=5 must be at least 6: it leaves 3 token"):
        feed.check()
