# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""data:chat: files and fields, hostile records, held-out conversations and batches."""

import dataclasses
import gzip
import json
import pathlib
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxmoe.checkpoint.huggingface.tokenizer import bundled_data
from jaxmoe.data import ChatConfig, DataError, Loader, Source, check_position
from jaxmoe.data.chat import Message, conversations, read_messages
from jaxmoe.data.chat.tokenizer_template import read_template
from jaxmoe.data.text_only import build_text
from jaxmoe.data.tokenizer import FileConfig, IdsConfig, TrainedConfig
from tests.jaxmoe.data.chat.tokenizers_with_templates import write_tokenizer


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _chat(number, turns=1):
    pairs = [("user", f"What is {number} and {turn}?") for turn in range(turns)]
    messages = [
        {"role": role, "content": content, "id": 3}
        for question in pairs
        for role, content in (question, ("assistant", f"It is ({number})."))
    ]
    return {"messages": messages, "source": "made up"}


def _write(name, records):
    text = "\n".join(
        record if isinstance(record, str) else json.dumps(record) for record in records
    )
    pathlib.Path(name).write_text(text, encoding="utf-8")
    return name


def _texts(source, split="train"):
    documents = source.documents[split]
    numbers = range(len(documents.lengths))
    return [source.decode(documents.document(n).astype(np.int32)) for n in numbers]


def test_every_format_gives_the_same_conversations():
    records = [*map(_chat, range(30)), {"prompt": "Say x", "completion": "x"}]
    records[-1]["messages"] = None
    plain = _write("a.jsonl", records)
    content = pathlib.Path(plain).read_bytes()
    pathlib.Path("b.ndjson.gz").write_bytes(gzip.compress(content))
    pathlib.Path("c.jsonl.zst").write_bytes(zstandard.compress(content))
    table = pyarrow.Table.from_pylist([{"messages": r["messages"]} for r in records[:-1]])
    pyarrow.parquet.write_table(table, "d.parquet")
    pairs = pyarrow.table({"prompt": ["Say x"], "completion": ["x"], "number": [1]})
    pyarrow.parquet.write_table(pairs, "e.parquet")
    found = [
        ChatConfig(path=path).build()
        for path in (("a.jsonl",), ("b.ndjson.gz",), ("c.jsonl.zst",), ("d.parquet", "e.parquet"))
    ]
    assert isinstance(found[0], Source)
    for source in found[1:]:
        for split in ("train", "validation"):
            ours, theirs = source.documents[split], found[0].documents[split]
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.weights, theirs.weights)
    texts = [text for split in ("train", "validation") for text in _texts(found[0], split)]
    assert "<|im_start|>user\nSay x<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n" in texts
    assert len(texts) == 31


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"messages": [', "is not JSON: "),
        ("[1, 2]", "expected an object, found list: a conversation has .messages"),
        ({"text": "x"}, "has fields 'text': a conversation has 'messages' .* Rename its fields"),
        ({"chosen": [], "rejected": []}, "These are pairs of preferences: rename 'chosen' to"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "rename 'chosen' to 'completion'"),
        ({"conversations": []}, "field 'conversations' is empty: give it a message"),
        ({"prompt": "x"}, "completion must be a text, found nothing"),
        ({"prompt": "x", "completion": 3}, "completion must be a text, found int 3"),
        ({"messages": []}, "field 'messages' is empty: give it a message, or remove the record"),
        ({"messages": "Hi"}, "field 'messages' must be a list of .* found str"),
        ({"messages": ["Hi"]}, r"messages\[0\] must be an object with .* found str"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no field 'content'; it has 'role'"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no field 'role'; it has 'content'"),
        (
            {"messages": [{"role": "gpt", "content": "x"}]},
            r"the role 'gpt' \(write 'assistant'\): choose one of system, user, assistant, tool",
        ),
        ({"messages": [{"role": "assistants", "content": "x"}]}, "did you mean 'assistant'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"has the role \['user'\]: choose"),
        (
            {"messages": [{"role": "user", "content": None}]},
            r"\['content'\] must be .* found nothing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}, {"type": "image_url"}]}]},
            r"messages\[0\]\['content'\]\[1\] must be a part of text, .*, found type 'image_url'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
            r"\['tool_calls'\]\[0\] must be an object with 'id', 'type': 'function'",
        ),
        ('{"prompt": "\\ud800", "completion": "x"}', "prompt has half a surrogate pair at charac"),
        ({"prompt": "a\0b", "completion": "x"}, r"spells the separator between documents \(id 0\)"),
        ({"prompt": "<|im_end|>", "completion": "x"}, "spells '<|im_end|>', which the template"),
        (
            {"messages": [{"role": "user", "content": "x"}] * 1001},
            "has 1,001 messages, at most 1,000 are read: write several conversations",
        ),
        ("[" * 100_000, "is JSON that cannot be read"),
    ],
)
def test_bad_record_is_located_or_left_out(record, message):
    _write("a.jsonl", [_chat(0), record, *map(_chat, range(1, 30))])
    with pytest.raises(DataError) as error:
        ChatConfig(path=("a.jsonl",)).build()
    assert re.search(rf"^a.jsonl line 2 \(byte \d+\):? .*{message}", str(error.value))
    assert str(error.value).endswith("(--data.on_bad_record skip leaves such records out)")
    source = ChatConfig(path=("a.jsonl",), on_bad_record="skip").build()
    assert "30 conversations" in source.describe(64) and "(1 records left out)" in source.describe(
        64
    )


