# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Templates of the published families: ids as of transformers, answers that are trained, ends."""

import datetime
import json

import numpy as np
import pytest

from jaxmoe.checkpoint.huggingface.tokenizer import byte_tokenizer
from jaxmoe.data import ChatConfig, DataError
from jaxmoe.data.chat import mask_conversation, render, stop_sequences
from jaxmoe.data.chat.messages import read_messages
from jaxmoe.data.chat.render import PrefixError, mask_answers
from jaxmoe.data.chat.tokenizer_template import read_template
from jaxmoe.data.tokenizer import FileConfig
from tests.jaxmoe.data.chat.family_templates import FAMILIES

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOL = {
    "name": "weather",
    "description": "of <b> & \u00e9",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
ARGUMENTS = {"days": 2, "city": "Z\u00fcrich"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
USER, ANSWER = {"role": "user", "content": "Hi <b> "}, {"role": "assistant", "content": "Hello! "}
PLAIN = [USER, ANSWER, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See"}]
THOUGHTS = {"reasoning_content": "hm", "thinking": "hm", "reasoning": "hm"}
CONVERSATIONS = {
    "plain": PLAIN,
    "system": [{"role": "system", "content": "Be brief."}, *PLAIN],
    "a question": [USER],
    "thoughts": [USER, {**ANSWER, **THOUGHTS}, USER, {**ANSWER, **THOUGHTS}],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1"},
        {"role": "assistant", "content": "3 degrees"},
    ],
}
VARIABLES = [{}, {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"}]


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A directory with the tokenizer and the template of a family."""
    template = FAMILIES[request.param]
    content = byte_tokenizer()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": 256 + number, "content": text, "special": True, **flags}
        for number, text in enumerate(template.special)
    ]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": template.eos}
    settings |= {} if template.bos is None else {"bos_token": template.bos}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(template.source)
    return request.param, tmp_path


def _tokenizer(place, name):
    return FileConfig(path=str(place), separator=FAMILIES[name].eos).build(tuple, place)


@pytest.mark.slow
def test_ids_of_a_family_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name, place = family
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    template, tokenizer = read_template(place), _tokenizer(place, name)
    for turns in CONVERSATIONS.values():
        for tools in (None, TOOLS) if "tools" in FAMILIES[name].source else (None,):
            for variables in VARIABLES:
                for is_prompt in (False, True):
                    wanted = theirs.apply_chat_template(
                        turns,
                        tools=tools,
                        add_generation_prompt=is_prompt,
                        return_dict=False,
                        **variables,
                    )
                    ours = template.with_variables(variables)
                    ours = ours if tools is None else ours.with_tools(json.dumps(tools))
                    ids = render(
                        read_messages(turns), ours, tokenizer, add_generation_prompt=is_prompt
                    )
                    assert ids.tolist() == list(wanted), (name, turns, variables, is_prompt)


TRAINED = {
    ("thinking", "plain"): [
        "<think>\n\n</think>\n\nHello! <|im_end|>",
        "<think>\n\n</think>\n\nSee<|im_end|>",
    ],
    ("thinking", "thoughts"): ["<think>\nhm\n</think>\n\nHello! <|im_end|>"] * 2,
    ("thinking", "tools"): [
        '<think>\n\n</think>\n\n\n<tool_call>{"name": "weather", "arguments": {"days": 2, "city":'
        ' "Z\u00fcrich"}}</tool_call><|im_end|>',
        "<think>\n\n</think>\n\n3 degrees<|im_end|>",
    ],
    ("next role", "plain"): ["\nHello! <|user|>", "\nSee<|user|>"],
    ("next role", "thoughts"): ["\n<think>hm</think>\nHello! <|user|>"] * 2,
    ("next role", "tools"): [
        "\n<tool_call>weather\n<arg>days</arg>2\n<arg>city</arg>Z\u00fcrich\n</tool_call>"
        "<|observation|>",
        "\n3 degrees<|user|>",
    ],
    ("channels", "plain"): [
        "<|channel|>final<|message|>Hello! <|return|>",
        "<|channel|>final<|message|>See<|return|>",
    ],
    ("channels", "thoughts"): [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello!"
        " <|return|>"
    ]
    * 2,
    ("channels", "tools"): [
        ' to=functions.weather<|channel|>commentary<|message|>{"days": 2, "city":'
        ' "Z\u00fcrich"}<|call|>',
        "<|channel|>final<|message|>3 degrees<|return|>",
    ],
    ("instructions", "plain"): [" Hello!</s>", " See</s>"],
    ("instructions", "thoughts"): [" Hello!</s>"] * 2,
    ("instructions", "tools"): [
        '[CALLS][{"arguments":{"city":"Z\u00fcrich","days":2},"name":"weather","id":"c1"}]</s>',
        " 3 degrees</s>",
    ],
    ("split", "plain"): ["Hello! <|stop|>", "See<|stop|>"],
    ("split", "thoughts"): ["Hello! <|stop|>"] * 2,
    ("split", "tools"): [
        '<|call|>weather<|sep|>{"days": 2, "city": "Z\u00fcrich"}<|stop|>',
        "3 degrees<|stop|>",
    ],
}  # fmt: skip
ENDS = {
    "next role": ["<end>", "<|user|>", "<|observation|>"],
    "channels": ["<|return|>", "<|call|>"],
}


@pytest.mark.parametrize("kind", ["plain", "thoughts", "tools"])
def test_what_is_trained_is_an_answer_with_its_end(family, kind):
    name, place = family
    if name == "channels":  # its call ends with another token, which the model declares
        ids = [261, 260]
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    template, tokenizer = read_template(place), _tokenizer(place, name)
    ends = [tokenizer.spell(np.array(stop)) for stop in stop_sequences(template, tokenizer)]
    assert sorted(ends) == sorted(ENDS.get(name, [FAMILIES[name].eos]))
    turns = read_messages(CONVERSATIONS[kind])
    try:
        parts = [mask_conversation(turns, template, tokenizer, "assistant")]
    except PrefixError:
        assert name in ("thinking", "channels")
        parts = mask_answers(turns, template, tokenizer)
    trained = [
        tokenizer.spell(ids)
        for part in parts
        for ids in np.split(part.tokens, np.flatnonzero(np.diff(part.weights.astype(int))) + 1)[
            1::2
        ]
    ]
    assert trained == TRAINED[name, kind] and not any(part.endless for part in parts)


def test_conversations_are_trained_answer_by_answer_with_a_sentence(family, caplog, monkeypatch):
    """Where a template writes earlier answers in another way; the day is the same every day."""
    name, place = family
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    records = [{"messages": [{**USER, "content": str(n)}, *PLAIN[1:]]} for n in range(8)]
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    file = str(place / "a.jsonl")
    config = ChatConfig(
        path=(file,),
        validation_path=(file,),
        template="tokenizer",
        tokenizer=FileConfig(path=str(place), separator=FAMILIES[name].eos),
    )
    source = config.build()
    is_parted = name in ("thinking", "channels")
    assert len(source.documents["train"].lengths) == 8 * (1 + is_parted)
    said = "8 conversations are trained answer by answer"
    messages = {record.getMessage() for record in caplog.records}
    assert [said in message for message in messages] == [True] * is_parted
    if name == "channels":
        text = source.tokenizer.spell(source.documents["train"].document(0))
        assert "Current date: 2026-01-01" in text
        template = read_template(place)
        (piece,) = template.pieces(read_messages([USER]), add_generation_prompt=True)
        assert f"Current date: {datetime.date.today()}" in piece.text
    calls = {**records[0], "messages": CONVERSATIONS["tools"]}
    plain = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    (place / "chat_template.jinja").write_text(plain)
    (place / "a.jsonl").write_text(json.dumps(calls))
    with pytest.raises(
        DataError, match="calls 'weather', and the chat template .* writes no calls"
    ):
        config.build()
