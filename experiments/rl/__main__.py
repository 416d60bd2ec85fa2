# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a model on the rewards of its own answers (GRPO and its variants).

    jaxmoe rl MODEL reward:arithmetic
    jaxmoe rl MODEL reward:arithmetic --rl.group 8 \\
        --rl.prompts 32 --training.steps 200 --objective.beta 0.02 --objective.advantage rloo
    jaxmoe rl MODEL reward:arithmetic adapter:lora
    jaxmoe rl MODEL --rl.epochs 1 --rl.minibatches 4

Each step draws groups of answers from the model as it is, scores them, and trains on them: twice by
default (`--rl.epochs`), each time in one update (`--rl.minibatches`). Where all answers to all
prompts have equal rewards, nothing changes.
MODEL gives model, tokenizer, held-out data and precision; flags change them.
Prompts of a model that knows a chat template are turns of a conversation, and answers end where the
model ends them; `--rl.template None` leaves prompts as they are, and `--rl.stop` names other ends.
`reward:` is short for `rl.reward:`, `adapter:` for `model.adapter:`, `--objective.` for
`--training.objective.`; all parameters are trained without an adapter: by AdamW at 1e-4 or, where
the model's parameterisation needs another optimiser, by the initial run's at a hundredth of its
learning rate. The run is like one of
`pretrain`: the same command resumes, bitwise (with `--rl.staleness` from a step that is a multiple
of `--checkpoint.every`), and evaluate, generate, serve and report open it.

A line shows the means over the answers of a step: reward, share solved, divergence from the initial
model (with beta) or from the program that drew them, share of tokens whose ratio the loss cut,
length, and the seconds of answers and training.

Exit codes: those of `pretrain`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags
from experiments.cli.continuation import named_fields
from experiments.cli.exit import run_command
from experiments.cli.model import INITIAL, value_of, with_about, with_model
from experiments.finetune import (
    finetune_config,
    in_own_directory,
    long_word,
    parse_tuning,
    with_fitting_optimizer,
)
from experiments.pretrain import train
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.objective import PolicyGradientConfig
from jaxmoe.data.chat import TemplateName
from jaxmoe.optim import AdamWConfig
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.provenance.tokens import model_data, template_name
from jaxmoe.training.guard import GuardConfig
from jaxmoe.training.stopwatch import process_age

LEARNING_RATE = 1e-4
RATE_SHARE = 0.01
"""Learning rate of optimisers other than AdamW, over that of the initial run."""
_FIRST_FIELDS = (
    "run.directory",
    "rl.prompts",
    "rl.group",
    "rl.max_tokens",
    "rl.template",
    "rl.epochs",
    "training.objective.beta",
    "training.steps",
    "training.sequence_length",
    "optimizer.learning_rate",
)
"""Fields that `--help` shows first."""
_SHORT = {"reward": "rl.reward", "objective": "training.objective"}


def main(argv: Sequence[str], *, age: float = 0.0) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Arguments of the command line.
        age: Seconds that the process has spent on this run before the call.
    """
    prog = "jaxmoe rl"
    description = with_about(__doc__, INITIAL)
    arguments = with_model([_long(word) for word in argv], INITIAL)
    with flags.exit_on_bad_configuration():
        start = rl_config(value_of(INITIAL, arguments), _sizes(arguments))
    config = parse_tuning(start, arguments, prog, description, _FIRST_FIELDS)
    with flags.exit_on_bad_configuration():
        config = with_template(config, named_fields(arguments))
        config = in_own_directory(config, "rl")
        config = with_fitting_optimizer(config, arguments, RATE_SHARE)
    return train(
        config,
        command="rl",
        name=str(config.run.name),
        fixed_fields=named_fields(arguments),
        age=age,
    )


def rl_config(initial: str | None, rl: RolloutsConfig) -> PretrainConfig:
    """Return the configuration of a run on rewards, before any flag.

    Args:
        initial: Run directory; directory, or name on the hub, of a Hugging Face model; None for the
            defaults, which `--help` shows.
        rl: Prompts and answers of a step, which decide the rows of a batch.

    Raises:
        ValueError: There is no such model, or it is adapted itself.
    """
    config = finetune_config(initial)
    # Groups of equal rewards have gradients near 0, beside which the others would be refused.
    training = dataclasses.replace(
        config.training,
        batch_size=rl.num_answers,
        objective=PolicyGradientConfig(),
        guard=GuardConfig(max_norm_ratio=None),
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, adapter=None),
        training=training,
        rl=dataclasses.replace(rl, template=_template(config.checkpoint.initial_path)),
        evaluation=dataclasses.replace(config.evaluation, batch_size=config.held_out_batch_size),
        optimizer=AdamWConfig(learning_rate=LEARNING_RATE),
    )


def with_template(config: PretrainConfig, fields: frozenset[str]) -> PretrainConfig:
    """Return the configuration with the chat template of a tokenizer that was named, if any.

    Says how prompts are written.

    Args:
        config: Configuration after all flags.
        fields: Fields that the command line names.
    """
    rollouts: Any = config.rl
    if "data.tokenizer" in fields and "rl.template" not in fields:
        rollouts = dataclasses.replace(rollouts, template=template_name(config.data))
    if rollouts.template is not None:
        print(
            f"note: prompts are turns of a conversation, rl.template={rollouts.template}; --rl."
            "template None leaves them as they are",
            file=sys.stderr,
            flush=True,
        )
    return dataclasses.replace(config, rl=rollouts)


def _template(path: str | None) -> TemplateName | None:
    """Return how the conversations of the initial model are written."""
    return None if path is None else template_name(model_data(path))


def _long(word: str) -> str:
    """Return a word with the whole path of a field."""
    for short, long_flag in _SHORT.items():
        for begin in (f"{short}:", f"--{short}.", f"--{short}="):
            if word.startswith(begin):
                return word.replace(short, long_flag, 1)
    return long_word(word)


def _sizes(arguments: Sequence[str]) -> RolloutsConfig:
    """Return the rollouts with the prompts and answers that a command line asks for."""
    sizes = {}
    for word, after in zip(arguments, (*arguments[1:], ""), strict=True):
        flag, _, value = word.partition("=")
        for field in ("prompts", "group"):
            if flag == f"--rl.{field}" and (value or after).isdigit():
                sizes[field] = int(value or after)
    return RolloutsConfig(**sizes)


if __name__ == "__main__":
    run_command(functools.partial(main, age=process_age()))
