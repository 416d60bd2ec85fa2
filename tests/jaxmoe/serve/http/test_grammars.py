# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that follow a grammar, of a model that would write anything."""

import dataclasses
import functools
import json
import random
import re

import numpy as np
import openai
import pytest

from jaxmoe.data import TextOnlyConfig
from jaxmoe.serve import Sampling
from jaxmoe.serve.answers import Generated
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.grammars import Grammars
from jaxmoe.serve.plan import Shapes
from tests.support.endpoint import serving
from tests.support.serving import MODEL, params

CODEC = TextOnlyConfig().build()
GRAMMARS = Grammars(CODEC, CODEC.vocab_size, ())
PROMPT = tuple(b"answer:")


@functools.cache
def _executor(pages=64, length=128):
    model = dataclasses.replace(MODEL, vocab_size=CODEC.vocab_size)
    sizes = ExecutorConfig(
        num_pages=pages,
        page_size=8,
        shapes=Shapes(singles=4, pieces=((2, 8),)),
        context_lengths=(length,),
    )
    return ModelExecutor(model, params(model), config=sizes)


def _answers(samplings, executor=None):
    """Return tokens and end of the answer of each request, all served together."""
    with Engine(executor or _executor(), codec=CODEC) as engine:
        streams = [engine.submit(PROMPT, sampling) for sampling in samplings]
        events = [list(stream) for stream in streams]
        num_preempted = engine.metrics.num_preempted
    tokens = [[e.token for e in stream if isinstance(e, Generated)] for stream in events]
    return tokens, [stream[-1].reason for stream in events], num_preempted


def _text(tokens):
    return CODEC.decode(np.asarray(tokens, np.int32))


