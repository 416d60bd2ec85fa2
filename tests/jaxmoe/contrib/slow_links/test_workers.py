# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose workers communicate rarely or briefly: train, resume, evaluate, refuse."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading

import numpy as np
import pytest

from jaxmoe.contrib.slow_links import (
    CodedConfig,
    DiLoCoConfig,
    NoLoCoConfig,
    OneBitAdamConfig,
    SpesConfig,
    StreamingConfig,
)
from jaxmoe.contrib.slow_links import site_part as sites
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.sites import LeftOutError, Rounds
from jaxmoe.contrib.slow_links.sites.config import VARIABLE
from jaxmoe.contrib.survival.devices import RecomputationConfig
from jaxmoe.errors import ConfigurationError
from jaxmoe.execution import ExecutionConfig
from jaxmoe.run import Run
from jaxmoe.run.config import TrainingConfig
from jaxmoe.training.replicas import SynchronousConfig
from sharding.mesh import MeshConfig
from tests.jaxmoe.run.test_run import config
from tests.support.runs import logged_losses, saved_leaves

STEPS = 8
TRAINING = TrainingConfig(steps=STEPS, batch_size=16, sequence_length=16)


def _config(replicas, mesh=None, **fields):
    given = dataclasses.replace(config(), replicas=replicas, training=TRAINING)
    if mesh is not None:
        given = dataclasses.replace(given, execution=ExecutionConfig(mesh=mesh))
    return dataclasses.replace(given, **fields)


def _train_in_two(given, path, step):
    """A run that is left after a step, and resumed."""
    run = Run(given, path)
    for trained in run.steps():
        if trained.step == step:
            break
    assert run.result is not None
    assert (run.result.status, run.result.checkpoint_step) == ("interrupted", step)
    assert run.train().status == "done"
    return run


def _said(run, name):
    """What the summary of a run says."""
    summary = run.summary()
    assert summary is not None
    return summary[name]


def _check_equal_bitwise(run, whole, step=STEPS):
    wanted, found = (saved_leaves(one.directory.path, step) for one in (whole, run))
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert logged_losses(run.directory.path) == logged_losses(whole.directory.path)


@pytest.mark.slow
def test_resume_within_a_round_evaluate_and_open(tmp_path, caplog):
    """Two workers on the same devices, with exchanges after steps 3 and 6, and after the last."""
    given = _config(DiLoCoConfig(every=3, workers=2))
    whole = Run(given, tmp_path / "whole")
    with caplog.at_level(logging.INFO, "jaxmoe"):
        assert whole.train().status == "done"
    said = (
        "2 on the same devices, diloco: all parameters every 3 steps, and all after the last step;"
        " 0.00674 MB a step and worker (synchronous 0.018 MB)"
    )
    assert _said(whole, "replicas") == said
    assert f"replicas {said}" in caplog.text
    found = saved_leaves(whole.directory.path, STEPS)
    own = {
        path: leaf
        for path, leaf in found.items()
        if path.startswith("['parts']['workers']['params']")
    }
    assert own and all(leaf.shape[0] == 2 for leaf in own.values())
    for path, leaf in own.items():
        np.testing.assert_array_equal(leaf[0], leaf[1], err_msg=path)
        np.testing.assert_array_equal(
            leaf[0], found[path.removeprefix("['parts']['workers']")], err_msg=path
        )

    _check_equal_bitwise(_train_in_two(given, tmp_path / "parts", 4), whole)

    steps, values = whole.metrics()["eval/bits_per_token"]
    assert steps.tolist() == [3, 6, 8]
    opened = Run.open(whole.directory.path)
    evaluated = opened.evaluate()
    assert (evaluated.step, evaluated.bits_per_token) == (STEPS, values[-1])
    with opened.restore() as loaded:
        assert loaded.state.parts == {} and loaded.state.opt_state == {}
        for path, leaf in found.items():
            if path.startswith("['params']"):
                assert own["['parts']['workers']" + path].shape[1:] == leaf.shape
    assert len(opened.generate("1 2", length=3).text.split()) == 3


