# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations in the terminal: history, ends, interrupts, and runs without a template."""

import errno
import io
import json

import numpy as np
import pytest

from experiments import generate
from experiments.cli.flags import ExitCode
from experiments.recipes import RECIPES
from jaxmoe.data.chat import Message, render
from jaxmoe.data.chat.built_in import ChatML
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.generation.chat import Chat
from jaxmoe.generation.prompts import read_prompts
from jaxmoe.generation.text import Sample

PROMPT = {"add_generation_prompt": True}


class Model:
    """Answers with the number of the call, in two parts; records what it was given."""

    def __init__(self, interrupts=False):
        self.seen, self.interrupts = [], interrupts

    def __call__(self, ids, *, eos_ids, stop, on_sample, **sampling):
        self.seen.append((ids.tolist(), eos_ids, stop, sampling))
        text = f"answer {len(self.seen)}"
        on_sample(Sample(prompt="", text=text[:3]))
        if self.interrupts:
            raise KeyboardInterrupt
        return Sample(prompt="", text=text)


def chat_with(model, **given):
    return Chat(template=ChatML(), tokenizer=ByteTokenizer(), generate=model, **given)


def test_an_answer_sees_the_conversation_before_it():
    model, parts = Model(), []
    chat = chat_with(model, messages=(Message(role="system", content="be brief"),))
    assert chat.answer("one", parts.append, temperature=0.0) == "answer 1"
    assert parts == ["ans", "wer 1"]
    chat.answer("two", stop=("\n",))
    turns = (
        Message(role="system", content="be brief"),
        Message(role="user", content="one"),
        Message(role="assistant", content="answer 1"),
        Message(role="user", content="two"),
    )
    wanted = render(turns, ChatML(), ByteTokenizer(), add_generation_prompt=True)
    ids, _, stop, sampling = model.seen[1]
    np.testing.assert_array_equal(ids, wanted)
    assert stop == ("\n", "<|im_end|>") and sampling == {}
    assert model.seen[0][3] == {"temperature": 0.0}


def test_an_interrupted_answer_is_kept_and_the_conversation_goes_on():
    model = Model(interrupts=True)
    chat = chat_with(model)
    assert chat.answer("one") == "ans"
    model.interrupts = False
    chat.answer("two")
    assert [one.content for one in chat.messages] == ["one", "ans", "two", "answer 2"]


def test_lines_are_answered_until_the_input_ends(finished, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/reset\n<|im_end|>\nagain\n"))
    model = Model()
    monkeypatch.setattr(generate, "open_chat", lambda run, **_: chat_with(model))
    assert generate.main(["--run.directory", str(finished), "--chat", "True"]) == ExitCode.DONE
    printed = capsys.readouterr()
    assert printed.err.count("spells '<|im_end|>'") == 1
    assert printed.out == "answer 1\n\nanswer 2\n"
    alone = render([Message(role="user", content="again")], ChatML(), ByteTokenizer(), **PROMPT)
    np.testing.assert_array_equal(model.seen[1][0], alone)  # after the reset


def test_a_run_without_a_template_is_refused(finished, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["--run.directory", str(finished), "--chat", "True"])
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    assert "has tokens without text" in capsys.readouterr().err


def test_prompts_of_a_file_are_continued_into_another(finished, tmp_path, capsys):
    given = tmp_path / "given.jsonl"
    given.write_text('{"prompt": "1 2"}\n\n{"prompt": "3"}\n')
    to = tmp_path / "written.jsonl"
    words = ["--run.directory", str(finished), "--length", "3", "--temperature", "0"]
    assert generate.main([*words, "--prompts", str(given), "--to", str(to)]) == ExitCode.DONE
    written = [json.loads(line) for line in to.read_text().splitlines()]
    capsys.readouterr()
    assert generate.main([*words, "--prompt", "1 2", "3"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert [one["prompt"] for one in written] == ["1 2", "3"]
    assert all(f"--- continued\n{one['text']}\n" in shown for one in written)
    with pytest.raises(SystemExit):
        generate.main([*words, "--prompts", str(given), "--to", str(to)])
    assert "exists: choose a new file" in capsys.readouterr().err


class Writer(generate.Run):
    """A run that generates one text for each prompt."""

    def __init__(self):
        self.config = RECIPES["tiny"]()

    def generate(self, prompts, **_):
        return [Sample(prompt=prompt, text="!") for prompt in prompts]


@pytest.fixture
def opened(monkeypatch):
    """The directories of the runs that a command has opened."""
    paths = []
    monkeypatch.setattr(generate, "start_process", lambda: None)
    monkeypatch.setattr(generate.Run, "open", lambda path, **_: paths.append(path) or Writer())
    return paths


def test_the_directory_of_the_samples_is_made(opened, tmp_path):
    to = tmp_path / "new" / "written.jsonl"
    assert generate.main(["--prompt", "a", "b", "--to", str(to)]) == ExitCode.DONE
    assert to.read_text().count('"text": "!"') == 2


def test_a_place_without_samples_is_refused_before_the_run_is_read(opened, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        generate.main(["--to", str(tmp_path / "file" / "written.jsonl")])
    assert ended.value.code == ExitCode.BAD_CONFIGURATION and opened == []
    assert "cannot be made" in capsys.readouterr().err


def test_samples_that_cannot_be_written_are_printed(opened, tmp_path, monkeypatch, capsys):
    def fill(samples, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "write_samples", fill)
    code = generate.main(["--prompt", "a", "b", "--to", str(tmp_path / "written.jsonl")])
    printed = capsys.readouterr()
    assert code == ExitCode.NOT_SAVED
    assert printed.out.count("--- continued\n!\n") == 2
    assert "cannot be written (No space left on device)" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "be brief"], "system='be brief' is for a conversation, and chat is False"),
        (["--template", "chatml"], "template='chatml' is for a conversation, and chat is False"),
        (["--chat", "True", "--prompt", "a"], "has no use for prompt: leave"),
        (["--chat", "True", "--prompts", "a", "--to", "b"], "has no use for prompts, to: leave"),
        (["--prompts", "a", "--prompt", "b"], "prompts=a replaces prompt, which is given too"),
        (["--length", "100000000000"], "length=100000000000 tokens are too many"),
    ],
)
def test_flags_without_a_use_are_refused(words, message, opened, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(words)
    assert ended.value.code == ExitCode.BAD_CONFIGURATION and opened == []
    assert message in capsys.readouterr().err


def test_lines_of_prompts_end_at_line_feeds_alone(tmp_path):
    """As lines of JSON: other separators of lines may stand within a text."""
    prompts = ["a\u2028b\u0085c\x0c", "d"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    for name, parts, ends in (("p.jsonl", lines, "\n"), ("p.txt", prompts, "\r\n")):
        (tmp_path / name).write_bytes(ends.join(parts).encode("utf-8-sig"))
        assert read_prompts(str(tmp_path / name)) == prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: write a prompt into each line"),
        ('{"prompt": "1"}\n{"text": "1"}', "line 2 must be an object with a text in the field"),
        ("{", "line 1 is not JSON"),
        (None, "cannot be read"),
    ],
)
def test_files_without_prompts_are_refused(text, message, tmp_path, capsys):
    given = tmp_path / "given.jsonl"
    if text is not None:
        given.write_text(text)
    with pytest.raises(SystemExit) as ended:
        generate.main(["--prompts", str(given)])
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err
