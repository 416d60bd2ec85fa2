# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""/v1/responses through OpenAI's client: items, events, what maps onto a conversation."""

import itertools
import json

import openai
import pytest

from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.errors import HTTPError
from jaxmoe.serve.http.grammars import Grammars
from jaxmoe.serve.http.reasoning import ThinkTagsConfig
from jaxmoe.serve.http.responses import _SAME, _messages, read_response
from jaxmoe.serve.http.served import Served
from tests.jaxmoe.serve.http.test_agents import text_executor
from tests.jaxmoe.serve.http.test_tools import (
    ADD,
    CHAT,
    CODEC,
    END,
    FIND,
    FORM,
    HERMES,
    Long,
    _chance_client,
    _check_arguments,
    _tool,
)
from tests.support.endpoint import Speller, Text, serving

ANSWER = (
    '<think>so</think>I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "find", "arguments": {}}</tool_call> Done.'
)
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("add", "find")
]
BODY = {"model": "speller", "input": "hi", "max_output_tokens": len(ANSWER)}


@pytest.fixture(scope="module")
def client():
    options = {"chat": CHAT, "tool_parser": HERMES, "reasoning": ThinkTagsConfig()}
    speller = Long(answer=[*ANSWER.encode(), END])
    with (
        serving(speller, eos_ids=(END,), **options) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def _plain(response):
    """Return the fields of a response that do not differ between two."""
    items = []
    for item in response.output:
        fields = item.model_dump(exclude_none=True)
        assert fields.pop("id")
        fields.pop("call_id", None)
        items.append(fields)
    usage = (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens)
    return items, response.status, usage


def test_a_response_has_items_in_their_order(client):
    body = BODY | {"max_output_tokens": 300}
    response = client.responses.create(**body, tools=TOOLS, instructions="be short")
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    reasoning, message, first, second, last = response.output
    assert reasoning.content[0].text == "so" and message.content[0].text == "I add."
    assert (first.name, json.loads(first.arguments)) == ("add", {"a": 1})
    assert second.name == "find" and first.call_id != second.call_id
    assert last.content[0].text.strip() == "Done." and response.output_text.startswith("I add.")
    assert response.status == "completed" and response.error is None
    assert response.instructions == "be short" and len(response.tools) == 2
    assert response.usage.output_tokens == len(ANSWER) + 1
    text = client.responses.create(**body).output
    assert [item.type for item in text] == ["reasoning", "message"]
    assert text[1].content[0].text == ANSWER.partition("</think>")[2]


@pytest.mark.parametrize("limit", [300, 40, 3])
def test_events_join_to_the_whole_response(client, limit):
    body = BODY | {"max_output_tokens": limit, "tools": TOOLS}
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert _plain(events[-1].response) == _plain(whole)
    if limit == 40:
        assert whole.status == "incomplete"
        assert whole.incomplete_details.reason == "max_output_tokens"
    texts = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    for number, item in enumerate(whole.output):
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert texts.get(number, "") == text
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert len(added) == len(done) == len(whole.output)
    assert [event.item.id for event in added] == [event.item.id for event in done]
    if whole.status == "completed":  # the helper of the client waits for that
        with client.responses.stream(**body) as stream:
            assert _plain(stream.get_final_response())[1:] == _plain(whole)[1:]
            assert stream.get_final_response().output_text == whole.output_text


def test_items_become_messages():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    spoken = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    question = {"type": "message", "role": "user", "content": "q"}
    written = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    assert _messages([question, {"type": "reasoning"}, call, call, output]) == [
        question,
        {"role": "assistant", "content": "", "tool_calls": [written, written]},
        result,
    ]
    assert _messages([spoken, call]) == [{**spoken, "tool_calls": [written]}]
    assert _messages("q") == [{"role": "user", "content": "q"}]


def test_a_forced_function_and_a_format_follow_grammars():
    tools = [
        tool["function"] | {"type": "function"} for tool in (_tool("add", ADD), _tool("find", FIND))
    ]
    form = {"format": FORM["json_schema"] | {"type": "json_schema"}}
    body = BODY | {"max_output_tokens": 200}
    with (
        _chance_client(tool_parser=HERMES) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        find = {"type": "function", "name": "find"}
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [find]}
        body |= {"parallel_tool_calls": False}
        for choice in (find, allowed):
            (call,) = client.responses.create(**body, tools=tools, tool_choice=choice).output
            assert call.name == "find"
            _check_arguments("find", call.arguments)
        assert json.loads(client.responses.create(**body, text=form).output_text) in ("yes", 1)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"input": None}, "input must be a text, or a list of items", "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type='computer_call' is not", "input"),
        ({"input": [{"role": "dog", "content": ""}]}, "has the role 'dog'", "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type='web_search' is not", "tools"),
        ({"tool_choice": "required"}, "the request has no tools", "tool_choice"),
        ({"text": "x"}, "text must be an object with 'format'", "text"),
        ({"text": {"format": {"type": "xml"}}}, "must be text, json_object or", "text"),
        ({"text": {"verbosity": "high"}}, "how much a model writes is not set", "text"),
        ({"reasoning_effort": "low"}, "use reasoning.effort", "reasoning_effort"),
        ({"max_tokens": 3}, "use max_output_tokens", "max_tokens"),
        ({"stop": ["a"] * 17}, "stop", "stop"),
        ({"min_tokens": 999}, "min_tokens=999 exceeds", "min_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens=0 must be an integer", "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "nothing is stored: send all", "previous_response_id"),
    ],
    ids=str,
)
def test_what_a_response_cannot_be_made_of_is_refused_by_its_field(client, fields, message, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**BODY | {"extra_body": fields})
    assert message in caught.value.body["message"] and caught.value.param == param


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ITEMS = (
    {"type": "message", "role": "assistant", "content": "a", "tool_calls": []},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "3"},
    {"type": "reasoning", "summary": [], "content": []},
)


