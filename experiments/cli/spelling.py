# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers words of a command line that name no field with one line, which has the right spelling.

To add a short name: a row of `_SHORT` in experiments/cli/spelling.py
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, get_origin

from experiments.cli.choices import (
    field_paths,
    find_choices,
    known_spelling,
    nested_configs,
)
from jaxmoe.configs import alternatives, closest, field_types

_SHORT: Final[Mapping[str, tuple[str, ...]]] = {
    "steps": ("training.steps",),
    "max_steps": ("training.steps",),
    "num_steps": ("training.steps",),
    "lr": ("optimizer.learning_rate",),
    "learning_rate": ("optimizer.learning_rate",),
    "depth": ("model.num_layers",),
    "layers": ("model.num_layers",),
    "num_layers": ("model.num_layers",),
    "n_layers": ("model.num_layers",),
    "width": ("model.embed_dim",),
    "dim": ("model.embed_dim",),
    "d_model": ("model.embed_dim",),
    "hidden_size": ("model.embed_dim",),
    "experts": ("model.moe.num_experts",),
    "num_experts": ("model.moe.num_experts",),
    "top_k": ("model.moe.top_k",),
    "batch": ("training.batch_size",),
    "batch_size": ("training.batch_size",),
    "seq_len": ("training.sequence_length",),
    "seq_length": ("training.sequence_length",),
    "sequence_length": ("training.sequence_length",),
    "context": ("training.sequence_length",),
    "seed": ("training.seed",),
    "accumulation": ("training.accumulation",),
    "grad_accum": ("training.accumulation",),
    "warmup": ("schedule.warmup_steps",),
    "warmup_steps": ("schedule.warmup_steps",),
    "weight_decay": ("optimizer.weight_decay",),
    "router": ("model.moe.router",),
    "gate": ("model.moe.gate",),
    "max_tokens": ("length",),
    "max_new_tokens": ("length",),
    "data": ("data.path",),
    "dataset": ("data.path",),
    "tokenizer": ("data.tokenizer",),
    "mesh": ("execution.mesh.data", "run.mesh.data"),
    "dir": ("run.directory",),
    "directory": ("run.directory",),
    "out": ("run.directory",),
    "output": ("run.directory",),
    "out_dir": ("run.directory",),
    "output_dir": ("run.directory",),
    "run": ("run.directory",),
    "run_dir": ("run.directory",),
    "name": ("run.name",),
    "run_name": ("run.name",),
}
"""Fields by names that users of other libraries try first."""


def check_words(
    config: Any, words: Sequence[str], prog: str, recipes: Collection[str] = ()
) -> None:
    """Refuse a flag that names no field, and a word that is no value of a flag.

    Args:
        config: The config, with the choices of the command line.
        words: The arguments without choices.
        prog: How the program is called.
        recipes: Names of recipes, which are first words.

    Raises:
        ValueError: A word names no field; the message has the nearest spelling.
    """
    hints = {
        f"{path}.{key}" if path else key: hint
        for path, value in nested_configs(config)
        for key, hint in field_types(type(value)).items()
    }
    expected = 0  # values that the last flag still takes
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            name = flag[2:].replace("-", "_")
            # Fields of members that are not chosen are read for a message only.
            if name not in hints and name not in (known := tuple(field_paths(type(config)))):
                raise ValueError(_unknown_flag(flag[2:], known, prog, recipes))
            expected = 0 if equals else _most_values(hints.get(name))
        elif expected:
            expected -= 1
        else:
            raise ValueError(stray_word(word, config, prog, recipes))


def stray_word(word: str, config: Any, prog: str, recipes: Collection[str] = ()) -> str:
    """Return the message about a word that is neither a flag nor its value.

    Args:
        word: The word.
        config: The config of the command.
        prog: How the program is called.
        recipes: Names of recipes, which are first words.
    """
    known = tuple(field_paths(type(config)))
    name = known_spelling(word, dict.fromkeys(recipes))
    if name in recipes:
        return f"{word!r} is a recipe, which is the first word: {prog} {name} [flags]"
    path, equals, value = word.lstrip("-").partition("=")
    if equals and (near := _nearest(path, known)):
        return f"{word!r} is not a flag: did you mean --{near} {value}?"
    path, colon, value = word.partition(":")
    if colon and value and "/" not in word:
        choices = [choice.path for choice in find_choices(config)]
        near = _nearest(path, choices)
        return f"there is no choice {path}" + (f": did you mean --{near} {value}?" if near else "")
    if prog.endswith("pretrain") and os.path.isfile(os.path.join(word, "config.json")):
        return f"{word!r} is a run: continue it with {prog} resume {word}"
    if ("/" in word or os.path.isdir(word)) and "run.directory" in known:
        return f"{word!r} stands alone: did you mean --run.directory {word}?"
    return f"unexpected word {word!r}: a field is --dotted.field value, see {prog} --help"


def _unknown_flag(name: str, known: Sequence[str], prog: str, recipes: Collection[str]) -> str:
    if name in ("recipe", "config", "preset") and recipes:
        return (
            f"there is no flag --{name}: a recipe is the first word: {prog} {next(iter(recipes))}"
        )
    path, colon, value = name.partition(":")
    if colon and (near := _nearest(path, known)):
        return f"there is no flag --{name}: did you mean --{near} {value}?"
    near = _nearest(name, known)
    if near:
        return f"there is no flag --{name}: did you mean --{near}?"
    return f"there is no flag --{name}: {prog} --help-all lists all of them"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the field that a name stands for, or is closest to."""
    name, known = name.replace("-", "_"), list(known)
    meant = _SHORT.get(name, ())
    for path in meant:
        if path in known:
            return path
    ends = {path.rpartition(".")[2] for path in (*meant, name)}
    same_end = [path for path in known if path.rpartition(".")[2] in ends]
    if same_end:
        return min(same_end, key=lambda path: path.count("."))
    near = closest(name, known) or closest(name, {path.rpartition(".")[2] for path in known})
    if not near:
        return None
    found = near.split("'")[1]
    return min((p for p in known if p == found or p.endswith(f".{found}")), key=len)


def _most_values(hint: Any) -> int:
    """Return the largest number of values that a flag takes."""
    is_tuple = any(get_origin(option) is tuple for option in alternatives(hint))
    return 1_000_000 if is_tuple else 1
