# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a trained run or a Hugging Face model: an adapter, or some of its own parameters.

    jaxmoe finetune MODEL --data.path chats.jsonl
    jaxmoe finetune MODEL data:files --data.path 'docs/**/*.md'
    jaxmoe finetune MODEL adapter:lora --adapter.rank 8 \\
        --adapter.targets.roles attention_in attention_out expert_in expert_out
    jaxmoe finetune MODEL adapter:select
    jaxmoe finetune MODEL adapter:lift --adapter.refresh_every 50
    jaxmoe finetune TUNED --adapter.trains logits

MODEL gives model, tokenizer, data and precision; flags change them.
`adapter:` is short for `model.adapter:`. `select` trains all but the routers unless told otherwise.
A fine-tuned run gives its adapter as well: a new run goes on with it, such as MHR-z from MHR above.
The run is like one of `pretrain`: the same command resumes, and evaluate, generate and report open
it. Its checkpoints hold what is trained, and name the model that was adapted.

Text and conversations are read by the tokenizer and the chat template of the model, whatever the
kind of data, and text ends where that of the model does. Files of conversations (of OpenAI, TRL,
ShareGPT or Alpaca) are taken as data:chat. `data.tokenizer:` takes another tokenizer, and the run
says what its ids mean to the embeddings. Batches and held-out data that no flag sets shrink to
what the data have.

The optimiser is AdamW at 1e-3, as for adapters everywhere. Where the parameterisation of the model
puts what is trained elsewhere, such as its matrices on spheres (HyperP), it is the optimiser of the
initial run at a tenth of its learning rate. `optimizer:` and `--optimizer.` say otherwise.

Exit codes: those of `pretrain`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags
from experiments.cli.choices import choose, with_value
from experiments.cli.continuation import named_fields
from experiments.cli.exit import run_command
from experiments.cli.model import INITIAL, value_of, with_about, with_model
from experiments.cli.output import warn
from experiments.pretrain import train
from jaxmoe.adapters import LoraConfig
from jaxmoe.checkpoint.huggingface.hub import model_directory
from jaxmoe.data import DataError
from jaxmoe.data.chat import holds_conversations
from jaxmoe.execution import ExecutionConfig
from jaxmoe.messages import command_line
from jaxmoe.optim import OPTIMIZERS, AdamWConfig, LinearConfig
from jaxmoe.run.config import CheckpointConfig, InitialConfig, PretrainConfig, RunConfig
from jaxmoe.run.plan import trained_groups
from jaxmoe.run.provenance.saved import saved_config
from jaxmoe.run.provenance.tokens import (
    check_model_tokens,
    missing_text,
    model_data,
    with_model_tokens,
    with_named_template,
)
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.replicas import SynchronousConfig
from jaxmoe.training.stopwatch import process_age

STEPS = 200
LEARNING_RATE = 1e-3
WARMUP_STEPS = 10
_FIRST_FIELDS = (
    "run.directory",
    "data.path",
    "training.steps",
    "training.batch_size",
    "training.sequence_length",
    "optimizer.learning_rate",
    "model.adapter.rank",
    "model.adapter.targets.roles",
    "evaluation.every",
    "checkpoint.every",
)
"""Fields that `--help` shows first."""
RATE_SHARE = 0.1
"""Learning rate of optimisers other than AdamW, over that of the initial run."""


