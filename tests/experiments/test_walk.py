# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The walk of a newcomer: the demo's recipe, a fine-tuning, rewards, and answers at the end."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from experiments import finetune, pretrain
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from experiments.finetune import finetune_config, with_fitting_optimizer
from experiments.recipes.tiny import tiny
from experiments.rl import __main__ as rl
from jaxmoe.adapters import LoraConfig, SelectConfig, TargetsConfig
from jaxmoe.configs import to_json
from jaxmoe.optim import MuonConfig
from jaxmoe.run.plan import make_plan
from jaxmoe.run.serving import ServedCheckpoint, open_served
from jaxmoe.scaling import HyperPConfig, StandardConfig
from jaxmoe.serve import Sampling
from jaxmoe.serve.sizes import EngineSizesConfig
from tests.support.runs import saved_leaves

SIZES = (
    "--model.num_layers",
    "2",
    "--model.embed_dim",
    "16",
    "--model.dense_dim",
    "16",
    "--model.attention.num_heads",
    "1",
    "--model.attention.num_kv_heads",
    "1",
    "--model.attention.head_dim",
    "16",
    "--model.moe.expert_dim",
    "16",
    "--training.batch_size",
    "8",
    "--training.sequence_length",
    "32",
    "--evaluation.batches",
    "1",
    "--evaluation.every",
    "0",
)
QUIET = ("--tracking.sample_length", "0", "--tracking.trackers")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A run of the demo's recipe with MuonH and HyperP, smaller."""
    directory = tmp_path_factory.mktemp("walk") / "demo"
    where = ("--run.directory", str(directory), "--training.steps", "3")
    assert pretrain.main(["tiny", *SIZES, *where, *QUIET]) == ExitCode.DONE
    return directory


@pytest.mark.slow
def test_the_demo_is_fine_tuned_rewarded_and_served(demo, tmp_path):
    """Its matrices are on spheres: both commands take the optimiser that moves them there."""
    tuned, folded, rewarded = (tmp_path / name for name in ("tuned", "folded", "rewarded"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "def ", "answer": "[a-zA-Z0-9 ]"}\n' * 4)

    def begin(base, directory):
        where = ("--checkpoint.initial.path", str(base), "--run.directory", str(directory))
        return [*where, "--training.steps", "2", "--schedule.warmup_steps", "0", *QUIET]

    assert finetune.main([*begin(demo, tuned), "adapter:select"]) == ExitCode.DONE
    fold = ["convert", "--run.directory", str(tuned), "--fold", "True", "--to", str(folded)]
    assert checkpoint.main(fold) == ExitCode.DONE
    reward = ("reward:match", "--rl.reward.compare", "regex", "--rl.reward.path", str(questions))
    sizes = ("--rl.group", "2", "--rl.prompts", "4", "--rl.max_tokens", "4")
    assert rl.main([*begin(folded, rewarded), *reward, *sizes]) == ExitCode.DONE
    optimizers = [
        json.loads((run / "config.json").read_text())["optimizer"] for run in (tuned, rewarded)
    ]
    assert [each["kind"] for each in optimizers] == ["muonh", "muonh"]
    assert [each["learning_rate"] for each in optimizers] == pytest.approx([3e-3, 3e-4])
    states = [saved_leaves(demo, 3), saved_leaves(folded, 2), saved_leaves(rewarded, 2)]
    heads = [next(v for k, v in state.items() if "params" in k and "head" in k) for state in states]
    norms = [np.linalg.norm(head) for head in heads]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    for before, after in itertools.pairwise(heads):
        assert 1e-6 < np.linalg.norm(after - before) / norms[0] < 0.05
    engine_sizes = EngineSizesConfig(max_sequences=1, pieces=("1x16",), num_logprobs=0)
    with open_served(ServedCheckpoint(path=str(rewarded)), engine_sizes).engine as engine:
        stream = engine.submit((1, 2, 3), Sampling(max_tokens=4, temperature=0.0))
        assert len([event for event in stream if hasattr(event, "token")]) == 4


NORMS = SelectConfig(targets=TargetsConfig(roles=("norm",)))
FITTING = {
    "an adapter": (HyperPConfig(), LoraConfig(), (), "adamw", 1e-3),
    "matrices on spheres": (HyperPConfig(), SelectConfig(), (), "muonh", 0.003),
    "all parameters": (HyperPConfig(), None, (), "muonh", 0.003),
    "gains alone": (HyperPConfig(), NORMS, (), "adamw", 1e-3),
    "a given rate": (
        HyperPConfig(),
        SelectConfig(),
        ("--optimizer.learning-rate=1e-3",),
        "muonh",
        1e-3,
    ),
    "a given optimizer": (HyperPConfig(), SelectConfig(), ("optimizer:adamw",), "adamw", 1e-3),
    "standard matrices": (StandardConfig(), SelectConfig(), (), "adamw", 1e-3),
    "matrices of another optimizer": (
        StandardConfig(matrices="muon"),
        SelectConfig(),
        (),
        "muon",
        0.1 * MuonConfig().learning_rate,
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_the_optimizer_can_train_what_the_parameterization_puts_on_spheres(case, tmp_path):
    parameterization, adapter, words, name, rate = FITTING[case]
    config = dataclasses.replace(tiny(), parameterization=parameterization)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    start = finetune_config(str(tmp_path))
    start = dataclasses.replace(start, model=dataclasses.replace(start.model, adapter=adapter))
    config = with_fitting_optimizer(start, words, 0.1)
    assert (config.optimizer.name, config.optimizer.learning_rate) == (name, pytest.approx(rate))
    if words != ("optimizer:adamw",):
        make_plan(config)
        return
    with pytest.raises(ValueError, match="has no group"):
        make_plan(config)
