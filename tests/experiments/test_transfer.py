# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.transfer`: axes, budget, resumption, one real sweep, one real check, errors."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from experiments.studies.programs import StudyPrograms
from experiments.studies.study import StudyStoppedError
from experiments.studies.transfer import command as transfer
from experiments.studies.transfer.arms import ARMS
from experiments.studies.transfer.axes import AXES, AxisSetting
from experiments.studies.transfer.budget import FEWEST_STEPS, size_of, timing_cells
from experiments.studies.transfer.config import TransferConfig, cells_of
from experiments.studies.transfer.trial import (
    SweepData,
    SweepPrograms,
    piece_of,
    program_key,
    schedule_factors,
)
from jaxmoe.models.config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.routing import LoadBalanceConfig
from jaxmoe.run.config import TrainingConfig
from jaxmoe.scaling import BasePoint, StandardConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.guard import GuardConfig
from jaxmoe.training.state import TrainState

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
    "2",
    "--training.batch_size",
    "2",
    "--training.sequence_length",
    "16",
    "--arms",
    "standard",
)
STEPS = ("--budget", "None", "--training.steps", "6")
SWEEP = (*STEPS, *"--rates 0.002 0.008 0.032 --seeds 2 --extend 0 --points 8 16".split())
SETTING = AxisSetting(
    model=ModelConfig(
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32),
        moe=MoEConfig(num_experts=8, top_k=2, expert_dim=48, num_shared_experts=1),
    ),
    training=TrainingConfig(steps=96, batch_size=8),
)


def run(directory, *arguments, recipe="short"):
    code = transfer.main([recipe, *TINY, *arguments, "--run.directory", str(directory)])
    return code, json.loads((directory / "summary.json").read_text())