def main(argv: Sequence[str], *, age: float = 0.0) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Arguments of the command line.
        age: Seconds that the process has spent on this run before the call.
    """
    prog = "jaxmoe finetune"
    description = with_about(__doc__, INITIAL)
    arguments = with_model([long_word(word) for word in argv], INITIAL)
    with flags.exit_on_bad_configuration():
        start = finetune_config(value_of(INITIAL, arguments))
    config = parse_tuning(start, arguments, prog, description, _FIRST_FIELDS)
    with flags.exit_on_bad_configuration():
        config = in_own_directory(config, "finetune")
        config = with_fitting_optimizer(config, arguments, RATE_SHARE)
    return train(
        config,
        command="finetune",
        name=str(config.run.name),
        fixed_fields=named_fields(arguments),
        age=age,
    )


def finetune_config(initial: str | None) -> PretrainConfig:
    """Return the configuration of a fine-tuning, before any flag.

    Args:
        initial: Run directory; directory, or name on the hub, of a Hugging Face model; None for the
            defaults, which `--help` shows.

    Raises:
        ValueError: There is no such model, or it is adapted itself.
    """
    path = None if initial is None else model_directory(initial, "checkpoint.initial.path")
    saved = PretrainConfig() if path is None else saved_config(path)
    adapter = saved.model.adapter
    if adapter is not None and not adapter.can_go_on:
        raise ValueError(
            f"checkpoint.initial.path={initial} holds an adapter ({adapter.name}) of"
            f" {saved.checkpoint.initial_path}: fold it first,"
            f" {command_line('checkpoint', 'convert', initial, '--fold', 'True')}"
        )
    training = dataclasses.replace(
        saved.training,
        steps=STEPS,
        batch_ramp=None,
        skipping=None,
        objective=saved.training.objective if saved.rl is None else NextTokenConfig(),
    )
    execution = dataclasses.replace(
        saved.execution, mesh=ExecutionConfig().mesh, fold=None, pipeline=None
    )
    return dataclasses.replace(
        saved,
        model=dataclasses.replace(saved.model, adapter=adapter or LoraConfig()),
        training=training,
        rl=None,
        optimizer=AdamWConfig(learning_rate=LEARNING_RATE),
        schedule=LinearConfig(warmup_steps=WARMUP_STEPS),
        replicas=SynchronousConfig(),
        execution=execution,
        checkpoint=CheckpointConfig(initial=None if path is None else InitialConfig(path=path)),
        run=RunConfig(),
    )


def parse_tuning(
    start: PretrainConfig,
    arguments: Sequence[str],
    prog: str,
    description: str,
    first_fields: Sequence[str] = (),
) -> PretrainConfig:
    """Return the configuration of a command line, whose data have the tokens of the initial model.

    Args:
        start: Configuration before any flag.
        arguments: Words of the command line.
        prog: How the program is called.
        description: The first paragraph of `--help`.
        first_fields: Fields that `--help` shows first.

    Returns:
        The changed configuration. Exits as `flags.parse` does, also where the ids of the data mean
        something else than those of the model, unless the command line names their tokenizer.
    """
    if start.checkpoint.initial_path is None:
        return flags.parse_flags(start, arguments, prog, description, first_fields=first_fields)
    paths = _paths_of_conversations(arguments)
    if paths:
        arguments = ["data:chat", *arguments]
    flag_names = {word.lstrip("-").replace("-", "_").partition("=")[0] for word in arguments}
    with flags.exit_on_bad_configuration():
        tokens = model_data(start.checkpoint.initial_path)
        if text := missing_text(start.checkpoint.initial_path):
            warn(f"note: {text}")
        start, arguments = choose(start, arguments)
        has_tokenizer = any(word.startswith("data.tokenizer") for word in flag_names)
        has_template = "data.template" in flag_names
        data = with_model_tokens(
            start.data, tokens, has_tokenizer=has_tokenizer, has_template=has_template
        )
        start = with_value(start, ("data",), data)
    config = flags.parse_flags(start, arguments, prog, description, first_fields=first_fields)
    with flags.exit_on_bad_configuration():
        if has_tokenizer and not has_template:
            config = dataclasses.replace(config, data=with_named_template(config.data))
        check_model_tokens(config.data, tokens, has_tokenizer=has_tokenizer)
    if paths:
        warn(
            f"note: data.path={' '.join(paths)} holds conversations: data:chat is taken, which"
            f" trains on their answers, written by the template {config.data.traits.template}."
            " data:files --data.text_field FIELD reads a field of theirs as text"
        )
    return config


def _paths_of_conversations(arguments: Sequence[str]) -> list[str]:
    """Return the files that a command line names without their kind, if they are conversations.

    Args:
        arguments: Words of the command line.
    """
    paths: list[str] = []
    is_path = False
    for word in arguments:
        name, _, value = word.partition("=")
        if name.startswith("--"):
            name = name.removeprefix("--").replace("-", "_")
            is_path = name == "data.path"
            paths.extend([value] if is_path and value else [])
            if name in ("data", "data.text_field"):
                return []
        elif word.startswith("data:"):
            return []
        elif is_path:
            is_path = ":" not in word or "://" in word or pathlib.Path(word).exists()
            paths.extend([word] if is_path else [])
    with contextlib.suppress(DataError):  # reading the data says what is wrong
        return paths if paths and holds_conversations(paths) else []
    return []


def with_fitting_optimizer(
    config: PretrainConfig, arguments: Sequence[str], share: float
) -> PretrainConfig:
    """Return the configuration with an optimiser that can train its parameters.

    The default, AdamW, stays where it has the groups in which the parameterisation puts what is
    trained. Otherwise the optimiser is that of the initial run or, if that lacks them too, the
    first that has them. An optimiser that the command line names is left as it is.

    Args:
        config: Configuration after all flags.
        arguments: Words of the command line.
        share: Learning rate of another optimiser, over that of the initial run.

    Raises:
        ValueError: The model does not fit the parameterisation.
    """
    flag_names = {word.partition("=")[0].replace("-", "_") for word in arguments}
    is_chosen = any(word == "__optimizer" or word.startswith("optimizer:") for word in flag_names)
    if is_chosen or config.optimizer.name != AdamWConfig.name:
        return config
    groups = trained_groups(config)
    assert config.checkpoint.initial_path is not None  # checked before
    if groups <= set(AdamWConfig.groups):
        return config
    candidates = (
        saved_config(config.checkpoint.initial_path).optimizer,
        *(kind() for kind in OPTIMIZERS.values()),
    )
    fitting = next((candidate for candidate in candidates if groups <= set(candidate.groups)), None)
    if fitting is None:  # refused in words where the optimiser is built
        return config
    changes: dict[str, Any] = {"learning_rate": share * fitting.learning_rate}
    for field in dataclasses.fields(config.optimizer):
        if f"__optimizer.{field.name}" in flag_names:
            changes[field.name] = getattr(config.optimizer, field.name)
    return dataclasses.replace(config, optimizer=dataclasses.replace(fitting, **changes))


def long_word(word: str) -> str:
    """Return a word with `model.adapter` for `adapter`.

    Args:
        word: Word of a command line.
    """
    for short in ("adapter:", "--adapter.", "--adapter="):
        if word.startswith(short):
            return word.replace("adapter", "model.adapter", 1)
    return "--model.adapter" if word == "--adapter" else word


def in_own_directory(config: PretrainConfig, command: str) -> PretrainConfig:
    """Return the configuration with a name and a directory of its own.

    Args:
        config: Configuration after all flags.
        command: Name of the command.

    Raises:
        ValueError: No initial model is given.
    """
    if config.checkpoint.initial_path is None:
        raise ValueError(
            f"{INITIAL} is missing: name the model to train as the first word, a run directory or"
            " one of a Hugging Face model"
        )
    adapter = config.model.adapter
    kind = "full" if adapter is None else adapter.name
    name = (
        config.run.name or f"{pathlib.Path(config.checkpoint.initial_path).resolve().name}-{kind}"
    )
    directory = config.run.directory or f"runs/{command}/{name}"
    run = dataclasses.replace(config.run, name=name, directory=directory)
    return dataclasses.replace(config, run=run)


if __name__ == "__main__":
    run_command(functools.partial(main, age=process_age()))
