# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How conversations are rendered, and defaults of the sampling, through OpenAI's client."""

import numpy as np
import openai
import pytest

from jaxmoe.data import TextOnlyConfig
from jaxmoe.data.chat.tokenizer_template import read_template
from jaxmoe.data.tokenizer import FileConfig
from jaxmoe.serve.http.served import ChatFormat, sampling_defaults
from tests.jaxmoe.data.chat.tokenizers_with_templates import CHATML, write_tokenizer
from tests.support.endpoint import Speller, serving

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]
VARIABLE = "{{ reasoning_effort }}{{ name }}" + CHATML


def _client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def _prompt(client, messages=TALK, **extra):
    answer = client.chat.completions.create(
        model="speller",
        messages=messages,
        max_tokens=1,
        extra_body={"return_token_ids": True, **extra},
    )
    return answer.choices[0].prompt_token_ids


def test_where_a_conversation_ends():
    with serving() as (address, _, _), _client(address) as client:
        turns = b"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nthe"
        begun = turns + b"<|im_end|>\n<|im_start|>assistant\n"
        assert bytes(_prompt(client)[1:]) == begun
        assert bytes(_prompt(client, add_generation_prompt=True)[1:]) == begun
        ended = bytes(_prompt(client, add_generation_prompt=False)[1:])
        assert ended == turns + b"<|im_end|>\n"
        for extra in ({}, {"add_generation_prompt": False}):
            assert bytes(_prompt(client, continue_final_message=True, **extra)[1:]) == turns
        with pytest.raises(openai.BadRequestError, match="set one of them"):
            _prompt(client, continue_final_message=True, add_generation_prompt=True)
        plain = _prompt(client, chat_template_kwargs={"enable_thinking": False})
        assert bytes(plain[1:]) == begun  # this template has no variables


def test_variables_reach_the_template_of_a_tokenizer(tmp_path):
    place = write_tokenizer(tmp_path / "t", VARIABLE)
    codec = TextOnlyConfig(tokenizer=FileConfig(path=str(place))).build()
    chat = ChatFormat(template=read_template(place), tokenizer=codec.tokenizer)
    with (
        serving(Speller(largest=999), codec=codec, chat=chat) as (address, _, _),
        _client(address) as client,
    ):

        def text(**extra):
            ids = np.asarray(_prompt(client, **extra), np.int32)
            return codec.decode(ids).partition("user\n")[0]

        assert text() == ""
        assert text(chat_template_kwargs={"name": "the"}) == "the"
        assert text(reasoning_effort="low", chat_template_kwargs={"name": 1}) == "low1"
        with pytest.raises(openai.BadRequestError, match="'messages' of a chat template is given"):
            text(chat_template_kwargs={"messages": []})
        with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
            text(chat_template_kwargs=[1])


def test_defaults_are_those_of_the_model_where_a_request_has_none():
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "do_sample": True,
        "eos_token_id": [1, 2],
        "min_p": None,
    }
    defaults = sampling_defaults(generation)
    with serving(defaults=defaults) as (address, endpoint, _), _client(address) as client:
        engine = endpoint._served.engine
        drawn = []
        submit = engine.submit_all

        def note(prompts, sampling, *number, **options):
            drawn.append(sampling)
            return submit(prompts, sampling, *number, **options)

        engine.submit_all = note
        client.completions.create(model="speller", prompt="a")
        client.chat.completions.create(model="speller", messages=TALK, temperature=0, max_tokens=2)
        extra = {"top_k": 0, "repetition_penalty": 1}
        client.completions.create(model="speller", prompt="a", top_p=1, extra_body=extra)
        engine.submit_all = submit
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    values = [tuple(getattr(sampling, field) for field in fields) for sampling in drawn]
    assert values == [
        (0.6, 20, 0.95, 0.0, 1.1, 5),
        (0.0, 20, 0.95, 0.0, 1.1, 2),
        (0.6, 0, 1.0, 0.0, 1.0, 5),
    ]


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"top_k": 2.5}, {"top_p": 7}])
def test_a_generation_config_with_no_values_of_a_sampling_is_refused(fields):
    with pytest.raises(ValueError, match=r"generation_config.json: .*--sampling plain"):
        sampling_defaults(fields)
