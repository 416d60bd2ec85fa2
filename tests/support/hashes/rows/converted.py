# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of conversions: quantised, folded and stacked runs, and Hugging Face directories."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from tests.support.hashes.digests import digest_of_record, digest_of_tree
from tests.support.hashes.rows import Row, runs

FEW_BITS = ("w8a8", "w4a8", "w4ax", "w4a4", "w8a16", "w4a16", "fp8")
WIDE = (
    "--model.embed_dim",
    "32",
    "--model.attention.num_heads",
    "2",
    "--model.attention.num_kv_heads",
    "2",
)


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from tests.support.huggingface_models import GOLDEN

    for form in FEW_BITS:
        yield f"quantised/{form}", functools.partial(_quantised, form)
    yield "quantised/bitstack", _bitstack
    yield "exported/run", _exported_run
    yield "exported/adapter", _exported_adapter
    yield "exported/folded", _folded
    for path in sorted(GOLDEN.glob("*.npz")):
        yield f"imported/{path.stem}", functools.partial(_imported, path.stem)


def convert(*words: str) -> None:
    """Run `checkpoint convert`."""
    from experiments.checkpoint import __main__ as checkpoint

    code = checkpoint.main(["convert", *words])
    if code != 0:
        raise RuntimeError(f"convert ended with exit code {code}")


def _trained(directory: pathlib.Path, *flags: str) -> pathlib.Path:
    runs.train(directory / "run", *WIDE, *flags, steps=3)
    return directory / "run"


def _of_converted(directory: pathlib.Path) -> dict[str, str]:
    """Return the hashes of the parameters of a converted run, of its loss and of a text."""
    from jaxmoe import load_checkpoint
    from jaxmoe.run import Run

    run = Run.open(directory)
    return {
        "params": digest_of_tree(load_checkpoint(directory / "checkpoints")["params"]),
        "tokens": digest_of_record(run.generate("1 2", length=6, temperature=0.0).text),
        "held-out loss": digest_of_record(run.evaluate().bits_per_token),
    }


def _quantised(form: str, directory: pathlib.Path) -> dict[str, str]:
    run, into = _trained(directory), directory / form
    mixed = ("--mixed.batches", "1", "--mixed.wide_fraction", "0.5") if form == "w4ax" else ()
    convert("--run.directory", str(run), "--quantise", form, "--to", str(into), *mixed)
    return _of_converted(into)


def _bitstack(directory: pathlib.Path) -> dict[str, str]:
    run, into = _trained(directory), directory / "stacked"
    sizes = ("--budget", "21kB", "--bitstack.rank", "2", "--bitstack.batches", "1")
    words = ("--quantise", "bitstack", "--to", str(into), *sizes)
    convert("--run.directory", str(run), *words)
    return _of_converted(into)


def _of_tensors(directory: pathlib.Path) -> dict[str, str]:
    """Return the hashes of the tensors of a directory by name, and of its config."""
    from safetensors.numpy import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    config = next(path for path in sorted(directory.glob("*config.json")))
    found = json.loads(config.read_text())
    found.pop("base_model_name_or_path", None)  # a path of this machine
    return {"tensors": digest_of_tree(tensors), "config": digest_of_record(found)}


def _exported_run(directory: pathlib.Path) -> dict[str, str]:
    run, into = _trained(directory, "model.moe.gate:renormalized"), directory / "files"
    convert("--run.directory", str(run), "--to_huggingface", "auto", "--to", str(into))
    return _of_tensors(into)


def _tuned(directory: pathlib.Path) -> pathlib.Path:
    from experiments import finetune

    base = _trained(directory)
    adapter = ["adapter:lora", "--adapter.rank", "2", "--checkpoint.initial.path", str(base)]
    length = ["--training.steps", "2", "--schedule.warmup_steps", "1", "--tracking.trackers"]
    where = ["--run.directory", str(directory / "tuned")]
    if code := finetune.main([*adapter, *where, *length, *runs.QUIET]):
        raise RuntimeError(f"finetune ended with exit code {code}")
    return directory / "tuned"


def _exported_adapter(directory: pathlib.Path) -> dict[str, str]:
    into = directory / "files"
    words = ("--to_huggingface", "peft", "--to", str(into))
    convert("--run.directory", str(_tuned(directory)), *words)
    return _of_tensors(into)


def _folded(directory: pathlib.Path) -> dict[str, str]:
    into = directory / "folded"
    convert("--run.directory", str(_tuned(directory)), "--fold", "True", "--to", str(into))
    return _of_converted(into)


def _imported(family: str, directory: pathlib.Path) -> dict[str, str]:
    """A recorded model of the family: parameters, logits, and the files written again."""
    import jax.numpy as jnp

    from jaxmoe import Transformer, from_huggingface
    from jaxmoe.checkpoint import to_huggingface
    from tests.support import huggingface_models as recorded

    golden = recorded.read(family)
    place = recorded.write_directory(directory / "read", golden.config, golden.state)
    read = from_huggingface(place)
    model, params, state = read.model, read.params, read.router_state
    tokens = jnp.asarray(golden.tokens)
    output = Transformer(model).apply({"params": params}, tokens, router_state=state)
    to_huggingface(model, params, directory / "written", router_state=state, max_length=64)
    parts = {"params": digest_of_tree(params), "logits": digest_of_tree([output.logits])}
    return parts | _of_tensors(directory / "written")
