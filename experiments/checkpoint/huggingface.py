# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts runs to files for `transformers`, and such files to runs.

Both directions copy layer by layer from disk to disk (`jaxmoe.checkpoint.streaming`): no stacked
parameter is whole in memory, unless the run saved it in one chunk. Missing and unexpected tensors
are listed in one error.

An imported run has parameters and router state at step 0, and no optimiser state; evaluate,
generate and convert open it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Literal

import jax
from flax import traverse_util

from jaxmoe.checkpoint.huggingface import open_huggingface, read_fields, to_huggingface
from jaxmoe.checkpoint.huggingface.export import TOKENS, suggest_family
from jaxmoe.checkpoint.huggingface.hub import model_directory
from jaxmoe.checkpoint.huggingface.tokenizer import (
    TOKENIZER,
    TokenizerFiles,
    bundled_data,
    eos_ids,
    is_byte_tokenizer,
    own_tokenizer,
    read_generation,
    read_tokenizer_files,
    tokenizer_files,
)
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE, Nonfinite, Tensors
from jaxmoe.checkpoint.streaming import Streamed, open_stored, save_streamed
from jaxmoe.configs import to_json
from jaxmoe.data import SourceKind
from jaxmoe.disk import replace_file
from jaxmoe.messages import command_line
from jaxmoe.models.predictor import Predictor
from jaxmoe.run.assemble import Assembly, assemble, describe_devices
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, RunConfig, TrainingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from jaxmoe.run.provenance.saved import (
    first_token_of,
    imported_generation,
    length_of,
    new_run,
    own_data,
    write_generation,
)
from jaxmoe.tracking.console import format_bytes
from jaxmoe.training import OBJECTIVES, Objective
from jaxmoe.training.state import state_around

