# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.routers`: the numbers it puts together, and what a method that fails looks like."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import measure
from experiments.cli.tables import paired_interval
from experiments.studies.routers import command as routers
from experiments.studies.routers import trial as routers_trial
from experiments.studies.routers.config import RoutersConfig, model_of
from experiments.studies.routers.data import RoutersTask
from experiments.studies.routers.table import TABLE, rows_of
from experiments.studies.routers.trial import earlier_logits_hold
from experiments.studies.study import StudyStoppedError
from jaxmoe.data import Batch
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.routing import (
    METHODS,
    LoadBalanceConfig,
    RouterStatistics,
    RoutingMethod,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
)
from jaxmoe.routing.telemetry.trace import load_trace
from jaxmoe.run.config import TrainingConfig
from jaxmoe.scaling.initialize import init_params
from jaxmoe.training.guard import GuardConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics

TINY = (
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "8",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "8",
    "--model.moe.num_experts",
    "4",
    "--model.moe.expert_dim",
    "8",
    "--evaluation_batches",
    "4",
    "--training.steps",
    "4",
    "--training.batch_size",
    "2",
    "--training.sequence_length",
    "16",
    "--schedule.warmup_steps",
    "1",
    "--timing_rounds",
    "1",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeakyConfig(SoftmaxTopKConfig):
    """Says that it is causal, and lets the mean of all tokens decide."""

    def score(self, params, inputs, **given):
        x = inputs.x + 8.0 * inputs.x.mean(0, keepdims=True)
        return SoftmaxTopKConfig.score(self, params, dataclasses.replace(inputs, x=x), **given)


def method(router, **parts):
    return RoutingMethod(
        router=router, gate=SoftmaxGateConfig(), balancers=(), source="test", **parts
    )


PARTS = RoutingMethod.parts
NAMES = ("mixtral", "leaky", "wrong")


def run(directory, *arguments):
    code = routers.main([*TINY, *arguments, "--run.directory", str(directory)])
    return code, json.loads((directory / "summary.json").read_text())


@pytest.fixture(scope="module")
def methods():
    """Two methods that cannot do what they should, and no pauses between turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_PAUSE_SECONDS", 0.0)
        wrong = dataclasses.replace(METHODS["mixtral"], source="wrong")
        added = {"leaky": method(LeakyConfig()), "wrong": wrong}
        for name, row in added.items():
            patch.setitem(METHODS, name, row)
        patch.setattr(
            RoutingMethod,
            "parts",
            lambda self: PARTS(self) | ({"top_k": 9} if self == wrong else {}),
        )
        yield


@pytest.fixture(scope="module")
def finished(methods, tmp_path_factory):
    """The directory of a comparison, and its summary."""
    directory = tmp_path_factory.mktemp("routers") / "run"
    code, summary = run(directory, "--seeds", "2", "--methods", *NAMES, "--trace", "mixtral")
    assert (code, summary["status"]) == (0, "done")
    return directory, summary


@pytest.mark.large
def test_table_and_picture(finished):
    directory, summary = finished
    rows = {row["method"]: row for row in summary["tables"]["autoregressive"]}
    others = {row["method"]: row for row in summary["tables"]["masked_diffusion"]}
    assert set(others) == {"mixtral", "leaky"}
    assert rows["mixtral"]["causal"] is others["mixtral"]["causal"] is True
    assert others["leaky"]["causal"] is False
    for row in (rows["mixtral"], *others.values()):
        assert row["status"] == "done"
        assert 0.0 < row["bits"] < 9.0 and row["excess_bits"] > 0.0
        assert 0.0 <= row["mutual_information"] <= 1.0 and row["dropped_fraction"] == 0.0
        assert row["expert_flops_ratio"] == pytest.approx(1.0) and row["step_ratio"] > 0.0
        violation = row["max_violation"]
        assert 0.0 <= violation["last"] <= violation["sup"] <= 3.0
    assert (rows["mixtral"]["difference"], rows["mixtral"]["half_width"]) == (0.0, 0.0)
    assert rows["mixtral"]["step_ratio"] == 1.0
    assert (directory / "plots" / "routers.png").read_bytes().startswith(b"\x89PNG")
    assert "| mixtral |" in summary["markdown"]


@pytest.mark.large
def test_the_routing_of_the_held_out_text_is_written_where_asked(finished):
    trace = load_trace(finished[0] / "traces" / "mixtral.npz")
    assert trace.expert_ids.shape == (1, 4 * 2 * 16, 2) and trace.num_experts == 4
    assert trace.loads().sum() == trace.expert_ids.size  # nothing empty without padding
    assert [path.name for path in (finished[0] / "traces").iterdir()] == ["mixtral.npz"]


@pytest.mark.large
def test_what_a_method_cannot_do_is_a_row(finished):
    rows = {row["method"]: row for row in finished[1]["tables"]["autoregressive"]}
    assert set(rows) == {"mixtral", "wrong"}
    assert finished[1]["without_ticket"] == ["leaky"]
    assert rows["wrong"]["status"] == "refused"
    assert "moe.top_k=9 must not exceed" in rows["wrong"]["reason"]


@pytest.mark.large
def test_the_same_command_continues(finished, monkeypatch, capsys):
    directory, summary = finished
    path, trained = directory / "trials.jsonl", []

    def fail(trial, stop):
        name, objective = trial.name, trial.objective
        trained.append((name, objective))
        old = {"method": name, "objective": objective, "source": "", "warnings": [], "seconds": 1.0}
        return {**old, "moe": None, "status": "failed", "reason": "not today"}, None

    monkeypatch.setattr(routers, "run_trial", fail)
    path.write_text(path.read_text() + '{"method": "swi')  # cut by a power failure
    _, more = run(directory, "--seeds", "2", "--methods", "leaky", "olmoe")
    assert trained == [("olmoe", "autoregressive")]
    rows = {row["method"]: row for row in more["tables"]["autoregressive"]}
    before = {row["method"]: row for row in summary["tables"]["autoregressive"]}
    assert rows["mixtral"] == before["mixtral"]
    assert rows["olmoe"]["reason"] == "not today"
    # A trace that is asked for and not there is a reason to train again.
    run(directory, "--seeds", "2", "--methods", "leaky", "mixtral", "--trace", "leaky", "mixtral")
    assert trained.pop() == ("leaky", "autoregressive")
    # The method is defined otherwise since: its record does not count.
    monkeypatch.setitem(METHODS, "mixtral", dataclasses.replace(METHODS["mixtral"], balancers=()))
    run(directory, "--seeds", "2", "--methods", "mixtral")
    assert trained[1:] == [("mixtral", "autoregressive")]
    with pytest.raises(SystemExit) as stopped:
        run(directory, "--seeds", "1")
    assert stopped.value.code == 2
    assert "seeds" in capsys.readouterr().err


class SpoiltPrograms(routers_trial.RouterPrograms):
    """Every step is refused; nothing is compiled."""

    def __init__(self, config, model, objective, batch):
        self.model, self.objective = model, routers_trial.OBJECTIVES[objective]()
        self.compile_seconds, counts = 0.0, np.ones((2, 8), np.float32)
        state = TrainState(0, {}, {}, {}, jax.random.key(0), skipped=0, skipped_in_a_row=0)
        sums = {"counts": counts, "kept": counts, "num_tokens": np.ones(2, np.float32)}
        statistics = RouterStatistics(**sums, prob_sum=counts, z_sum=counts, entropy_sum=counts)
        names = ("max_violation", "dropped_fraction", "dead_fraction")

        def step(state, batch):
            state = dataclasses.replace(state, skipped=state.skipped + 1)
            router = dict.fromkeys(names, math.nan)
            return state, StepMetrics(
                math.nan, {}, math.nan, 1.0, True, state.skipped, router, load=None
            )

        self.__dict__ |= {  # in the place of the cached properties
            "init": lambda key: state,
            "step": step,
            "evaluate": lambda *given: (jnp.float32(1.0), jnp.float32(1.0)),
            "look": lambda *given: (jnp.zeros((16, 64, 2)), statistics),
        }


def test_steps_that_are_not_finite_are_a_row(monkeypatch):
    config = RoutersConfig(
        seeds=1, training=TrainingConfig(steps=3, guard=GuardConfig(max_skipped=2))
    )
    batch = Batch(
        tokens=np.zeros((1, 4), np.int32),
        targets=np.zeros((1, 4), np.int32),
        loss_weights=np.ones((1, 4), np.float32),
    )
    given = {"training": ((batch,) * 3,), "held_out": (batch,)}
    tasks = {name: RoutersTask(name=name, **given) for name in ("corpus", "languages")}
    monkeypatch.setattr(routers_trial, "RouterPrograms", SpoiltPrograms)
    monkeypatch.setattr(routers_trial, "_time_beside", lambda *given: 1.0)
    trial = routers_trial.RoutersTrial(
        config=config,
        name="switch",
        objective="autoregressive",
        tasks=tasks,
        baseline=lambda: None,
    )
    record, _ = routers_trial.run_trial(trial, StopRequest())
    assert (record["status"], record["corpus"]["bits"]) == ("diverged", [None])
    assert record["reason"] == "languages, seed 0: 3 of 3 steps not finite"
    json.dumps(record, allow_nan=False)
    (row,) = rows_of([record], "autoregressive", baseline="mixtral", floor=0.0)
    assert row["bits"] is None and "3 of 3 steps not finite" in TABLE.as_text([row])
    # A signal ends the trial, and nothing of it is kept.
    stop = StopRequest()
    stop.reason = "preempted"
    with pytest.raises(StudyStoppedError):
        routers_trial.run_trial(trial, stop)


def test_the_ticket():
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6) % 5
    assert earlier_logits_hold(lambda t: jnp.cumsum(jnp.eye(5)[t], axis=1), tokens, 5)
    assert not earlier_logits_hold(lambda t: jnp.eye(5)[t][:, ::-1], tokens, 5)

    def by_a_hair(tokens):
        logits = jnp.ones((*tokens.shape, 5))
        return logits + 1e-7 * jnp.float32(tokens[0, -1] == 0)

    assert not earlier_logits_hold(by_a_hair, tokens * 0, 5)


def test_equal_active_flops():
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=48)
    config = RoutersConfig(model=ModelConfig(attention=AttentionConfig(), moe=moe))
    patched = dataclasses.replace(METHODS["mixtral"])
    for top_k in (1, 2, 3, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(METHODS, "mixtral", patched)
            patch.setattr(RoutingMethod, "parts", lambda self, k=top_k: PARTS(self) | {"top_k": k})
            layer = model_of(config, "mixtral", "autoregressive").moe
        assert (layer.top_k, layer.top_k * layer.expert_dim) == (top_k, 96)
    assert not model_of(config, "mixtral", "masked_diffusion").attention.is_causal


def test_a_schedule_of_top_k_ends_before_the_training_does():
    """And the experts that are left have the FLOPs of the others'."""
    config = RoutersConfig()
    layer, base = model_of(config, "sigma", "autoregressive").moe, config.model.moe
    steps = config.training.steps
    assert 0.8 * steps < layer.router.switch_step < steps
    assert layer.router.final_top_k * layer.expert_dim == base.top_k * base.expert_dim


def test_initial_values_are_paired(tmp_path):
    """All but the router's are the same for every method."""
    config = RoutersConfig()
    trees = []
    for name in ("mixtral", "hyperp"):
        model = model_of(config, name, "autoregressive")
        trees.append(init_params(model, jax.random.key(1)))
    for path, leaf in jax.tree.leaves_with_path(trees[0]):
        other = dict(jax.tree.leaves_with_path(trees[1]))[path]
        assert (leaf == other).all(), path


def test_paired_interval_is_students():
    assert paired_interval([0.5]) == (0.5, None)
    mean, half = paired_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.302653 * 1.0 / math.sqrt(3))
    assert paired_interval([1.0] * 10) == (1.0, 0.0)


