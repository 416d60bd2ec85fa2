# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Says which command follows, at the end of each command of the life of a model.

    pretrain -> finetune -> generate -> checkpoint convert --fold -> rl -> evaluate_tasks
             -> checkpoint convert --to_huggingface -> serve -> a client
    report -> evaluate -> generate

The line is on standard error, so that the output of a command is what it was asked for.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

import jax

from experiments.cli.output import warn
from jaxmoe.messages import command_line
from jaxmoe.run.config import PretrainConfig


def after_training(command: str, config: PretrainConfig, path: str) -> str:
    """Return what follows a run that is trained.

    Args:
        command: Command that trained it: pretrain, finetune or rl.
        config: Configuration of the run.
        path: Run directory.
    """
    if not _has_text(config):
        return command_line("evaluate", path)
    if command == "finetune":
        return _question(config, path)
    if command == "rl":
        return command_line("evaluate_tasks", path, "--tasks", "arc_easy")
    return command_line("finetune", path, "--data.path", "FILES")


def after_evaluation(config: PretrainConfig, path: str) -> str:
    """Return what follows the held-out loss of a model.

    Args:
        config: Configuration of the run.
        path: Run directory, or directory of a Hugging Face model.
    """
    if not _has_text(config):
        return command_line("describe", "--run.directory", path)
    return _question(config, path)


def after_report(losses: Mapping[str, float | None]) -> str:
    """Return what follows a page about runs: a look at the one with the lowest held-out loss.

    Args:
        losses: Held-out losses in one unit, by run directory; None where they are not known.
    """

    def known_loss(path: str) -> float:
        loss = losses[path]
        return loss if loss is not None and math.isfinite(loss) else math.inf

    return command_line("evaluate", min(losses, key=known_loss))


def after_text(path: str, *, has_adapter: bool) -> str:
    """Return what follows text of a model: an adapter is folded, for what trains on rewards.

    Args:
        path: Run directory, or directory of a Hugging Face model.
        has_adapter: Whether the run holds an adapter.
    """
    if has_adapter:
        return _fold(path)
    return command_line("rl", path, "reward:arithmetic")


def after_tasks(path: str, *, has_adapter: bool) -> str:
    """Return what follows the tasks of a model.

    Args:
        path: Run directory, or directory of a Hugging Face model.
        has_adapter: Whether the run holds an adapter.
    """
    if has_adapter:
        return _fold(path)
    target = ("--to_huggingface", "auto", "--to", f"{path}-exported")
    return command_line("checkpoint", "convert", path, *target)


def after_conversion(mode: str, path: str) -> str:
    """Return what follows a conversion.

    Args:
        mode: Field of the conversion, such as fold.
        path: Directory that was written.
    """
    if mode == "fold":
        return command_line("rl", path, "reward:arithmetic")
    if mode == "to_huggingface":
        return command_line("serve", path)
    return command_line("generate", path, "--prompt", "TEXT")


def client(address: str, *, talks: bool, reads_text: bool = True) -> str:
    """Return a command that asks a server.

    Args:
        address: Address of the server, with /v1.
        talks: Whether the model reads conversations.
        reads_text: Whether its tokens stand for text; prompts of others are ids.
    """
    body = '{"prompt": "def main("}' if reads_text else '{"prompt": [0, 1]}'
    if talks:
        body = '{"messages": [{"role": "user", "content": "17+5="}]}'
    return f"curl {address}/{'chat/' if talks else ''}completions -d {shlex.quote(body)}"


def say_next(text: str) -> None:
    """Print the command that follows, on standard error of the first process.

    Args:
        text: The command.
    """
    if jax.process_index() == 0:
        write_next(text)


def write_next(text: str) -> None:
    """Print the command that follows, without asking JAX for the number of the process.

    Args:
        text: The command.
    """
    warn(f"next: {text}")


def _has_text(config: PretrainConfig) -> bool:
    """Return whether the tokens of a model stand for text."""
    tokenizer = config.data.tokenizer
    return tokenizer is not None and tokenizer.is_text


def _question(config: PretrainConfig, path: str) -> str:
    """Return the command that asks a model for text."""
    if config.data.traits.template is None:
        return command_line("generate", path, "--prompt", "TEXT")
    return command_line("generate", path, "--chat", "True")


def _fold(path: str) -> str:
    """Return the command that folds the adapter of a run."""
    return command_line("checkpoint", "convert", path, "--fold", "True")
