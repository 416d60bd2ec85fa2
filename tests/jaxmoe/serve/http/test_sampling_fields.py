# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fields that change how tokens are drawn and where answers end, through OpenAI's client."""

import openai
import pytest

from jaxmoe.serve import Sampling
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.asked import read_completion
from jaxmoe.serve.http.served import Served
from tests.support.endpoint import Speller, Text, serving
from tests.support.serving import VOCAB, executor, serve

ASKED = {"model": "speller", "prompt": "a", "seed": 0}


def _client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model():
    """Client of a tiny model."""
    with serving(executor()) as (address, _, _), _client(address) as made:
        yield made


@pytest.fixture(scope="module")
def client():
    """Client of an endpoint whose texts end with the letter e."""
    with serving(eos_ids=(ord("e"),)) as (address, _, _), _client(address) as made:
        yield made


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.75},
        {"repetition_penalty": 1.7},
        {"logit_bias": {"4": 5, "6": -100}},
        {"min_tokens": 6, "stop_token_ids": [3, 4, 9, 11]},
        {"presence_penalty": None, "logit_bias": {}, "repetition_penalty": 1.0},
    ],
    ids=str,
)
def test_fields_of_the_sampling_reach_the_draws(model, fields):
    prompt = (3, 5, 5, 7)
    answer = model.completions.create(
        model="speller",
        prompt=list(prompt),
        temperature=0,
        max_tokens=12,
        seed=1,
        extra_body=fields | {"return_token_ids": True},
    )
    values = {name: value for name, value in fields.items() if value is not None}
    values["logit_bias"] = tuple((int(t), b) for t, b in values.get("logit_bias", {}).items())
    values["stop_ids"] = tuple(values.pop("stop_token_ids", ()))
    sampling = Sampling(temperature=0.0, max_tokens=12, seed=1, **values)
    served = serve({0: (prompt, sampling)}, {0: 0})
    assert answer.choices[0].token_ids == served.answers[0]
    assert answer.choices[0].finish_reason == served.reasons[0]


def test_equal_prompts_are_drawn_apart_unless_a_seed_is_given():
    with Engine(Speller(), codec=Text()) as engine:
        served = Served(name="speller", engine=engine, codec=Text())
        body = {"prompt": ["a", "b", "a"], "n": 2, "max_tokens": 1}
        for seed, stride in ((None, 2), (7, 0)):
            asked = read_completion(body | {"seed": seed}, served)
            first = asked.sampling.seed
            streams = engine.submit_all(asked.prompts, asked.sampling, asked.number, **asked.given)
            expected = [first + stride * place + j for place in range(3) for j in range(2)]
            assert [stream.request.sampling.seed for stream in streams] == expected
        assert first == 7


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "bcd", "stop"),
        ({"ignore_eos": True}, "bcdefghi", "length"),
        ({"stop_token_ids": [ord("c")]}, "b", "stop"),
        ({"stop_token_ids": [ord("g")], "ignore_eos": True}, "bcdef", "stop"),
        ({"include_stop_str_in_output": True}, "bcde", "stop"),
        ({"stop": ["cd"], "include_stop_str_in_output": True}, "bcd", "stop"),
        ({"stop": ["cd", "gh"], "min_tokens": 3, "ignore_eos": True}, "bcdef", "stop"),
    ],
    ids=str,
)
def test_where_an_answer_ends(client, fields, text, reason):
    """Whole and as a stream."""
    asked = ASKED | {"max_tokens": 8, "extra_body": fields}
    choice = client.completions.create(**asked).choices[0]
    assert (choice.text, choice.finish_reason) == (text, reason)
    parts = list(client.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].text for part in parts) == text


def test_a_chat_goes_on_behind_the_mark_of_its_template_where_asked_to():
    with serving(Speller(answer=b"hi<|im_end|>you")) as (address, _, _), _client(address) as client:
        asked = {"model": "speller", "messages": [{"role": "user", "content": "a"}]}
        whole = client.chat.completions.create(**asked, max_tokens=15)
        assert whole.choices[0].message.content == "hi"
        further = client.chat.completions.create(
            **asked, max_tokens=15, extra_body={"ignore_eos": True}
        )
        assert further.choices[0].message.content == "hi<|im_end|>you"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 3}, "presence_penalty=3 must be a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be a number from 0.001"),
        ({"logit_bias": {"a": 1}}, "logit_bias={'a': 1} must be an object of up to 300 token ids"),
        ({"logit_bias": {"1": 101}}, "with biases from -100 to 100"),
        ({"logit_bias": {"999": 1}}, "logit_bias names the ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "must be an object of up to 300 token ids"),
        ({"stop_token_ids": [2**31], "min_tokens": 1}, "stop_ids names the ids [2147483648]"),
        ({"stop_token_ids": [VOCAB]}, f"stop_ids names the ids [{VOCAB}]"),
        ({"stop_token_ids": ["a"]}, "must be a list of up to 128 token ids"),
        ({"stop_token_ids": [-1]}, "must be a list of up to 128 token ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 exceeds 8"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused_in_words(model, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        model.completions.create(model="speller", prompt=[1], extra_body=fields)
    assert message in caught.value.body["message"]
