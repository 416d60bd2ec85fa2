# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tools of /v1/chat/completions through OpenAI's client: prompts, calls, grammars, refusals."""

import dataclasses
import json
import random
import re

import httpx2 as httpx
import numpy as np
import openai
import pytest

from jaxmoe.data import TextOnlyConfig
from jaxmoe.data.chat.tokenizer_template import TokenizerTemplate
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.serve.device.matchers import Matchers
from jaxmoe.serve.http.fields import BodyFields
from jaxmoe.serve.http.grammars import Grammars
from jaxmoe.serve.http.marks import MarkedCodec, with_marks
from jaxmoe.serve.http.reasoning import ThinkTagsConfig
from jaxmoe.serve.http.served import ChatFormat
from jaxmoe.serve.http.tools import TOOL_PARSERS
from jaxmoe.serve.http.tools.request import read_tools
from jaxmoe.serve.requests import Result
from tests.support.endpoint import Speller, serving

SOURCE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}:{% endif %}"
    "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{{ call.id }}={{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{{ call.function.arguments + '' }}{% endfor %}"
    "{{ turn.tool_call_id or '' }}{{ turn.reasoning_content or '' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ begin }}{% endif %}"
)
CHAT = ChatFormat(template=TokenizerTemplate(SOURCE, (), "here"), tokenizer=ByteTokenizer())
HERMES = TOOL_PARSERS["hermes"]()
TALK = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FIND = {
    "type": "object",
    "properties": {"t": {"type": "string", "pattern": "^[x-z]{1,3}$"}},
    "required": ["t"],
    "additionalProperties": False,
}


def _tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool("add", ADD), _tool("find", FIND)]
ANSWER = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
)
BODY = {"model": "speller", "messages": TALK, "max_tokens": 127, "stop": ["!"]}


@pytest.fixture(scope="module")
def client():
    answer = (ANSWER + "!").encode()
    with (
        _long(Speller(answer=answer)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


class Long(Speller):
    """A speller with room for long answers."""

    def facts(self, *, max_waiting):
        """Return sizes of an instance that holds 1,024 tokens of a request."""
        facts = super().facts(max_waiting=max_waiting)
        return dataclasses.replace(facts, num_pages=512, max_length=1024)


def _long(speller, **options):
    executor = Long(answer=speller.answer)
    served = {"chat": CHAT, "tool_parser": HERMES} | options
    return _address(serving(executor, **served))


class _address:
    """Yields the address alone."""

    def __init__(self, server):
        self._server = server

    def __enter__(self):
        return self._server.__enter__()[0]

    def __exit__(self, *error):
        return self._server.__exit__(*error)


def _joined(stream):
    """Return the message of a stream, and the reason of its end."""
    content = ""
    calls = []
    reasons = []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id and part.type == "function" and part.function.name
                calls.append([part.id, part.function.name, ""])
            else:
                assert part.id is None and part.function.name is None
            calls[part.index][2] += part.function.arguments
    assert len(reasons) == 1
    return content, calls, reasons[0]


BODY["max_tokens"] = 400


def test_calls_of_an_answer_whole_and_as_a_stream(client):
    choice = client.chat.completions.create(**BODY, tools=TOOLS).choices[0]
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["add", "find"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}, {}]
    assert {call.type for call in calls} == {"function"} and calls[0].id != calls[1].id
    assert choice.message.content == "I add." and choice.finish_reason == "tool_calls"
    content, streamed, reason = _joined(
        client.chat.completions.create(**BODY, tools=TOOLS, stream=True)
    )
    assert (content, reason) == ("I add.", "tool_calls")
    assert [(name, text) for _, name, text in streamed] == [("add", '{"a": 1}'), ("find", "{}")]
    with client.chat.completions.stream(**BODY, tools=TOOLS) as events:
        message = events.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["add", "find"]


def test_without_tools_an_answer_is_text(client):
    for fields in (
        {},
        {"tools": []},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "auto"},
    ):
        choice = client.chat.completions.create(**BODY, **fields).choices[0]
        assert choice.message.content == ANSWER and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None


def test_one_call_without_parallel_calls_and_the_length_stays_the_reason(client):
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    message = client.chat.completions.create(**BODY, **fields).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["add"]
    choice = client.chat.completions.create(**BODY | {"max_tokens": 80}, tools=TOOLS).choices[0]
    assert choice.finish_reason == "length" and choice.message.content.startswith("I add.")