ExportFamily = Literal[
    "auto",
    "olmoe",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "jamba",
    "granitemoehybrid",
    "jaxmoe",
    "peft",
]
_PARAMS = "params/"
_FOLDER = "tokenizer"
_BYTES = 256
_HOW_TO_NAME = (
    "name its tokenizer with --imported.data.tokenizer:file --imported.data.tokenizer.path, or give"
    " files of token ids"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """Options of files for transformers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the tensors; biases of routers stay float32."""
    experts: Literal["each", "stacked"] = "each"
    """One tensor per expert (each), which all readers support, or one per layer (stacked)."""
    max_length: int | None = None
    """Positions that readers should support; None: those of a training row or of the imported
    model."""
    max_shard_bytes: int = 5_000_000_000
    """Largest size of a file, bytes."""

    def __post_init__(self):
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"exported.max_length={self.max_length} must be at least 1, or None")
        if self.max_shard_bytes < 1:
            raise ValueError(f"exported.max_shard_bytes={self.max_shard_bytes} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImportConfig:
    """Evaluation data of an imported run, or the model of an imported adapter."""

    data: SourceKind | None = None
    """Data in the tokens of the model; files of text use its tokenizer.json. None: no data, only
    the tokenizer (the embedded corpus, for a model of bytes)."""
    batches: int = 8
    """Number of held-out batches."""
    batch_size: int = 8
    """Sequences of a batch."""
    sequence_length: int = 128
    """Tokens of a sequence."""
    nonfinite: Nonfinite = "refuse"
    """Whether weights that are NaN or infinite are refused or kept."""
    predictor: Predictor | None = None
    """Modules after the last layer to read, which predict tokens further ahead; None leaves those
    of the files out."""
    base: str | None = None
    """Model that an adapter of PEFT adapts: run directory, or directory or name on the hub of a
    Hugging Face model; the one that the adapter names when None."""


def export_run(
    source: str, step: int | None, target: pathlib.Path, family: ExportFamily, export: ExportConfig
) -> str:
    """Write a step of a run for `transformers`.

    Args:
        source: Run directory.
        step: Step of the checkpoint; the newest undamaged one when None.
        target: Directory to make.
        family: Family as in `ConvertConfig`.
        export: Options of the files.

    Returns:
        A report for the user.

    Raises:
        ValueError: There is no run or checkpoint, its weights are quantised, or the family does
            not compute its model.
    """
    directory = RunDirectory(source)
    config = directory.load_config(PretrainConfig)
    if (weights := config.execution.precision.weights) != "floating":
        raise ValueError(
            f"run.directory={source} holds quantised weights ({weights}), with which transformers"
            " computes other logits: convert the run that it came from"
        )
    if (adapter := config.model.adapter) is not None:
        raise ValueError(
            f"run.directory={source} holds an adapter ({adapter.name}): fold it first,"
            f" {command_line('checkpoint', 'convert', source, '--fold', 'True')}"
        )
    model = make_plan(config).model
    name, why = suggest_family(model) if family == "auto" else (family, "")
    files = tokenizer_files(own_data(config, directory), seed=config.training.seed)
    step, arrays = open_stored(directory.checkpoints_directory, step)
    params = _under(arrays, _PARAMS)
    state = _under(arrays, f"{ROUTER_STATE}/")
    length = export.max_length or length_of(directory, config)
    special = {"eos_token_id": files.separator, "bos_token_id": first_token_of(directory)}
    tensors, generation = imported_generation(directory)
    special |= tensors
    if files.ends:  # of the answers that the run was trained on
        ends = (*eos_ids(special, generation), *files.ends)
        generation = generation | {"eos_token_id": list(dict.fromkeys(ends))}
    title = f"Step {step} of the run {config.run.name or pathlib.Path(source).name}"
    to_huggingface(
        model,
        params,
        target,
        router_state=state,
        family=name,
        dtype=export.dtype,
        experts=export.experts,
        max_shard_bytes=export.max_shard_bytes,
        max_length=length,
        fields={name: token for name, token in special.items() if token is not None},
        generation=generation,
        texts={"README.md": _card(title, name, files), **files.texts},
    )
    size = sum(file.stat().st_size for file in target.iterdir())
    lines = [
        f"step {step} of {source} is in {target}: family {name}, {export.dtype},"
        f" {format_bytes(size)}",
        f"tokenizer: {files.words}",
    ]
    if name == "jaxmoe":
        lines.append("read it with from_pretrained(..., trust_remote_code=True)")
    return "\n".join([*([why] if why else ()), *lines])


def import_run(source: str, target: pathlib.Path, options: ImportConfig) -> str:
    """Convert files of `transformers` to a run.

    Args:
        source: Directory with config.json, safetensors and optionally tokenizer.json.
        target: Run directory to make.
        options: Evaluation data of the run.

    Returns:
        A report for the user.

    Raises:
        ValueError: A file is not a plain file of the directory; tensors are missing, unexpected, of
            another shape or not finite; the model is not supported; or the data has other tokens
            than the model.
    """
    if options.base is not None:
        raise ValueError(
            f"imported.base={options.base} is for an adapter of PEFT, and from_huggingface={source}"
            " holds a whole model: leave it out"
        )
    place = pathlib.Path(model_directory(source, "from_huggingface"))
    if not place.is_dir():
        raise ValueError(
            f"from_huggingface={source} is not a directory: give the one with config.json, or a"
            " name on the Hugging Face hub, such as allenai/OLMoE-1B-7B-0924"
        )
    model, tensors = open_huggingface(
        place, nonfinite=options.nonfinite, predictor=options.predictor
    )
    texts = read_tokenizer_files(place)
    fields = read_fields(place)
    generation = read_generation(place)
    config = PretrainConfig(
        run=RunConfig(directory=str(target), name=target.name),
        model=model,
        data=_data(options.data, place, texts, fields),
        training=TrainingConfig(
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
            objective=_objective(options.predictor),
        ),
        evaluation=EvaluationConfig(batches=options.batches),
    )
    assembly = assemble(config)
    _check_disk(target, 4 * (tensors.table.total))
    config = _with_own_tokenizer(config, place, target)
    with new_run(target, config) as unfinished:
        if texts:
            for name, text in texts.items():
                replace_file(unfinished.path / _FOLDER / name, text)
            write_generation(unfinished, {name: fields.get(name) for name in TOKENS}, generation)
        _save(unfinished, config, assembly, tensors)
        unfinished.write_environment(describe_devices(assembly.mesh.devices.flat))
        unfinished.write_summary(
            {
                "status": "imported",
                "format": fields["model_type"],
                "source": source,
                "checkpoint_step": 0,
                "parameters_total": tensors.table.total,
                "max_length": fields.get("max_position_embeddings"),
                "bos_token_id": fields.get("bos_token_id"),
                "special_tokens": {name: fields.get(name) for name in TOKENS},
                "generation": generation,
                "data": assembly.source.fingerprint(),
            }
        )
    return "\n".join(
        [
            f"{source} ({fields['model_type']}, {tensors.table.total:,} parameters) is in {target},"
            " at step 0, without an optimiser's state",
            f"data: {assembly.source.describe(options.sequence_length)}",
        ]
    )


def _objective(predictor: Predictor | None) -> Objective:
    """Return what trains an imported model: the next token, or what its modules predict too."""
    return OBJECTIVES["next_token" if predictor is None else predictor.objective]()


def _under(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The nested dict of the arrays whose paths begin so."""
    inside = {path.removeprefix(prefix): a for path, a in arrays.items() if path.startswith(prefix)}
    return traverse_util.unflatten_dict(inside, sep="/")


def _card(title: str, family: str, files: TokenizerFiles) -> str:
    """Return the text of README.md."""
    trust = ", trust_remote_code=True" if family == "jaxmoe" else ""
    has = "with" if files.texts else "without"
    return (
        f"# {title}\n\nWritten by jaxmoe for transformers, as {family}, {has} a tokenizer:"
        f" {files.words}.\n\n"
        f'    AutoModelForCausalLM.from_pretrained("."{trust})\n'
    )


def _data(
    data: SourceKind | None,
    place: pathlib.Path,
    texts: Mapping[str, str],
    fields: Mapping[str, Any],
) -> SourceKind:
    """Return the data in the tokens of the model; its tokenizer alone if there is none.

    Raises:
        ValueError: The data has other tokens, or the tokenizer of the model is unknown.
    """
    if data is None:
        return bundled_data(place, fields)
    is_bytes = TOKENIZER in texts and is_byte_tokenizer(texts[TOKENIZER])
    has_other = TOKENIZER in texts and not is_bytes
    reads_bytes = data.tokenizer is not None and data.tokenizer.is_bytes
    if not has_other:
        is_of_bytes = is_bytes or fields["vocab_size"] == _BYTES
        if not is_of_bytes and reads_bytes:
            raise ValueError(
                f"from_huggingface={place} has no {TOKENIZER}, and imported.data reads bytes, which"
                f" are not the {fields['vocab_size']} tokens of this model: {_HOW_TO_NAME}"
            )
        return data
    if reads_bytes and not data.takes_tokenizer:
        raise ValueError(
            f"imported.data:{data.name} is in bytes, and the tokens of {place} are those of its"
            f" {TOKENIZER}: choose imported.data:files --imported.data.path 'docs/**/*.md'"
        )
    if reads_bytes:
        return dataclasses.replace(data, tokenizer=own_tokenizer(place, texts[TOKENIZER], fields))
    return data


def _with_own_tokenizer(
    config: PretrainConfig, place: pathlib.Path, target: pathlib.Path
) -> PretrainConfig:
    """Return the config with the run's copy of the tokenizer."""
    tokenizer = config.data.tokenizer
    if tokenizer is None or tokenizer.file != place / TOKENIZER:
        return config
    data = config.data.with_tokenizer(target / _FOLDER / TOKENIZER)
    return dataclasses.replace(config, data=data)


def _save(
    unfinished: RunDirectory, config: PretrainConfig, assembly: Assembly, tensors: Tensors
) -> None:
    """Write the checkpoint layer by layer."""
    model = assembly.plan.model
    execution = assembly.execution
    dtype = str(jax.numpy.dtype(execution.precision.parameter_dtype))
    state = state_around(model, None, execution, {}, jax.random.key(config.training.seed))
    state = dataclasses.replace(state, router_state={})

    def stream(row: Any) -> Streamed:
        return Streamed(
            row.shape,
            dtype,
            lambda layer: tensors.read(row, layer).astype(dtype, copy=False),
            is_stacked=tensors.is_stacked(row),
        )

    arrays = {f"{_PARAMS}{row.path}": stream(row) for row in tensors.table}
    arrays |= {
        row.path: Streamed(row.shape, "float32", lambda _, row=row: tensors.read(row))
        for row in tensors.state_table
    }
    save_streamed(
        unfinished.checkpoints_directory,
        state,
        arrays,
        step=0,
        config=to_json(config),
        data=assembly.loader.position(0),
    )


def _check_disk(target: pathlib.Path, num_bytes: int) -> None:
    """Raise if the disk has not enough space, before writing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < 1.1 * num_bytes:
        raise ValueError(
            f"to={target} needs {num_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free:"
            " free space, or choose another disk with --to"
        )
