# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations that end within their last message, and variables of templates."""

import json

import pytest

from jaxmoe.data.chat import render
from jaxmoe.data.chat.built_in import ChatML, Plain
from jaxmoe.data.chat.messages import ConversationError, Message
from jaxmoe.data.chat.tokenizer_template import read_template
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig
from tests.jaxmoe.data.chat.tokenizers_with_templates import CHATML, LLAMA, write_tokenizer

VARIABLE = (
    "{% if enable_thinking is defined and not enable_thinking %}<|im_end|>{% endif %}" + CHATML
)
TURNS = (Message("user", "quick the"), Message("assistant", "the and "))


def _tokenizer(place, template):
    write_tokenizer(place, template)
    return read_template(place), FileConfig(path=str(place)).build(tuple, place)


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "trims"])
@pytest.mark.parametrize("content", ["the and", "the and ", " the\n", "quick the"])
def test_a_message_is_continued_as_by_transformers(tmp_path, template, content):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours, tokenizer = _tokenizer(tmp_path / "t", template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    messages = (TURNS[0], Message("assistant", content))
    expected = theirs.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        continue_final_message=True,
        tokenize=True,
        return_dict=False,
    )
    ids = render(messages, ours, tokenizer, add_generation_prompt=False, is_continued=True)
    assert ids.tolist() == list(expected)


@pytest.mark.parametrize("template", [ChatML(), Plain()], ids=["chatml", "plain"])
def test_a_continued_message_ends_with_its_content(template):
    tokenizer = ByteTokenizer()
    ids = render(TURNS, template, tokenizer, add_generation_prompt=False, is_continued=True)
    whole = render(TURNS, template, tokenizer, add_generation_prompt=False)
    assert bytes(ids[1:].tolist()).endswith(b"\nthe and ")
    assert ids.tolist() == whole[: len(ids)].tolist()


@pytest.mark.slow
def test_variables_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours, tokenizer = _tokenizer(tmp_path / "t", VARIABLE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    turns = [{"role": message.role, "content": message.content} for message in TURNS]
    for values in ({}, {"enable_thinking": False}, {"enable_thinking": True, "other": [1]}):
        expected = theirs.apply_chat_template(turns, tokenize=True, return_dict=False, **values)
        ids = render(TURNS, ours.with_variables(values), tokenizer, add_generation_prompt=False)
        assert ids.tolist() == list(expected)
    assert json.loads(ours.with_variables({"b": 1, "a": 2}).variables) == {"a": 2, "b": 1}
    with pytest.raises(ConversationError, match="'messages' of a chat template is given by"):
        ours.with_variables({"messages": []})
    assert ChatML().with_variables({"enable_thinking": False}) == ChatML()


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it(tmp_path):
    ours, tokenizer = _tokenizer(tmp_path / "t", "{{ messages[0].content }}")
    with pytest.raises(ConversationError, match="does not write the content of the last message"):
        render(TURNS, ours, tokenizer, add_generation_prompt=False, is_continued=True)