def records_of(directory):
    lines = (directory / "trials.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def programs():
    """Programs by what decides them, so that a second sweep of the same compiles none."""
    made = {}

    class Shared(type):
        """Takes the place of the class in annotations too."""

        def __call__(cls, cell, batch):
            return made.setdefault(program_key(cell), SweepPrograms(cell, batch))

        def __instancecheck__(cls, one):
            return isinstance(one, SweepPrograms)

    return Shared("SharedPrograms", (), {})


@pytest.fixture(scope="module")
def finished(programs, tmp_path_factory):
    """The directory of a real sweep, its summary, and what was compiled for it."""
    directory = tmp_path_factory.mktemp("transfer") / "run"
    compiled = []
    with pytest.MonkeyPatch.context() as patch:
        real = StudyPrograms.compile

        def counted(self, function, *given, options=None):
            compiled.append(getattr(function, "__name__", "?"))
            return real(self, function, *given, options=options)

        patch.setattr(StudyPrograms, "compile", counted)
        patch.setattr(transfer, "SweepPrograms", programs)
        code, summary = run(directory, *SWEEP)
    assert (code, summary["status"]) == (0, "done")
    return directory, summary, compiled


def test_one_compilation_per_shape(finished):
    """Rates and seeds are arguments: two widths are two programs of each kind."""
    _, summary, compiled = finished
    assert summary["programs_compiled"] == 2
    assert sorted(compiled) == sorted(2 * ["first", "_train", "step"])


def test_records_table_and_picture(finished):
    directory, summary, _ = finished
    records = records_of(directory)
    assert len(records) == 2 * 3 * 2 and {r["status"] for r in records} == {"done"}
    assert {r["seed"] for r in records} == {0, 1} and {r["steps"] for r in records} == {6}
    assert all(0.0 < r["bits"] < 9.0 and 0.0 <= r["max_violation"] <= 3.0 for r in records)
    assert len({r["bits"] for r in records}) == len(records)  # the rate does something
    assert [row["value"] for row in summary["points"]] == [8.0, 16.0]
    (arm,) = summary["arms"]
    assert arm["verdict"] in ("transfers", "does not transfer", "undecided")
    assert "| standard |" in summary["markdown"] and len(summary["verdicts"]) == 1
    assert (directory / "plots" / "transfer.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_sweep_equals_an_uninterrupted_one(
    finished, programs, tmp_path, monkeypatch
):
    real, trained = transfer.train, []

    def stopping(programs, cell, rate, seed, data, stop):
        record = real(programs, cell, rate, seed, data, stop)
        trained.append(record)
        if len(trained) == 7:
            stop.reason = "interrupted"
        return record

    monkeypatch.setattr(transfer, "train", stopping)
    monkeypatch.setattr(transfer, "SweepPrograms", programs)
    directory = tmp_path / "run"
    code, summary = run(directory, *SWEEP)
    assert (code, summary["status"], len(trained)) == (130, "interrupted", 7)
    path = directory / "trials.jsonl"
    path.write_text(path.read_text() + '{"arm": "stand')  # cut by a power failure
    code, summary = run(directory, *SWEEP)
    assert (code, len(trained)) == (0, 12)
    assert (summary["points"], summary["arms"]) == (finished[1]["points"], finished[1]["arms"])


def parabola(best_of, violation_of=lambda value: 0.5):
    """A `train` that only looks up a loss."""
    calls = []

    def train(programs, cell, rate, seed, data, stop):
        del programs, stop
        calls.append((cell.arm, cell.value, rate, seed))
        bits = 3.0 + 0.1 * math.log2(rate / best_of(cell.value)) ** 2 + 0.01 * seed
        record = {"arm": cell.arm, "value": cell.value, "rate": rate, "seed": seed}
        more = {"cell": cell.digest, "data": data.digest, "status": "done", "seconds": 1.0}
        return record | more | {"bits": bits, "max_violation": violation_of(cell.value)}

    return train, calls


def test_a_verdict_is_over_the_points_of_its_arm(tmp_path, monkeypatch):
    train, calls = parabola(lambda width: 4e-3)

    def stopping(programs, cell, rate, seed, data, stop):
        stop.reason = "interrupted" if len(calls) == 14 else None
        return train(programs, cell, rate, seed, data, stop)

    monkeypatch.setattr(transfer, "train", stopping)
    more = ("--points", "8", "16", "32", "--rates", "0.002", "0.004", "0.008", "--seeds", "1")
    _, summary = run(tmp_path / "run", *STEPS, *more, "--arms", "standard", "mup", "hyperp")
    whole, part, none = summary["verdicts"]
    assert whole.startswith("standard: transfers over width 8 to 32") and "finished" not in whole
    assert "over width 8 to 16" in part and part.endswith("missing at width 32")
    assert none == "hyperp: not finished: fewer than two points have a rate"


def test_grids_are_extended_and_nothing_is_trained_twice(tmp_path, monkeypatch, capsys):
    train, calls = parabola(lambda width: 1.2e-2 * 8 / width)
    monkeypatch.setattr(transfer, "train", train)
    more = ("--points", "8", "32", "--rates", "3", "--seeds", "1")
    # The grid 0.002 0.004 0.008 is too low for 8; 32 is given what was the best of 8.
    _, summary = run(tmp_path / "run", *STEPS, *more)
    rates = {value: [c[2] for c in calls if c[1] == value] for value in (8.0, 32.0)}
    assert rates[8.0] == [0.002, 0.004, 0.008, 0.016, 0.032]
    assert rates[32.0] == [0.002, 0.004, 0.008, 0.016]
    (arm,) = summary["arms"]
    assert arm["shift"] == pytest.approx(-2.0) and arm["verdict"] == "does not transfer"
    assert summary["points"][0]["best_rate"] == pytest.approx(1.2e-2)
    assert arm["regret"] == pytest.approx(0.1 * 2**2, abs=0.03)
    # More seeds and a point join what is there.
    known = len(calls)
    run(tmp_path / "run", *STEPS, "--points", "8", "16", "32", "--rates", "3", "--seeds", "2")
    new = calls[known:]
    assert len(new) == len(set(new)) and not set(new) & set(calls[:known])
    assert {c[3] for c in new if c[1] != 16.0} == {1}
    # Other steps are another sweep.
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", "--budget", "None", "--training.steps", "8", *more)
    assert stopped.value.code == 2
    assert "training.steps: saved 6, given 8" in capsys.readouterr().err
    # Another smallest point is another base point, and is repeated.
    run(tmp_path / "run", *STEPS, "--points", "16", "32", "--rates", "3", "--seeds", "1")
    assert "earlier trials had other settings" in capsys.readouterr().out


def test_a_budget_decides_once(tmp_path, monkeypatch, capsys):
    train, calls = parabola(lambda width: 4e-3)
    monkeypatch.setattr(transfer, "train", train)
    seconds = {8.0: (0.01, 0.1), 16.0: (0.02, 0.1)}
    monkeypatch.setattr(transfer, "seconds_of", lambda programs, cell, data: seconds[cell.value])
    more = ("--points", "8", "16", "--rates", "5", "--seeds", "3")
    _, summary = run(tmp_path / "run", *more, "--budget", "4")
    # 0.9 * 240 s; 18 runs (a sixth rate, beyond an edge) of 0.03 s a step and 0.2 s of evaluation
    assert summary["steps"] == int((216 - 3.6) / (18 * 0.03)) // 16 * 16 == 384
    words = capsys.readouterr().out
    assert "4 minutes allow 36 trials of 384 steps" in words and "standard 8: 10 ms" in words
    known = len(calls)
    seconds[8.0] = (1.0, 0.1)  # a slower machine keeps the steps
    _, summary = run(tmp_path / "run", *more, "--budget", "4")
    assert (summary["steps"], len(calls)) == (384, known)
    with pytest.raises(SystemExit):
        run(tmp_path / "other", *more, "--budget", "1")
    words = capsys.readouterr().err
    assert "budget=1 minutes are 0 steps for each of 36 trials" in words
    assert "give --budget" in words


def test_the_least_budget_that_is_named_is_enough():
    config = TransferConfig(budget=1.0, arms=("standard",))
    cells = timing_cells(config)
    timed = {(cell.arm, cell.value): (0.4, 1.0) for cell in cells}
    with pytest.raises(ValueError, match="give --budget") as refused:
        size_of(config, cells, timed, 60.0)
    least = float(str(refused.value).split("--budget ")[1].split()[0])
    config = dataclasses.replace(config, budget=least)
    assert size_of(config, cells, timed, 60.0).steps == FEWEST_STEPS


@pytest.mark.large
def test_the_check_finds_that_standard_grows(tmp_path):
    arguments = ("--check", "coordinates", "--points", "16", "64", "--seeds", "1")
    code, summary = run(tmp_path / "run", *arguments, "--check_steps", "2")
    assert (code, summary["passes"]) == (0, {"standard": False})  # it does not claim to pass
    (verdict,) = summary["verdicts"]
    assert "standard: fails (it does not claim" in verdict and "change grows" in verdict
    slopes = {c["quantity"]: c for c in summary["arms"]["standard"]["coordinates"]}
    assert max(slopes["stream"]["change_slopes"]) > 0.25
    assert abs(slopes["embedding"]["change_slopes"][0]) < 0.05  # AdamW's step is the rate
    assert (tmp_path / "run" / "plots" / "coordinates.png").exists()


@pytest.mark.parametrize(
    ("smallest", "words", "passes"),
    [
        (0.6, "6.0x from 0.001 to 0.1 (5x or more: passes)", True),
        (0.4, "4.0x from 0.001 to 0.1 (less than 5x: fails)", False),
    ],
)
def test_balance_has_a_verdict_of_its_own(smallest, words, passes, tmp_path, monkeypatch, capsys):
    train, _ = parabola(lambda _: 8e-3, {1e-3: smallest, 1e-2: 0.9, 1e-1: 0.1}.get)
    monkeypatch.setattr(transfer, "train", train)
    more = ("--axis", "balance", "--rates", "0.004", "0.008", "0.016", "--seeds", "1")
    _, summary = run(tmp_path / "run", *STEPS, *more)
    assert summary["verdicts"][-1] == f"standard: max violation falls {words}"
    assert summary["verdicts"][-1] in capsys.readouterr().out
    (row,) = summary["balance"]
    assert (row["arm"], row["values"], row["passes"]) == ("standard", [1e-3, 1e-1], passes)
    assert row["fall"] == pytest.approx(smallest / 0.1)


@pytest.mark.parametrize("axis", AXES)
def test_axes_change_what_they_say(axis):
    """And nothing else: the first default point of each is the setting or a part of it."""
    points = AXES[axis].points(SETTING)
    settings = [AXES[axis].apply(SETTING, value) for value in points]
    moe, attention = settings[-1].model.moe, settings[-1].model.attention
    assert len(points) == 3 and points[-1] / points[0] >= 4
    match axis:
        case "width":
            assert (settings[-1].model.embed_dim, attention.head_dim) == (512, 32)
            assert (attention.num_heads, attention.num_kv_heads, moe.expert_dim) == (16, 8, 192)
        case "depth":
            assert [s.model.num_layers for s in settings] == [2, 4, 8]
        case "tokens":
            assert [s.training.steps for s in settings] == [96, 192, 384]
        case "batch":
            tokens = {s.training.steps * s.training.batch_size for s in settings}
            assert len(tokens) == 1 and settings[-1].training.batch_size == 16
        case "granularity":
            for top_k, s in zip((2, 4, 8), settings, strict=True):
                assert (s.model.moe.top_k, s.model.moe.num_experts) == (top_k, 4 * top_k)
                assert top_k * s.model.moe.expert_dim == 96
                assert s.model.moe.num_shared_experts * s.model.moe.expert_dim == 48
        case "sparsity":
            assert [s.model.moe.num_experts for s in settings] == [4, 8, 16]
            assert {s.model.moe.expert_dim for s in settings} == {48}
        case "balance":
            assert LoadBalanceConfig(coefficient=0.1) in moe.balancers
            assert len(moe.balancers) == len(SETTING.model.moe.balancers)
    kept = settings[-1].model if axis in ("tokens", "batch") else settings[-1].training
    assert kept == (SETTING.model if axis in ("tokens", "batch") else SETTING.training)


SPELLED_OUT = dataclasses.replace(
    SETTING.model,
    attention=dataclasses.replace(SETTING.model.attention, num_heads=8),
    dense_layers=(),
    dense_dim=1024,
    layers=(
        LayerConfig(mixer=SETTING.model.attention, feed_forward=DenseConfig(hidden_dim=96)),
        *(LayerConfig(mixer=SETTING.model.attention, feed_forward=SETTING.model.moe),) * 3,
    ),
)
"""A dense layer before three of experts, in `layers`."""


@pytest.mark.parametrize("axis", ["width", "granularity", "sparsity", "balance"])
def test_axes_scale_spelled_out_layers_as_the_short_form(axis):
    short = dataclasses.replace(SETTING.model, dense_layers=(0,), dense_dim=96)
    for value in AXES[axis].points(SETTING):
        wanted, found = (
            AXES[axis].apply(dataclasses.replace(SETTING, model=model), value).model
            for model in (short, SPELLED_OUT)
        )
        assert found.kinds == wanted.kinds and found.stacks == wanted.stacks
        # Fields of messages differ: model.layers.0 and model.attention.
        rows = (
            [dataclasses.replace(row, fields=()) for row in parameter_table(model)]
            for model in (found, wanted)
        )
        assert next(rows) == next(rows)


def test_width_names_the_layer_that_it_cannot_scale():
    mixer = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=384)
    model = dataclasses.replace(SETTING.model, layers=(LayerConfig(), LayerConfig(mixer=mixer)))
    with pytest.raises(ValueError, match=r"width 256 must be .* model.layers.1.mixer.head_dim=384"):
        AXES["width"].apply(dataclasses.replace(SETTING, model=model), 256)


