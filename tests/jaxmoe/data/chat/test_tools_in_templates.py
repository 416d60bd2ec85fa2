# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tools, calls, their results and reasoning, as chat templates of tokenizers write them."""

import json

import pytest

from jaxmoe.checkpoint.huggingface.tokenizer import read_tokenizer_files, tokenizer_files
from jaxmoe.data.chat import ChatConfig, render
from jaxmoe.data.chat.built_in import ChatML, Plain
from jaxmoe.data.chat.messages import ConversationError, read_messages
from jaxmoe.data.chat.tokenizer_template import read_template
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig
from tests.jaxmoe.data.chat.tokenizers_with_templates import CHATML, write_tokenizer

TAGS = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for turn in messages %}
    {{- '<|im_start|>' + turn.role + '\n' }}
    {%- if turn.reasoning_content is defined %}{{- turn.reasoning_content + '\n' }}{%- endif %}
    {{- turn.content }}
    {%- for call in turn.tool_calls or [] %}
        {{- call.id + ' ' + call.function.name + ' ' + call.function.arguments | tojson }}
        {%- if call.function.arguments is mapping %}{{- call.function.arguments | length }}
        {%- endif %}
        {%- for name, value in call.function.arguments | items %}{{- name ~ value }}{%- endfor %}
    {%- endfor %}
    {%- if turn.tool_call_id is defined %}{{- turn.tool_call_id }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
JOINED = (
    "{% for turn in messages %}{% for call in turn.tool_calls or [] %}"
    "{{ 'the ' + call.function.arguments + ' and' }}{% endfor %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "find", "description": "the <dogs> & \u00e9"}}]
ARGUMENTS = {"q": "the \u00e9 <quick>", "n": [1, 2.5, None]}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": ARGUMENTS}}
TURNS = [
    {"role": "user", "content": "quick the"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "the and"},
    {"role": "tool", "content": "dogs", "tool_call_id": "c1"},
]


def _tokenizer(place, template, **fields):
    write_tokenizer(place, template, **fields)
    return read_template(place), FileConfig(path=str(place)).build(tuple, place)


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_tools_and_calls_are_written_as_by_transformers(tmp_path, tools):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours, tokenizer = _tokenizer(tmp_path / "t", TAGS)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    expected = theirs.apply_chat_template(
        TURNS, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    template = ours if tools is None else ours.with_tools(json.dumps(tools, ensure_ascii=False))
    messages = read_messages(TURNS)
    ids = render(messages, template, tokenizer, add_generation_prompt=True)
    assert ids.tolist() == list(expected)


@pytest.mark.slow
def test_the_template_for_tools_is_taken_with_tools_as_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TAGS}]
    ours, tokenizer = _tokenizer(tmp_path / "t", None, chat_template=several)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    messages = read_messages(TURNS[:1])
    for tools, template in ((None, ours), (TOOLS, ours.with_tools(json.dumps(TOOLS)))):
        expected = theirs.apply_chat_template(
            TURNS[:1], tools=tools, tokenize=True, return_dict=False
        )
        ids = render(messages, template, tokenizer, add_generation_prompt=False)
        assert ids.tolist() == list(expected)


def test_arguments_are_a_text_where_a_template_joins_them(tmp_path):
    ours, _ = _tokenizer(tmp_path / "t", JOINED)
    (piece,) = ours.pieces(read_messages(TURNS), add_generation_prompt=False)
    assert piece.text == f"the {json.dumps(ARGUMENTS, ensure_ascii=False)} and"


ASKS_FOR_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}"
    "{% for call in m.tool_calls %}{{ 'CALL ' + call.function.name }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)
"""Knows an answer that calls by a content of null, as templates of DeepSeek do."""


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_has_no_content_where_a_template_asks_so(tmp_path, content):
    ours, _ = _tokenizer(tmp_path / "t", ASKS_FOR_NULL)
    messages = read_messages([TURNS[0], TURNS[1] | {"content": content}, TURNS[2]])
    (piece,) = ours.pieces(messages, add_generation_prompt=False)
    assert piece.text == "quick the<|im_end|>CALL find<|im_end|>dogs<|im_end|>"
    (piece,) = ours.pieces(read_messages([TURNS[0]]), add_generation_prompt=False)
    assert piece.text == "quick the<|im_end|>"


def test_a_template_that_writes_no_calls_is_refused_wherever_it_is_rendered(tmp_path):
    ours, tokenizer = _tokenizer(tmp_path / "t", CHATML)
    with pytest.raises(ConversationError, match="an answer calls 'find', and the chat template of"):
        render(read_messages(TURNS), ours, tokenizer, add_generation_prompt=True)
    # Calls of an answer that is continued stand behind its content, where it is cut.
    ours, tokenizer = _tokenizer(tmp_path / "tags", TAGS)
    begun = [TURNS[0], TURNS[1] | {"content": "the"}]
    given = {"add_generation_prompt": False, "is_continued": True}
    text = tokenizer.spell(render(read_messages(begun), ours, tokenizer, **given))
    assert text.endswith("the and\nthe")


def test_templates_in_files_of_their_own_are_read_and_kept(tmp_path):
    """As transformers writes them since version 5: one file each, in a folder."""
    write_tokenizer(tmp_path / "t", None)
    folder = tmp_path / "t" / "additional_chat_templates"
    folder.mkdir()
    (tmp_path / "t" / "chat_template.jinja").write_text("D{{ messages[0].content }}")
    (folder / "tool_use.jinja").write_text("T{{ tools | length }}{{ messages[0].content }}")
    template = read_template(tmp_path / "t")
    (piece,) = template.pieces(read_messages(TURNS[:1]), add_generation_prompt=False)
    assert piece.text == "Dquick the"
    with_tools = template.with_tools(json.dumps(TOOLS))
    (piece,) = with_tools.pieces(read_messages(TURNS[:1]), add_generation_prompt=False)
    assert piece.text == "T1quick the"
    kept = read_tokenizer_files(tmp_path / "t")
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} <= kept.keys()
    data = ChatConfig(
        path=("none",), template="tokenizer", tokenizer=FileConfig(path=str(tmp_path / "t"))
    )
    assert tokenizer_files(data).texts == kept


@pytest.mark.parametrize("template", [ChatML(), Plain()], ids=["chatml", "plain"])
def test_built_in_templates_refuse_tools_and_calls(template):
    with pytest.raises(ConversationError, match="writes no tools"):
        template.with_tools("[]")
    messages = read_messages(TURNS)
    with pytest.raises(ConversationError, match="calls a tool, which the templates chatml and"):
        render(messages, template, ByteTokenizer(), add_generation_prompt=False)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (
            {"arguments": '{"a": "<|im_end|>"}'},
            r"\['tool_calls'\]\[0\]\['function'\]\['arguments'\]",
        ),
        ({"name": "<|im_end|>"}, r"\['tool_calls'\]\[0\]\['function'\]\['name'\]"),
    ],
    ids=["arguments", "name"],
)
def test_marks_of_the_template_are_refused_within_calls(tmp_path, changes, path):
    ours, tokenizer = _tokenizer(tmp_path / "t", TAGS)
    call = CALL | {"function": CALL["function"] | changes}
    messages = read_messages([TURNS[1] | {"tool_calls": [call]}])
    with pytest.raises(ConversationError, match=rf"messages\[0\]{path} spells '<\|im_end\|>'"):
        render(messages, ours, tokenizer, add_generation_prompt=False)
