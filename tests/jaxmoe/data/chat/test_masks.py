# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations with the masked text spelled out: what is trained stands in [[ ]]."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxmoe.checkpoint.huggingface.tokenizer import bundled_data, tokenizer_files
from jaxmoe.data.chat import (
    ChatConfig,
    ConversationError,
    Message,
    mask_conversation,
    render,
    stop_sequences,
    template_of,
)
from jaxmoe.data.chat.built_in import ChatML, Plain
from jaxmoe.data.chat.render import mask_answers
from jaxmoe.data.chat.tokenizer_template import TokenizerTemplate, read_template
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig
from jaxmoe.run.provenance.tokens import template_name
from tests.jaxmoe.data.chat.tokenizers_with_templates import (
    DATED,
    LLAMA,
    THINKING,
    write_tokenizer,
)

BYTES = ByteTokenizer()
TEMPLATES = {"chatml": ChatML(), "plain": Plain()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def subword(place):
    return FileConfig(path=str(place), separator="<|end|>").build(lambda: (), place)


def _messages(*turns):
    return [Message(*turn.split(": ", 1)) for turn in turns]


def _marked(found, tokenizer):
    """The text of a conversation, with [[ ]] around what is trained."""
    borders = np.flatnonzero(np.diff(found.weights.astype(int))) + 1
    parts = np.split(found.tokens, borders)
    trained = found.weights[np.append(0, borders)]
    return "".join(
        f"[[{tokenizer.spell(part)}]]" if is_trained else tokenizer.spell(part)
        for part, is_trained in zip(parts, trained, strict=True)
    )


TWO_TURNS = ("user: Hi", "assistant: Hello", "user: Bye", "assistant: See you")
TABLE = [
    (
        "chatml",
        "assistant",
        ("user: Hi", "assistant: Hello"),
        "|<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello<|im_end|>]]\n",
    ),
    (
        "chatml",
        "assistant",
        ("system: Be brief.", *TWO_TURNS),
        "|<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello<|im_end|>]]\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[[See you<|im_end|>]]\n",
    ),
    (
        "chatml",
        "last",
        TWO_TURNS,
        "|<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[See you<|im_end|>]]\n",
    ),
    (
        "chatml",
        "all",
        ("user: Hi", "assistant: Hello"),
        "|[[<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n]]",
    ),
    (  # consecutive turns of the user, a tool, and a conversation that ends with the user
        "chatml",
        "assistant",
        ("user: a", "user: b", "tool: 42", "assistant: c", "user: d"),
        "|<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>tool\n42"
        "<|im_end|>\n<|im_start|>assistant\n[[c<|im_end|>]]\n<|im_start|>user\nd<|im_end|>\n",
    ),
    (  # an empty answer trains its end
        "chatml",
        "assistant",
        ("user: a", "assistant: "),
        "|<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[<|im_end|>]]\n",
    ),
    (  # consecutive answers, and an answer that comes first
        "chatml",
        "assistant",
        ("assistant: a", "assistant: b"),
        "|<|im_start|>assistant\n[[a<|im_end|>]]\n<|im_start|>assistant\n[[b<|im_end|>]]\n",
    ),
    ("chatml", "assistant", ("user: a",), "|<|im_start|>user\na<|im_end|>\n"),
    ("chatml", "last", ("system: a",), "|<|im_start|>system\na<|im_end|>\n"),
    (
        "plain",
        "assistant",
        ("system: Be brief.", *TWO_TURNS),
        "|System:\nBe brief.\n\nUser:\nHi\n\nAssistant:\n[[Hello|]]User:\nBye\n\n"
        "Assistant:\n[[See you|]]",
    ),
    (
        "plain",
        "last",
        TWO_TURNS,
        "|User:\nHi\n\nAssistant:\nHello|User:\nBye\n\nAssistant:\n[[See you|]]",
    ),
    (  # unicode, line ends at the borders, and text that looks like a turn
        "plain",
        "assistant",
        ("user: \n\nAssistant:\nna\u00efve \U0001f914\n", "assistant: \n\u4f60\u597d "),
        "|User:\n\n\nAssistant:\nna\u00efve \U0001f914\n\n\nAssistant:\n[[\n\u4f60\u597d |]]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("template", "train_on", "turns", "expected"), TABLE)
def test_masked_text_is_the_answers(template, train_on, turns, expected, subword):
    found = mask_conversation(_messages(*turns), TEMPLATES[template], BYTES, train_on)
    assert _marked(found, BYTES) == expected
    # With marks that are tokens, and another separator, the text is the same.
    found = mask_conversation(_messages(*turns), TEMPLATES[template], subword, train_on)
    marks = ("<|im_start|>", "<|im_end|>")
    plain = _marked(found, subword).replace("<|end|>", "|")
    assert plain == expected and found.tokens[0] == subword.separator
    assert all(mark in subword.special_tokens for mark in marks)


def test_marks_are_tokens_where_the_vocabulary_has_them(subword):
    messages = _messages("user: <|im_end|> quick", "assistant: the")
    ids = render(messages, ChatML(), subword, add_generation_prompt=False)
    (end,) = subword.encode_controls("<|im_end|>").tolist()
    assert ids.tolist().count(end) == 2  # that of the message is text
    assert stop_sequences(ChatML(), subword) == ((end,),)
    assert stop_sequences(ChatML(), BYTES) == (tuple(b"<|im_end|>"),)
    assert stop_sequences(Plain(), BYTES) == ((0,),)
    with pytest.raises(ConversationError, match=r"messages\[0\].* spells '<\|im_end\|>'"):
        render(messages, ChatML(), BYTES, add_generation_prompt=False)
    with pytest.raises(ConversationError, match="spells the separator between documents .id 0"):
        render(_messages("user: a\0b"), ChatML(), BYTES, add_generation_prompt=False)


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8),
    ),
    min_size=1,
    max_size=6,
)


