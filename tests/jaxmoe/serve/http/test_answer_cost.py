# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A token of a streamed answer costs the same in a long answer as in a short one."""

import functools
import json

import pytest

from jaxmoe.generation.text_stream import TextStream
from jaxmoe.serve.answers import Ended, Generated
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.answered import AnswerChoice, ChatForm, CompletionForm
from jaxmoe.serve.http.asked import Asked
from jaxmoe.serve.http.messages import CallsFormat, MessageFormat
from jaxmoe.serve.http.reasoning import ThinkTagsConfig
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.tools.hermes import HermesConfig
from jaxmoe.serve.requests import Sampling
from tests.support.endpoint import Speller
from tests.support.lines import lines_of
from tests.support.texts import CountedBytes

PROMPT = tuple(b"say ")
CALL = '<tool_call>{"name": "find", "arguments": {"text": "'
MESSAGE = MessageFormat(
    reasoning=ThinkTagsConfig(), calls=CallsFormat(parser=HermesConfig(), names=("find",))
)


def asked(message):
    return Asked(
        model="one",
        prompts=(PROMPT,),
        number=1,
        sampling=Sampling(num_logprobs=2),
        stop=(),
        is_streamed=True,
        has_usage=True,
        has_usage_of_parts=True,
        num_logprobs=2,
        num_prompt_logprobs=None,
        has_echo=False,
        has_answer=True,
        has_token_ids=True,
        given={},
        message=message,
    )


def stream(form, codec, text, chunks):
    """Write the chunks of an answer."""
    choice = AnswerChoice(index=0)
    texts = TextStream(codec, ("x" * 60_000,), PROMPT)
    for index, token in enumerate(text.encode()):
        new = texts.add(token)
        alternatives = ((token, -0.5), (0x80, -1.0))
        event = Generated(
            index=index, token=token, text=new, logprob=-0.5, alternatives=alternatives
        )
        chunks += form.chunks(choice, *form.take(choice, event))
    ending = Ended(reason="length", text=texts.finish())
    chunks += form.chunks(choice, *form.take(choice, ending))


CASES = {
    "completion": (CompletionForm, None, "abc \u00e9"),
    "chat": (ChatForm, MESSAGE, "abc \u00e9"),
    "call": (ChatForm, MESSAGE, CALL + "abc \u00e9"),
}


@pytest.fixture(scope="module")
def engine():
    with Engine(Speller()) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_chunks_with_log_probabilities_cost_the_same_in_a_long_answer(name, engine):
    kind, message, text = CASES[name]
    costs = []
    for size in (400, 3200):
        codec = CountedBytes()
        served = Served(name="one", engine=engine, codec=codec, max_logprobs=2)
        whole = text + text[-5:] * (size // 6)
        chunks = []
        form = kind(served, asked(message))
        lines = lines_of(functools.partial(stream, form, codec, whole, chunks))
        number = len(whole.encode())
        written = sum(len(json.dumps(chunk)) for chunk in chunks[:-2])
        costs.append(
            (lines / number, codec.num_tokens / number, codec.num_calls / number, written / number)
        )
    for short, long in zip(*costs, strict=True):
        assert long <= 1.1 * short
    assert costs[1][1] <= 20