def test_a_member_of_any_type_is_taken_or_refused_in_words():
    with Engine(Speller(), codec=Text()) as engine:
        served = Served(name="speller", engine=engine, codec=CODEC, chat=CHAT, tool_parser=HERMES)
        refusals = list[str]()
        for item, value in itertools.product(ITEMS, (None, 3, True, "x", [], [1], [None], {})):
            for name in item:
                try:
                    read_response({"input": [{**item, name: value}, CALL]}, served)
                except HTTPError as error:
                    assert error.status == 400 and error.param == "input"
                    refusals.append(error.message)
        assert any("tool_calls=3 are no list" in message for message in refusals)
        body = {"input": [{**ITEMS[0], "tool_calls": None}, CALL]}
        assert read_response(body, served)[0].prompts


ENDS = [*"@ABCDEFGHIJKLMNO"]
SHARED = {
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.02},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 0.9},
    "seed": {"seed": 4},
    "presence_penalty": {"presence_penalty": -2},
    "frequency_penalty": {"frequency_penalty": 2},
    "repetition_penalty": {"repetition_penalty": 5},
    "logit_bias": {"logit_bias": {"65": 50}},
    "stop": {"stop": ENDS, "ignore_eos": True, "min_tokens": 2},
    "min_tokens": {"min_tokens": 2},
    "stop_token_ids": {"stop_token_ids": [*range(96)], "min_tokens": 2},
    "ignore_eos": {"ignore_eos": True, "min_tokens": 2},
    "include_stop_str_in_output": {
        "stop": ENDS,
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
    },
    "guided_json": {"guided_json": {"enum": [1, 2]}},
    "guided_regex": {"guided_regex": "(ab|ba){2}"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "structured_outputs": {"structured_outputs": {"choice": ["up", "down"]}},
    "chat_template_kwargs": {"chat_template_kwargs": {"begin": "so:"}},
}
"""Fields that a conversation has too, each with values that change an answer."""


@pytest.fixture(scope="module")
def model():
    """Client of a tiny model; half of its tokens end an answer."""
    ends = tuple(range(128, 256))
    options = {"eos_ids": ends, "grammars": Grammars(CODEC, CODEC.vocab_size, ends)}
    with (
        serving(text_executor(), codec=CODEC, chat=CHAT, **options) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize("name", SHARED)
def test_a_field_that_conversations_have_means_the_same(model, name):
    """Whole and as a stream; the text is another one than without the field."""

    def text(**fields):
        body = {"model": "speller", "input": "hi", "max_output_tokens": 24}
        extra = {"seed": 3, "min_tokens": 16, "temperature": 2.5} | fields
        whole = model.responses.create(**body, extra_body=extra).output_text
        events = model.responses.create(**body, extra_body=extra, stream=True)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole
        talk = [{"role": "user", "content": "hi"}]
        answer = model.chat.completions.create(
            model="speller", messages=talk, max_tokens=24, extra_body=extra
        )
        assert (answer.choices[0].message.content or "") == whole
        return whole

    less = {key: value for key, value in SHARED[name].items() if key != name}
    assert text(**SHARED[name]) != text(**less)


def test_each_field_that_conversations_have_is_tried():
    """Those that do not change the text of a plain answer have tests below and elsewhere."""
    further = {
        "model",
        "stream",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "include_reasoning",
        "user",
        "priority",
        "cache_salt",
    }
    assert {*SHARED} | further == {*_SAME} and not {*SHARED} & further


def test_reasoning_is_left_out_where_asked_to(client):
    body = BODY | {"max_output_tokens": 300, "extra_body": {"include_reasoning": False}}
    assert [item.type for item in client.responses.create(**body).output] == ["message"]
    kinds = {event.type for event in client.responses.create(**body, stream=True)}
    assert not any("reasoning" in kind for kind in kinds)


def test_session_priority_and_salt_reach_the_engine(client):
    prompt = "a long beginning of two prompts"

    def cached(**fields):
        response = client.responses.create(**BODY | {"input": prompt}, extra_body=fields)
        return response.usage.input_tokens_details.cached_tokens

    assert cached(cache_salt="x", user="me", priority=-3) == 0
    assert cached(cache_salt="x") > 0 and cached(cache_salt="y") == 0
    with pytest.raises(openai.BadRequestError, match="--has_priority"):
        cached(priority=1)