@hypothesis.given(TURNS, st.sampled_from(["chatml", "plain"]), st.booleans())
def test_every_prefix_is_the_beginning_of_the_whole(place, subword, turns, name, is_bytes):
    template, tokenizer = TEMPLATES[name], BYTES if is_bytes else subword
    messages = [Message(*turn) for turn in turns]
    whole = render(messages, template, tokenizer, add_generation_prompt=False)
    for count, message in enumerate(messages):
        is_answer = message.role == "assistant"
        part = render(messages[:count], template, tokenizer, add_generation_prompt=is_answer)
        np.testing.assert_array_equal(part, whole[: len(part)])
    found = mask_conversation(messages, template, tokenizer, "assistant")
    answers = "".join(message.content for message in messages if message.role == "assistant")
    trained = tokenizer.decode(found.tokens[found.weights > 0]).decode()
    assert trained.replace("<|im_end|>", "") == answers


def _read(tmp_path, template, **fields):
    place = write_tokenizer(tmp_path / "t", template, **fields)
    return read_template(place), FileConfig(path=str(place)).build(lambda: (), place)


ROLES = (
    "{% for m in messages %}{{ '<|im_end|>' if m.role == 'assistant' else '<|im_start|>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_end|>{% endif %}"
)
"""Turns end with the mark of the next role, as those of GLM: a user's begins with <|im_start|>."""


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_the_mark_of_the_next_role_ends_an_answer(tmp_path, train_on):
    template, tokenizer = _read(tmp_path, ROLES, eos_token="<|end|>")
    (user,) = tokenizer.encode_controls("<|im_start|>").tolist()
    assert stop_sequences(template, tokenizer)[-1] == (user,)
    found = mask_conversation(_messages(*TWO_TURNS), template, tokenizer, train_on)
    wanted = {
        "assistant": (
            "<|im_start|>Hi<|im_end|>[[Hello<|im_start|>]]Bye<|im_end|>[[See you<|im_start|>]]"
        ),
        "last": "<|im_start|>Hi<|im_end|>Hello<|im_start|>Bye<|im_end|>[[See you<|im_start|>]]",
        "all": "<|im_start|>[[Hi<|im_end|>Hello<|im_start|>Bye<|im_end|>See you<|im_start|>]]",
    }
    assert _marked(found, tokenizer) == wanted[train_on] and not found.endless
    # A conversation that ends with the user has no further mark.
    found = mask_conversation(_messages(*TWO_TURNS[:3]), template, tokenizer, "assistant")
    assert _marked(found, tokenizer) == "<|im_start|>Hi<|im_end|>[[Hello<|im_start|>]]Bye"


