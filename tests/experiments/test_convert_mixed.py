# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`convert --quantise w4ax`: files, lineage, evaluate and generate on it, refusals, its loss."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import evaluate, generate
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.quantize import dequantize_parameter, quantize_parameter
from jaxmoe.precision import MixedConfig, PrecisionPolicy
from jaxmoe.run import Run
from jaxmoe.run.calibrate import measure_activations
from jaxmoe.run.config import EvaluationConfig, TrainingConfig
from jaxmoe.run.load import load_run
from jaxmoe.training.evaluate import evaluate as evaluate_loss
from jaxmoe.training.evaluate import make_eval_step
from pallas_kernels import MixedArray
from tests.support.untrained import small_config, untrained_run

MIXED = ("--quantise", "w4ax", "--mixed.batches", "2", "--mixed.wide_fraction", "0.5")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("runs") / "small")


def convert(run, *words):
    return checkpoint.main(["convert", "--run.directory", str(run), *words])


@pytest.fixture(scope="module")
def converted(run):
    assert convert(run, *MIXED) == ExitCode.DONE
    return run.with_name("small-w4ax")


def bits_of(capsys, directory, *words):
    capsys.readouterr()
    assert evaluate.main(["--run.directory", str(directory), *words]) == ExitCode.DONE
    line = capsys.readouterr().out
    return float(line.split("eval/bits_per_token=")[1].split()[0]), line.strip()


@pytest.mark.slow
def test_converted_run_restores_the_calibrated_arrays(run, converted):
    assembly, state, _ = load_run(str(run), None)
    mixed = MixedConfig(batches=2, wide_fraction=0.5)
    measured = measure_activations(assembly, state, 2)
    restored, rounded, _ = load_run(str(converted), None)
    assert restored.execution.precision.mixed == mixed and rounded.opt_state == {}
    for row in assembly.plan.table:
        value, held = (tree.params for tree in (state, rounded))
        for name in row.path.split("/"):
            value, held = value[name], held[name]
        largest = measured.get(row.path)
        assert isinstance(held, MixedArray) == (largest is not None), row.path
        if largest is None:
            assert (np.asarray(held) == np.asarray(value)).all(), row.path
            continue
        value, held = jax.tree.map(jnp.asarray, jax.device_get((value, held)))
        wanted = quantize_parameter(row, value, "w4ax", mixed, jnp.asarray(largest))
        assert held.num_wide == wanted.num_wide
        for ours, theirs in zip(jax.tree.leaves(held), jax.tree.leaves(wanted), strict=True):
            assert ours.dtype == theirs.dtype and (np.asarray(ours) == np.asarray(theirs)).all()
        error = np.abs(np.asarray(dequantize_parameter(held)) - np.asarray(value)).max()
        assert 0.0 < error <= np.abs(np.asarray(value)).max() / 14 * 1.001, row.path


@pytest.mark.slow
def test_summary_has_blocks_and_calibration(converted):
    summary = json.loads((converted / "summary.json").read_text())
    assert summary["status"] == "converted" and summary["format"] == "w4ax"
    assert summary["calibration"] == {"batches": 2, "first_batch": 1, "rows": 16, "tokens": 256}
    rounded = {path: one["wide_blocks"] for path, one in summary["rounded"].items()}
    assert rounded["moe_blocks_0/attention/q"] == "1/2"
    assert rounded["moe_blocks_0/moe/experts/down"] == "1/1"
    saved = json.loads((converted / "config.json").read_text())["execution"]["precision"]
    assert saved["weights"] == "w4ax"
    assert saved["mixed"] == {"wide_fraction": 0.5, "block_size": None, "batches": 2}


