# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The forms in which conversations are published are read as the same messages."""

import csv
import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxmoe.data import ChatConfig, DataError
from jaxmoe.data.chat import ConversationError, Message, holds_conversations, mask_conversation
from jaxmoe.data.chat.built_in import ChatML
from jaxmoe.data.chat.messages import ToolCall, read_conversation
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig
from tests.jaxmoe.data.chat.test_tools_in_templates import CALL, TAGS, TOOLS, TURNS
from tests.jaxmoe.data.chat.tokenizers_with_templates import write_tokenizer

PAIR = (Message("user", "Hi"), Message("assistant", "Hello"))
SYSTEM = Message("system", "Be brief.")
ROLES = [{"role": message.role, "content": message.content} for message in PAIR]
TURNS_OF_SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
FIND = {"name": "find", "arguments": {"q": "x"}}
UNTRAINED = Message("assistant", "Hello", is_trained=False)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": ROLES, "id": 7, "images": []}, PAIR),
        ({"messages": json.dumps(ROLES)}, PAIR),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *ROLES]}, (SYSTEM, *PAIR)),
        ({"messages": [*ROLES, *({**item, "weight": 1} for item in ROLES)]}, (*PAIR, *PAIR)),
        ({"messages": [ROLES[0], {**ROLES[1], "weight": 0}]}, (PAIR[0], UNTRAINED)),
        ({"conversations": TURNS_OF_SHAREGPT}, PAIR),
        ({"conversations": ROLES, "messages": None}, PAIR),
        ({"conversation": ROLES, "messages": ""}, PAIR),
        ({"conversations": TURNS_OF_SHAREGPT, "system": "Be brief."}, (SYSTEM, *PAIR)),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, *TURNS_OF_SHAREGPT]},
            (SYSTEM, *PAIR),
        ),
        ({"prompt": "Hi", "completion": "Hello"}, PAIR),
        ({"prompt": ROLES[:1], "completion": ROLES[1:]}, PAIR),
        ({"prompt": [*ROLES, ROLES[0]], "completion": "Hello"}, (PAIR[0], UNTRAINED, *PAIR)),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, PAIR),
        ({"instruction": "Hi", "output": "Hello", "text": "### Hi"}, PAIR),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."},
            (SYSTEM, Message("user", "Add.\n1 2"), Message("assistant", "3")),
        ),
        ({"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello"]]}, (*PAIR, *PAIR)),
        (
            {
                "conversations": [
                    TURNS_OF_SHAREGPT[0],
                    {"from": "function_call", "value": json.dumps(FIND)},
                    {"from": "observation", "value": "42"},
                ]
            },
            (
                PAIR[0],
                Message("assistant", "", calls=(ToolCall("", "find", '{"q": "x"}'),)),
                Message("tool", "42"),
            ),
        ),
        (
            {"messages": [{"role": "assistant", "content": "Hello", "thinking": "hm"}]},
            (Message("assistant", "Hello", reasoning="hm"),),
        ),
    ],
)
def test_forms_are_the_same_messages(record, messages):
    assert read_conversation(record) == (messages, None)


def test_tools_of_a_record_are_a_list_or_its_json():
    bare = [tool["function"] for tool in TOOLS]
    for tools in (TOOLS, bare, json.dumps(TOOLS), json.dumps(bare)):
        found = read_conversation({"messages": ROLES, "tools": tools})
        assert found.messages == PAIR and json.loads(found.tools) == TOOLS
    for tools in ([], "", None):
        assert read_conversation({"messages": ROLES, "tools": tools}).tools is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": ROLES, "images": ["a.png"]}, "has a field 'images', and models here read te"),
        ({"conversations": TURNS_OF_SHAREGPT, "image": "a.png"}, "has a field 'image', and models"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}, {"text": "x"}]}]},
            "must be a part of text, .*, found type 'image': models here read text alone",
        ),
        (
            {"conversations": [{"from": "humans", "value": "x"}]},
            r"conversations\[0\] is from 'humans'.*'human'.* choose one of",
        ),
        (
            {"conversations": [{"from": "human"}]},
            r"conversations\[0\]\['value'\] must be a text, found nothing",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "find x"}]},
            r"conversations\[0\]\['value'\] is no JSON",
        ),
        ({"messages": "[1"}, "messages is no JSON"),
        ({"messages": [{**ROLES[1], "weight": 2}]}, r"\['weight'\] must be 0 or 1, found 2"),
        ({"messages": ROLES, "tools": "find"}, "tools is no JSON"),
        ({"messages": ROLES, "tools": [3]}, "tools must be a list of objects"),
        ({"instruction": "x"}, "output must be a text, found nothing"),
        (
            {"instruction": "x", "output": "y", "history": [["a"]]},
            r"history\[0\] must be a list of an instruction and its output",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": FIND}]},
            "calls a tool by function_call .* write it as tool_calls",
        ),
    ],
)
def test_records_that_are_no_text_conversations_are_refused(record, message):
    with pytest.raises(ConversationError, match=message):
        read_conversation(record)


