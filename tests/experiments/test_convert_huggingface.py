# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`experiments.checkpoint convert` to Hugging Face files and back: runs that evaluate, generate and
convert open, with the tokenizer that they were trained with."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from experiments import evaluate, generate, pretrain
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from experiments.recipes.markov import markov
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.checkpoint.huggingface.tokenizer import byte_tokenizer
from jaxmoe.data import CorpusConfig, FilesConfig
from jaxmoe.data.tokenizer import TrainedConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.routing import SqrtGateConfig
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import length_of
from jaxmoe.run.serving import ServedCheckpoint, open_served
from jaxmoe.serve.answers import Generated, whole_experts
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.sizes import EngineSizesConfig
from jaxmoe.training.state import state_around

ONE = ("--imported.batches", "1")
TEXTS = (
    "h\u00e9llo\n  w\u00f6rld",
    "\x00\x01 \u0100 \u0101",
    "<|endoftext|> def f(x):\r\n\treturn '\u00df\u2192\U0001f642'",
    " ",
)


def model_of(vocab_size: int = 256, **more) -> ModelConfig:
    """A model of the family Qwen3-MoE: two layers of odd widths."""
    moe = MoEConfig(num_experts=3, top_k=2, expert_dim=10, **more)
    attention = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=6, qk_norm="head")
    return ModelConfig(
        vocab_size=vocab_size, num_layers=2, embed_dim=24, attention=attention, moe=moe
    )


