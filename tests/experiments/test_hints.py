# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The wrong words that users of other libraries type first are answered with the right ones."""

import shlex

import pytest

from experiments.checkpoint.convert import ConvertConfig
from experiments.cli import hints
from experiments.cli.choices import field_paths
from experiments.cli.flags import parse_flags
from experiments.evaluate import EvaluateConfig
from experiments.evaluate_tasks.__main__ import EvaluateTasksConfig
from experiments.finetune import finetune_config, long_word
from experiments.generate import GenerateConfig
from experiments.rl import __main__ as rl
from experiments.serve import ServeConfig
from jaxmoe.contrib.rl.config import RolloutsConfig

STARTS = {
    "finetune": lambda: finetune_config(None),
    "rl": lambda: rl.rl_config(None, RolloutsConfig()),
    "serve": ServeConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "evaluate_tasks": EvaluateTasksConfig,
    "checkpoint convert": ConvertConfig,
}
MODEL = "the model is the first word"
SHORT = {"reward": "rl.reward", "objective": "training.objective", "adapter": "model.adapter"}
WORDS = {
    "finetune": """
        model: the model is the first word
        model_name_or_path: the model is the first word
        base_model: the model is the first word
        checkpoint: the model is the first word
        epochs: training is counted in steps, --training.steps N
        num_train_epochs: training is counted in steps, --training.steps N
        steps: --training.steps
        max_steps: --training.steps
        lr: --optimizer.learning_rate
        learning-rate: --optimizer.learning_rate
        batch_size: --training.batch_size
        per_device_train_batch_size: --training.batch_size
        gradient_accumulation_steps: --training.accumulation
        max_seq_length: --training.sequence_length
        block_size: --training.sequence_length
        dataset: --data.path
        train_file: --data.path
        dataset_name: data:huggingface --data.dataset
        chat: data:chat --data.path FILE
        output_dir: --run.directory
        out: --run.directory
        lora: adapter:lora
        lora_r: --adapter.rank
        lora_alpha: --adapter.alpha
        lora_dropout: adapters have no dropout: leave it out
        target_modules: --adapter.targets.roles
        eval_steps: --evaluation.every
        save_steps: --checkpoint.every
        logging_steps: --tracking.print_every
        warmup_ratio: --schedule.warmup_steps
        lr_scheduler_type: --schedule
        optim: --optimizer
        bf16: --execution.precision.compute bfloat16
        wandb: --tracking.trackers wandb
        seed: --training.seed
        resume: the same command resumes, without a flag
        weight_decay: --optimizer.weight_decay
    """,
    "rl": """
        model: the model is the first word
        num_generations: --rl.group
        group_size: --rl.group
        num_prompts: --rl.prompts
        beta: --training.objective.beta
        kl_coef: --objective.beta
        reward: --rl.reward
        reward_funcs: reward:python --rl.reward.function
        max_completion_length: --rl.max_tokens
        max_tokens: --rl.max_tokens
        temp: answers are drawn at temperature 1, by which they are trained
        epochs: --rl.epochs
        chat_template: --rl.template
    """,
    "serve": """
        model: the model is the first word
        max_model_len: --engine.max_length
        max_num_seqs: --engine.max_sequences
        tensor_parallel_size: --run.mesh.tensor
        data_parallel_size: --engine.instances
        api_key: the key is the environment variable JAXMOE_API_KEY
        served_model_name: --name
        tool_call_parser: --tool_parser
        lora_modules: --adapters NAME=RUN
        chat_template: --template
        quantization: convert the run first: jaxmoe checkpoint convert --help
        temperature: a request says it: {"temperature": 0.5}
    """,
    "generate": """
        model: the model is the first word
        runs: the model is the first word
        run: the model is the first word
        temp: --temperature
        max_tokens: --length
        max_new_tokens: --length
        topk: --top_k
        top-P: --top_p
        text: --prompt
        file: --prompts
        output: --to
        greedy: --temperature 0
        interactive: --chat True
    """,
    "evaluate": """
        model: the model is the first word
        runs: the model is the first word
        dataset: --data.path
        seq_len: --sequence_length
        tasks: tasks are those of jaxmoe evaluate_tasks
    """,
    "evaluate_tasks": """
        model_args: the model is the first word
        task: --tasks
        shots: --num_fewshot
        output_path: --to
    """,
    "checkpoint convert": """
        input: the model is the first word
        output: --to
        quantize: --quantise
        merge: --fold True
        to_hf: --to_huggingface auto
    """,
}
ROWS = [
    (command, *line.strip().split(": ", 1))
    for command, lines in WORDS.items()
    for line in lines.strip().splitlines()
]


@pytest.fixture(scope="module")
def fields():
    """Names of the fields of every command."""
    return {name: {*field_paths(type(make()))} for name, make in STARTS.items()}


@pytest.mark.parametrize(("command", "wrong", "right"), ROWS)
def test_a_wrong_word_is_answered_with_the_right_one(command, wrong, right, capsys):
    prog = f"jaxmoe {command}"
    with pytest.raises(SystemExit) as stop:
        parse_flags(STARTS[command](), [long_word(f"--{wrong}"), "7"], prog, "about")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    if right == MODEL:
        wanted = f"{MODEL}: {prog} MODEL"
    else:
        wanted = f"did you mean {right}?" if is_command_line(right) else right
    assert error == f"error: there is no flag --{wrong}: {wanted}\n"


@pytest.mark.parametrize(("command", "wrong", "right"), ROWS)
def test_the_right_word_is_one(command, wrong, right, fields):
    del wrong
    if not is_command_line(right):
        return
    for word in shlex.split(right):
        if word.startswith("--") or ":" in word:
            name = word.removeprefix("--").partition(":")[0]
            first, dot, remaining = name.partition(".")
            assert SHORT.get(first, first) + dot + remaining in fields[command], word


def is_command_line(text):
    return text.startswith("--") or ":" in text.partition(" ")[0]


def test_every_answer_of_a_command_names_words_that_it_has(fields):
    for command, answers in hints._OF_COMMANDS.items():
        name = "checkpoint convert" if command == "convert" else command
        for wrong, right in answers.items():
            test_the_right_word_is_one(name, wrong, right, fields)


def test_there_are_more_than_fifty():
    assert len(ROWS) > 50 and len({row[:2] for row in ROWS}) == len(ROWS)


def test_a_group_as_a_flag_and_a_path_as_a_choice_are_answered(capsys):
    for words, wanted in (
        (["--training", "5"], "there is no flag --training: it is a group of flags, which prog"),
        (["--data", "docs/*.md"], "--data has no 'docs/*.md': did you mean --data.path docs/*.md?"),
    ):
        with pytest.raises(SystemExit):
            parse_flags(STARTS["finetune"](), words, "prog", "about")
        assert wanted in capsys.readouterr().err
