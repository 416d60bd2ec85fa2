# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories in a program and in the commands: text in, text out, nothing written."""

import json
import os
import shutil

import numpy as np
import pytest

import jaxmoe
from experiments import describe, evaluate, generate, pretrain
from experiments.checkpoint import __main__ as checkpoint
from experiments.cli.flags import ExitCode
from jaxmoe.checkpoint.huggingface import hub
from jaxmoe.errors import ConfigurationError
from jaxmoe.optional import MissingPackageError
from jaxmoe.run import Run
from tests.support.huggingface_directories import END, write_model

GREEDY = {"length": 12, "temperature": 0.0}
PROMPTS = ["the quick", "and then the longer \u00e9 prompt", "x"]
SMALL = ("--batches", "1", "--sequence_length", "16")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "olmoe"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def pretrained(place):
    return jaxmoe.from_huggingface(place)


@pytest.fixture
def downloads(place, monkeypatch):
    """Names that were downloaded, from a hub that holds one model."""
    import huggingface_hub as module  # tokenizers need it

    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        files = (
            "model-00001-of-00002.safetensors",
            "additional_chat_templates/tool_use.jinja",
            "original/model.safetensors",
            "consolidated-00001-of-00008.safetensors",
        )
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert [*module.utils.filter_repo_objects(files, **patterns)] == [*files[:2]]
        asked.append(name)
        if name != "org/olmoe":
            raise OSError(f"404: there is no model {name}\nmore lines")
        return str(place)

    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    return asked


def refused(capsys, function, *arguments):
    with pytest.raises(SystemExit) as stopped:
        function([*arguments])
    assert stopped.value.code == ExitCode.BAD_CONFIGURATION
    return capsys.readouterr().err


def test_prompts_of_unequal_length_continue_as_each_alone(pretrained):
    together = pretrained.generate(PROMPTS, **GREEDY)
    assert together == [pretrained.generate(prompt, **GREEDY) for prompt in PROMPTS]
    assert len(set(together)) == 3
    ids = [pretrained.tokenizer.encode(prompt).tolist() for prompt in PROMPTS]
    assert [*map(len, ids)] != [len(ids[0])] * 3
    found = pretrained.generate(ids, **GREEDY)
    assert found[1] == pretrained.generate(ids[1], **GREEDY)
    assert pretrained.tokenizer.decode(np.asarray(found[0])) == together[0]


def test_stop_strings_and_streams(pretrained):
    whole = pretrained.generate(PROMPTS[0], length=60, seed=1, ignores_eos=True)
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    seen = []
    given = {"length": 60, "seed": 1, "ignores_eos": True, "stop": (stop, "never there")}
    assert pretrained.generate(PROMPTS[0], on_sample=seen.append, **given) == cut
    texts = [sample.text for sample in seen]
    assert len(texts) > 1 and texts == sorted(texts, key=len)
    assert all(cut.startswith(text) for text in texts)
    with pytest.raises(ConfigurationError, match="2 prompts cannot be streamed together"):
        pretrained.generate(PROMPTS[:2], on_sample=seen.append)
    with pytest.raises(ConfigurationError, match="stop holds an empty string"):
        pretrained.generate("x", stop=("",))
    with pytest.raises(ConfigurationError, match="prompt row 0 must be token ids from 0 to"):
        pretrained.generate([1, 5000])


def test_directory_without_tokenizer_takes_ids(tmp_path, capsys):
    model = write_model(tmp_path / "bare", has_tokenizer=False)
    bare = jaxmoe.from_huggingface(str(tmp_path / "bare"))
    ids = bare.generate([5, 6, 7], length=4, temperature=0.0)
    assert len(ids) == 4 and all(0 <= token < model.vocab_size for token in ids)
    text = bare.generate("5 6 7", length=4, temperature=0.0)
    assert f"5 6 7{text}" == " ".join(map(str, [5, 6, 7, *ids]))  # a text goes on as it began
    given = ("--run.directory", str(tmp_path / "bare"), "--length", "4", "--temperature", "0")
    assert generate.main([*given, "--prompt", "5 6 7"]) == ExitCode.DONE
    assert " ".join(map(str, ids)) in capsys.readouterr().out


