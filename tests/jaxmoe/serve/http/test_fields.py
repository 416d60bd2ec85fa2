# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The table of fields that clients of OpenAI and vLLM send, each row through a client."""

import inspect
import logging

import httpx2 as httpx
import openai
import pytest

from jaxmoe.serve.http import table
from tests.support.endpoint import serving
from tests.support.source_tree import ROOT

TALK = [{"role": "user", "content": "hi"}]
BODIES = {
    "completions": {"model": "speller", "prompt": "a", "max_tokens": 2, "seed": 0},
    "chat/completions": {"model": "speller", "messages": TALK, "max_tokens": 2, "seed": 0},
    "embeddings": {"model": "speller", "input": "hi"},
    "responses": {"model": "speller", "input": "hi", "max_output_tokens": 2, "seed": 0},
}
REFUSED_VALUES = {"add_special_tokens": {"completions": False, "chat/completions": True}}
"""Values that ask for something, where 3 and "x" do not."""
ROWS = [(field, route) for field in table.FIELDS for route in field.routes]


@pytest.fixture(scope="module")
def client():
    with (
        serving() as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def _create(client, route, body):
    """Send a body through the official client, which passes its own fields and further ones on."""
    api = _api(client, route)
    needed = ("model", "prompt", "messages", "input")
    needed = {name: body[name] for name in BODIES[route] if name in needed}
    extra = {name: value for name, value in body.items() if name not in needed}
    return api.create(**needed, extra_body=extra)


def _api(client, route):
    apis = {
        "completions": client.completions,
        "chat/completions": client.chat.completions,
        "responses": client.responses,
        "embeddings": client.embeddings,
    }
    return apis[route]


def _text(answer):
    if hasattr(answer, "data"):
        return str(answer.data[0].embedding)
    if hasattr(answer, "output_text"):
        return answer.output_text
    choice = answer.choices[0]
    return choice.text if hasattr(choice, "text") else choice.message.content


def _ids(rows):
    return [f"{field.name}-{route.partition('/')[0]}" for field, route in rows]


_IGNORED = [row for row in ROWS if row[0].outcome == "ignored"]
_REFUSED = [row for row in ROWS if row[0].outcome == "refused"]


@pytest.mark.parametrize(("field", "route"), _IGNORED, ids=_ids(_IGNORED))
def test_an_ignored_field_changes_no_answer(client, field, route):
    plain = _text(_create(client, route, BODIES[route]))
    for value in (None, 3, "x", {"a": ["b"]}, True):
        assert _text(_create(client, route, BODIES[route] | {field.name: value})) == plain


@pytest.mark.parametrize(("field", "route"), _REFUSED, ids=_ids(_REFUSED))
def test_a_refused_field_is_named_and_taken_where_it_asks_for_nothing(client, field, route):
    body = BODIES[route]
    plain = _text(_create(client, route, body))
    for value in (None, *field.neutral):
        assert _text(_create(client, route, body | {field.name: value})) == plain
    asked = REFUSED_VALUES.get(field.name, {}).get(route, "surely not neutral")
    with pytest.raises(openai.BadRequestError, match=field.name) as caught:
        _create(client, route, body | {field.name: asked})
    assert caught.value.param == field.name and caught.value.code == "unsupported_field"
    assert field.text in caught.value.body["message"]


def test_every_parameter_of_the_official_client_has_a_row(client):
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for route in table.ROUTES:
        api = _api(client, route)
        names = {field.name for field in table.FIELDS if route in field.routes}
        assert inspect.signature(api.create).parameters.keys() - own <= names


def test_a_route_and_a_name_have_one_row():
    pairs = [(field.name, route) for field, route in ROWS]
    assert len(pairs) == len(set(pairs))


def test_the_page_has_the_table():
    page = (ROOT / "jaxmoe/serve/http/README.md").read_text(encoding="utf-8")
    assert table.markdown_table() in page


def test_unknown_fields_are_ignored_and_the_log_names_them_once(client, caplog):
    body = BODIES["completions"]
    plain = _text(_create(client, "completions", body))
    with caplog.at_level(logging.WARNING, "jaxmoe.serve.http.table"):
        for _ in range(2):
            extra = {"max_token": 1, "of_another_server": {"a": 1}}
            assert _text(_create(client, "completions", body | extra)) == plain
    named = [one.getMessage() for one in caplog.records]
    assert len(named) == 2 and "did you mean 'max_tokens'" in named[0]
    assert "'of_another_server' of requests is unknown and ignored" in named[1]


def test_a_field_of_another_route_is_refused_by_name(client):
    for route, name, value, other in (
        ("completions", "messages", TALK, "chat/completions"),
        ("chat/completions", "prompt", "a", "completions"),
        ("completions", "max_output_tokens", 3, "responses"),
        ("chat/completions", "instructions", "be short", "responses"),
        ("responses", "messages", TALK, "chat/completions"),
        ("responses", "suffix", "a", "completions"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{name} is a field of /v1/{other}"):
            _create(client, route, BODIES[route] | {name: value})
    for route, name, empty in (
        ("completions", "text", {}),
        ("chat/completions", "reasoning", {}),
        ("responses", "messages", []),
    ):
        assert _create(client, route, BODIES[route] | {name: empty})


def test_parts_of_text_and_the_role_developer_are_read():
    """The prompt is that of one text, and of the role system."""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    with (
        serving() as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):

        def prompt_of(messages):
            answer = client.chat.completions.create(
                model="speller",
                messages=messages,
                max_tokens=1,
                extra_body={"return_token_ids": True},
            )
            return bytes(answer.choices[0].prompt_token_ids)

        by_parts = prompt_of([{"role": "developer", "content": parts}, *TALK])
        assert by_parts == prompt_of([{"role": "system", "content": "h\ni"}, *TALK])
        assert b"system\nh\ni" in by_parts and b"developer" not in by_parts
        image = [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]
        with pytest.raises(openai.BadRequestError, match="models here read text alone"):
            prompt_of([{"role": "user", "content": image}])


def test_a_limit_above_the_room_is_clipped_to_it(client):
    """A prompt of 120 tokens leaves 8 of 128; one of 128 is refused."""
    for limit in (8, 9, 10**6, None):
        body = {"model": "speller", "prompt": "p" * 120, "max_tokens": limit, "seed": 0}
        choice = client.completions.create(**body).choices[0]
        assert (len(choice.text), choice.finish_reason) == (8, "length")
    several = client.completions.create(
        model="speller", prompt=["p" * 120, "p" * 100], max_tokens=50, seed=0
    )
    assert [len(choice.text) for choice in several.choices] == [8, 28]
    talk = client.chat.completions.create(model="speller", messages=TALK, max_tokens=999, seed=0)
    assert talk.usage.total_tokens == 128 and talk.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="shorten the prompt") as caught:
        client.completions.create(model="speller", prompt="p" * 128, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("route", BODIES)
def test_a_prompt_that_is_too_long_is_named_by_its_field(client, route):
    names = {"chat/completions": "messages", "completions": "prompt"}
    name = names.get(route, "input")
    text = "y" * 300
    value = [{"role": "user", "content": text}] if name == "messages" else text
    with pytest.raises(openai.BadRequestError, match="shorten the prompt") as caught:
        _create(client, route, BODIES[route] | {name: value})
    assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")


def test_options_of_a_stream(client):
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = {"model": "speller", "prompt": "abc", "max_tokens": 4, "seed": 0}
    parts = list(client.completions.create(**body, stream=True, stream_options=options))
    counts = [(part.usage.prompt_tokens, part.usage.completion_tokens) for part in parts]
    assert counts == [(3, 1), (3, 2), (3, 3), (3, 4), (3, 4), (3, 4)]
    plain = {"include_usage": True}
    parts = list(client.completions.create(**body, stream=True, stream_options=plain))
    assert [part.usage is None for part in parts] == [True] * 5 + [False]


def test_the_body_is_an_object(client):
    answer = httpx.post(f"{client.base_url}completions", content=b"[1]")
    assert answer.status_code == 400 and "must be a JSON object" in answer.text
