# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`convert --quantise bitstack`: sizes, prefixes, evaluate and generate, refusals, its loss."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import evaluate, generate
from experiments.checkpoint import __main__ as checkpoint
from experiments.checkpoint.bitstack import parse_bytes
from experiments.cli.flags import ExitCode
from jaxmoe.contrib.few_bits.bitstack import BitStack, expand, prefix, stacked_rows
from jaxmoe.models.quantize import stored_bytes
from jaxmoe.run import Run
from jaxmoe.run.config import EvaluationConfig, TrainingConfig
from jaxmoe.run.load import load_run
from tests.support.untrained import small_config, untrained_run

BUDGET = 21_000
STACKED = ("--quantise", "bitstack", "--budget")
SMALL = ("--bitstack.rank", "2", "--bitstack.batches", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("runs") / "small")


def convert(run, *words):
    return checkpoint.main(["convert", "--run.directory", str(run), *words])


@pytest.fixture(scope="module")
def converted(run):
    assert convert(run, *STACKED, f"{BUDGET / 1e3}kB", *SMALL) == ExitCode.DONE
    return run.with_name("small-bitstack")


def stacks_of(directory):
    """The table, and all parameters by path as they are stored."""
    assembly, state, _ = load_run(str(directory), None, keeps_blocks=True)
    table, found = assembly.plan.table, {}
    jax.tree.map(
        lambda row, value: found.update({row.path: jax.device_get(value)}),
        table.tree(lambda row: row),
        state.params,
    )
    return table, found


def one_block(stack):
    return stored_bytes(stack.blocks) // stack.blocks.places.size


def test_bytes_are_the_budget_but_for_less_than_a_block(run, converted):
    summary = json.loads((converted / "summary.json").read_text())
    assert summary["status"] == "converted" and summary["format"] == "bitstack"
    table, stored = stacks_of(converted)
    assert summary["parameter_bytes"] == stored_bytes(list(stored.values()))
    stacks = {path: value for path, value in stored.items() if isinstance(value, BitStack)}
    assert stacks.keys() == stacked_rows(table).keys()
    places = sorted(p for s in stacks.values() if s.blocks for p in s.blocks.places.tolist())
    assert places == list(range(summary["blocks"]))
    largest = max(one_block(stack) for stack in stacks.values() if stack.blocks)
    assert 0 <= BUDGET - summary["parameter_bytes"] < largest
    source = jax.device_get(load_run(str(run), None, needs_data=False)[1].params)
    for path in stored.keys() - stacks.keys():
        value = source
        for name in path.split("/"):
            value = value[name]
        assert (np.asarray(stored[path]) == value).all(), path


@pytest.mark.slow
def test_a_cut_run_holds_the_first_blocks_and_loads_as_their_sum(converted):
    target, budget = converted.with_name("cut"), 17_000
    words = (*STACKED, str(budget), "--to", str(target))
    assert convert(converted, *words) == ExitCode.DONE
    summary = json.loads((target / "summary.json").read_text())
    _, whole = stacks_of(converted)
    table, cut = stacks_of(target)
    assembly, state, _ = load_run(str(target), None, needs_data=False)
    assert state.opt_state == {} and assembly.execution.precision.has_floating_weights
    sizes = {}
    for path, row in stacked_rows(table).items():
        wanted = prefix(whole[path], summary["blocks"])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(wanted), cut[path])
        value = state.params
        for name in path.split("/"):
            value = value[name]
        assert (np.asarray(value) == np.asarray(expand(row, wanted, jnp.float32))).all()
        places = whole[path].blocks.places.tolist()
        sizes.update(dict.fromkeys(places, one_block(whole[path])))
    bytes_left = budget - summary["parameter_bytes"]
    assert 0 <= bytes_left < sizes[summary["blocks"]]


@pytest.mark.slow
def test_evaluate_and_generate_open_the_blocks(converted, capsys):
    assert evaluate.main(["--run.directory", str(converted), "--cache", "int4"]) == ExitCode.DONE
    assert " weights=bitstack cache=int4" in capsys.readouterr().out
    words = ("--prompt", "1 2 3", "--length", "4", "--temperature", "0")
    assert generate.main(["--run.directory", str(converted), *words]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("weights=bitstack\n")


def test_bad_budgets_are_refused(run, converted, capsys):
    def words(source, *arguments):
        with pytest.raises(SystemExit) as stopped:
            convert(source, "--to", str(run.with_name("never")), *arguments)
        assert stopped.value.code == ExitCode.BAD_CONFIGURATION
        return capsys.readouterr().err

    for text in ("many", "0", "1.9TB", "-1MB", "nan"):
        assert f"budget={text!r} is no size: give bytes" in words(
            run, *STACKED[:2], f"--budget={text}"
        )
    said = words(run, *STACKED, "5kB", *SMALL)
    assert "budget=5000 bytes is below the " in said and "in no block" in said
    said = words(run, "--quantise", "w4a8", "--budget", "1MB")
    assert "--budget and --bitstack change nothing without --quantise bitstack" in said
    assert "bitstack.rank=0 must be at least 1" in words(run, *STACKED, "1MB", "--bitstack.rank=0")
    said = words(converted, *STACKED, "30kB")
    assert "budget=30000 bytes is not below the " in said
    assert "give a smaller size with --budget" in words(converted, "--quantise", "bitstack")
    assert "which --bitstack does not change" in words(converted, *STACKED, "17kB", *SMALL)
    assert f"{converted} is converted already, to bitstack" in words(
        converted, "--quantise", "w8a8"
    )
    assert not run.with_name("never").exists()


def test_sizes_have_units():
    assert parse_bytes("1.9MB") == 1_900_000 and parse_bytes("2 KiB") == 2048
    assert parse_bytes("77") == 77


@pytest.mark.trains
@pytest.mark.slow
def test_loss_falls_with_the_budget(tmp_path, capsys):
    """Each larger budget has at most 1 % more loss, and all blocks have that of the trained run."""
    config = dataclasses.replace(
        small_config(),
        training=TrainingConfig(steps=80, batch_size=16, sequence_length=32),
        evaluation=EvaluationConfig(every=0, batches=4),
    )
    trained = tmp_path / "trained"
    assert Run(config, trained).train().status == "done"

    def loss(directory):
        return Run.open(directory).evaluate().bits_per_token

    assert convert(trained, *STACKED, "90kB", "--bitstack.rank", "4") == ExitCode.DONE
    whole = tmp_path / "trained-bitstack"
    losses = [loss(whole)]
    for budget in (60, 35, 20, 14):
        target = tmp_path / f"cut-{budget}"
        assert convert(whole, *STACKED, f"{budget}kB", "--to", str(target)) == ExitCode.DONE
        losses.append(loss(target))
    capsys.readouterr()
    assert all(new >= old / 1.01 for old, new in zip(losses, losses[1:], strict=False)), losses
    assert abs(losses[0] - loss(trained)) < 0.01 * losses[0] < losses[-1] - losses[0], losses
