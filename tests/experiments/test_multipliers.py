# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The forward multipliers of a parameterisation outlive training: nothing may lose them."""

import dataclasses
import json

import jax
import pytest

from experiments import evaluate, generate, pretrain
from experiments.cli.flags import ExitCode
from jaxmoe.configs import from_json, to_json
from jaxmoe.models.config import ForwardMultipliers
from jaxmoe.optim import MuonConfig
from jaxmoe.run import run as run_module
from jaxmoe.run.assemble import describe_rates, make_plan
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.scaling import StandardConfig
from jaxmoe.training.evaluate import evaluate as evaluate_batches
from jaxmoe.training.evaluate import make_eval_step

# One layer of width 16 with base width 8 and base depth 4; heads of 16.
WANTED = ForwardMultipliers(residual=2**-0.5, logits=0.5, router=0.5, attention_scale=128**0.5 / 16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "multiplied"
    arguments = [
        *("markov", "--run.directory", str(directory), "--training.steps", "3"),
        *("--model.num_layers", "1", "--model.embed_dim", "16", "--model.attention.num_heads", "1"),
        *("--model.attention.num_kv_heads", "1", "--model.attention.head_dim", "16"),
        *("--model.moe.expert_dim", "16", "--training.batch_size", "8"),
        *("--training.sequence_length", "16", "--schedule.warmup_steps", "0"),
        *(
            "--evaluation.batches",
            "2",
            "--tracking.sample_length",
            "0",
            "--tracking.trackers",
            "parameterization:mup_plus_plus",
        ),
        *("--base.embed_dim", "8", "--base.num_layers", "4", "--base.batch_tokens", "128"),
    ]
    assert pretrain.main(arguments) == ExitCode.DONE
    return directory


def logged(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/bits_per_token"] for line in lines if "eval/bits_per_token" in line][-1]


def test_evaluation_has_them(run, capsys):
    """The command gives training's number, and without them the number is another."""
    assert evaluate.main(["--run.directory", str(run)]) == ExitCode.DONE
    assert f"eval/bits_per_token={logged(run)!r}" in capsys.readouterr().out
    assembly, state, _ = load_run(str(run), None)
    assert assembly.plan.model.multipliers == WANTED
    bare = dataclasses.replace(assembly.plan.model, multipliers=ForwardMultipliers())
    with jax.set_mesh(assembly.mesh):
        step = make_eval_step(bare, execution=assembly.execution)
        lost = evaluate_batches(step, state.params, state.router_state, assembly.held_out())
    assert abs(lost.bits_per_token - logged(run)) > 1e-3


def test_generation_has_them(run, monkeypatch):
    models = []
    continue_rows = run_module.continue_rows

    def spy(model, *arguments, **given):
        models.append(model)
        return continue_rows(model, *arguments, **given)

    monkeypatch.setattr(run_module, "continue_rows", spy)
    arguments = ["--run.directory", str(run), "--prompt", "1 2", "--length", "2"]
    assert generate.main(arguments) == ExitCode.DONE
    assert [model.multipliers for model in models] == [WANTED]


def test_the_header_says_what_the_rates_become(run):
    """0.01 at width 8 and depth 4: twice that by depth, and half of it for matrices by width."""
    config = RunDirectory(run).load_config(PretrainConfig)
    assert describe_rates(make_plan(config)) == (
        "0.01 at the base point, here 0.02 embedding, head, norm;"
        " 0.01 attention_in, attention_out, expert_in, expert_out, router"
    )
    usual = dataclasses.replace(config, parameterization=StandardConfig())
    assert describe_rates(make_plan(usual)) == ""
    law = StandardConfig(batch_exponent=1.0)
    halved = dataclasses.replace(config.base, batch_tokens=256)
    both = dataclasses.replace(config, parameterization=law, base=halved)
    assert describe_rates(make_plan(both)) == "0.01 at the base point, here 0.005"
    muon = MuonConfig(learning_rate=0.02, adamw_ratio=0.5)
    rule = StandardConfig(matrices="muon")
    mixed = dataclasses.replace(config, parameterization=rule, optimizer=muon)
    assert describe_rates(make_plan(mixed)) == (
        "0.02 at the base point, here 0.01 embedding, head, norm;"
        " 0.02 attention_in, attention_out, expert_in, expert_out, router"
    )


def test_the_checkpoint_has_them(run):
    """In its own config, for readers without the run; that config builds the same plan."""
    metadata = json.loads((run / "checkpoints" / "3" / "manifest" / "metadata").read_text())
    saved = from_json(PretrainConfig, metadata["config"])
    assert saved.model.multipliers == WANTED
    given = RunDirectory(run).load_config(PretrainConfig)
    assert given.model.multipliers == ForwardMultipliers()  # what was asked for
    assert make_plan(saved).model == make_plan(given).model
    assert from_json(type(saved.model), to_json(saved.model)) == saved.model