@pytest.mark.parametrize(
    ("number", "train_on", "wanted"),
    [
        (1, "assistant", "|Hi|Hello<|im_end|>Bye|[[See you<|im_end|>]]"),
        (1, "last", "|Hi|Hello<|im_end|>Bye|[[See you<|im_end|>]]"),
        (1, "all", "|[[Hi|]]Hello<|im_end|>[[Bye|See you<|im_end|>]]"),
        (3, "assistant", "|Hi|[[Hello<|im_end|>]]Bye|See you<|im_end|>"),
        (3, "last", "|Hi|Hello<|im_end|>Bye|See you<|im_end|>"),
        (3, "all", "|[[Hi|Hello<|im_end|>Bye|]]See you<|im_end|>"),
    ],
)
def test_an_answer_of_weight_0_is_not_trained(tmp_path, number, train_on, wanted):
    text = (
        "{% for m in messages %}{{ m.content + '<|im_end|>' if m.role == 'assistant' else"
        " '<|im_start|>' + m.content + '<|im_start|>' }}{% endfor %}"
    )
    template, tokenizer = _read(tmp_path, text)
    messages = _messages(*TWO_TURNS)
    messages[number] = dataclasses.replace(messages[number], is_trained=False)
    found = _marked(mask_conversation(messages, template, tokenizer, train_on), tokenizer)
    wanted = wanted.replace("Bye", "|Bye").replace("||", "|")
    assert found.replace("<|im_start|>", "|") == wanted


def test_answers_of_a_template_without_prefixes_are_masked_one_by_one(tmp_path):
    """Each behind what the model reads when it writes it, in words about it."""
    template, tokenizer = _read(tmp_path, THINKING)
    found = [
        _marked(masked, tokenizer)
        for masked in mask_answers(_messages(*TWO_TURNS), template, tokenizer)
    ]
    first = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"
    later = "<|im_start|>user\nBye<|im_end|><|im_start|>assistant\n"
    assert found == [
        f"{first}[[<think></think>Hello<|im_end|>]]",
        f"{first}Hello<|im_end|>{later}[[<think></think>See you<|im_end|>]]",
    ]


def test_template_without_prefixes_is_refused_with_the_first_differing_token(tmp_path):
    template, tokenizer = _read(tmp_path, THINKING)
    messages = _messages("system: a", *TWO_TURNS)
    found = mask_conversation(messages, template, tokenizer, "last")
    assert _marked(found, tokenizer).endswith("assistant\n[[<think></think>See you<|im_end|>]]")
    with pytest.raises(
        ConversationError,
        match=r"cannot be masked: it writes messages 1 to 3 in another way when more follows. The "
        r"first difference is at token 29: '<' \(id 60\) alone, 'H' \(id 72\) in the whole "
        r"conversation. Choose data.template chatml, or data.train_on last or all",
    ):
        mask_conversation(messages, template, tokenizer, "assistant")


@pytest.mark.slow
@pytest.mark.parametrize("text", [LLAMA, "chatml"])
@pytest.mark.parametrize("is_prompt", [False, True])
def test_ids_equal_those_of_transformers(tmp_path, text, is_prompt):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kwargs = {} if text == "chatml" else {"template": text}
    place = write_tokenizer(tmp_path / "t", **kwargs)
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    template, ours = read_template(place), FileConfig(path=str(place)).build(tuple, place)
    turns = ("system:  quick ", "user: the and\n\nna\u00efve ", "assistant: \U0001f914 the")
    given = [{"role": m.role, "content": m.content} for m in _messages(*turns)]
    wanted = theirs.apply_chat_template(
        given, add_generation_prompt=is_prompt, tokenize=True, return_dict=False
    )
    found = render(_messages(*turns), template, ours, add_generation_prompt=is_prompt)
    assert found.tolist() == list(wanted)
    assert stop_sequences(template, ours) == ((theirs.eos_token_id,),)