@pytest.mark.slow
def test_an_site_that_is_left_out_ends_in_order_and_resumes(tmp_path, monkeypatch, caplog):
    """One site of one: its second round fails after the step has donated the state."""
    monkeypatch.setenv(VARIABLE, f"member=0 of=1 transport=directory:{tmp_path / 'exchange'}")
    given = _config(DiLoCoConfig(every=3))
    exchange, run = Rounds.exchange, Run(given, tmp_path / "run")

    def left_out(self, update, state=None):
        if self.number == 1:
            raise LeftOutError("round 1 closed with sites 1, without 0")
        return exchange(self, update, state)

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "exchange", left_out)
        result = run.train()
    assert (result.status, result.step, result.checkpoint_step) == ("preempted", 5, 4)
    reason = "site 0: round 1 closed with sites 1, without 0; it joins when it is started again"
    assert reason in caplog.text
    assert _said(run, "status") == "preempted"
    assert run.train().status == "done"
    assert list(logged_losses(run.directory.path)) == [*range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGINT, "interrupted")]
)
def test_an_site_answers_signals_while_it_waits_for_the_others(
    tmp_path, monkeypatch, caplog, number, status
):
    """The second of two never comes: the round of step 3 would wait for its timeout."""
    where = f"transport=directory:{tmp_path / 'exchange'} timeout=30"
    monkeypatch.setenv(VARIABLE, f"member=0 of=2 {where}")
    monkeypatch.setattr(sites, "LAST_WAIT", 0.2)
    given = _config(DiLoCoConfig(every=3))
    checkpoint = dataclasses.replace(given.checkpoint, every=2)
    given = dataclasses.replace(given, checkpoint=checkpoint)
    exchange, run = Rounds.exchange, Run(given, tmp_path / "run")

    def waits(self, update, state=None):
        timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
        timer.start()
        return exchange(self, update, state)

    monkeypatch.setattr(Rounds, "exchange", waits)
    result = run.train()
    assert (result.status, result.step, result.checkpoint_step) == (status, 2, 2)
    assert f"site 0: {status} while it waited for the others; it goes on from" in caplog.text


@pytest.mark.slow
def test_streaming_resumes_within_a_delay_bitwise(tmp_path):
    """Fragments are sent before steps 2 and 6, or 4 and 8, and merged two steps later."""
    replicas = StreamingConfig(every=4, fragments=2, delay=2, workers=2)
    given = _config(replicas)
    whole = Run(given, tmp_path / "whole")
    assert whole.train().status == "done"
    timing = replicas.build(TrainingFacts((), 2, STEPS)).timing
    sent = [step for step in range(STEPS) for part in range(2) if timing.sends(part, step)]
    assert (step := sent[1] + 1) < STEPS - 1
    arrived = "['parts']['workers']['arrived']"
    run = _train_in_two(given, tmp_path / "parts", step)
    kept = saved_leaves(run.directory.path, step)
    assert any(np.any(leaf) for path, leaf in kept.items() if path.startswith(arrived))
    _check_equal_bitwise(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas", [DiLoCoConfig(every=3), SpesConfig(every=3, merging=0.0)], ids=("diloco", "spes")
)
def test_a_run_goes_on_with_more_workers(replicas, tmp_path, caplog):
    """Those of spes have the moments of fewer experts each, and begin with new ones."""
    run = Run(_config(replicas, MeshConfig(replica=2, data=4)), tmp_path / "run")
    for trained in run.steps():
        if trained.step == 4:
            break
    before = saved_leaves(run.directory.path, 4)
    with caplog.at_level(logging.WARNING):
        more = Run(_config(replicas, MeshConfig(replica=4, data=2)), tmp_path / "run")
        for trained in more.steps():
            if trained.step == 5:
                break
    said = (
        "the checkpoint of step 4 has 2 workers, and this run 4: each begins with the common"
        " parameters, and what was under way between workers is dropped"
    )
    assert said in caplog.text
    after = saved_leaves(run.directory.path, 5)
    for path, leaf in before.items():
        if path.startswith("['params']"):  # no exchange between steps 4 and 5
            np.testing.assert_array_equal(after[path], leaf, err_msg=path)
        if path.startswith("['parts']['workers']['params']"):
            assert after[path].shape == (4, *leaf.shape[1:])
    assert more.train().status == "done" and _said(more, "replicas").startswith(
        f"4, {replicas.name}"
    )