def test_the_base_point_is_the_smallest_unless_given():
    config = TransferConfig(axis="width", base=BasePoint(num_layers=3))
    bases = {cell.config.base for cell in cells_of(config)}
    assert bases == {
        BasePoint(num_layers=3, embed_dim=64, tokens=150 * 1024, batch_tokens=1024),
    }


def test_rate_and_seed_are_no_part_of_a_cell_and_size_is():
    (cell, other, _) = cells_of(TransferConfig(arms=("standard",)))
    training = dataclasses.replace(cell.config.training, seed=5)
    optimizer = dataclasses.replace(cell.config.optimizer, learning_rate=1.0)
    moved = dataclasses.replace(cell.config, training=training, optimizer=optimizer)
    assert dataclasses.replace(cell, config=moved).digest == cell.digest != other.digest
    # The number of steps is not part of the program either, its pieces are.
    longer = dataclasses.replace(cell.config, training=TrainingConfig(steps=300, batch_size=16))
    short = dataclasses.replace(cell.config, training=TrainingConfig(steps=150, batch_size=16))
    keys = {program_key(dataclasses.replace(cell, config=c)) for c in (longer, short)}
    assert len(keys) == 1
    assert program_key(cell) != program_key(other)


def test_pieces_and_factors():
    assert [piece_of(steps) for steps in (1, 7, 16, 48, 150, 151)] == [1, 7, 16, 16, 15, 1]
    config = TransferConfig(schedule=LinearConfig(floor=0.1), arms=("standard",))
    factors = schedule_factors(cells_of(config)[0])
    assert factors[0] == 1.0 and factors[149] == pytest.approx(0.1 + 0.9 / 150)
    assert factors[150] == 0.0