def _schema(rng, depth=2):
    """Return a schema whose values are short, and a function that tells its values."""
    kind = rng.choice(["enum", "boolean", "null", "string"] + ["object", "array"] * (depth > 0))
    if kind == "enum":
        values = rng.sample([1, 2, 30, "a", "b c", None, True], 3)
        return {"enum": values}, lambda value: any(_same(value, item) for item in values)
    if kind == "boolean":
        return {"type": "boolean"}, lambda value: isinstance(value, bool)
    if kind == "null":
        return {"type": "null"}, lambda value: value is None
    if kind == "string":
        return {"type": "string", "pattern": "^[a-c]{1,3}$"}, lambda value: bool(
            re.fullmatch("[a-c]{1,3}", value)
        )
    if kind == "array":
        inner, fits = _schema(rng, depth - 1)
        schema = {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
        return schema, lambda value: 1 <= len(value) <= 2 and all(map(fits, value))
    parts = {name: _schema(rng, depth - 1) for name in rng.sample("xyz", rng.randint(1, 2))}
    schema = {
        "type": "object",
        "properties": {name: part for name, (part, _) in parts.items()},
        "required": list(parts),
        "additionalProperties": False,
    }
    return (
        schema,
        lambda value: (
            value.keys() == parts.keys()
            and all(fits(value[name]) for name, (_, fits) in parts.items())
        ),
    )


def _same(left, right):
    return type(left) is type(right) and left == right


def test_answers_parse_and_fit_their_schemas_and_other_requests_are_as_alone():
    """Drawn schemas; the answers of a hot model, beside requests without a grammar.

    That model would write spaces alone, had it the choice.
    """
    rng = random.Random(0)
    cases = [_schema(rng) for _ in range(200)]
    base = Sampling(max_tokens=240, temperature=1.5, seed=7)
    followed = [
        dataclasses.replace(base, seed=number, grammar=GRAMMARS.schema(schema))
        for number, (schema, _) in enumerate(cases)
    ]
    plain = [dataclasses.replace(base, max_tokens=30, seed=seed) for seed in range(3)]
    executor = _executor(pages=128, length=256)
    tokens, reasons, _ = _answers([*followed[:20], *plain, *followed[20:]], executor)
    alone, _, _ = _answers(plain, executor)
    assert tokens[20:23] == alone
    answers = [*tokens[:20], *tokens[23:]]
    assert {*reasons[:20], *reasons[23:]} == {"stop"}
    for (schema, fits), answer in zip(cases, answers, strict=True):
        assert fits(json.loads(_text(answer))), (schema, _text(answer))


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_json_may_be_written_on_one_line_or_indented(indent):
    value = {"a": [1, {"b": "c d"}], "e": {"f": None}}
    matcher = GRAMMARS.schema({"type": "object"}).start()
    for byte in json.dumps(value, indent=indent).encode():
        assert matcher.mask()[byte // 32] >> (byte % 32) & 1, chr(byte)
        matcher.take(byte)
    assert matcher.is_done
    matcher = GRAMMARS.schema({"type": "object"}).start()
    matcher.take(ord("{"))
    matcher.take(ord(" "))
    assert not any(matcher.mask()[byte // 32] >> (byte % 32) & 1 for byte in b" \t\r\n")


def test_a_step_is_launched_before_the_last_is_fetched_with_grammars_and_penalties_too(monkeypatch):
    """The device has the logits of a step to compute when the host makes the mask of its draw."""
    executor = _executor()
    samplings = [
        Sampling(max_tokens=40, grammar=GRAMMARS.regex("[a-c]{39}-")),
        Sampling(max_tokens=40, frequency_penalty=1.0, presence_penalty=0.5, seed=1),
        Sampling(max_tokens=40, seed=2),
    ]
    alone = [_answers([sampling])[0][0] for sampling in samplings]
    num_launched, num_fetched, leads = 0, 0, []
    step, fetch = executor._step, executor._fetch

    def count_step(*arguments):
        nonlocal num_launched
        num_launched += 1
        return step(*arguments)

    def count_fetch(launched):
        nonlocal num_fetched
        num_fetched += 1
        leads.append(num_launched - num_fetched)
        return fetch(launched)

    monkeypatch.setattr(executor, "_step", count_step)
    monkeypatch.setattr(executor, "_fetch", count_fetch)
    tokens, reasons, _ = _answers(samplings, executor)
    assert tokens == alone and reasons == ["stop", "length", "length"]
    assert re.fullmatch("[a-c]{39}-", _text(tokens[0]))
    assert num_fetched == num_launched >= 40
    assert sum(lead == 1 for lead in leads) >= num_launched - 4, leads


def test_a_preempted_answer_goes_on_in_its_grammar():
    pattern = "[a-c]{20}-[0-9]{20}"
    samplings = [
        Sampling(max_tokens=60, seed=seed, grammar=GRAMMARS.regex(pattern)) for seed in range(4)
    ]
    tokens, reasons, num_preempted = _answers(samplings, _executor(pages=17))
    assert num_preempted and reasons == ["stop"] * 4
    assert all(re.fullmatch(pattern, _text(answer)) for answer in tokens)
    assert tokens == _answers(samplings)[0]


def test_a_grammar_ends_where_it_may_by_an_end_of_text():
    end = ord("!")
    grammar = Grammars(CODEC, CODEC.vocab_size, (end,)).regex("a+")
    bias = ((end, 50.0),)
    sampling = Sampling(max_tokens=9, grammar=grammar, stop_ids=(end,), logit_bias=bias)
    tokens, reasons, _ = _answers([sampling, dataclasses.replace(sampling, logit_bias=())])
    assert tokens[0] == [ord("a"), end] and reasons[0] == "stop"
    assert re.fullmatch("a+!?", _text(tokens[1]))


def test_an_end_that_is_also_text_does_not_end_an_answer_within():
    """As the end of some models is, a line or a letter; half of the letters are ends here."""
    ends = tuple(b"acegikmoqsuwy")
    grammar = Grammars(CODEC, CODEC.vocab_size, ends).schema({"type": "string", "maxLength": 9})
    samplings = [
        Sampling(max_tokens=60, seed=seed, grammar=grammar, stop_ids=ends) for seed in range(4)
    ]
    tokens, reasons, _ = _answers(samplings)
    assert reasons == ["stop"] * 4
    texts = [_text([token for token in answer if token not in ends]) for answer in tokens]
    assert all(isinstance(json.loads(text), str) for text in texts)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "()", "matches the empty text alone"),
        ("regex", "a{0}|b{0}", "matches the empty text alone"),
        ("regex", "[a&&b]", "matches no text"),
        ("schema", {"type": "thing"}, "Invalid type: thing"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(kind, value, message):
    with pytest.raises(ValueError, match=message):
        getattr(GRAMMARS, kind)(value)


def test_an_answer_may_be_empty_where_a_token_ends_it():
    grammar = Grammars(CODEC, CODEC.vocab_size, (10,)).regex("()")
    tokens, reasons, _ = _answers([Sampling(grammar=grammar, stop_ids=(10,)), Sampling()])
    assert (tokens[0], reasons[0]) == ([10], "stop")
    maybe = [Sampling(grammar=GRAMMARS.regex("a?"))]
    assert _answers(maybe)[:2] == ([[97]], ["stop"])


@pytest.fixture(scope="module")
def client():
    with (
        serving(_executor(), codec=CODEC, grammars=GRAMMARS) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "is_new": {"type": "boolean"}},
    "required": ["name", "is_new"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            }
        },
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA), "response_format": {"type": "text"}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    ],
    ids=[
        "response_format",
        "guided_json",
        "schema of json_object",
        "text of guided_json",
        "structured_outputs",
    ],
)
def test_a_schema_reaches_the_answer_of_a_chat(client, fields):
    answer = client.chat.completions.create(
        model="speller",
        messages=[{"role": "user", "content": "who?"}],
        max_tokens=80,
        extra_body=fields,
    )
    choice = answer.choices[0]
    value = json.loads(choice.message.content)
    assert value["name"] in ("Ada", "Bo") and isinstance(value["is_new"], bool)
    assert choice.finish_reason == "stop"