def test_answers_in_a_prompt_and_of_weight_0_are_not_trained():
    record = {"prompt": [*ROLES, ROLES[0]], "completion": "Yes"}
    found = mask_conversation(
        read_conversation(record).messages, ChatML(), ByteTokenizer(), "assistant"
    )
    text = ByteTokenizer().decode(found.tokens[found.weights > 0]).decode()
    assert text == "Yes<|im_end|>"


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _write_all(records):
    """The same records as files of every format; a table holds JSON where it needs it."""
    pathlib.Path("a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pathlib.Path("b.json").write_text("\ufeff" + json.dumps(records, indent=2))
    pathlib.Path("c.json").write_text("\n".join(map(json.dumps, records)))
    with open("d.csv", "w", newline="") as file:
        table = csv.DictWriter(file, records[0])
        table.writeheader()
        for record in records:
            table.writerow(
                {k: v if isinstance(v, str) else json.dumps(v) for k, v in record.items()}
            )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), "e.parquet")
    return ["a.jsonl", "b.json", "c.json", "d.csv", "e.parquet"]


@pytest.mark.parametrize(
    "record",
    [
        lambda n: {"messages": [{**ROLES[0], "content": f"Hi {n}"}, ROLES[1]]},
        lambda n: {"conversations": [TURNS_OF_SHAREGPT[0], {"from": "gpt", "value": str(n)}]},
        lambda n: {"prompt": f"Hi {n}", "completion": "Hello"},
        lambda n: {"instruction": "Add, with 'commas'.\n", "input": f"1 {n}", "output": f'"{n}"'},
    ],
    ids=["messages", "conversations", "prompt", "instruction"],
)
def test_every_file_format_of_a_form_is_the_same_data(record):
    files = _write_all([record(number) for number in range(20)])
    first, *others = (ChatConfig(path=(file,)).build().documents["train"] for file in files)
    assert len(first.lengths) == 19
    for documents in others:
        np.testing.assert_array_equal(documents.tokens, first.tokens)
        np.testing.assert_array_equal(documents.weights, first.weights)
    assert all(holds_conversations([file]) for file in files) and holds_conversations(["*"])


def test_files_of_text_are_no_conversations():
    pathlib.Path("a.jsonl").write_text('{"text": "one"}')
    pathlib.Path("b.txt").write_text('{"messages": []}\n{"messages": []}')
    pathlib.Path("c.json").write_text("{")
    for path in ("a.jsonl", "b.txt", "c.json", "*"):
        assert not holds_conversations([path])
    with pytest.raises(DataError, match="matches no file"):
        holds_conversations(["nowhere"])


def test_calls_and_tools_of_files_are_written_by_the_template():
    """Parquet gives every call the arguments of all; the nulls that it adds are not written."""
    place = write_tokenizer(pathlib.Path("t"), TAGS)
    other = {**CALL, "function": {"name": "find", "arguments": {"q": "dogs"}}}
    turns = [TURNS[0], {**TURNS[1], "tool_calls": [other]}, TURNS[2]]
    records = [{"messages": TURNS, "tools": TOOLS}, {"messages": turns, "tools": TOOLS}]
    pathlib.Path("a.jsonl").write_text("\n".join(map(json.dumps, records)))
    simple = json.loads(json.dumps(records).replace("[1, 2.5, null]", "1"))
    pathlib.Path("b.jsonl").write_text("\n".join(map(json.dumps, simple)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(simple), "b.parquet")
    tokenizer = FileConfig(path=str(place))

    def texts(file):
        source = ChatConfig(
            path=(file,), template="tokenizer", tokenizer=tokenizer, validation_path=(file,)
        ).build()
        documents = source.documents["train"]
        return [source.tokenizer.spell(documents.document(n)) for n in range(2)]

    assert texts("b.jsonl") == texts("b.parquet")
    first, second = texts("a.jsonl")
    assert "the <dogs> & \u00e9" in first and 'find {"q": "the \u00e9 <quick>", "n": [1, ' in first
    assert 'c1 find {"q": "dogs"}1qdogs' in second
    with pytest.raises(DataError, match="the template 'chatml' writes no tools"):
        ChatConfig(path=("a.jsonl",)).build()
