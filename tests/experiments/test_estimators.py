# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the gradient by command: what they bring, refuse, and how far they move."""

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.cli import flags
from experiments.cli.flags import ExitCode
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.contrib.estimators.seed_pool import replay
from jaxmoe.optim import LinearConfig, MuonHConfig, SGDConfig
from jaxmoe.run.load import load_run
from tests.support.runs import flags as run_flags


def parsed(*words):
    return flags.parse(RECIPES, DEFAULT, words, "pretrain", "about")[1]


@pytest.mark.parametrize("name", ["spsa", "seed_pool"])
def test_methods_bring_the_descent_that_they_are_defined_with(name):
    for recipe in ((), ("markov",)):
        config = parsed(*recipe, f"training.gradients:{name}")
        assert config.optimizer == SGDConfig(learning_rate=1e-4)
        assert config.training.clip is None
        assert config.schedule == LinearConfig(warmup_steps=0, floor=1.0)
    named = ("--optimizer.learning_rate", "1e-6", "schedule:cosine")
    config = parsed(f"training.gradients:{name}", *named)
    assert config.optimizer == SGDConfig(learning_rate=1e-6) and config.schedule.name == "cosine"


def test_evolution_brings_no_limit_and_leaves_the_optimizer():
    config = parsed("training.gradients:evolution")
    assert config.training.clip is None and isinstance(config.optimizer, MuonHConfig)


REFUSED = {
    "optimizer:muonh divides a gradient by its size": ("optimizer:muonh",),
    "training.clip=1.0 limits each derivative": ("--training.clip", "1.0"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_optimizers_and_limits_are_refused(message, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed("training.gradients:spsa", *REFUSED[message])
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [(), ("parameterization:mup_plus_plus",)])
def test_the_sums_of_a_run_replay_its_parameters(recipe, tmp_path):
    """FedKSeed by command: the movement is that of the sums, whose derivatives are not cut."""
    rate = 1e-3
    seeds = ("training.gradients:seed_pool", "--training.gradients.seeds", "8")
    words = run_flags(tmp_path / "run", 4, *seeds, "--tracking.sample_length", "0", *recipe)
    place = words.index("--optimizer.learning_rate")
    words[place + 1] = str(rate)
    words = [
        word
        for i, word in enumerate(words)
        if "warmup" not in word and "warmup" not in words[i - 1]
    ]
    if recipe:
        base = ("--base.embed_dim", "8", "--base.num_layers", "4", "--base.batch_tokens", "128")
        words += base
    assert pretrain.main(words) == ExitCode.DONE
    assembly, state, step = load_run(str(tmp_path / "run"), None)
    assert step == 4
    first = assembly.new_state()
    sums, table = state.parts["gradients"].sums, assembly.plan.table
    assert float(np.abs(np.asarray(sums)).max()) > 1.0
    with jax.set_mesh(assembly.mesh):
        again = replay(table, first.params, sums, state.rng, rate)
    moved = off = 0.0
    for begun, ended, made in zip(
        *map(jax.tree.leaves, (first.params, state.params, again)), strict=True
    ):
        moved += float(np.square(np.asarray(ended) - np.asarray(begun)).sum())
        off += float(np.square(np.asarray(ended) - np.asarray(made)).sum())
    assert moved > 0.0 and (off / moved) ** 0.5 < 1e-3