def test_rates_round_the_centre_keep_their_places():
    """So that a grid of seven holds the one of five."""
    arm = ARMS["standard"]
    grids = [TransferConfig(rates=(float(n),)).rates_of(arm) for n in (3, 4, 5, 7)]
    for small, large in zip(grids, grids[1:], strict=False):
        assert set(small) < set(large)
    assert grids[2] == tuple(arm.optimizer.learning_rate * 2.0**k for k in (-2, -1, 0, 1, 2))


def test_an_arm_of_ones_own():
    arms = TransferConfig(optimizer=AdamWConfig(learning_rate=0.5)).chosen_arms
    assert list(arms) == ["own"] and arms["own"].optimizer.learning_rate == 0.5
    both = TransferConfig(optimizer=AdamWConfig(), arms=("standard",)).chosen_arms
    assert list(both) == ["own", "standard"]
    alone = TransferConfig(parameterization=StandardConfig()).chosen_arms
    assert alone == {"own": ARMS["standard"]}
    assert "standard" in TransferConfig().chosen_arms and "own" not in TransferConfig().chosen_arms


def test_a_run_that_diverges_is_a_record():
    """Steps that are refused end it; nothing is evaluated."""
    calls = []

    class Spoilt(SweepPrograms):
        def __init__(self):
            state = TrainState(0, {}, {}, {}, jax.random.key(0), skipped=9, skipped_in_a_row=9)
            self.__dict__["init"] = lambda key: state

        def train_piece(self, state, rate, factors, batches):
            calls.append(rate)
            return state, (np.full(4, np.nan), np.arange(4) + 4 * len(calls), np.full(4, np.nan))

    class Endless(SweepData):
        def __init__(self):
            self.digest = ""

        def pieces(self, training, piece):
            return (None,) * 5

    training = TrainingConfig(steps=100, guard=GuardConfig(max_skipped=9))
    (cell, *_) = cells_of(TransferConfig(arms=("standard",), training=training))
    record = transfer.train(Spoilt(), cell, 0.5, 0, Endless(), StopRequest())
    assert (record["status"], record["bits"], len(calls)) == ("diverged", None, 2)
    json.dumps(record, allow_nan=False)
    stop = StopRequest()
    stop.reason = "preempted"
    with pytest.raises(StudyStoppedError):
        transfer.train(Spoilt(), cell, 0.5, 0, Endless(), stop)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--axis", "widt"), "there is no axis 'widt': did you mean 'width'"),
        (("--arms", "standard_"), "there is no arm 'standard_': did you mean 'standard'"),
        (("--points", "64"), "one point has nothing to transfer to"),
        (("--points", "64", "64"), "they must differ"),
        (("--points", "64", "100"), "width 100 must be a multiple of model.attention.head_dim=32"),
        (("--points", "64.5", "128"), "the axis width (embed_dim) has whole numbers"),
        (("--rates", "2"), "fewer than 3 rates have no optimum between them"),
        (("--rates", "0.01"), "fewer than 3 rates"),
        (("--rates", "inf"), "rates=inf: they must be finite"),
        (("--rates", "0.01", "nan", "0.02"), "rates=0.01 nan 0.02: they must be finite"),
        (("--points", "inf", "64"), "points=inf 64: they must be finite"),
        (("--budget", "inf"), "budget=inf minutes must be above 0 and finite"),
        (("--rates", "3.5"), "one number alone is how many, a whole number"),
        (("--rates", "0.01", "0.02"), "fewer than 3 rates"),
        (("--rates", "0.01", "0.01", "0.02"), "they must differ"),
        (("--seeds", "0"), "seeds=0 must lie between 1 and 16"),
        (("--budget", "0"), "budget=0 minutes must be above 0"),
        (("--training.steps", "7"), "budget=30 minutes both decide the steps"),
        (("model.moe:none", "--axis", "sparsity"), "axis sparsity needs a mixture of experts"),
        (("--axis", "balance", "--model.moe.balancers", "router_z"), "needs load_balance among"),
        (("--axis", "granularity", "--points", "2", "3"), "which must be a whole number"),
        (("--model.vocab_size", "64"), "give --model.vocab_size 256"),
        (("--base.tokens", "0"), "base.tokens=0 must be at least 1"),
        (("--extend", "-1"), "extend=-1 must be at least 0"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        transfer.main([*arguments, "--run.directory", str(tmp_path / "run")])
    assert stopped.value.code == 2
    words = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert message in words


def test_help_is_about_the_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        transfer.main(["--help"])
    assert stopped.value.code == 0
    words = capsys.readouterr().out
    for part in (
        "Sweeps the learning rate at several sizes",
        "short",
        "quick",
        "--axis",
        "--check",
        "experts of a token",
        "hyperp_bounded  hyperp logit_bound=20.48 with muonh, rates round 0.04",
    ):
        assert part in words
