# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parsers of calls: what each family writes, what is no call, and answers cut anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.serve import ServeConfig
from jaxmoe.data.chat.built_in import ChatML
from jaxmoe.data.chat.tokenizer_template import TokenizerTemplate
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.run import serving
from jaxmoe.serve.http.messages import CallsFormat, MessageFormat, MessageStream, whole_message
from jaxmoe.serve.http.reasoning import NoReasoningConfig, ThinkTagsConfig
from jaxmoe.serve.http.served import ChatFormat
from jaxmoe.serve.http.tools import TOOL_PARSERS, fitting_parser

NAMES = ("add", "find-it")
PARSERS = {name: TOOL_PARSERS[name]() for name in TOOL_PARSERS}
BAR = "\uff5c"
BEGIN, END, CALL, CALL_END, SEP = (
    f"<{BAR}tool\u2581{words}{BAR}>"
    for words in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
FENCE = "```"
WRITTEN = {
    "hermes": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"arguments": {"t": "</tool_call>{"}, "name": "find-it"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [1, 2]}}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "find-it", "arguments": {"b":1}}]',
        '[TOOL_CALLS]find-it[ARGS]{"b": "]"}',
        '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}',
        '[TOOL_CALLS]add{"a": 1}',
    ],
    "llama3_json": [
        '{"name": "add", "parameters": {"a": "}"}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '; {"name": "find-it", "parameters": {}}',
    ],
    "deepseek_v3": [
        f'{BEGIN}{CALL}function{SEP}add\n{FENCE}json\n{{"a": 1}}\n{FENCE}{CALL_END}{END}',
        f'{CALL}function{SEP}find-it\n{FENCE}json\n{{"b": "{FENCE}"}}\n{FENCE}{CALL_END}',
        f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{CALL_END}{CALL}add{SEP}{{}}{CALL_END}{END}',
    ],
}
WRITTEN["deepseek_v31"] = WRITTEN["deepseek_v3"]
TEMPLATES = {
    "hermes": '{{ tools }}<tool_call>{\\"name\\": <name>, \\"arguments\\": <object>}</tool_call>',
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "llama3_json": '{{ tools }}{"name": name, "parameters": dictionary of argument name and value}',
    "deepseek_v3": f"{{{{ tools }}}}{BEGIN}{CALL}{FENCE}json",
    "deepseek_v31": f"{{{{ tools }}}}{BEGIN}{CALL}",
}


def _message(form, parts):
    """Return the message of an answer in parts, without the ids of its calls."""
    stream = MessageStream(form)
    for part in parts:
        stream.add(part, is_last=False)
    stream.add("", is_last=True)
    message = whole_message(stream.parts)
    for call in message.get("tool_calls", ()):
        assert call.pop("type") == "function" and call.pop("id")
    return message


def _form(name, *, reasoning=None, prompt="", **options):
    calls = CallsFormat(parser=PARSERS[name], names=NAMES, **options)
    return MessageFormat(reasoning=reasoning or NoReasoningConfig(), calls=calls, prompt=prompt)


def _calls(message):
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


EXPECTED = {
    "hermes": [("add", {"a": 1}), ("find-it", {"t": "</tool_call>{"}), ("add", {"a": 2})],
    "mistral": [("add", {"a": [1, 2]}), ("add", {}), ("find-it", {"b": 1})],
    "llama3_json": [("add", {"a": "}"}), ("add", {"a": 1}), ("find-it", {})],
    "deepseek_v3": [("add", {"a": 1}), ("find-it", {"b": FENCE}), ("add", {"a": 1})],
}
EXPECTED["hermes"] += [("add", {})]
EXPECTED["mistral"] += [("find-it", {"b": "]"}), ("add", {"a": 1}), ("add", {"a": 1})]
EXPECTED["deepseek_v3"] += [("add", {})]
EXPECTED["deepseek_v31"] = EXPECTED["deepseek_v3"]


def test_every_parser_has_a_row():
    assert WRITTEN.keys() == EXPECTED.keys() == TEMPLATES.keys() == {*TOOL_PARSERS}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_a_family_are_read_whatever_is_between(name):
    message = _message(_form(name), ["\n".join(WRITTEN[name]) + "\n"])
    assert _calls(message) == EXPECTED[name] and message["content"] is None
    if name != "llama3_json":
        message = _message(_form(name), ["I look. " + " so, ".join(WRITTEN[name]) + " Done. "])
        assert _calls(message) == EXPECTED[name]
        number = len(WRITTEN[name])
        assert message["content"] == "I look. " + " so, " * (number - 1) + " Done."


def test_arguments_are_the_text_of_the_model():
    text = '<tool_call>{"name": "add", "arguments": {"a":1.0,  "b": "\\u00e9"}}</tool_call>'
    (call,) = _message(_form("hermes"), [text])["tool_calls"]
    assert call["function"]["arguments"] == '{"a":1.0,  "b": "\\u00e9"}'


BROKEN = {
    "hermes": [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": nope}}</tool_call>',
        "<tool_call> add(1) </tool_call>",
        '<tool_call>{"name": "add"',
        "<tool_ca",
    ],
    "mistral": ["[TOOL_CALLS] []", '[TOOL_CALLS] [{"name": "add"]', "[TOOL_CALLS] add", "[TOOL_"],
    "llama3_json": ['{"name": "add"', '{"answer": 1}', "<|python_tag|>print(1)", "<|py", "{"],
    "deepseek_v3": [
        f"{BEGIN}{CALL}function{SEP}add\n{FENCE}json\n[1]\n{FENCE}{CALL_END}{END}",
        f"{BEGIN}no{END}",
        f"{BEGIN}{CALL}function{SEP}ad",
        BEGIN,
    ],
}
BROKEN["deepseek_v31"] = BROKEN["deepseek_v3"]