def test_log_probabilities_and_ids_of_a_stream_with_calls_are_those_of_the_whole(client):
    fields = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**BODY, **fields).choices[0]
    parts = [
        chunk.choices[0] for chunk in client.chat.completions.create(**BODY, **fields, stream=True)
    ]
    ids = [token for part in parts for token in part.token_ids]
    assert ids == whole.token_ids == list((ANSWER + "!").encode())
    tokens = [entry.token for part in parts for entry in part.logprobs.content]
    assert tokens == [entry.token for entry in whole.logprobs.content]


def _prompt(client, messages, **fields):
    fields = {"max_tokens": 1, "extra_body": {"return_token_ids": True}} | fields
    answer = client.chat.completions.create(model="speller", messages=messages, **fields)
    return bytes(answer.choices[0].prompt_token_ids).decode()


def test_tools_calls_and_their_results_reach_the_template(client):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    turns = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    written = '[user]hi[assistant]c1=add{"a": 1}{"a": 1}hm[tool]3c1[a]'
    assert _prompt(client, turns) == written
    assert _prompt(client, turns, tools=TOOLS) == "add,find:" + written
    assert _prompt(client, turns, tools=TOOLS, tool_choice="none") == written
    call["function"]["arguments"] = ""
    assert "c1=add{}{}" in _prompt(client, turns)
    address = str(client.base_url).removesuffix("/v1/")
    body = {"messages": TALK, "tools": TOOLS}
    tokens = httpx.post(f"{address}/tokenize", json=body).json()["tokens"]
    assert bytes(tokens).decode() == "add,find:[user]hi[a]"


def _call(**fields):
    function = {"name": "add", "arguments": "{}"} | fields.pop("function", {})
    call = {"id": "c", "type": "function", "function": function} | fields
    return [*TALK, {"role": "assistant", "tool_calls": [call]}]


def _allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools must be a list of functions, found dict"),
        ({"tools": [1]}, "tools[0] must be an object {'type': 'function'"),
        ({"tools": [{"type": "custom"}]}, "tools[0] must be an object {'type': 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function must be an object"),
        ({"tools": [_tool("a b")]}, "tools[0].function.name='a b' must be up to 64 letters"),
        ({"tools": [_tool("f", 3)]}, "tools[0].function.parameters=3 must be a JSON schema"),
        ({"tools": [_tool("f", {"type": "array"})]}, "must be a JSON schema of an object"),
        ({"tools": [_tool("f"), _tool("f")]}, "tools[1].function.name='f' is the name of tools[0]"),
        ({"tools": [_tool(f"f{n}") for n in range(129)]}, "at most 128 are taken"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice='any' must be none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function"}},
            "tool_choice.function.name must be",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name='g' is none of the tools: 'add', 'find'",
        ),
        (
            {"tools": TOOLS, "tool_choice": _allowed("auto", "find", "g")},
            "tool_choice.allowed_tools.tools[1].function.name='g' is none of the tools: 'add'",
        ),
        ({"tools": TOOLS, "tool_choice": _allowed("any", "find")}, "mode='any' must be auto or"),
        ({"tools": TOOLS, "tool_choice": _allowed("auto")}, "must be a list of functions, at"),
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls=1 must be true or false"),
        ({"tools": TOOLS, "tool_choice": "required"}, "this server makes none"),
        ({"functions": [1]}, "use tools"),
        (
            {"messages": _call(function={"arguments": "{"})},
            "messages[1]['tool_calls'][0]['function']['arguments'] is no JSON",
        ),
        ({"messages": _call(function={"arguments": "[]"})}, "must be a JSON object, or its text"),
        ({"messages": _call(function={"name": None})}, "['function']['name'] must be a text"),
        ({"messages": _call(type="custom")}, "messages[1]['tool_calls'][0] must be an object"),
        ({"messages": [TALK[0] | {"tool_calls": [{}]}]}, "is a field of messages of the role"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "must be a list of calls"),
        ({"messages": [{"role": "assistant"}]}, "has no field 'content'"),
    ],
    ids=str,
)
def test_what_is_no_tool_is_refused_with_its_path(client, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**BODY | {"extra_body": fields})
    assert message in caught.value.body["message"]
    param = message.partition("[")[0].partition(".")[0].partition("=")[0].partition(" ")[0]
    assert param not in fields or caught.value.param == param


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_parser": None}, "start the server with --tool_parser, one of hermes, mistral"),
        ({"chat": None}, "tools: the template 'chatml' writes no tools"),
        (
            {"chat": dataclasses.replace(CHAT, template=TokenizerTemplate("x", (), "here"))},
            "tools: the chat template of here writes no tools",
        ),
    ],
    ids=["no parser", "chatml", "no tools"],
)
def test_a_server_that_cannot_call_tools_says_so_and_takes_none(options, message):
    with (
        _long(Speller(answer=b"a"), **options) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        body = BODY | {"max_tokens": 9}
        client.chat.completions.create(**body, tools=TOOLS, tool_choice="none")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body, tools=TOOLS)
        assert message.lower() in caught.value.body["message"].lower()
        assert caught.value.param == "tools"


