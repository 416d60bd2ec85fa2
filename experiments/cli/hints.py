# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers wrong words of a command line with the right ones.

    --temp 0.5          there is no flag --temp: did you mean --temperature?
    --model runs/mine   there is no flag --model: the model is the first word

A word of another library is looked up among those of the command, then among those of all commands;
any other word is answered with the flag that is spelled most alike.

To add a word: `_OF_COMMANDS` or `_SHORT` in experiments/cli/hints.py, and a row of
tests/experiments/test_hints.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from experiments.cli.choices import field_paths, find_choices, known_spelling
from jaxmoe.configs import closest

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


_MOVED: Final[Mapping[str, str]] = {
    "checkpoint.initial_step": "--checkpoint.initial.step",
    "checkpoint.initial_state": "--checkpoint.initial.state",
    "checkpoint.initial_mapping": "--checkpoint.initial.mapping",
    "checkpoint.verify": "--checkpoint.safety.verify",
    "checkpoint.on_damage": "--checkpoint.safety.on_damage",
    "checkpoint.max_failed_saves": "--checkpoint.safety.max_failed_saves",
    "checkpoint.compare_replicas": "--checkpoint.safety.compare_replicas",
    "training.max_skipped": "--training.guard.max_skipped",
    "training.max_norm_ratio": "--training.guard.max_norm_ratio",
    "training.rollbacks": "--training.guard.rollbacks",
    "optimizer.coefficients": "--optimizer.newton_schulz.coefficients",
    "optimizer.dtype": "--optimizer.newton_schulz.dtype",
    "optimizer.layout": "--optimizer.newton_schulz.layout",
    "parameterization.token_exponent": "--parameterization.exponents.tokens",
    "parameterization.batch_exponent": "--parameterization.exponents.batch",
    "parameterization.depth_exponent": "--parameterization.exponents.depth",
    "parameterization.residual_exponent": "--parameterization.exponents.residual",
    "run.steal_lock": "--run.lock.steal",
    "run.lock_heartbeat": "--run.lock.heartbeat",
    "execution.host_order": "--processes.order",
    "execution.optimizer_memory": "--execution.offload.optimizer",
    "execution.optimizer_parts": "--execution.offload.parts",
    "execution.optimizer_directory": "--execution.offload.directory",
    "execution.parameter_memory": "--execution.offload.parameters",
    "checkpoint.snapshot_every": "--snapshots.every",
    "checkpoint.on_lost_stage": "--parts check_free",
    "checkpoint.recovery_steps": "--check_free.recovery_steps",
    "checkpoint.recompute": "--recomputation.every",
    "watch.links_every": "--link_measurements.every",
    "watch.gradients_every": "--gradient_comparison.every",
    "watch.gradient_groups": "--gradient_comparison.groups",
}
"""Flags of version 0.1, and what to type."""


MODEL_COMMANDS: Final = frozenset(
    ("finetune", "rl", "evaluate", "generate", "serve", "evaluate_tasks", "depth", "layer_paths")
    + ("replay", "convert", "inspect", "reshard", "verify")
)
"""Last words of programs whose first word is a model."""
_MODEL_WORDS: Final = frozenset(
    ("model", "models", "model_name", "model_name_or_path", "model_path", "model_id", "model_dir")
    + ("model_args", "base_model", "pretrained", "pretrained_model", "init", "init_from", "path")
    + ("checkpoint", "ckpt", "checkpoint_dir", "ckpt_dir", "checkpoint_path", "load", "load_from")
    + ("runs", "run", "run_dir", "run_directory", "dir", "directory", "hf", "input", "from")
)
"""Words for the model in other libraries."""