@pytest.mark.parametrize("name", BROKEN)
def test_what_looks_like_a_call_and_is_none_stays_text(name):
    for text in BROKEN[name]:
        for around in ("", " \n"):
            whole = f"{around}{text}{around}"
            assert _message(_form(name), [whole]) == {"content": whole}


def test_a_call_after_a_broken_one_is_read():
    broken = BROKEN["hermes"][0]
    message = _message(_form("hermes"), [broken + WRITTEN["hermes"][0]])
    assert message["content"] == broken and _calls(message) == [("add", {"a": 1})]


def test_an_answer_that_is_cut_off_behind_its_arguments_is_a_call():
    text = WRITTEN["hermes"][0]
    for end in ("\n</tool_call>", "</tool_call>", "_call>"):
        assert _calls(_message(_form("hermes"), [text.removesuffix(end)])) == [("add", {"a": 1})]


def test_without_parallel_calls_the_first_is_taken():
    form = _form("hermes", is_parallel=False)
    message = _message(form, [WRITTEN["hermes"][0] * 3 + "end"])
    assert _calls(message) == [("add", {"a": 1})] and message["content"] == "end"


def _answers(name):
    """Return a strategy of answers: texts, calls, broken calls, and pieces of either."""
    whole = st.sampled_from([*WRITTEN[name], *BROKEN[name]])
    piece = st.builds(lambda text, size: text[: size % (len(text) + 1)], whole, st.integers(0, 99))
    space = st.sampled_from(["", " ", "\n\n", "; "])
    text = st.text('ab{}[]"\\<>:, \n\u00e9', max_size=8)
    tags = st.sampled_from(["<think>", "</think>", "<thin", "</th"])
    return st.lists(st.one_of(whole, whole, piece, space, text, tags), max_size=5).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_cut_of_a_stream_gives_the_message_of_the_whole(name, data):
    answer = data.draw(_answers(name))
    reasoning = data.draw(st.sampled_from([NoReasoningConfig(), ThinkTagsConfig()]))
    prompt = data.draw(st.sampled_from(["", "<think>\n", "</think>\n\n"]))
    form = _form(name, reasoning=reasoning, prompt=prompt, is_spelled=data.draw(st.booleans()))
    whole = _message(form, [answer])
    if whole.keys() == {"content"} and isinstance(reasoning, NoReasoningConfig):
        assert whole["content"] == answer
    assert _message(form, list(answer)) == whole
    for place in range(len(answer) + 1):
        assert _message(form, [answer[:place], answer[place:]]) == whole, place
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=20))
    parts = []
    start = 0
    for size in sizes:
        parts.append(answer[start : start + size])
        start += size
    assert _message(form, [*parts, answer[start:]]) == whole


@pytest.mark.parametrize("name", PARSERS)
def test_what_a_grammar_spells_is_read_by_both_streams(name):
    spelling = PARSERS[name].spelling
    calls = [("add", '{"a": "}{\\""}'), ("find-it", "{}"), ("add", '{"a": [{"b": 1}]}')]
    written = [
        spelling.before_arguments(function) + text + spelling.after for function, text in calls
    ]
    text = spelling.begin + spelling.between.join(written) + spelling.end
    for is_spelled in (False, True):
        message = _message(_form(name, is_spelled=is_spelled), [text])
        functions = [call["function"] for call in message["tool_calls"]]
        assert [(one["name"], one["arguments"]) for one in functions] == calls
        assert message["content"] is None
    stop = text.index("}{")
    cut = _message(_form(name, is_spelled=True), [text[:stop]])
    assert cut["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": "'}
    assert _message(_form(name, is_spelled=True), [text[:5]]) == {"content": text[:5]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_parser_fits_the_marks_of_a_template(name):
    template = TokenizerTemplate(TEMPLATES[name], (), "here")
    assert fitting_parser(template) == PARSERS[name]


@pytest.mark.parametrize(
    "source",
    ["{{ messages }}", "{{ tools }}", "{{ tools }}<tool_call><function=name> arguments", ""],
)
def test_no_parser_fits_a_template_with_other_marks(source):
    assert fitting_parser(TokenizerTemplate(source, (), "here")) is None


def test_a_server_takes_the_parser_that_it_is_told_of_or_that_fits():
    template = TokenizerTemplate(TEMPLATES["mistral"], (), "here")
    chat = ChatFormat(template=template, tokenizer=ByteTokenizer())
    names = {"auto": "mistral", "hermes": "hermes"}
    for name, expected in names.items():
        assert serving._tool_parser(name, chat) == PARSERS[expected]
    assert serving._tool_parser("none", chat) is None is serving._tool_parser("auto", None)
    plain = ChatFormat(template=ChatML(), tokenizer=ByteTokenizer())
    assert serving._tool_parser("auto", plain) is None
    for kind in ("tool_parser", "reasoning_parser"):
        for config in (serving.ServedCheckpoint, ServeConfig):
            path = {"path": "x"} if config is serving.ServedCheckpoint else {}
            with pytest.raises(ValueError, match=f"{kind} .*'hermez'"):
                config(**path, **{kind: "hermez"})
