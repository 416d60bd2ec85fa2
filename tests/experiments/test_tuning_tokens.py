# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The first batch of a fine-tuning has the ids of the model's tokenizer, of all models and data."""

import dataclasses
import json
import shutil
import sys
import types

import jax
import numpy as np
import pytest
import tokenizers

from experiments import finetune
from experiments.cli.flags import ExitCode
from experiments.recipes.tiny import tiny
from experiments.rl import __main__ as rl
from jaxmoe.configs import to_json
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.rewards import ArithmeticConfig
from jaxmoe.contrib.rl.rollouts import Rollouts
from jaxmoe.contrib.rl.turns import TurnCodec
from jaxmoe.data import ChatConfig, CorpusConfig, FilesConfig, Loader, MarkovConfig
from jaxmoe.data.chat import Message, TemplateName, render, template_of
from jaxmoe.data.chat.tokenizer_template import read_template
from jaxmoe.data.text_only import build_text
from jaxmoe.data.tokenizer import ByteTokenizer, FileConfig, SubwordTokenizer, TrainedConfig
from jaxmoe.data.tokenizer.subword import SEPARATOR
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from jaxmoe.run.provenance.saved import end_ids, imported_generation, keep_generation
from jaxmoe.run.provenance.tokens import describe_other_tokens, keep_tokens
from tests.support.huggingface_directories import END, tokenizer_json, write_model
from tests.support.runs import start_run, written_by