_TRAINING: Final[Mapping[str, str]] = {
    "epochs": "training is counted in steps, --training.steps N",
    "num_epochs": "training is counted in steps, --training.steps N",
    "num_train_epochs": "training is counted in steps, --training.steps N",
    "max_seq_length": "--training.sequence_length",
    "max_seq_len": "--training.sequence_length",
    "max_length": "--training.sequence_length",
    "block_size": "--training.sequence_length",
    "cutoff_len": "--training.sequence_length",
    "per_device_train_batch_size": "--training.batch_size",
    "micro_batch_size": "--training.accumulation",
    "gradient_accumulation_steps": "--training.accumulation",
    "train_file": "--data.path",
    "train_data": "--data.path",
    "dataset_name": "data:huggingface --data.dataset",
    "files": "--data.path",
    "val_file": "--data.validation_path",
    "validation_file": "--data.validation_path",
    "save_dir": "--run.directory",
    "lora": "adapter:lora",
    "lora_r": "--adapter.rank",
    "lora_rank": "--adapter.rank",
    "rank": "--adapter.rank",
    "r": "--adapter.rank",
    "lora_alpha": "--adapter.alpha",
    "alpha": "--adapter.alpha",
    "lora_dropout": "adapters have no dropout: leave it out",
    "target_modules": "--adapter.targets.roles",
    "lora_target_modules": "--adapter.targets.roles",
    "eval_steps": "--evaluation.every",
    "eval_every": "--evaluation.every",
    "save_steps": "--checkpoint.every",
    "save_every": "--checkpoint.every",
    "logging_steps": "--tracking.print_every",
    "log_every": "--tracking.print_every",
    "warmup_ratio": "--schedule.warmup_steps",
    "lr_scheduler_type": "--schedule",
    "lr_scheduler": "--schedule",
    "bf16": "--execution.precision.compute bfloat16",
    "fp16": "--execution.precision.compute bfloat16",
    "dtype": "--execution.precision.compute",
    "wandb": "--tracking.trackers wandb",
    "report_to": "--tracking.trackers",
    "resume": "the same command resumes, without a flag",
    "resume_from_checkpoint": "the same command resumes, without a flag",
    "grad_clip": "--training.clip",
    "max_grad_norm": "--training.clip",
    "chat": "data:chat --data.path FILE",
    "temperature": "answers are written after the training, by generate --temperature",
}
_OF_COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "finetune": _TRAINING,
    "rl": _TRAINING
    | {
        "epochs": "--rl.epochs",
        "num_generations": "--rl.group",
        "group_size": "--rl.group",
        "n": "--rl.group",
        "num_prompts": "--rl.prompts",
        "rollout_batch_size": "--rl.prompts",
        "kl": "--objective.beta",
        "kl_coef": "--objective.beta",
        "reward_function": "reward:python --rl.reward.function",
        "reward_funcs": "reward:python --rl.reward.function",
        "max_completion_length": "--rl.max_tokens",
        "max_new_tokens": "--rl.max_tokens",
        "max_response_length": "--rl.max_tokens",
        "clip_range": "--objective.clip_high",
        "cliprange": "--objective.clip_high",
        "epsilon": "--objective.clip_high",
        "loss_type": "--objective.aggregation",
        "temp": "answers are drawn at temperature 1, by which they are trained",
        "temperature": "answers are drawn at temperature 1, by which they are trained",
        "chat": "--rl.template",
        "chat_template": "--rl.template",
        "template": "--rl.template",
    },
    "serve": {
        "max_model_len": "--engine.max_length",
        "max_length": "--engine.max_length",
        "max_num_seqs": "--engine.max_sequences",
        "max_batch_size": "--engine.max_sequences",
        "batch_size": "--engine.max_sequences",
        "max_num_batched_tokens": "--engine.batching.budget",
        "block_size": "--engine.page_size",
        "num_pages": "--engine.pages",
        "gpu_memory_utilization": "--engine.pages",
        "tensor_parallel_size": "--run.mesh.tensor",
        "tp": "--run.mesh.tensor",
        "ep": "--run.mesh.expert",
        "enable_expert_parallel": "--run.mesh.expert",
        "data_parallel_size": "--engine.instances",
        "dp": "--engine.instances",
        "workers": "--engine.instances",
        "replicas": "--engine.instances",
        "api_key": "the key is the environment variable JAXMOE_API_KEY",
        "key": "the key is the environment variable JAXMOE_API_KEY",
        "served_model_name": "--name",
        "tool_call_parser": "--tool_parser",
        "lora": "--adapters NAME=RUN",
        "lora_modules": "--adapters NAME=RUN",
        "adapter": "--adapters NAME=RUN",
        "quantization": "convert the run first: jaxmoe checkpoint convert --help",
        "quantize": "convert the run first: jaxmoe checkpoint convert --help",
        "temp": 'a request says it: {"temperature": 0.5}',
        "temperature": 'a request says it: {"temperature": 0.5}',
        "max_tokens": 'a request says it: {"max_tokens": 100}',
        "address": "--host",
        "listen": "--host",
        "bind": "--host",
        "timeout": "--drain",
    },
    "generate": {
        "temp": "--temperature",
        "n": "--length",
        "tokens": "--length",
        "num_tokens": "--length",
        "n_predict": "--length",
        "max_length": "--length",
        "text": "--prompt",
        "file": "--prompts",
        "prompt_file": "--prompts",
        "output": "--to",
        "out": "--to",
        "greedy": "--temperature 0",
        "interactive": "--chat True",
        "system_prompt": "--system",
        "chat_template": "--template",
        "num_samples": "give a prompt several times, --prompt A A A",
        "adapter": "an adapter is a run of its own, which is the first word",
    },
    "evaluate": {
        "dataset": "--data.path",
        "batch_size": "--batches",
        "limit": "--batches",
        "steps": "--batches",
        "tasks": "tasks are those of jaxmoe evaluate_tasks",
    },
    "evaluate_tasks": {
        "task": "--tasks",
        "shots": "--num_fewshot",
        "output": "--to",
        "output_path": "--to",
        "out": "--to",
        "num_samples": "--limit",
        "max_model_len": "--max_length",
        "include_path": "--include",
        "device": "the devices are those of JAX_PLATFORMS, and the mesh is --run.mesh.data",
    },
    "convert": {
        "output": "--to",
        "output_dir": "--to",
        "out": "--to",
        "out_dir": "--to",
        "bits": "--quantise w4a8",
        "format": "--quantise",
        "merge": "--fold True",
        "export": "--to_huggingface auto",
        "to_hf": "--to_huggingface auto",
        "from_hf": "--from_huggingface",
        "dtype": "--exported.dtype",
    },
}
"""Right words by command and by the word of another library: a flag or a choice, or a sentence."""