def test_commands_take_the_directory_and_write_nothing(place, pretrained, capsys, tmp_path):
    """The same text as the library, the same loss as the imported run."""
    before = {name: os.stat(place / name).st_mtime_ns for name in sorted(os.listdir(place))}
    here = ("--run.directory", str(place))
    given = ("--length", "12", "--temperature", "0")
    assert generate.main([*here, *given, "--prompt", PROMPTS[0]]) == ExitCode.DONE
    text = pretrained.generate(PROMPTS[0], **GREEDY)
    out = capsys.readouterr().out
    assert out == f"--- prompt\n{PROMPTS[0]}\n--- continued\n{text}\n\n"
    assert generate.main([*here, *given, "--prompt", *PROMPTS]) == ExitCode.DONE
    assert out in capsys.readouterr().out
    assert "holds a model without data of its own" in refused(capsys, evaluate.main, *here)
    (tmp_path / "text.txt").write_text("the quick and the rest " * 200)
    data = ("--data.path", str(tmp_path / "text.txt"), "--data.cache", str(tmp_path / "cache"))
    assert evaluate.main([*here, *data, *SMALL]) == ExitCode.DONE
    line = capsys.readouterr().out
    assert line.startswith("step=0 tokens=128 eval/bits_per_token=") and "bits_per_byte" in line
    imported = str(tmp_path / "run")
    convert = ("convert", "--from_huggingface", str(place), "--to", imported)
    assert checkpoint.main(convert) == ExitCode.DONE  # no data is asked for
    assert "subword tokenizer of" in capsys.readouterr().out
    assert evaluate.main(["--run.directory", imported, *data, *SMALL]) == ExitCode.DONE
    assert capsys.readouterr().out == line
    assert generate.main(["--run.directory", imported, *given, "--prompt", PROMPTS[0]]) == 0
    assert capsys.readouterr().out == out
    assert describe.main([*here, "--training.batch_size", "8"]) == ExitCode.DONE
    assert "olmoe" in capsys.readouterr().out
    assert "brings a model" in refused(capsys, describe.main, *here, "--model.num_layers", "3")
    assert "holds a Hugging Face model" in refused(capsys, pretrain.main, "tiny", *here)
    assert "has no steps" in refused(capsys, generate.main, *here, "--run.step", "3")
    assert "data:tokenizer_only has no rows to train on" in refused(
        capsys,
        pretrain.main,
        "tiny",
        "--run.directory",
        str(tmp_path / "new"),
        "data:tokenizer_only",
    )
    after = {name: os.stat(place / name).st_mtime_ns for name in sorted(os.listdir(place))}
    assert after == before