END = ord("!")
FORM = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": ["yes", 1]}}}
CODEC = TextOnlyConfig().build()
GRAMMARS = Grammars(CODEC, CODEC.vocab_size, (END,))


class Chance(Long):
    """Draws any printable character that the grammar of a request allows, and ends where it may."""

    def __init__(self):
        super().__init__()
        self.matchers = Matchers(4)

    def run(self, step):
        """Return a draw for each request."""
        drawn = {}
        for work in (*step.singles, *step.pieces):
            if not work.draws:
                continue
            mask = self.matchers.mask(work)
            mask = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = [byte for byte in (10, *range(32, 127)) if mask[byte]]
            allowed = allowed or [byte for byte in range(256) if mask[byte]]
            is_free = len(allowed) > 90
            rng = random.Random(work.sampling.seed * 1000 + work.index)
            token = END if mask[END] and not is_free else rng.choice(allowed)
            token = ord("x") if token == END and is_free else token
            drawn[work.id] = self.matchers.ending(work, Result(token))
        return drawn


def _chance_client(**options):
    served = {"codec": CODEC, "grammars": GRAMMARS, "chat": CHAT, "eos_ids": (END,)} | options
    return _address(serving(Chance(), **served))


def _check_arguments(name, text):
    value = json.loads(text)
    if name == "add":
        assert value.keys() == {"a", "b"} and value["a"] in (1, 2) and isinstance(value["b"], bool)
    else:
        assert value.keys() == {"t"} and re.fullmatch("[x-z]{1,3}", value["t"])


def test_allowed_tools_may_be_called_and_all_are_described():
    body = {"tools": TOOLS, "tool_choice": _allowed("auto", "find", "find")}
    tools = read_tools(BodyFields(body, body))
    assert tools.names == ("find",) and not tools.is_required
    assert [tool["function"]["name"] for tool in json.loads(tools.text)] == ["add", "find"]


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_required_call_is_one_and_fits_its_schema(name):
    """Whole and as a stream, of a model that would write anything."""
    named = {"type": "function", "function": {"name": "find"}}
    with (
        _chance_client(tool_parser=TOOL_PARSERS[name]()) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for fields in (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "required"},
            {"tool_choice": named},
            {"tool_choice": _allowed("required", "find"), "parallel_tool_calls": False},
        ):
            body = BODY | {"tools": TOOLS, "seed": 3, "temperature": 1.5, "stop": None} | fields
            choice = client.chat.completions.create(**body).choices[0]
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert call.function.name in ("add", "find")
            _check_arguments(call.function.name, call.function.arguments)
            assert fields["tool_choice"] == "required" or call.function.name == "find"
            stream = client.chat.completions.create(**body, stream=True)
            content, ((_, called, text),), reason = _joined(stream)
            assert (content, reason) == ("", "tool_calls")
            assert (called, text) == (call.function.name, call.function.arguments)


def test_grammars_of_calls_join_others():
    """A format of the content, or calls."""
    body = BODY | {"tools": TOOLS, "stop": None}
    kinds = set()
    with (
        _chance_client(tool_parser=HERMES) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for seed in range(9):
            choice = client.chat.completions.create(
                **body, seed=seed, response_format=FORM
            ).choices[0]
            if choice.message.tool_calls:
                (call,) = choice.message.tool_calls
                _check_arguments(call.function.name, call.function.arguments)
            else:
                assert json.loads(choice.message.content) in ("yes", 1)
            kinds.add(bool(choice.message.tool_calls))
        assert kinds == {True, False}
        with pytest.raises(openai.BadRequestError, match="both say what the answer is made of"):
            client.chat.completions.create(**body, tool_choice="required", response_format=FORM)
        broken = [_tool("f", {"type": "object", "properties": {"a": {"type": "thing"}}})]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body | {"tools": broken}, tool_choice="required")
        assert "tools[0].function.parameters cannot be followed: " in caught.value.body["message"]
        assert caught.value.param == "tools"