def stray_word(word: str, config: Any, prog: str, recipes: Collection[str] = ()) -> str:
    """Return the message about a word that is neither a flag nor its value.

    Args:
        word: The word.
        config: The config of the command.
        prog: How the program is called.
        recipes: Names of recipes, which are first words.
    """
    paths = tuple(field_paths(type(config)))
    name = known_spelling(word, dict.fromkeys(recipes))
    if name in recipes:
        return f"{word!r} is a recipe, which is the first word: {prog} {name} [flags]"
    path, equals, value = word.lstrip("-").partition("=")
    if equals and (near := _nearest(path, paths)):
        return f"{word!r} is not a flag: did you mean --{near} {value}?"
    path, colon, value = word.partition(":")
    if colon and value and "/" not in word:
        choices = [choice.path for choice in find_choices(config)]
        near = _nearest(path, choices)
        return f"there is no choice {path}" + (f": did you mean --{near} {value}?" if near else "")
    if prog.endswith("pretrain") and os.path.isfile(os.path.join(word, "config.json")):
        return f"{word!r} is a run: continue it with {prog} resume {word}"
    if ("/" in word or os.path.isdir(word)) and _command(prog) in MODEL_COMMANDS:
        return f"{word!r} stands alone: a model is the first word, {prog} {word}"
    if ("/" in word or os.path.isdir(word)) and "run.directory" in paths:
        return f"{word!r} stands alone: did you mean --run.directory {word}?"
    return f"unexpected word {word!r}: a field is --dotted.field value, see {prog} --help"


def unknown_flag(name: str, flag_names: Sequence[str], prog: str, recipes: Collection[str]) -> str:
    """Return the message about a flag that the command has not.

    Args:
        name: The flag without its hyphens.
        flag_names: Dotted names of the fields of the command.
        prog: How the program is called.
        recipes: Names of recipes, which are first words.
    """
    if name in ("recipe", "config", "preset") and recipes:
        return (
            f"there is no flag --{name}: a recipe is the first word: {prog} {next(iter(recipes))}"
        )
    if moved := _MOVED.get(name.replace("-", "_")):
        return f"there is no flag --{name}: it is {moved} now"
    if answer := _answer(name.replace("-", "_"), prog):
        return f"there is no flag --{name}: {answer}"
    path, colon, value = name.partition(":")
    if colon and (near := _nearest(path, flag_names)):
        return f"there is no flag --{name}: did you mean --{near} {value}?"
    near = _nearest(name, flag_names)
    if near:
        return f"there is no flag --{name}: did you mean --{near}?"
    return f"there is no flag --{name}: {prog} --help-all lists all of them"


def group_as_flag(name: str, prog: str) -> str:
    """Return the message about a flag that is a group of flags, such as --model.

    Args:
        name: Dotted name of the group.
        prog: How the program is called.
    """
    answer = _answer(name, prog) or f"it is a group of flags, which {prog} --help {name} lists"
    return f"there is no flag --{name}: {answer}"


def _answer(name: str, prog: str) -> str:
    """Return what a command answers to a word of another library; empty where it knows none."""
    command = _command(prog)
    if name in _MODEL_WORDS and command in MODEL_COMMANDS:
        return f"the model is the first word: {prog} MODEL"
    answer = _OF_COMMANDS.get(command, {}).get(name) or ""
    is_command_line = answer.startswith("--") or ":" in answer.partition(" ")[0]
    return f"did you mean {answer}?" if is_command_line else answer


def _command(prog: str) -> str:
    """Return the name of the command or of its part, such as generate, or convert."""
    return prog.rpartition(".")[2].rpartition(" ")[2]


def _nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the field that a name stands for, or is closest to."""
    name = name.replace("-", "_")
    candidates = list(candidates)
    meant = _SHORT.get(name, ())
    for path in meant:
        if path in candidates:
            return path
    ends = {path.rpartition(".")[2] for path in (*meant, name)}
    same_end = [path for path in candidates if path.rpartition(".")[2] in ends]
    if same_end:
        return min(same_end, key=lambda path: path.count("."))
    near = closest(name, candidates) or closest(
        name, {path.rpartition(".")[2] for path in candidates}
    )
    if not near:
        return None
    suggestion = near.split("'")[1]
    return min((p for p in candidates if p == suggestion or p.endswith(f".{suggestion}")), key=len)