CORPUS = CorpusConfig()
BEGIN = "<|begin|>"
JINJA = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = [f"the quick and the {number}" for number in range(30)]
IDS = np.arange(1, 200, dtype=np.uint8).repeat(20)
TRAINED = TrainedConfig(vocab_size=300)
RUNS = {
    "bytes": CORPUS,
    "conversations of bytes": ChatConfig(path=("a.jsonl",), template="plain"),
    "a trained vocabulary": FilesConfig(path=("a.txt",), tokenizer=TRAINED),
    "a tokenizer that has moved": FilesConfig(
        path=("a.txt",), tokenizer=FileConfig(path="gone/tokenizer.json", separator=END)
    ),
    "conversations": ChatConfig(path=("a.jsonl",), tokenizer=TRAINED),
}
MODELS = {"Hugging Face": (), "Hugging Face with a begin": (BEGIN,)}
"""Tokens that a tokenizer of a model puts before a text."""
ENDS = dict.fromkeys(RUNS, SEPARATOR) | dict.fromkeys(("a tokenizer that has moved", *MODELS), END)
TEMPLATES: dict[str, TemplateName] = dict.fromkeys(MODELS, "tokenizer")
TEMPLATES["conversations of bytes"] = "plain"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of runs, with a config and the tokenizer that they keep, and of models."""
    folder = tmp_path_factory.mktemp("models")
    for name, data in RUNS.items():
        (place := folder / name / "tokenizer").mkdir(parents=True)
        config = dataclasses.replace(tiny(), data=data)
        (folder / name / "config.json").write_text(json.dumps(to_json(config)))
        if "bytes" not in name:
            _write_tokenizer(place, ENDS[name])
    for name, begins in MODELS.items():
        _ = write_model(folder / name)
        _write_tokenizer(folder / name, END, begins)
        (folder / name / "chat_template.jinja").write_text(JINJA)
    return folder


def _write_tokenizer(place, end, begins=()):
    content = tokenizer_json()
    special = content["added_tokens"]
    for token in begins:
        special.append({**special[0], "id": special[0]["id"] + 1, "content": token})
        pieces = [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        tokens = {token: {"id": token, "ids": [special[-1]["id"]], "tokens": [token]}}
        empty = {"type": "TemplateProcessing", "pair": [], "special_tokens": tokens}
        content["post_processor"] = {**empty, "single": pieces}
    (place / "tokenizer.json").write_text(json.dumps(content).replace(END, end))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in TEXTS))
    chats = [{"prompt": line, "completion": f"and the {line}"} for line in TEXTS]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    np.save(folder / "ids.npy", IDS)
    return folder


class _FakeRows(list):
    """The part of `datasets.Dataset` that is used."""

    column_names = ("text",)
    _fingerprint = "0123"

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


DATA = {
    "files": ("data:files", "--data.path", "{texts}/a.jsonl"),
    "chat": ("data:chat", "--data.path", "{texts}/chats.jsonl"),
    "mixture": ("data:mixture", "--data.mix", "one=1:{texts}/a.jsonl"),
    "huggingface": ("data:huggingface", "--data.dataset", "some/set"),
    "ids": ("data:files", "--data.path", "{texts}/ids.npy"),
}


def parsed(model, *words, start=finetune.finetune_config):
    where = ["--checkpoint.initial.path", str(model), *words]
    return finetune.parse_tuning(start(str(model)), where, "finetune", "about")


def rl_start(model):
    return rl.rl_config(model, RolloutsConfig())


def documents_of(kind, name, place):
    """The ids of all documents, by the files of the model."""
    if kind == "ids":
        return [IDS]
    tokenizer = ByteTokenizer()
    begin = [0]
    if "bytes" not in name:
        tokenizer = SubwordTokenizer(place / "tokenizer.json", ENDS[name])
        begin = tokenizer.encode_prompt("").tolist() or [tokenizer.separator]
    if kind != "chat":
        return [[*begin, *tokenizer.encode_all([text])[0], tokenizer.separator] for text in TEXTS]
    template = template_of(TEMPLATES.get(name, "chatml"), FileConfig(path=str(place)))
    turns = [(Message("user", text), Message("assistant", f"and the {text}")) for text in TEXTS]
    return [render(pair, template, tokenizer, add_generation_prompt=False) for pair in turns]


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("name", [*RUNS, *MODELS])
def test_the_first_batch_has_the_ids_of_the_models_tokenizer(
    name, kind, models, texts, tmp_path, monkeypatch
):
    rows = _FakeRows({"text": text} for text in TEXTS)
    fake = types.SimpleNamespace(load_dataset=lambda *names, **options: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    words = [word.format(texts=texts) for word in DATA[kind]]
    config = parsed(models / name, *words, "--data.cache", str(tmp_path))
    of_rl = parsed(models / name, *words, start=rl_start)
    assert of_rl.data == dataclasses.replace(config.data, cache=None)
    assert of_rl.execution.precision == config.execution.precision
    place = models / name if name in MODELS else models / name / "tokenizer"
    wanted = {tuple(map(int, ids)) for ids in documents_of(kind, name, place)}
    batch = Loader(config.data.build(0), batch_size=2, sequence_length=256, seed=0).batch(0)
    found = [
        tokens[segments == number]
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True)
        for number in range(1, segments.max() + 1)
    ]
    assert len(found) >= 2
    for ids in found:  # the last token of a row is a target only, and long documents are cut
        text = ",".join(map(str, ids))
        assert any(f",{text}," in f",{','.join(map(str, document))}," for document in wanted)
    if kind != "ids":
        assert all(any(tuple(ids[:3]) == document[:3] for document in wanted) for ids in found)


PROMPTS = {
    "bytes": None,
    "a trained vocabulary": None,
    "a tokenizer that has moved": None,
    "conversations of bytes": "User:\n17+5=\n\nAssistant:\n",
    "conversations": "<|im_start|>user\n17+5=<|im_end|>\n<|im_start|>assistant\n",
    "Hugging Face": f"<user>17+5={END}",
    "Hugging Face with a begin": f"<user>17+5={END}",
}
"""What stands before an answer to 17+5= of models that know a chat template."""


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_rl_are_turns_where_the_model_knows_a_template(name, models):
    """The ids are those of the tokenizers package, or bytes, of texts that are written out here."""
    config = parsed(models / name, start=rl_start)
    assert config.rl.template == {None: None}.get(PROMPTS[name], TEMPLATES.get(name, "chatml"))
    assert parsed(models / name, "--rl.template", "None", start=rl_start).rl.template is None
    if (text := PROMPTS[name]) is None:
        assert config.rl.stops == ("\n",)
        return
    assert config.rl.stops == ()
    place = models / name if name in MODELS else models / name / "tokenizer"
    if "bytes" in name:
        wanted = [0, *text.encode()]
        end = 0
    else:
        plain = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
        end = plain.token_to_id(ENDS[name])
        begin = [] if name in MODELS else [end]
        wanted = begin + plain.encode(text, add_special_tokens=False).ids
    source = build_text(config.data, 0)
    turns = TurnCodec.of(source, config.data.tokenizer, config.rl.template)
    np.testing.assert_array_equal(turns.encode("17+5="), wanted)
    # Marks that are no token of the vocabulary end an answer as text.
    of_model = ((end,), (END,)) if name in MODELS else ((end,), ())
    assert turns.ends == (((), ("<|im_end|>",)) if name == "conversations" else of_model)


def test_a_template_without_text_and_a_prompt_that_spells_control_are_refused(models):
    source = MarkovConfig().build(0)
    with pytest.raises(ValueError, match="tokens of this run have none: set rl.template to None"):
        TurnCodec.of(source, None, "chatml")
    config = parsed(models / "Hugging Face", start=rl_start)
    turns = TurnCodec.of(build_text(config.data, 0), config.data.tokenizer, "tokenizer")
    with pytest.raises(ValueError, match="written as turns already need rl.template=None"):
        turns.encode(f"<user>17+5={END}")


REFUSED = {
    "data:corpus has the tokens of data.tokenizer:bytes": ("Hugging Face", ("data:corpus",)),
    "data:markov has the tokens of a synthetic language": ("bytes", ("data:markov",)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_data_of_other_ids_is_refused(message, models, capsys):
    name, words = REFUSED[message]
    with pytest.raises(SystemExit) as ended:
        parsed(models / name, *words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


NAMED = {
    "bytes": ("data.tokenizer:bytes", "255 of 256 ids have the same text"),
    "a longer vocabulary": ("data.tokenizer:file", "270 of 272 ids have the same text in both"),
    "other ids": ("data.tokenizer:file", "268 of 271 ids have the same text in both"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_tokenizer_that_is_named_is_taken_and_its_embeddings_are_explained(
    name, models, texts, tmp_path
):
    choice, words = NAMED[name]
    _write_tokenizer(tmp_path, SEPARATOR, () if name == "other ids" else (BEGIN,))
    if name == "other ids":
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    path = () if choice.endswith("bytes") else ("--data.tokenizer.path", str(tmp_path))
    files = ("data:files", "--data.path", str(texts / "a.jsonl"), "--data.cache", str(tmp_path))
    texts_of = []
    for adapter in ("model.adapter:lora", "model.adapter:select"):
        config = parsed(models / "Hugging Face", *files, choice, *path, adapter)
        plan = make_plan(config)
        texts_of.append(describe_other_tokens(plan, config.data.build(0)))
    frozen, trained = texts_of
    assert words in frozen and "model.adapter freezes them: adapter:select trains" in frozen
    assert words in trained and "They are trained here" in trained


def test_a_vocabulary_that_the_embeddings_do_not_hold_is_refused_in_words(models, texts, tmp_path):
    files = ("data:files", "--data.path", str(texts / "a.jsonl"), "--data.cache", str(tmp_path))
    small = ("data.tokenizer:trained", "--execution.mesh.data", "1", "--training.batch_size", "2")
    config = parsed(models / "Hugging Face", *files, *small)
    with pytest.raises(ValueError, match="has no embeddings for the ids from 273 on, and none"):
        assemble(config, devices=jax.devices()[:1])


def test_what_ends_a_text_of_the_model_ends_one_of_a_run_that_began_with_it(
    models, texts, tmp_path
):
    model = shutil.copytree(models / "Hugging Face", tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 270], "top_k": 5}')
    chats = ("data:chat", "--data.path", str(texts / "chats.jsonl"), "--data.cache", str(tmp_path))
    config = parsed(model, *chats)
    source, plan = config.data.build(0), make_plan(config)
    first, second = (RunDirectory(tmp_path / name) for name in ("first", "second"))
    keep_tokens(first, plan, source)
    initial = dataclasses.replace(config.checkpoint.initial, path=str(first.path))
    checkpoint = dataclasses.replace(config.checkpoint, initial=initial)
    keep_generation(second, dataclasses.replace(config, checkpoint=checkpoint))
    for directory in (RunDirectory(model), first, second):
        assert end_ids(directory, config, source, "auto") == (7, 270)
        assert end_ids(directory, config, source, "ignore") == ()
        assert imported_generation(directory)[1]["top_k"] == 5
    assert read_template(first.tokenizer_directory).end_ids == (7, 270)
    assert (
        config.data.build_template().identity()
        == read_template(first.tokenizer_directory).identity()
    )
    shutil.rmtree(model)  # a run stands alone
    assert end_ids(first, config, source, "auto") == (7, 270)
    assert end_ids(second, config, source, "auto") == (7, 270)


def test_a_run_with_other_tokens_keeps_no_ends_of_the_model(models, texts, tmp_path, caplog):
    files = ("data:files", "--data.path", str(texts / "a.jsonl"), "--data.cache", str(tmp_path))
    _write_tokenizer(tmp_path, SEPARATOR, (BEGIN,))
    named = ("data.tokenizer:file", "--data.tokenizer.path", str(tmp_path))
    config = parsed(models / "Hugging Face", *files, *named)
    directory = RunDirectory(tmp_path / "run")
    keep_tokens(directory, make_plan(config), config.data.build(0))
    assert "270 of 272 ids have the same text" in caplog.text
    assert not (directory.tokenizer_directory / "generation_config.json").exists()


def test_a_model_without_a_tokenizer_json_says_what_to_write(tmp_path, capsys):
    _ = write_model(tmp_path / "model", has_tokenizer=False)
    with pytest.raises(SystemExit):
        parsed(tmp_path / "model", "data:chat", "--data.path", "a.jsonl")
    assert "AutoTokenizer.from_pretrained(" in capsys.readouterr().err


@pytest.mark.slow
def test_twenty_conversations_train_a_model_of_hugging_face(models, texts, tmp_path):
    model = shutil.copytree(models / "Hugging Face", tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 270]}')
    lines = (texts / "chats.jsonl").read_text().splitlines()[:20]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    words = ["--checkpoint.initial.path", str(model), "--training.steps", "1"]
    words += ["data:chat", "--data.path", str(tmp_path / "chats.jsonl")]
    words += ["--data.cache", str(tmp_path / "cache"), "--run.directory", str(tmp_path / "run")]
    script = "import sys; from experiments import finetune; sys.exit(finetune.main(sys.argv[1:]))"
    process = start_run([*words, "--tracking.trackers"], script)
    (output,) = written_by(process)
    assert process.returncode == 0, output
    assert "note: evaluation.batches=1, for the validation split has 1 rows of 128" in output
    directory = RunDirectory(tmp_path / "run")
    config = directory.load_config(PretrainConfig)
    source = config.data.build(config.training.seed)
    assert end_ids(directory, config, source, "auto") == (7, 270)


@pytest.mark.slow
def test_the_first_answers_of_rl_follow_turns_and_end_where_the_model_ends_them(
    models, tmp_path, monkeypatch
):
    model = shutil.copytree(models / "Hugging Face with a begin", tmp_path / "model")
    ends = [7, *range(20, 270, 2)]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    drawn = []
    take = Rollouts.take

    def taken(self):
        samples, lag = take(self)
        drawn.extend(samples)
        return samples, lag

    monkeypatch.setattr(Rollouts, "take", taken)
    words = ["--checkpoint.initial.path", str(model), "--run.directory", str(tmp_path / "run")]
    words += ["--rl.prompts", "4", "--rl.group", "4", "--training.steps", "1"]
    (tmp_path / "a.txt").write_text(str(ends))
    words += ["data:files", "--data.path", str(tmp_path / "a.txt"), "--evaluation.every", "0"]
    words += ["--data.cache", str(tmp_path), "--data.validation_path", str(tmp_path / "a.txt")]
    sizes = ["--training.sequence_length", "64", "--tracking.sample_length", "0"]
    assert rl.main([*words, *sizes, "--tracking.trackers"]) == ExitCode.DONE
    plain = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    questions = ArithmeticConfig().build().prompts(0, 4, 0)
    texts = [f"<user>{question.prompt}{END}" for question in questions for _ in range(4)]
    wanted = [tuple(plain.encode(text, add_special_tokens=False).ids) for text in texts]
    assert [sample.prompt for sample in drawn] == wanted
    short = [sample for sample in drawn if len(sample.answer) < 16]
    assert short and all(sample.answer[-1] in ends for sample in short)
    for sample in drawn:
        assert not set(sample.answer[:-1]) & {*ends}
        whole = sample.answer[:-1] if sample.answer[-1] in ends else sample.answer
        assert sample.text == plain.decode(list(whole))


def test_a_model_of_ids_takes_no_bytes(tmp_path, capsys):
    config = dataclasses.replace(tiny(), data=MarkovConfig())
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    with pytest.raises(SystemExit):
        parsed(tmp_path, "--data.path", "a.jsonl")
    message = "the model to begin with has those of a synthetic language"
    assert message in capsys.readouterr().err


def test_a_copy_of_the_models_tokenizer_may_be_named(models, tmp_path):
    _write_tokenizer(tmp_path, SEPARATOR)
    named = ("data.tokenizer:file", "--data.tokenizer.path", str(tmp_path))
    config = parsed(models / "a trained vocabulary", "--data.path", "a.jsonl", *named)
    assert config.data.tokenizer == FileConfig(path=str(tmp_path))


@pytest.mark.parametrize("name", ["bytes", "a trained vocabulary", "Hugging Face"])
def test_conversations_in_a_file_are_taken_as_chats_with_a_sentence(name, models, texts, capsys):
    """In a file whose kind is not named; text of their fields where it is."""
    file = str(texts / "chats.jsonl")
    capsys.readouterr()
    config = parsed(models / name, f"--data.path={file}", "--training.steps", "30")
    said = " ".join(capsys.readouterr().err.split())
    template = TEMPLATES.get(name, "chatml")
    words = ("data:chat", "--data.path", file, "--training.steps", "30")
    assert config == parsed(models / name, *words)
    assert config.data.name == "chat" and config.data.template == template
    assert f"note: data.path={file} holds conversations: data:chat is taken" in said
    assert f"written by the template {template}" in said and said.count("note:") == 1
    assert not capsys.readouterr().err
    for words in (("--data.text_field", "prompt"), ("data:files",)):
        config = parsed(models / name, *words, "--data.path", file)
        assert config.data.name == "files" and not capsys.readouterr().err
    config = parsed(models / name, "--data.path", str(texts / "a.jsonl"))
    assert config.data.name == "files" and not capsys.readouterr().err