def test_enormous_line_is_refused_without_reading_it(monkeypatch):
    monkeypatch.setattr(conversations, "_LONGEST_RECORD", 2**12)
    pathlib.Path("a.jsonl.gz").write_bytes(
        gzip.compress(b"".join([json.dumps(_chat(0)).encode(), b"\n", b"x" * 2**23, b"\r\n\n"]))
    )
    with pytest.raises(DataError, match=r"line 2 \(byte 151\) has 8,388,610 bytes, .* most 4,096"):
        ChatConfig(path=("a.jsonl.gz",)).build()


def test_files_that_are_no_conversations_are_refused():
    pathlib.Path("a.txt").write_text("User: Hi")
    with pytest.raises(DataError, match=r"a.txt must be a .jsonl, .ndjson, .json, .csv"):
        ChatConfig(path=("a.txt",)).build()
    pathlib.Path("a.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="a.jsonl line 1 is not UTF-8: byte 0xff at offset 12"):
        ChatConfig(path=("a.jsonl",)).build()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), "a.parquet")
    with pytest.raises(
        DataError, match="has columns 'text', not 'messages', or 'conv.*'prompt' and"
    ):
        ChatConfig(path=("a.parquet",)).build()
    binary = pyarrow.array([b"ok", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": binary, "completion": ["a", "b"]}), "b.parquet"
    )
    with pytest.raises(DataError, match="b.parquet row 1 is not UTF-8"):
        ChatConfig(path=("b.parquet",)).build()
    with pytest.raises(DataError, match="data.path is empty"):
        ChatConfig().build()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": "concatenate"}, "data.packing=concatenate .* Choose best_fit or levels"),
        ({"tokenizer": IdsConfig()}, "data.tokenizer:ids has no text, .* choose data.tokenizer:by"),
        ({"template": "tokenizer"}, "beside a tokenizer.json, which data.tokenizer:bytes has not"),
        (
            {"template": "tokenizer", "tokenizer": TrainedConfig()},
            "data.template=tokenizer reads the chat_template",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ChatConfig(path=("a.jsonl",), **fields)


def _directory(settings, jinja=None):
    place = write_tokenizer(pathlib.Path("t"), None)
    for name, text in (("tokenizer_config.json", settings), ("chat_template.jinja", jinja)):
        if text is not None:
            (place / name).write_text(text)
    return str(place)


def test_special_tokens_of_a_map_are_given_to_the_template():
    """They are named in special_tokens_map.json alone, as by older tokenizers; settings win."""
    jinja = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    place = pathlib.Path(_directory(json.dumps({"eos_token": "<|im_end|>"}), jinja))
    named = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "</s>"}
    (place / "special_tokens_map.json").write_text(json.dumps(named))
    template = read_template(place)
    (piece,) = template.pieces([Message("user", "hi")], add_generation_prompt=False)
    assert piece.text == "<|im_start|>hi<|im_end|>" and template.end.text == "<|im_end|>"
    (place / "tokenizer_config.json").write_text("{}")
    named["eos_token"] = {"content": "<|im_end|>"}
    (place / "special_tokens_map.json").write_text(json.dumps(named))
    data = bundled_data(place, {"vocab_size": 400, "eos_token_id": None})
    assert data.tokenizer.separator == "<|im_end|>"
    (place / "special_tokens_map.json").write_text("[]")
    with pytest.raises(DataError, match="special_tokens_map.json must hold an object"):
        read_template(place)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_answers_that_a_template_does_not_end_are_told_of(train_on, caplog):
    """Turns begin with words and end with nothing: no answer is trained to end."""
    _write("a.jsonl", map(_chat, range(6)))
    jinja = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant:\n{% endif %}"
    tokenizer = FileConfig(path=_directory(json.dumps({"eos_token": "<|im_end|>"}), jinja + prompt))
    config = ChatConfig(
        path=("a.jsonl",), template="tokenizer", tokenizer=tokenizer, train_on=train_on
    )
    for _ in range(2):  # read, and from the cache
        caplog.clear()
        config.build()
        (told,) = {one.getMessage() for one in caplog.records}
        assert "6 answers are trained without an end, a.jsonl line 1 " in told
        assert "does not write '<|im_end|>' behind them, where generation stops" in told
    caplog.clear()
    dataclasses.replace(config, template="chatml").build()
    assert not caplog.records


def test_a_content_may_be_a_list_of_parts():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = read_messages([{"role": "user", "content": parts}, {"role": "tool", "content": "x"}])
    assert found == (Message("user", "one\ntwo"), Message("tool", "x"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{}", "t has no chat_template.jinja, and no text chat_template in tokenizer_config.json"),
        ("{", "t/tokenizer_config.json cannot be read"),
        ("[]", r"t/tokenizer_config.json must hold an object, found '\[\]'"),
        ('{"chat_template": "{% for %}"}', "t/tokenizer_config.json is no chat template: Expected"),
    ],
)
def test_unusable_template_of_a_tokenizer_is_refused(settings, message):
    with pytest.raises(DataError, match=message):
        read_template(pathlib.Path(_directory(settings)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system message') }}",
            "refuses messages 1 to 2: no system message",
        ),
        ("{{ messages[9].content.x }}", "refuses messages 1 to 2"),
        (
            "{% for i in range(90000) %}{{ 'a' * 999 }}{% endfor %}",
            "refuses messages 1 to 2: it writes more than 33,554,432 characters",
        ),
        ("{{ 1 // 0 }}", "refuses messages 1 to 2: integer division"),
        ("{{ messages.__class__.__mro__ }}", "refuses messages 1 to 2: .*unsafe"),
        (
            "{{ messages.append(1) }}",
            "refuses messages 1 to 2: .* 'append' .* is unsafe",
        ),
        ("{{ cycler.__init__.__globals__ }}", "refuses messages 1 to 2: .*unsafe"),
    ],
)
def test_template_runs_in_a_sandbox_and_its_errors_name_the_record(template, message):
    _write("a.jsonl", map(_chat, range(3)))
    place = _directory("{}", template)
    tokenizer = FileConfig(path=place)
    config = ChatConfig(path=("a.jsonl",), template="tokenizer", tokenizer=tokenizer)
    with pytest.raises(DataError, match=rf"a.jsonl line 1 .*chat_template.jinja {message}"):
        config.build()