def test_arguments_that_a_function_does_not_name_are_not_written():
    """Unless its schema allows them; also within the objects and lists of its arguments."""
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    closed = {
        "type": "object",
        "properties": {"one": inner, "each": {"type": "array", "items": inner}},
    }

    def behind(schema, text):
        spelling = HERMES.spelling
        grammar = GRAMMARS.calls(spelling, {"f": schema}, is_parallel=False)
        return _take(grammar.start(), f"{spelling.begin}{spelling.before_arguments('f')}{text}")

    for text, begins in (('{"', {"o", "e"}), ('{"one": {"', {"x"}), ('{"each": [{"', {"x"})):
        assert behind(closed, text) == begins
    free = closed | {"additionalProperties": {"type": "null"}}
    composed = {"allOf": [closed], "properties": {"y": {}}}
    needing = closed | {"required": ["z"]}
    for schema in (free, composed, needing):
        assert "z" in behind(schema, '{"')


def _take(matcher, text):
    for byte in text.encode():
        assert matcher.mask()[byte // 32] >> (byte % 32) & 1, chr(byte)
        matcher.take(byte)
    mask = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return {chr(byte) for byte in range(256) if mask[byte]}


@pytest.mark.parametrize(("prompt", "begin"), [("<think>\n", ""), ("", "<think>")])
def test_a_grammar_begins_behind_the_reasoning(prompt, begin):
    """Thoughts are free, and what follows them is not."""
    rules = ThinkTagsConfig().lark(prompt)
    calls = GRAMMARS.calls(HERMES.spelling, {"add": ADD}, is_parallel=False)
    for other, text, ends in (
        (GRAMMARS.regex("a+"), "aa", {"a", "!"}),
        (GRAMMARS.schema({"const": "b"}), '"b"', {"!"}),
        (calls, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": ', {"t", "f"}),
    ):
        joined = GRAMMARS.behind(rules, other).start()
        assert _take(joined, f"{begin}so <b> </th it </think>\n\n{text}") in (ends, set())
    assert begin == "" or _take(GRAMMARS.behind(rules, other).start(), "<") >= {"t"}


def test_the_content_of_a_server_follows_a_grammar_behind_the_reasoning():
    body = BODY | {"max_tokens": 60, "stop": None, "response_format": FORM}
    with (
        _chance_client(reasoning=ThinkTagsConfig()) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for begin in ("<think>", "<think></think>"):
            extra = {"chat_template_kwargs": {"begin": begin}}
            choice = client.chat.completions.create(**body, seed=1, extra_body=extra).choices[0]
            if "</" in begin:
                assert json.loads(choice.message.content) in ("yes", 1)
            else:
                assert choice.message.content is None and choice.finish_reason == "length"
                assert len(choice.message.reasoning_content) > 30


class Hidden(ByteTokenizer):
    """Bytes, of which some are special tokens without a text."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(int(token) for token in tokens if token > 9).decode()

    def token_bytes(self, token, *, is_first=False):
        return self.decode([token]).encode()

    def encode_controls(self, text):
        return [1] if text == "[TOOL_CALLS]" else [2] if text == "[ARGS]" else self.encode(text)


def test_marks_that_are_special_tokens_are_shown_to_parsers():
    codec = with_marks(Hidden(), Hidden(), TOOL_PARSERS["mistral"].marks)
    assert codec.decode([1, *b"add", 2, *b"{}", 3]) == "[TOOL_CALLS]add[ARGS]{}"
    assert codec.token_bytes(2) == b"[ARGS]" and codec.token_bytes(65) == b"A"
    assert isinstance(codec, MarkedCodec) and codec.encode("a") == [97]
    assert with_marks(CODEC, ByteTokenizer(), HERMES.marks) is CODEC
    answer = [1, *b"add", 2, *b"{}", *b"!"]
    with (
        _long(
            Speller(answer=answer), codec=codec, tool_parser=TOOL_PARSERS["mistral"]()
        ) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (call,) = client.chat.completions.create(**BODY, tools=TOOLS).choices[0].message.tool_calls
        assert call.function.name == "add" and re.fullmatch("[0-9a-zA-Z]{9}", call.id)