@pytest.mark.slow
def test_the_mean_of_workers_without_a_common_copy_is_evaluated(tmp_path):
    given = _config(NoLoCoConfig(every=3), MeshConfig(replica=4, data=2))
    run = Run(given, tmp_path / "run")
    assert run.train().status == "done"
    found = saved_leaves(run.directory.path, STEPS)
    differ = 0
    for path, leaf in found.items():
        if path.startswith("['params']"):
            own = found["['parts']['workers']" + path]
            np.testing.assert_allclose(leaf, own.mean(0), rtol=1e-6, atol=1e-7, err_msg=path)
            differ += np.any(own[0] != own[1])
    assert differ
    steps, values = run.metrics()["eval/bits_per_token"]
    opened = Run.open(run.directory.path).evaluate()
    assert (opened.step, opened.bits_per_token) == (steps[-1], values[-1])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [OneBitAdamConfig(), CodedConfig()], ids=("one_bit", "coded"))
def test_workers_that_exchange_gradients_resume_bitwise(tmp_path, replicas):
    given = _config(replicas, MeshConfig(replica=4, data=2))
    whole = Run(given, tmp_path / "whole")
    assert whole.train().status == "done"
    assert f"4, {replicas.name}: gradients in every step;" in _said(whole, "replicas")
    assert all(np.isfinite(loss) for loss in logged_losses(whole.directory.path).values())
    _check_equal_bitwise(_train_in_two(given, tmp_path / "parts", 5), whole)


TWO = DiLoCoConfig(workers=2)
REFUSED = {
    "batch": (
        _config(DiLoCoConfig(workers=3)),
        "training.batch_size=16 must be divisible by the 3 workers of replicas 'diloco' times"
        " training.accumulation=1 times the 8 devices that share the rows of a worker: choose a"
        " multiple of 24",
    ),
    "rows_of_a_worker": (
        _config(DiLoCoConfig(workers=4)),
        "training.batch_size=16 must be divisible by the 4 workers of replicas 'diloco' times"
        " training.accumulation=1 times the 8 devices that share the rows of a worker: choose a"
        " multiple of 32",
    ),
    "alone": (
        _config(DiLoCoConfig()),
        "the number of workers of replicas 'diloco' must be at least 2, and is 1: set"
        " execution.mesh.replica, or replicas.workers to train several on the same devices",
    ),
    "places": (
        _config(DiLoCoConfig(workers=4), MeshConfig(replica=2, data=4)),
        "execution.mesh.replica=2 must be replicas.workers=4, or 1, which trains all workers on the"
        " same devices",
    ),
}
SITE_REFUSED = {
    "nothing": (
        _config(SynchronousConfig()),
        "JAXMOE_ISLAND makes this run site 0 of 2, and replicas 'none' exchanges nothing: choose"
        " replicas:diloco",
    ),
    "late": (
        _config(StreamingConfig()),
        "replicas.delay=1: sites merge what they exchange at once; set replicas.delay to 0",
    ),
    "pairs": (
        _config(NoLoCoConfig()),
        "sites exchange means, and this method exchanges otherwise: choose replicas:diloco, or a"
        " method whose workers average their messages",
    ),
    "mesh": (
        _config(DiLoCoConfig(), MeshConfig(replica=2, data=4)),
        "JAXMOE_ISLAND makes this run site 0 of 2, and a site is one worker in one process:"
        " execution.mesh.replica=2 must be 1, and 1 processes must be 1",
    ),
    "recompute": (
        _config(DiLoCoConfig(), parts=(RecomputationConfig(every=2),)),
        "JAXMOE_ISLAND makes this run site 0 of 2, and parts:recomputation repeats steps with their"
        " exchanges: leave recomputation out of parts",
    ),
}


@pytest.mark.parametrize("row", [*REFUSED, *SITE_REFUSED])
def test_what_workers_cannot_train_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, row
):
    given, message = (REFUSED | SITE_REFUSED)[row]
    if row in SITE_REFUSED:
        monkeypatch.setenv(VARIABLE, f"member=0 of=2 transport=directory:{tmp_path / 'exchange'}")
    run = Run(given, tmp_path / "run")
    with pytest.raises(ConfigurationError) as raised:
        run.train()
    assert str(raised.value) == message
    assert not run.directory.has_config()