def test_end_of_text_ends_a_text(place, pretrained, tmp_path):
    """The first generated token is made the end of text."""
    ids = pretrained.generate(pretrained.tokenizer.encode("the quick").tolist(), **GREEDY)
    fields = json.loads((place / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (other / name).write_bytes((place / name).read_bytes())
    number = next(n for n in range(1, len(ids)) if ids[n] not in ids[:n])
    end = ids[number]
    (other / "config.json").write_text(json.dumps({**fields, "eos_token_id": [end, 0]}))
    found = jaxmoe.from_huggingface(other)
    assert found.generate(found.tokenizer.encode("the quick").tolist(), **GREEDY) == ids[:number]
    run = Run.open(other)
    short = run.generate("the quick", **GREEDY)
    assert list(short.token_ids) == ids[:number]
    assert list(run.generate("the quick", eos="ignore", **GREEDY).token_ids) == ids
    texts = run.generate(["the quick", "x"], **GREEDY)
    assert texts[0] == short and texts[1] == run.generate("x", **GREEDY)


def test_ends_of_generation_config_hold_through_import_and_export(place, pretrained, tmp_path):
    """As transformers takes them: those of generation_config.json, where it names any."""
    other, prompt = tmp_path / "other", pretrained.tokenizer.encode("the quick").tolist()
    shutil.copytree(place, other)
    ids = pretrained.generate(prompt, **GREEDY)
    number = next(n for n in range(1, len(ids)) if ids[n] not in ids[:n])
    end = json.loads((place / "config.json").read_text())["eos_token_id"]
    generation = {"eos_token_id": [end, ids[number]], "top_p": 0.5, "pad_token_id": 0}
    (other / "generation_config.json").write_text(json.dumps(generation))
    found = jaxmoe.from_huggingface(other)
    assert found.eos_ids == (end, ids[number]) and found.generate(prompt, **GREEDY) == ids[:number]
    assert list(Run.open(other).generate("the quick", **GREEDY).token_ids) == ids[:number]
    run, back = str(tmp_path / "run"), tmp_path / "back"
    assert checkpoint.main(["convert", "--from_huggingface", str(other), "--to", run]) == 0
    assert list(Run.open(run).generate("the quick", **GREEDY).token_ids) == ids[:number]
    given = ("--run.directory", run, "--to_huggingface", "auto", "--to", str(back))
    assert checkpoint.main(["convert", *given]) == ExitCode.DONE
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == end
    written = json.loads((back / "generation_config.json").read_text())
    assert generation.items() <= written.items()
    for wrong in ({"eos_token_id": ["x"]}, {"eos_token_id": -1}, {"eos_token_id": [True]}):
        (other / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ConfigurationError, match="generation_config.json: eos_token_id"):
            jaxmoe.from_huggingface(other)


def test_names_on_the_hub_are_downloaded(place, downloads, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = ("--prompt", "the", "--length", "2", "--temperature", "0")
    assert generate.main(["--run.directory", "org/olmoe", *given]) == ExitCode.DONE
    assert "downloading it from the Hugging Face hub" in capsys.readouterr().out
    assert jaxmoe.from_huggingface("org/olmoe").eos_ids
    wrong = refused(capsys, generate.main, "--run.directory", "org/none", *given)
    assert "org/none is not a directory, and was not downloaded from the Hugging Face hub" in wrong
    assert "404: there is no model org/none." in wrong and "more lines" not in wrong
    assert "`hf download org/none --local-dir none`" in wrong
    assert downloads == ["org/olmoe", "org/olmoe", "org/none"]
    (tmp_path / "runs").mkdir()
    missing = refused(capsys, generate.main, "--run.directory", "runs/mine", *given)
    assert "holds no run" in missing and len(downloads) == 3

    def require(name, extra):
        raise MissingPackageError(f"{name} is not installed")

    monkeypatch.setattr(hub, "require", require)
    how = refused(
        capsys, checkpoint.main, "convert", "--from_huggingface", "org/olmoe", "--to", "new"
    )
    assert "`hf download org/olmoe --local-dir olmoe` (pip install huggingface_hub)" in how
    with pytest.raises(ConfigurationError, match="holds no Hugging Face model"):
        jaxmoe.from_huggingface(tmp_path)


@pytest.mark.slow
def test_text_equals_that_of_transformers(place, pretrained):
    """Greedy text after prompts, one of which spells a special token."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    transformers = pytest.importorskip("transformers", reason="not installed: extra hf")
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, **eager)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
    for prompt in (*PROMPTS, f"the {END}quick"):
        ids = tokenizer(prompt)["input_ids"]
        assert pretrained.tokenizer.encode(prompt).tolist() == ids
        with torch.no_grad():
            out = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
        wanted = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        assert pretrained.generate(prompt, **GREEDY) == wanted