def test_rows_are_ranked_and_say_why_not():
    def record(name, bits, **more):
        corpus = {"bits": bits, "max_violation": [[1.0, 0.5]], "dropped_fraction": [0.25]}
        fields = {"method": name, "objective": "autoregressive", "status": "done"}
        return {**fields, "corpus": corpus, "causal": True, **more}

    records = [
        record("base", [3.0, 3.2]),
        record("better", [2.9, 3.0], languages={"bits": [2.0, 2.2], "mutual_information": [[1.0]]}),
        {"method": "no", "objective": "autoregressive", "status": "refused", "reason": "two|bars"},
        record("leaky", [0.1, 0.1], status="no ticket"),
        record("other", [0.1, 0.1], objective="masked_diffusion"),
    ]
    rows = rows_of(records, "autoregressive", baseline="base", floor=1.5)
    assert [row["method"] for row in rows] == ["better", "base", "no"]
    assert rows[0]["difference"] == pytest.approx(-0.15)
    assert rows[0]["excess_bits"] == pytest.approx(0.6)
    assert rows[0]["max_violation"] == {"mean": 0.75, "last": 0.5, "sup": 1.0}
    text, page = TABLE.as_text(rows), TABLE.as_markdown(rows)
    assert "refused: two|bars" in text and "0.75/0.50/1.00" in text and "25.0%" in text
    assert len({line.count("|") - line.count("\\|") for line in page.splitlines()}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "mixtrall"), "no method 'mixtrall': did you mean 'mixtral'"),
        (("--baseline", "nothing"), "baseline: there is no method 'nothing'"),
        (("--seeds", "0"), "seeds=0 must lie between 1 and 10"),
        (("--timing_rounds", "0"), "timing_rounds=0 must be at least 1"),
        (("model.moe:none",), "has no router"),
        (("--model.vocab_size", "64"), "give --model.vocab_size 256"),
        (("corpus:markov",), "corpus has no bytes"),
        (
            ("--training.steps", "10", "--schedule.warmup_steps", "10"),
            "schedule.warmup_steps=10 must be at most 9, below",
        ),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        routers.main([*arguments, "--run.directory", str(tmp_path / "run")])
    assert stopped.value.code == 2
    words = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert message in words


def test_balance_loss_is_part_of_the_baseline():
    assert any(
        isinstance(b, LoadBalanceConfig) for b in METHODS[RoutersConfig().baseline].balancers
    )