def test_expressions_choices_and_objects(client):
    def text(**fields):
        return (
            client.completions.create(
                model="speller", prompt="a", max_tokens=40, seed=3, extra_body=fields
            )
            .choices[0]
            .text
        )

    assert re.fullmatch("[xy]{5}z", text(guided_regex="[xy]{5}z"))
    texts = ['"quoted" \\ back', "\u00e9\n", "plain text"]
    answers = {text(guided_choice=texts, temperature=2) for _ in range(3)}
    assert answers <= {*texts}
    assert text(structured_outputs={"choice": ["only"]}) == "only"
    assert text(structured_outputs={"json_object": True}).startswith("{")
    assert text(response_format={"type": "json_object"}).startswith("{")
    stream = client.completions.create(
        model="speller",
        prompt="a",
        max_tokens=40,
        stream=True,
        n=2,
        extra_body={"guided_regex": "[xy]{5}z"},
    )
    parts = ["", ""]
    for part in stream:
        parts[part.choices[0].index] += part.choices[0].text
    assert all(re.fullmatch("[xy]{5}z", part) for part in parts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "("}, "guided_regex cannot be followed"),
        ({"guided_choice": ["a", 1]}, "must be a list of up to 1000 texts"),
        ({"guided_json": [1]}, "is no JSON schema"),
        ({"guided_json": "{"}, "guided_json cannot be followed"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "both give a grammar: send one"),
        ({"response_format": {"type": "xml"}}, "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "must have json_schema.schema"),
        ({"structured_outputs": {"grammar": "a"}}, "must have one of json, regex, choice"),
        ({"guided_grammar": "a"}, "guided_grammar='a' is not supported"),
    ],
    ids=str,
)
def test_what_gives_no_grammar_is_refused_in_words(client, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="speller", prompt="a", extra_body=fields)
    assert message in caught.value.body["message"]


def test_a_server_without_grammars_refuses_them():
    with (
        serving() as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
        pytest.raises(openai.BadRequestError, match="this server makes none"),
    ):
        client.completions.create(model="speller", prompt="a", extra_body={"guided_regex": "a"})
