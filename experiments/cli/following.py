# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Says which command follows, at the end of each command of the life of a model.

    pretrain -> finetune -> generate -> checkpoint convert --fold -> rl -> evaluate_tasks
             -> checkpoint convert --to_huggingface -> serve -> a client

The line is on standard error, so that the output of a command is what it was asked for.
"""

from __future__ import annotations

import shlex
import sys
from typing import Final

import jax

from experiments.cli.output import dropped_output
from jaxmoe.run.config import PretrainConfig

_EXPERIMENTS: Final = "python -m experiments."


def after_training(command: str, config: PretrainConfig, path: str) -> str:
    """Return what follows a run that is trained.

    Args:
        command: Command that trained it: pretrain, finetune or rl.
        config: Configuration of the run.
        path: Run directory.
    """
    run = shlex.quote(path)
    tokenizer = config.data.tokenizer
    if tokenizer is None or not tokenizer.is_text:
        return f"{_EXPERIMENTS}evaluate {run}"
    if command == "finetune":
        prompt = '--prompt "TEXT"' if config.data.traits.template is None else "--chat True"
        return f"{_EXPERIMENTS}generate {run} {prompt}"
    if command == "rl":
        return f"{_EXPERIMENTS}evaluate_tasks {run} --tasks arc_easy"
    return f"{_EXPERIMENTS}finetune {run} --data.path FILES"


def after_text(path: str, *, has_adapter: bool) -> str:
    """Return what follows text of a model: an adapter is folded, for what trains on rewards.

    Args:
        path: Run directory, or directory of a Hugging Face model.
        has_adapter: Whether the run holds an adapter.
    """
    if has_adapter:
        return _fold(path)
    return f"{_EXPERIMENTS}rl {shlex.quote(path)} reward:arithmetic"


def after_tasks(path: str, *, has_adapter: bool) -> str:
    """Return what follows the tasks of a model.

    Args:
        path: Run directory, or directory of a Hugging Face model.
        has_adapter: Whether the run holds an adapter.
    """
    run = shlex.quote(path)
    if has_adapter:
        return _fold(path)
    return f"{_EXPERIMENTS}checkpoint convert {run} --to_huggingface auto --to {run}-exported"


def after_conversion(mode: str, path: str) -> str:
    """Return what follows a conversion.

    Args:
        mode: Field of the conversion, such as fold.
        path: Directory that was written.
    """
    run = shlex.quote(path)
    if mode == "fold":
        return f"{_EXPERIMENTS}rl {run} reward:arithmetic"
    if mode == "to_huggingface":
        return f"{_EXPERIMENTS}serve {run}"
    return f'{_EXPERIMENTS}generate {run} --prompt "TEXT"'


def client(address: str, *, talks: bool) -> str:
    """Return a command that asks a server.

    Args:
        address: Address of the server, with /v1.
        talks: Whether the model reads conversations.
    """
    body = '{"prompt": "def main("}'
    if talks:
        body = '{"messages": [{"role": "user", "content": "17+5="}]}'
    return f"curl {address}/{'chat/' if talks else ''}completions -d {shlex.quote(body)}"


def say_next(text: str) -> None:
    """Print the command that follows, on standard error of the first process.

    Args:
        text: The command.
    """
    if jax.process_index() == 0:
        with dropped_output():
            print(f"next: {text}", file=sys.stderr, flush=True)


def _fold(path: str) -> str:
    """Return the command that folds the adapter of a run."""
    return f"{_EXPERIMENTS}checkpoint convert {shlex.quote(path)} --fold True"
