# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reasoning told from content, with tags that the template or the model opens."""

import itertools
import json
import re

import openai
import pytest

from jaxmoe.serve.http.messages import MessageFormat, MessageStream, whole_message
from jaxmoe.serve.http.reasoning import REASONING_PARSERS, ThinkTagsConfig
from tests.support.endpoint import Speller, serving

THINK = ThinkTagsConfig()
TALK = [{"role": "user", "content": "hi"}]
ROWS = {
    "none": [("", "<think>a</think>b", None, "<think>a</think>b")],
    "think_tags": [
        ("", "<think>\na b\n</think>\n\nc d", "a b", "c d"),
        ("<think>\n", "a b\n</think>\n\nc d\n", "a b", "c d\n"),
        ("<think>", "<think>a</think>b", "a", "b"),
        ("<think>\n", "a <think> b", "a <think> b", None),
        ("<think>\n", "\n</think>\nb", None, "b"),
        ("<think>\n\n</think>\n\n", "<think>a</think>b", None, "<think>a</think>b"),
        ("", "b</think>c", None, "b</think>c"),
        ("", " <thin", None, " <thin"),
        ("", "<think>a</thin", "a</thin", None),
        ("", "", None, ""),
        ("", "  ", None, "  "),
    ],
}
CASES = [(name, *row) for name, rows in ROWS.items() for row in rows]


def test_every_parser_has_rows():
    assert ROWS.keys() == {*REASONING_PARSERS}


@pytest.mark.parametrize(("name", "prompt", "answer", "reasoning", "content"), CASES)
def test_reasoning_and_content_of_every_cut(name, prompt, answer, reasoning, content):
    form = MessageFormat(reasoning=REASONING_PARSERS[name](), prompt=prompt)
    places = range(len(answer) + 1)
    for start, end in itertools.combinations_with_replacement(places, 2):
        stream = MessageStream(form)
        for part in (answer[:start], answer[start:end], answer[end:]):
            stream.add(part, is_last=False)
        stream.add("", is_last=True)
        message = whole_message(stream.parts)
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_the_message_of_a_server_has_reasoning_content():
    answer = "<think>\nso it is\n</think>\n\nyes"
    with (
        serving(Speller(answer=answer.encode()), reasoning=THINK) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        body = {"model": "speller", "messages": TALK, "max_tokens": len(answer)}
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.message.content == "yes" and choice.finish_reason == "length"
        assert choice.message.reasoning_content == "so it is"
        parts = [
            part.choices[0].delta for part in client.chat.completions.create(**body, stream=True)
        ]
        thoughts = [getattr(part, "reasoning_content", None) or "" for part in parts]
        assert "".join(thoughts) == "so it is" and sum(map(bool, thoughts)) > 1
        assert "".join(part.content or "" for part in parts) == "yes"
        assert not any(
            part.content and thought for part, thought in zip(parts, thoughts, strict=True)
        )
        body["extra_body"] = {"include_reasoning": False}
        message = client.chat.completions.create(**body).choices[0].message
        assert message.content == "yes" and not hasattr(message, "reasoning_content")
        parts = client.chat.completions.create(**body, stream=True)
        assert not any(hasattr(part.choices[0].delta, "reasoning_content") for part in parts)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("<think>\nso it is\n</think>\n\nyes", 8),
        ("<think>so \u00e9", 5),  # the last character has two tokens
        ("<think> </think>yes", 0),
        ("yes", 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted(answer, number):
    """Those whose text it is: the tags and the space around it are none; a byte is a token."""
    content = answer.encode()
    with (
        serving(Speller(answer=content), reasoning=THINK) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        body = {"model": "speller", "messages": TALK, "max_tokens": len(content)}
        for has_reasoning in (True, False):
            extra = {"include_reasoning": has_reasoning}
            whole = client.chat.completions.create(**body, extra_body=extra).usage
            assert whole.completion_tokens_details.reasoning_tokens == number
        options = {"include_usage": True}
        *_, last = client.chat.completions.create(**body, stream=True, stream_options=options)
        assert last.usage == whole
        asked = {"model": "speller", "input": "x", "max_output_tokens": len(content)}
        usage = client.responses.create(**asked).usage
        assert usage.output_tokens_details.reasoning_tokens == number


def test_a_message_of_reasoning_alone_is_taken_back():
    """Its content is null, as that of a message of calls."""
    with (
        serving(Speller(answer=b"<think>hello there"), reasoning=THINK) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        body = {"model": "speller", "max_tokens": 14}
        message = client.chat.completions.create(**body, messages=TALK).choices[0].message
        assert message.content is None and message.reasoning_content
        turns = [*TALK, message.model_dump(), *TALK]
        client.chat.completions.create(**body, messages=turns)
        with pytest.raises(openai.BadRequestError, match="messages.0...content"):
            client.chat.completions.create(**body, messages=[{"role": "user", "content": None}])


@pytest.mark.parametrize("prompt", ["", "<think>\n", "<think></think>\n"])
def test_a_grammar_of_reasoning_begins_as_the_prompt_ends(prompt):
    rules = THINK.lark(prompt)
    assert bool(rules) == ("</think>" not in prompt)
    assert ("?" in rules.partition("\n")[0]) == (not prompt)
    assert json.dumps(THINK.opening) in rules or prompt
    assert not rules or re.search(r"^thoughts\[lazy\]: ", rules, re.MULTILINE)
