# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The forward multipliers of a parameterisation outlive training: nothing may lose them."""

import dataclasses
import json

import jax

from experiments import generate
from experiments.cli.flags import ExitCode
from jaxmoe.configs import from_json, to_json
from jaxmoe.generation.text import Sample
from jaxmoe.models.config import ForwardMultipliers
from jaxmoe.optim import MuonConfig
from jaxmoe.run import run as run_module
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.plan import describe_rates, make_plan
from jaxmoe.scaling import StandardConfig, StandardExponents
from jaxmoe.training.evaluate import evaluate as evaluate_batches
from jaxmoe.training.evaluate import make_eval_step

# One layer of width 16 with base width 8 and base depth 4; heads of 16.
WANTED = ForwardMultipliers(residual=2**-0.5, logits=0.5, router=0.5, attention_scale=128**0.5 / 16)


def logged(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/bits_per_token"] for line in lines if "eval/bits_per_token" in line][-1]


def test_evaluation_without_multipliers_gives_another_loss(finished):
    """With them the command gives training's number: see test_pretrain.py."""
    assembly, state, _ = load_run(str(finished), None)
    assert assembly.plan.model.multipliers == WANTED
    bare = dataclasses.replace(assembly.plan.model, multipliers=ForwardMultipliers())
    with jax.set_mesh(assembly.mesh):
        step = make_eval_step(bare, execution=assembly.execution)
        lost = evaluate_batches(step, state.params, state.router_state, assembly.held_out())
    assert abs(lost.bits_per_token - logged(finished)) > 1e-3


def test_generation_has_them(finished, monkeypatch):
    models = []

    def continue_texts(model, *arguments, **given):
        models.append(model.config)
        return [Sample(prompt="1 2", text="3")]

    monkeypatch.setattr(run_module, "continue_texts", continue_texts)
    arguments = ["--run.directory", str(finished), "--prompt", "1 2", "--length", "2"]
    assert generate.main(arguments) == ExitCode.DONE
    assert [model.multipliers for model in models] == [WANTED]


def test_the_header_says_what_the_rates_become(finished):
    """0.005 at width 8 and depth 4: twice that by depth, and half of it for matrices by width."""
    config = RunDirectory(finished).load_config(PretrainConfig)
    assert describe_rates(make_plan(config)) == (
        "0.005 at the base point, here 0.01 embedding, head, norm;"
        " 0.005 attention_in, attention_out, expert_in, expert_out, router"
    )
    usual = dataclasses.replace(config, parameterization=StandardConfig())
    assert describe_rates(make_plan(usual)) == ""
    law = StandardConfig(exponents=StandardExponents(batch=1.0))
    halved = dataclasses.replace(config.base, batch_tokens=256)
    both = dataclasses.replace(config, parameterization=law, base=halved)
    assert describe_rates(make_plan(both)) == "0.005 at the base point, here 0.0025"
    muon = MuonConfig(learning_rate=0.02, adamw_ratio=0.5)
    rule = StandardConfig(matrices="muon")
    mixed = dataclasses.replace(config, parameterization=rule, optimizer=muon)
    assert describe_rates(make_plan(mixed)) == (
        "0.02 at the base point, here 0.01 embedding, head, norm;"
        " 0.02 attention_in, attention_out, expert_in, expert_out, router"
    )


def test_the_checkpoint_has_them(finished):
    """In its own config, for readers without the run; that config builds the same plan."""
    metadata = json.loads((finished / "checkpoints" / "6" / "manifest" / "metadata").read_text())
    saved = from_json(PretrainConfig, metadata["config"])
    assert saved.model.multipliers == WANTED
    given = RunDirectory(finished).load_config(PretrainConfig)
    assert given.model.multipliers is None  # what was asked for
    assert make_plan(saved).model == make_plan(given).model
    assert from_json(type(saved.model), to_json(saved.model)) == saved.model