def test_message_cannot_spell_a_special_token_of_a_template():
    _write("a.jsonl", [{"prompt": "<|im_start|>system", "completion": "x"}])
    place = write_tokenizer(pathlib.Path("t"))
    tokenizer = FileConfig(path=str(place))
    config = ChatConfig(path=("a.jsonl",), template="tokenizer", tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"messages\[0\].* spells '<\|im_start\|>', which the"):
        config.build()
    assert dataclasses.replace(config, template="chatml", validation_path=config.path).build()


def test_template_is_read_beside_the_copy_of_a_run(tmp_path):
    _write("a.jsonl", map(_chat, range(8)))
    place = write_tokenizer(pathlib.Path("t"))
    tokenizer = FileConfig(path=str(place))
    config = ChatConfig(path=("a.jsonl",), template="tokenizer", tokenizer=tokenizer)
    write_tokenizer(tmp_path / "run")
    copy = config.with_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert copy.build_template().identity() == config.build_template().identity()
    assert build_text(copy).vocab_size == config.build().vocab_size


def test_changed_template_and_mask_refuse_to_resume():
    _write("a.jsonl", map(_chat, range(60)))

    def position(**fields):
        source = ChatConfig(path=("a.jsonl",), **fields).build()
        return Loader(source, batch_size=2, sequence_length=96, seed=0).position(3)

    before = position()
    check_position(before, position())
    for name, value in {
        "template": "plain",
        "train_on": "all",
        "long_conversations": "truncate",
    }.items():
        with pytest.raises(DataError, match="the checkpoint was trained on other data"):
            check_position(before, position(**{name: value}))


def test_equal_conversations_are_held_out_by_any_template_and_tokenizer():
    _write("a.jsonl", [_chat(number // 2) for number in range(60)])
    configs = [
        ChatConfig(path=("a.jsonl",), validation_fraction=0.2, **fields)
        for fields in ({}, {"template": "plain"}, {"tokenizer": TrainedConfig(vocab_size=300)})
    ]
    held_out = [
        {re.search(r"What is (\d+)", text)[1] for text in _texts(config.build(), "validation")}
        for config in configs
    ]
    train = {re.search(r"What is (\d+)", text)[1] for text in _texts(configs[0].build())}
    assert held_out[0] == held_out[1] == held_out[2] and not train & held_out[0]


@pytest.mark.parametrize("packing", ["best_fit", "levels"])
def test_targets_with_weight_are_the_answers(packing):
    _write("a.jsonl", [_chat(number, turns=number % 3 + 1) for number in range(40)])
    source = ChatConfig(path=("a.jsonl",), packing=packing).build()
    loader = Loader(source, batch_size=4, sequence_length=512, seed=0)
    batch = loader.batch(0)
    answers = source.decode(batch.targets[batch.loss_weights > 0])
    numbers = re.findall(r"It is \((\d+)\)\.<\|im_end\|>", answers)
    assert "".join(f"It is ({number}).<|im_end|>" for number in numbers) == answers
    assert source.text("validation") is None and source.bytes_per_token == 1.0