def trained_vocabulary(folder) -> FilesConfig:
    """Texts in a folder, and a vocabulary of 300 ids that is trained on them."""
    (folder / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{i % 7} and {i * number % 13}" for i in range(60))
        (folder / "text" / f"{number:02}.txt").write_text(words)
    return FilesConfig(
        path=(str(folder / "text"),),
        tokenizer=TrainedConfig(vocab_size=300),
        cache=str(folder / "cache"),
    )


def new_run(path, data, model) -> str:
    """A run with initial parameters and without optimiser state."""
    config = dataclasses.replace(
        PretrainConfig(),
        model=model,
        data=data,
        training=TrainingConfig(steps=3, batch_size=8, sequence_length=16),
        evaluation=EvaluationConfig(batches=1),
    )
    directory = RunDirectory(path)
    directory.acquire()
    directory.check_config(config)
    assembly = assemble(config)
    rng = np.random.default_rng(0)
    params = assembly.plan.table.tree(lambda row: rng.normal(size=row.shape).astype(np.float32))
    state = state_around(assembly.plan.model, None, assembly.execution, params, jax.random.key(0))
    save_checkpoint(
        directory.checkpoints_directory,
        state,
        step=3,
        config=config,
        data=assembly.loader.position(3),
    )
    directory.release()
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on bytes."""
    return new_run(tmp_path_factory.mktemp("runs") / "bytes", CorpusConfig(), model_of())


@pytest.fixture(scope="module")
def exported(run):
    convert("--run.directory", run, "--to_huggingface", "auto", "--to", f"{run}-hf")
    return f"{run}-hf"


@pytest.fixture(scope="module")
def imported(exported):
    given = ("--imported.batch_size", "8", "--imported.sequence_length", "16", *ONE)
    convert("--from_huggingface", exported, "--to", f"{exported}-run", *given)
    return f"{exported}-run"


def convert(*arguments):
    assert checkpoint.main(["convert", *arguments]) == ExitCode.DONE


def refused(capsys, function, *arguments):
    with pytest.raises(SystemExit) as stopped:
        function([*arguments])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def read_json(directory, name):
    return json.loads((pathlib.Path(directory) / name).read_text())


def assert_same(actual, desired):
    jax.tree.map(np.testing.assert_array_equal, actual, desired)


def test_run_to_huggingface_and_back_is_bitwise(run, exported, imported):
    """Bitwise, with its family and tokenizer."""
    fields = read_json(exported, "config.json")
    assert fields["model_type"] == "qwen3_moe" and fields["eos_token_id"] == 0
    assert fields["max_position_embeddings"] == 16
    _, state, step = load_run(run, None)
    assembly, back, first = load_run(imported, None)
    assert (step, first) == (3, 0)
    assert_same(back.params, state.params)
    assert back.opt_state == {} and isinstance(assembly.plan.config.data, CorpusConfig)
    leaf = back.params["moe_blocks_0"]["moe"]["experts"]["gate_up"]
    assert leaf.sharding.mesh.shape == assembly.mesh.shape
    summary = read_json(imported, "summary.json")
    assert summary["status"] == "imported" and summary["format"] == "qwen3_moe"
    longer = dataclasses.replace(PretrainConfig(), training=TrainingConfig(sequence_length=64))
    assert length_of(RunDirectory(imported), longer) == 16 == summary["max_length"]
    assert length_of(RunDirectory(run), longer) == 64


@pytest.mark.slow
def test_a_directory_of_hugging_face_is_served_as_its_run_is(run, exported):
    """The same tokens and experts, without a run directory."""
    sizes = EngineSizesConfig(max_sequences=2, pieces=("1x8",), num_logprobs=0, has_experts=True)
    sampling = Sampling(max_tokens=5, temperature=0.0, has_experts=True)
    found = []
    for path in (run, exported):
        served = open_served(ServedCheckpoint(path=path, eos="ignore"), sizes)
        assert served.max_logprobs == 0 and served.has_experts and served.pool_bytes > 0
        with served.engine as engine:
            events = list(engine.submit(served.encode("ab", "prompt"), sampling))
        tokens = [event.token for event in events if isinstance(event, Generated)]
        found.append((tokens, whole_experts(events)))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 5
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_defaults_of_the_sampling_are_those_of_the_directory(exported, tmp_path):
    place = tmp_path / "model"
    shutil.copytree(exported, place)
    (place / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": [1, 2]}')
    sizes = EngineSizesConfig(max_sequences=1, pieces=("1x8",), num_logprobs=0)
    for kind, defaults in (("model", {"temperature": 0.3}), ("plain", {})):
        served = open_served(ServedCheckpoint(path=str(place), sampling=kind), sizes)
        with served.engine:
            assert served.defaults == defaults and served.eos_ids == (1, 2)


@pytest.mark.slow
def test_imported_run_evaluates_and_generates(run, imported, capsys):
    """The same held-out loss, the same text."""
    said = []
    for directory in (run, imported):
        given = ("--run.directory", directory)
        assert evaluate.main([*given]) == ExitCode.DONE
        line = capsys.readouterr().out.partition(" ")[2]
        assert generate.main([*given, "--prompt", "def", "--length", "4"]) == ExitCode.DONE
        said.append((line, capsys.readouterr().out))
    assert "eval/bits_per_byte" in said[0][0]
    assert said[0] == said[1]


def test_an_imported_run_is_converted_but_not_trained(run, exported, imported, capsys):
    """The next export is the same file."""
    convert("--run.directory", imported, "--to_huggingface", "qwen3_moe", "--to", f"{imported}-hf")
    first, second = (open_tensors(f"{place}") for place in (exported, f"{imported}-hf"))
    assert first.keys() == second.keys()
    assert_same({k: np.asarray(first[k]) for k in first}, {k: np.asarray(second[k]) for k in first})
    assert "imported, without an optimiser's state" in refused(
        capsys, pretrain.main, "--run.directory", imported
    )


def test_byte_tokenizer_ids_are_byte_values(exported):
    """For any text, including special spellings and byte 0."""
    import tokenizers

    read = tokenizers.Tokenizer.from_file(f"{exported}/tokenizer.json")
    for text in TEXTS:
        ids = read.encode(text).ids
        assert ids == list(text.encode())
        assert read.decode(ids, skip_special_tokens=False) == text
    assert read.get_vocab_size() == 256


def test_trained_vocabulary_is_exported_and_imported(tmp_path):
    """Trained here, read by transformers, and copied by the imported run."""
    data = trained_vocabulary(tmp_path)
    run = new_run(tmp_path / "run", data, model_of(300))
    convert("--run.directory", run, "--to_huggingface", "auto", "--to", str(tmp_path / "hf"))
    source = load_run(run, None)[0].source
    convert(
        "--from_huggingface",
        str(tmp_path / "hf"),
        "--to",
        str(tmp_path / "new"),
        "imported.data:files",
        "--imported.data.path",
        str(tmp_path / "text"),
        "--imported.data.cache",
        str(tmp_path / "cache2"),
        "--imported.batch_size",
        "8",
        "--imported.sequence_length",
        "16",
        *ONE,
    )
    shutil.rmtree(tmp_path / "hf")
    again = load_run(str(tmp_path / "new"), None)[0].source
    text = "word3 and 5 <|endoftext|>"
    np.testing.assert_array_equal(again.encode(text), source.encode(text))
    assert again.tokenizer.separator == source.tokenizer.separator
    assert str(tmp_path / "new") in again.tokenizer.path.as_posix()


@pytest.mark.slow
def test_model_of_no_family_is_exported_with_modelling_file(tmp_path, capsys):
    """SqrtGate, and ids that are not text; bytes are refused as data."""
    model = model_of(16, gate=SqrtGateConfig())
    run = new_run(tmp_path / "run", markov().data, model)
    convert("--run.directory", run, "--to_huggingface", "auto")
    said = capsys.readouterr().out
    place = tmp_path / "run-huggingface"
    assert "model.moe.gate" in said and "trust_remote_code=True" in said
    assert (place / "modeling_jaxmoe.py").exists() and not (place / "tokenizer.json").exists()
    assert (
        "without a tokenizer: there is no tokenizer: the data is"
        in (place / "README.md").read_text()
    )
    back = ("convert", "--from_huggingface", str(place), "--to", str(tmp_path / "new"))
    assert "imported.data reads bytes, which are not the 16 tokens of this model" in refused(
        capsys, checkpoint.main, *back, "imported.data:corpus"
    )
    small = ("--imported.batch_size", "8", "--imported.sequence_length", "16", *ONE)
    convert(*back[1:], "imported.data:markov", *small)
    assert_same(load_run(str(tmp_path / "new"), None)[1].params, load_run(run, None)[1].params)


def test_bad_convert_requests_are_refused(run, exported, tmp_path, capsys, monkeypatch):
    """Errors are early and leave no files."""

    def words(*arguments):
        return refused(capsys, checkpoint.main, "convert", *arguments)

    here, new = ("--run.directory", run), ("--to", str(tmp_path / "new"))
    both = words(*here, "--to_huggingface", "auto", "--quantise", "w4a8")
    assert "--quantise and --to_huggingface exclude each other: give one" in both
    assert "needs --to RUN" in words("--from_huggingface", exported)
    assert 'model.attention.qk_norm: "head" here' in words(*here, "--to_huggingface", "olmoe", *new)
    assert "is not a directory" in words("--from_huggingface", str(tmp_path / "none"), *new)
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    vocabulary = byte_tokenizer()
    vocabulary["model"]["vocab"]["ab"] = 256
    vocabulary["model"]["merges"] = ["a b"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    asked = ("--from_huggingface", str(other), *new)
    assert "the tokens of" in words(*asked, "imported.data:corpus")
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))
    found = words("--from_huggingface", str(other), *new)
    assert "config.json: config.num_hidden_layers=3, and the tensors are of 2 layers: give" in found
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "convert runs in one process" in words(*here, "--to_huggingface", "auto", *new)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_nonfinite_weights_are_imported_only_if_asked_for(exported, tmp_path, capsys):
    """A refused import leaves nothing behind."""
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    file = other / "model.safetensors"
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with file.open("r+b") as stream:
        stream.seek(open_tensors(file)[name].start)
        stream.write(np.float32(np.nan).tobytes())
    asked = ("--from_huggingface", str(other), "--to", str(tmp_path / "new"))
    small = ("--imported.batch_size", "8", "--imported.sequence_length", "16", *ONE)
    found = refused(capsys, checkpoint.main, "convert", *asked, *small)
    assert f"error: {file}: {name} holds 1 of 240 values that are NaN" in found
    assert found.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    convert(*asked, *small, "--imported.nonfinite", "keep")
    params = load_run(str(tmp_path / "new"), None)[1].params
    assert sum(int(np.isnan(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(params)) == 1


@pytest.mark.slow
def test_transformers_reads_model_and_tokenizer(run, exported, tmp_path):
    """The auto classes of transformers give the same logits and ids."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    transformers = pytest.importorskip("transformers", reason="not installed: extra hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == list(text.encode())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        exported, attn_implementation="eager", experts_implementation="eager"
    )
    assembly, state, _ = load_run(run, None)
    tokens = np.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    from jaxmoe import Transformer

    params = jax.tree.map(jax.numpy.asarray, jax.device_get(state.params))
    ours = Transformer(assembly.plan.model).apply({"params": params}, jax.numpy.asarray(tokens))
    np.testing.assert_allclose(ours.logits, logits, atol=1e-4)
    # What transformers saves of it is read as a run again.
    tokenizer.save_pretrained(tmp_path / "again")
    theirs.save_pretrained(tmp_path / "again")
    small = ("--imported.batch_size", "8", "--imported.sequence_length", "16", *ONE)
    convert("--from_huggingface", str(tmp_path / "again"), "--to", str(tmp_path / "new"), *small)
    assert_same(load_run(str(tmp_path / "new"), None)[1].params, state.params)
