# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The feed of answers keeps what every feed promises."""

import contextlib
import dataclasses
import gc
import json
import math
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.adapters import LoraConfig, SwitchLoraConfig
from jaxmoe.contrib.rl.batches import RolloutSample
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.feed import Learner, RolloutFeed
from jaxmoe.contrib.rl.objective import PolicyGradientConfig
from jaxmoe.contrib.rl.rewards import PythonConfig, Question
from jaxmoe.contrib.rl.stream import StreamCounts
from jaxmoe.data import CorpusConfig
from jaxmoe.data.synthetic import MarkovConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.loop import Loop
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from tests.jaxmoe.training.test_feed import (  # noqa: F401
    STEPS,
    one_device,
    test_a_later_step_has_the_same_batch_wherever_a_loop_begins,
    test_a_session_may_end_without_a_step_and_another_follow,
    test_the_batch_that_is_compiled_for_has_the_shapes_of_all,
)
from tests.support.models import TINY
from tests.support.one_step import empty_state


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


def _loop(monkeypatch, *, bad=(), take=None, updates=2, max_skipped=2):
    """The end of a loop whose answers are given, and whose step refuses updates by their number."""
    sample = RolloutSample(prompt=(1,), answer=(2,), log_probs=(-1.0,), text="", reward=0.5)
    rollouts = mock.Mock()
    rollouts.take.side_effect = take or (lambda: ([sample] * 4, 0))
    rollouts.counts.return_value = StreamCounts()
    monkeypatch.setattr("jaxmoe.contrib.rl.feed.Rollouts", mock.Mock(return_value=rollouts))
    done = []

    def step_function(state, batch):
        del batch
        is_bad = len(done) in bad
        done.append(int(state.step))
        in_a_row = int(state.skipped_in_a_row) + 1 if is_bad else 0
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + int(is_bad),
            skipped_in_a_row=jnp.int32(in_a_row),
        )
        return state, StepMetrics(
            loss=jnp.float32(math.nan if is_bad else 1.0),
            losses={},
            grad_norm=jnp.float32(math.nan if is_bad else 1.0),
            num_tokens=jnp.float32(4),
            is_skipped=jnp.asarray(is_bad),
            skipped_in_a_row=jnp.int32(in_a_row),
        )

    config = RolloutsConfig(group=2, prompts=2, max_tokens=3, old="engine", epochs=updates)
    learner = dataclasses.replace(_learner(), config=config)
    feed = RolloutFeed(learner, MarkovConfig().build(), every=2, last_step=STEPS)
    state = empty_state(0)
    reports = []
    with feed.session(step_function, lambda step, measures: None, lambda: None) as step:
        loop = Loop(
            state,
            step,
            feed,
            first_step=0,
            last_step=STEPS,
            hooks=(),
            report=reports.append,
            report_every=1,
            max_skipped=max_skipped,
            stop=StopRequest(),
        )
        with contextlib.closing(loop):
            while loop.status is None:
                loop.advance()
    return loop, [one for report in reports for one in report.metrics]


@pytest.mark.parametrize(
    ("bad", "status", "in_a_row", "skipped"),
    [
        ({0, 1}, "done", [1, 0, 0, 0], 1),  # one step
        ({1, 2}, "done", [0, 0, 0, 0], 0),  # one update of each of two steps
        ({2, 3, 5}, "done", [0, 1, 0, 0], 1),
        ({2, 3, 4, 5}, "diverged", [0, 1, 2], 2),
    ],
)
def test_a_step_counts_as_refused_once_if_all_its_updates_were(
    monkeypatch, bad, status, in_a_row, skipped
):
    loop, metrics = _loop(monkeypatch, bad=bad)
    assert loop.status == status
    assert [int(each.skipped_in_a_row) for each in metrics] == in_a_row
    assert [bool(each.is_skipped) for each in metrics] == [number > 0 for number in in_a_row]
    assert int(loop.state.skipped) == skipped
    assert int(loop.state.skipped_in_a_row) == in_a_row[-1]
    assert loop.refused == (None if status == "done" else (2, 3))
    # A step that was trained has the loss of its accepted updates.
    losses = [float(each.loss) for each in metrics]
    assert [math.isnan(loss) for loss in losses] == [number > 0 for number in in_a_row]


def test_an_exception_of_a_reward_function_ends_the_run_with_the_state_before_the_step(
    monkeypatch, tmp_path, caplog
):
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "a"}))
    (tmp_path / "rewards_of_words.py").write_text("def third(question, text): text.split()[2]\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = PythonConfig(path=str(tmp_path / "q.jsonl"), function="rewards_of_words:third")
    task = config.build()
    loop, _ = _loop(monkeypatch, take=lambda: task.score(Question("a"), "two words"))
    assert loop.status == "interrupted"
    assert loop.step == 0 and int(loop.state.step) == 0
    assert "step 1: rl.reward.function=rewards_of_words:third raised IndexError" in caplog.text
