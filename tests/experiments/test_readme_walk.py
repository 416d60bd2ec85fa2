# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of the README from `make demo` to a client, one after the other.

Each is run as it stands there, with flags behind it that make it small, in an empty folder. Each
says the next one. Tasks of the harness need a network: the last `--tasks` counts, which is local.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import httpx2 as httpx
import pytest

from experiments.cli.following import after_conversion, after_training, client
from experiments.recipes.markov import markov
from tests.experiments.test_walk import QUIET, SIZES
from tests.support.runs import ROOT

STEPS = ("--training.steps", "2", "--schedule.warmup_steps", "0")
HELD_OUT = ("--evaluation.batches", "1", "--evaluation.every", "0")
ANSWERS = ("--rl.group", "2", "--rl.prompts", "2", "--rl.max_tokens", "4")
ENGINE = ("--engine.max_sequences", "2", "--engine.pieces", "1x128", "--engine.num_logprobs", "0")
CHATS = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(40)]
TASK = """\
task: sums
dataset_path: json
dataset_name: null
test_split: train
dataset_kwargs: {{data_files: {file}}}
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["{{{{completion}}}}", "no"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def small(command, folder):
    """The flags that make a command of the README small."""
    tasks = ("--tasks", "sums", "--include", str(folder / "tasks"), "--limit", "4")
    return {
        "pretrain": (*SIZES, *QUIET, "--training.steps", "4", "--training.sequence_length", "64"),
        "finetune": (*STEPS, *HELD_OUT, *QUIET),
        "generate": ("--length", "8"),
        "checkpoint": (),
        "rl": (*STEPS, *HELD_OUT, *QUIET, *ANSWERS),
        "evaluate_tasks": (*tasks, "--max_length", "64"),
        "serve": ("--port", "0", *ENGINE),
    }[command]


def commands():
    """The lines of the README, `make demo` first, as words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(part for part in text.split("```") if "experiments.finetune runs/" in part)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", makefile, re.MULTILINE).group(1)
    return [shlex.split(line) for line in (demo, *block.splitlines()[1:])]


def begin(words):
    """The part of a command up to its model: what a line about the next one has to say."""
    end = next((i for i, word in enumerate(words) if "/" in word or word == "mine"), 2)
    return words[: end + 1]


def test_the_readme_goes_from_the_demo_to_a_client():
    names = [words[2].removeprefix("experiments.") for words in commands()[:-1]]
    assert names == [
        *("pretrain", "finetune", "generate", "checkpoint", "rl", "evaluate_tasks"),
        *("checkpoint", "serve"),
    ]
    assert commands()[-1][0] == "curl"


@pytest.mark.slow
def test_the_commands_of_the_readme_run_one_after_the_other(tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: extra lm-eval")
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (tmp_path / "tasks").mkdir()
    task = TASK.format(file=tmp_path / "chats.jsonl")
    (tmp_path / "tasks" / "sums.yaml").write_text(task)
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    places = {"HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    environment = os.environ | offline | places
    *walk, asking = commands()
    for words, following in zip(walk[:-1], walk[1:], strict=True):
        command = [
            sys.executable,
            *words[1:],
            *small(words[2].removeprefix("experiments."), tmp_path),
        ]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            input="1+5=\n",
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, (words, done.stderr)
        said = shlex.split(done.stderr.splitlines()[-1])
        wanted = ["next:", *begin(following)]
        assert said[: len(wanted)] == wanted, (words, said)
    serving = [sys.executable, *walk[-1][1:], *small("serve", tmp_path)]
    with subprocess.Popen(
        serving,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        with contextlib.ExitStack() as stack:
            stack.callback(server.send_signal, signal.SIGINT)
            lines = iter(server.stdout.readline, "")
            line = next((line for line in lines if line.startswith("next: ")), "")
            said = shlex.split(line)
            assert said[1] == "curl" and said[2].endswith("/v1/chat/completions"), line
            address = said[2].removesuffix("/v1/chat/completions")
            path = "/" + asking[1].split("/", 3)[3]
            answer = httpx.post(address + path, content=asking[3], timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    assert server.returncode == 0


def test_what_follows_depends_on_what_was_made():
    plain = markov()
    assert after_training("pretrain", plain, "a b") == "python -m experiments.evaluate 'a b'"
    assert after_conversion("quantise", "a").startswith("python -m experiments.generate a --prompt")
    for talks, place in ((True, "/v1/chat/completions"), (False, "/v1/completions")):
        words = shlex.split(client("http://h:1/v1", talks=talks))
        assert words[1] == f"http://h:1{place}" and json.loads(words[3])
