# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The loop with a step that computes nothing: order, reports, signals, refusals, time."""

import dataclasses
import itertools
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.hook import CheckpointHook
from jaxmoe.data.batch import Batch
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.training import loop as loop_module
from jaxmoe.training.evaluate import Evaluation
from jaxmoe.training.feed import Feed
from jaxmoe.training.hooks import EvaluateHook, is_every
from jaxmoe.training.loop import Loop
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from tests.support.one_step import empty_state


@dataclasses.dataclass
class Clock:
    """Time that passes only where a test says so."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclasses.dataclass
class Bench:
    """Everything a loop is given, each writing into one diary."""

    monkeypatch: pytest.MonkeyPatch
    diary: list = dataclasses.field(default_factory=list)
    clock: Clock = dataclasses.field(default_factory=Clock)
    bad_steps: frozenset = frozenset()
    signals: dict = dataclasses.field(default_factory=dict)
    rates: list = dataclasses.field(default_factory=list)
    in_a_row: int = 0

    def step(self, state: TrainState, batch: Batch):
        number = int(state.step) + 1
        assert int(batch.tokens[0, 0]) == number - 1, "the batch of this step, once"
        self.clock.now += 2.0
        self.diary.append(f"step {number}")
        self.in_a_row = self.in_a_row + 1 if number in self.bad_steps else 0
        if number in self.signals:
            os.kill(os.getpid(), self.signals[number])
        metrics = StepMetrics(
            loss=jnp.float32(number),
            losses={},
            grad_norm=jnp.float32(1.0),
            num_tokens=jnp.float32(10.0),
            is_skipped=jnp.asarray(number in self.bad_steps),
            skipped_in_a_row=jnp.int32(self.in_a_row),
            router={},
            load=None,
        )
        return dataclasses.replace(state, step=jnp.int32(number)), metrics

    def batches(self, first: int):
        for number in itertools.count(first):
            ids = np.full((1, 1), number, np.int32)
            yield Batch(tokens=ids, targets=ids, loss_weights=ids, segment_ids=ids, positions=ids)

    def hook(self, name: str, every: int, seconds: float = 0.0):
        def run(step, state):
            assert int(state.step) == step
            self.clock.now += seconds
            self.diary.append(f"{name} {step}")

        return types.SimpleNamespace(is_due=lambda step: step % every == 0, run=run)

    def report(self, report):
        assert all(isinstance(metrics.loss, np.generic | np.ndarray) for metrics in report.metrics)
        assert tuple(int(metrics.loss) for metrics in report.metrics) == report.steps
        self.diary.append(f"report {','.join(map(str, report.steps))} in {report.seconds:g} s")
        self.rates.append(report.tokens_per_second)

    def run(self, *hooks, first: int = 0, last: int = 6, report_every: int = 100, max_skipped=3):
        self.monkeypatch.setattr(loop_module, "time", self.clock)
        with StopRequest() as stop:
            loop = Loop(
                empty_state(first),
                self.step,
                BenchFeed(self),
                first_step=first,
                last_step=last,
                hooks=hooks,
                report=self.report,
                report_every=report_every,
                max_skipped=max_skipped,
                stop=stop,
            )
            while loop.status is None:
                loop.advance()
            return loop


@dataclasses.dataclass
class BenchFeed(Feed):
    """The batches of a bench."""

    bench: Bench

    def batches(self, first_step):
        yield from self.bench.batches(first_step)


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def test_reports_come_before_hooks_and_hooks_in_their_order(bench):
    result = bench.run(bench.hook("a", 2), bench.hook("b", 4), report_every=3)
    assert bench.diary == [
        "step 1",
        "step 2",
        "report 1,2 in 4 s",
        "a 2",
        "step 3",
        "report 3 in 2 s",
        "step 4",
        "report 4 in 2 s",
        "a 4",
        "b 4",
        "step 5",
        "step 6",
        "report 5,6 in 4 s",
        "a 6",
    ]
    assert (result.status, result.step, int(result.state.step)) == ("done", 6, 6)
    assert bench.rates == [5.0] * 4  # 10 tokens a step of 2 seconds


def test_a_feed_that_knows_its_positions_counts_them_for_the_speed(bench, monkeypatch):
    """Those of each batch, in place of its loss weights."""

    def positions(feed, batch):
        return 100 + int(batch.tokens[0, 0])

    monkeypatch.setattr(BenchFeed, "positions", positions, raising=False)
    bench.run(last=6, report_every=3)
    assert bench.rates == [303 / 6, 312 / 6]


def test_the_time_of_hooks_is_not_training_time(bench):
    bench.run(bench.hook("slow", 2, seconds=50.0), last=5)
    reports = [entry for entry in bench.diary if entry.startswith("report")]
    assert reports == ["report 1,2 in 4 s", "report 3,4 in 4 s", "report 5 in 2 s"]


def test_a_run_resumes_after_its_first_step(bench):
    result = bench.run(first=4, last=6)
    assert bench.diary == ["step 5", "step 6", "report 5,6 in 4 s"]
    assert result.step == 6


def test_a_finished_run_does_nothing(bench):
    result = bench.run(first=6, last=6)
    assert bench.diary == [] and (result.status, result.step) == ("done", 6)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGINT, "interrupted")]
)
def test_a_signal_stops_after_the_step(bench, number, status):
    bench.signals = {3: number}
    result = bench.run(bench.hook("a", 3))
    assert (result.status, result.step, int(result.state.step)) == (status, 3, 3)
    assert bench.diary == ["step 1", "step 2", "step 3", "report 1,2,3 in 6 s", "a 3"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_hook_of_one_process_does_not_end_the_run_alone(bench, processes):
    """All end two steps later, when each of them reads the same metrics."""
    bench.monkeypatch.setattr(jax, "process_count", lambda: processes)
    bench.monkeypatch.setattr(StopRequest, "agree", lambda self: None)
    bench.bad_steps = frozenset((3, 4, 5))
    local = bench.hook("own", 1)
    local.is_local = True
    result = bench.run(local, last=12, report_every=4)
    assert (result.status, result.refused) == ("diverged", (3, 5))
    assert result.step == {1: 5, 2: 7}[processes]


def test_a_signal_in_the_last_step_comes_too_late(bench):
    bench.signals = {6: signal.SIGTERM}
    assert bench.run().status == "done"


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) not in before
        assert stop.agree() is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("first", "reason"), [("SIGINT", "interrupted"), ("SIGTERM", "preempted")])
def test_second_signal_raises_keyboard_interrupt(first, reason):
    with StopRequest() as stop:
        signal.raise_signal(signal.Signals[first])
        assert stop.agree() == reason
        with pytest.raises(KeyboardInterrupt, match="SIGINT"):
            signal.raise_signal(signal.SIGINT)


def test_too_many_bad_steps_in_a_row_end_the_run(bench):
    """Seen at the next report, and no hook saves what diverged."""
    bench.bad_steps = frozenset({2, 3, 4})
    result = bench.run(bench.hook("a", 5))
    assert (result.status, result.step, result.refused) == ("diverged", 5, (2, 4))
    assert bench.diary[-1] == "report 1,2,3,4,5 in 10 s"


def test_a_run_ends_soon_after_the_refused_steps(bench):
    bench.bad_steps = frozenset(range(2, 100))
    result = bench.run(last=100, report_every=50)
    assert (result.status, result.step, result.refused) == ("diverged", 6, (2, 4))


def test_what_is_refused_does_not_depend_on_the_reports(bench):
    """Further steps, which a loop that reports seldom has done as well, are not counted in."""
    bench.bad_steps = frozenset({2, 3, 4, 5, 6})
    assert bench.run(report_every=6).refused == (2, 4)
    bench.in_a_row = 0
    assert bench.run(report_every=1).refused == (2, 4)


def test_bad_steps_apart_do_not_end_the_run(bench):
    bench.bad_steps = frozenset({1, 2, 4, 5})
    result = bench.run(report_every=1)
    assert (result.status, result.refused) == ("done", None)


def test_is_every():
    assert [step for step in range(1, 8) if is_every(step, 3, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if is_every(step, 0, 7)] == [7]


def test_evaluate_hook(bench):
    """The held-out batches are made anew each time."""
    reported = []

    def eval_step(params, router_state, batch):
        assert (params, router_state) == ("params", "router state")
        return jnp.float32(6.0), jnp.float32(2.0)

    hook = EvaluateHook(
        eval_step,
        lambda: itertools.islice(bench.batches(0), 3),
        every=2,
        last_step=5,
        report=lambda step, result: reported.append((step, result)),
    )
    assert [step for step in range(1, 6) if hook.is_due(step)] == [2, 4, 5]
    state = dataclasses.replace(empty_state(0), params="params", router_state="router state")
    for step in (2, 4):
        hook.run(step, state)
    assert reported == [(step, Evaluation(nats_per_token=3.0, num_tokens=6)) for step in (2, 4)]


class FullDisk(CheckpointManager):
    """A manager that cannot save step 4."""

    failures = 0

    def __init__(self, diary):
        self.diary = diary

    def is_owed(self):
        return False

    def save(self, step, state, *, config, data=None, is_lazy=False):
        self.diary.append((step, config, data, is_lazy))
        return step != 4


def test_checkpoint_hook():
    """What belongs to the steps saved is flushed first; the last save and others are not lazy."""
    diary = []
    hook = CheckpointHook(
        FullDisk(diary),
        config={"a": 1},
        position=lambda step: {"step": step},
        every=2,
        last_step=5,
        before=lambda: diary.append("before"),
    )
    assert [step for step in range(1, 6) if hook.is_due(step)] == [2, 4, 5]
    assert hook.saved_step is None
    for step in (2, 4, 5):
        hook.run(step, empty_state(step))
        assert hook.saved_step == (5 if step == 5 else 2)
    hook.save(3, empty_state(3))
    saves = [(2, True), (4, True), (5, False), (3, False)]
    assert diary[::2] == ["before"] * 4
    assert diary[1::2] == [(step, {"a": 1}, {"step": step}, is_lazy) for step, is_lazy in saves]