@pytest.mark.slow
def test_evaluate_and_generate_run_the_mixed_format(run, converted, capsys):
    bits, line = bits_of(capsys, converted, "--cache", "int4")
    assert re.search(r" weights=w4ax cache=int4 cache_bytes_per_token=48$", line)
    whole, _ = bits_of(capsys, run)
    assert 0.0 < abs(bits - whole) < 0.2
    words = ("--prompt", "1 2 3", "--length", "8", "--temperature", "0", "--cache", "int4")
    assert generate.main(["--run.directory", str(converted), *words]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("weights=w4ax cache=int4")


def test_bad_mixed_requests_are_refused(run, capsys, monkeypatch):
    def words(*arguments):
        with pytest.raises(SystemExit) as stopped:
            convert(run, "--to", str(run.with_name("never")), *arguments)
        assert stopped.value.code == ExitCode.BAD_CONFIGURATION
        return capsys.readouterr().err

    mixed = ("--quantise", "w4ax")
    assert "mixed.wide_fraction=1.5 must be between 0" in words(*mixed, "--mixed.wide_fraction=1.5")
    assert "mixed.batches=0 must be at least 1" in words(*mixed, "--mixed.batches", "0")
    said = words(*mixed, "--mixed.block_size", "24")
    assert "mixed.block_size=24 must divide the 32 inputs of moe_blocks_0/attention/k" in said
    assert "choose 16 or 32, or leave it out" in said
    said = words("--quantise", "w4a8", "--mixed.batches", "2")
    assert "--mixed changes nothing without --quantise w4ax" in said
    source = type(load_run(str(run), None)[0].source)
    for rows, said in ((24, "ask for at most 2 with --mixed.batches"), (8, "convert to w4a8")):
        monkeypatch.setattr(
            source,
            "num_rows",
            lambda self, split, length, n=rows: n if split == "validation" else None,
        )
        assert said in words(*mixed)
    assert not run.with_name("never").exists()


def planted(params):
    """Parameters of the same function, whose normed activations have outliers.

    Gains times a factor, 30 for three channels and 8 for twenty, and the rows of what reads them
    divided by it.
    """
    params = jax.tree.map(np.array, jax.device_get(params))
    channels, factor = np.random.default_rng(0).permutation(64), np.ones(64, np.float32)
    factor[channels[:3]], factor[channels[3:23]] = 30.0, 8.0
    layers = params["moe_blocks_0"]
    for name in ("attention_norm", "feed_forward_norm"):
        layers[name]["gain"] *= factor
    for name in ("q", "k", "v"):
        layers["attention"][name] /= factor[:, None, None]
    layers["moe"]["experts"]["gate_up"] /= factor[:, None, None]
    layers["moe"]["router"]["weight"] /= factor[:, None]
    return params


@pytest.mark.trains
@pytest.mark.slow
def test_loss_of_mixed_lies_between_w4a4_and_w4a8(tmp_path):
    """A trained run with planted outliers, in W4A8 and W4A4 of equal weights, and in plain W4A4."""
    config = small_config()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, embed_dim=64),
        training=TrainingConfig(steps=80, batch_size=16, sequence_length=32),
        evaluation=EvaluationConfig(every=0, batches=8),
    )
    assert Run(config, tmp_path / "trained").train().status == "done"
    assembly, state, _ = load_run(str(tmp_path / "trained"), None)
    state = dataclasses.replace(state, params=planted(state.params))
    measured = measure_activations(assembly, state, 4)
    held_out = jax.device_get(list(assembly.held_out()))
    rows = assembly.plan.table.tree(lambda row: row)
    steps = {
        form: make_eval_step(
            assembly.plan.model, execution=ExecutionConfig(precision=PrecisionPolicy(weights=form))
        )
        for form in ("floating", "w4ax", "w4a4")
    }

    def loss(form, wide_fraction=0.125):
        mixed = MixedConfig(wide_fraction=wide_fraction)

        def rounded(row, value):
            if form == "floating":
                return value
            largest = measured.get(row.path)
            largest = None if largest is None else jnp.asarray(largest)
            return quantize_parameter(row, jnp.asarray(value), form, mixed, largest)

        params = jax.tree.map(rounded, rows, state.params)
        router_state = jax.device_get(state.router_state)
        return evaluate_loss(steps[form], params, router_state, held_out).bits_per_token

    whole, w4a4 = loss("floating"), loss("w4a4")
    eight, mixed, four = (loss("w4ax", fraction) for fraction in (1.0, 0.125, 0.0))
    seen = f"{whole=} {eight=} {mixed=} {four=} {w4a4=}"
    assert whole < eight < mixed < four < w4a4, seen
    assert mixed - eight < 0.05 * (w4a4 - eight), seen