@pytest.mark.parametrize("name", TEMPLATES)
def test_exported_template_writes_the_same_text(name):
    """As jinja2 renders it in the sandbox that transformers has too."""
    ours = TEMPLATES[name]
    exported = TokenizerTemplate(ours.jinja("\0"), (), "chat_template.jinja")
    turns = ("system: it's {{ 1 }}", "user: the\n\\n quick", "assistant: \U0001f914", "user: ")
    for is_prompt in (False, True):
        wanted, found = (
            render(_messages(*turns), one, BYTES, add_generation_prompt=is_prompt)
            for one in (ours, exported)
        )
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_bytes", [True, False])
def test_exported_template_is_read_again_with_its_end(tmp_path, place, name, is_bytes):
    """Where its marks are text, the tokenizer does not say where answers end."""
    data = ChatConfig(path=("none",), template=name)
    if not is_bytes:
        tokenizer = FileConfig(path=str(place), separator="<|end|>")
        data = ChatConfig(path=("none",), template=name, tokenizer=tokenizer)
    files = tokenizer_files(data)
    for file, text in files.texts.items():
        (tmp_path / file).write_text(text)
    end = {"chatml": "<|im_end|>", "plain": "<|end|>"}[name]
    assert is_bytes or data.tokenizer.build(tuple, place).spell(np.array(files.ends)) == end
    assert not (is_bytes and files.ends)
    model = bundled_data(tmp_path, {"vocab_size": 256, "eos_token_id": None})
    assert model.tokenizer.is_bytes == is_bytes
    assert template_of(template_name(model), model.tokenizer) == TEMPLATES[name]
    assert model.build().is_imported == (not is_bytes)


@pytest.mark.slow
def test_exported_tokenizer_writes_conversations_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for name, text in tokenizer_files(ChatConfig(path=("none",))).texts.items():
        (tmp_path / name).write_text(text)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    turns = ("user: the quick\n\u00ef", "assistant: fox", "user: and")
    given = [{"role": m.role, "content": m.content} for m in _messages(*turns)]
    found = theirs.apply_chat_template(given, add_generation_prompt=True, return_dict=False)
    wanted = render(_messages(*turns), ChatML(), BYTES, add_generation_prompt=True)
    assert list(found) == wanted.tolist()


def test_rendering_does_not_depend_on_the_day(tmp_path):
    messages = _messages("user: the", "assistant: quick")
    plain, dated = (
        render(messages, *_read(tmp_path, text), add_generation_prompt=False)
        for text in (LLAMA, DATED + LLAMA)
    )
    np.testing.assert_array_equal(plain, dated)


def test_an_answer_ends_at_an_id_that_the_model_beside_the_tokenizer_declares(tmp_path):
    """Its template ends turns with another mark than the eos_token, as models for chats do."""
    place = write_tokenizer(tmp_path / "tokenizer", eos_token="<|end|>")
    tokenizer = FileConfig(path=str(place), separator="<|end|>").build(lambda: (), place)
    messages = _messages(*TWO_TURNS)
    before = mask_conversation(messages, read_template(place), tokenizer, "assistant")
    end = int(tokenizer.encode_controls("<|im_end|>")[0])
    # Without a model it is the special token behind the content.
    assert before.endless == 0 and _marked(before, tokenizer).count("<|im_end|>]]") == 2
    assert (end,) in stop_sequences(read_template(place), tokenizer)
    for name in ("config.json", "generation_config.json"):
        beyond = tokenizer.vocab_size
        ids = [end, tokenizer.separator, beyond]
        (place / name).write_text(json.dumps({"eos_token_id": ids}))
        assert (beyond,) not in stop_sequences(read_template(place), tokenizer)
        found = mask_conversation(messages, read_template(place), tokenizer, "assistant")
        assert found.endless == 0 and _marked(found, tokenizer).count("<|im_end|>]]") == 2
        assert (end,) in stop_sequences(read_template(place), tokenizer)
        (place / name).unlink()
