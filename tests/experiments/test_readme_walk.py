# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of the README from `make demo` to a client, one after the other.

Each is run as it stands there, with flags behind it that make it small, in an empty folder. Each
says the next one. Tasks of the harness need a network: the last `--tasks` counts, which is local.
"""

import contextlib
import json
import math
import re
import shlex
import signal
import subprocess

import httpx2 as httpx
import pytest

from experiments.cli.following import (
    after_conversion,
    after_evaluation,
    after_report,
    after_training,
    client,
)
from experiments.recipes.markov import markov
from experiments.recipes.tiny import tiny
from tests.experiments.test_walk import QUIET, SIZES
from tests.support.documented import environment, shell_lines
from tests.support.documented_files import CHATS, TASK
from tests.support.runs import ROOT

STEPS = ("--training.steps", "2", "--schedule.warmup_steps", "0")
HELD_OUT = ("--evaluation.batches", "1", "--evaluation.every", "0")
ANSWERS = ("--rl.group", "2", "--rl.prompts", "2", "--rl.max_tokens", "4")
ENGINE = ("--engine.max_sequences", "2", "--engine.pieces", "1x128", "--engine.num_logprobs", "0")


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
    lines = shell_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    first = next(i for i, line in enumerate(lines) if line.startswith("jaxmoe finetune runs/"))
    last = next(i for i, line in enumerate(lines) if line.startswith("curl "))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", makefile, re.MULTILINE).group(1)
    assert demo == "python -m experiments.pretrain"
    return [shlex.split(line) for line in ("jaxmoe pretrain", *lines[first : last + 1])]


def begin(words):
    """The part of a command up to its model: what a line about the next one has to say."""
    end = next((i for i, word in enumerate(words) if "/" in word or word == "mine"), 2)
    return words[: end + 1]


def test_the_readme_goes_from_the_demo_to_a_client():
    names = [words[1] for words in commands()[:-1]]
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
    variables = environment(HF_HOME=str(tmp_path / "cache"))
    *walk, asking = commands()
    for words, following in zip(walk[:-1], walk[1:], strict=True):
        done = subprocess.run(
            [*words, *small(words[1], tmp_path)],
            cwd=tmp_path,
            env=variables,
            input="1+5=\n",
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, (words, done.stderr)
        said = shlex.split(done.stderr.splitlines()[-1])
        wanted = ["next:", *begin(following)]
        assert said[: len(wanted)] == wanted, (words, said)
    serving = [*walk[-1], *small("serve", tmp_path)]
    with subprocess.Popen(
        serving,
        cwd=tmp_path,
        env=variables,
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
    assert after_training("pretrain", plain, "a b") == "jaxmoe evaluate 'a b'"
    assert after_conversion("quantise", "a").startswith("jaxmoe generate a --prompt")
    assert after_evaluation(plain, "a") == "jaxmoe describe --run.directory a"
    assert after_evaluation(tiny(), "a b") == "jaxmoe generate 'a b' --prompt TEXT"
    assert after_report({"old": None, "worse": 2.0, "best": 1.5}) == "jaxmoe evaluate best"
    assert after_report({"old": None}) == "jaxmoe evaluate old"
    losses = {"lost": math.nan, "far": math.inf, "worse": 1.0, "best": 0.0}
    assert after_report(losses) == "jaxmoe evaluate best"
    for talks, place in ((True, "/v1/chat/completions"), (False, "/v1/completions")):
        words = shlex.split(client("http://h:1/v1", talks=talks))
        assert words[1] == f"http://h:1{place}" and json.loads(words[3])
    of_ids = shlex.split(client("http://h:1/v1", talks=False, reads_text=False))
    assert json.loads(of_ids[3]) == {"prompt": [0, 1]}
