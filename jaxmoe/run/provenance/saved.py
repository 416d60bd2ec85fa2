# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration of a run or a Hugging Face model, with another mesh or other data.

A copy of the tokenizer stands in the run directory, so that text needs no other file. The digest of
its tokenizer.json is kept beside it: with ids of another tokenizer a model reads and writes other
text, and no error would say so.

Run directories of converted models are made whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.huggingface import open_huggingface, read_fields
from jaxmoe.checkpoint.huggingface.export import TOKENS
from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.checkpoint.huggingface.placing import load
from jaxmoe.checkpoint.huggingface.tokenizer import (
    GENERATION,
    TOKENIZER,
    bundled_data,
    eos_ids,
    read_generation,
    tokenizer_texts,
)
from jaxmoe.data import Source, SourceKind
from jaxmoe.data.chat import answer_end_ids
from jaxmoe.data.tokenizer import SubwordTokenizer
from jaxmoe.disk import replace_file
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text import separator_of
from jaxmoe.json_bounds import read_record
from jaxmoe.messages import TEXT_FILES
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.predictor import Predictor
from jaxmoe.run.config import (
    EvaluationConfig,
    InitialConfig,
    PretrainConfig,
    RunConfig,
    TrainingConfig,
)
from jaxmoe.run.directory import RunDirectory
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import CacheFormat


def huggingface_values(
    path: str | os.PathLike[str],
    execution: ExecutionConfig,
    mesh: Mesh,
    predictor: Predictor | None = None,
) -> tuple[Any, Any]:
    """Return the parameters, in the dtype of the run, and the router state; {} without any.

    Args:
        path: Directory of the model.
        execution: Rules and dtype of the parameters.
        mesh: Mesh to place them on.
        predictor: Modules after the last layer to read; None leaves them out.

    Raises:
        ValueError: The weights cannot be read, or do not fit the mesh.
    """
    rules = execution.axis_rules
    _, tensors = open_huggingface(pathlib.Path(path), rules=rules, predictor=predictor)
    dtype = execution.precision.parameter_dtype
    return load(tensors, mesh=mesh, axis_rules=rules, dtype=dtype)


DIGESTS = "sha256.json"
"""File with the digest of the copy of tokenizer.json."""


def keep_tokenizer(directory: RunDirectory, config: PretrainConfig, source: Source) -> None:
    """Copy the tokenizer.json of a run's data and its companions, unless there is a copy.

    Args:
        directory: Run directory, held by this process.
        config: Configuration of the run.
        source: Data of the run.

    Raises:
        ValueError: The directory cannot be written.
    """
    tokenizer = getattr(source, "tokenizer", None)
    kind = config.data.tokenizer
    place = directory.tokenizer_directory
    if not isinstance(tokenizer, SubwordTokenizer) or (place / TOKENIZER).exists():
        return
    texts = tokenizer_texts(tokenizer, is_trained=kind is not None and kind.is_trained)
    digest = hashlib.sha256(texts[TOKENIZER].encode()).hexdigest()
    with directory.usable():
        replace_file(place / DIGESTS, json.dumps({TOKENIZER: digest}))
        for name in sorted(texts, key=lambda name: name == TOKENIZER):  # last: then all are there
            replace_file(place / name, texts[name])


def own_data(config: PretrainConfig, directory: RunDirectory) -> SourceKind:
    """Return the data config of a run with its own copy of the tokenizer, if there is one.

    Args:
        config: Configuration of the run.
        directory: Run directory, which may have been moved.

    Raises:
        ValueError: The copy is not the file that the run kept.
    """
    path = directory.tokenizer_directory / TOKENIZER
    data: Any = config.data
    if not path.is_file():
        return data
    _check(path)
    return data.with_tokenizer(path)


def _check(path: pathlib.Path) -> None:
    """Compare a copy with the digest beside it, if there is one."""
    digests = path.parent / DIGESTS
    if not digests.is_file():
        return
    digest_saved = read_record(digests, dict).get(TOKENIZER)
    if digest_saved != hashlib.sha256(path.read_bytes()).hexdigest():
        raise ValueError(
            f"{path} is not the file that the run kept (its digest is not that of {digests.name}):"
            " the model was trained on the ids of another one; restore it"
        )


def copy_tokenizer(source: RunDirectory, target: RunDirectory) -> None:
    """Copy the tokenizer that a run keeps to another run directory.

    Args:
        source: Run directory with or without a tokenizer.
        target: Run directory without one.

    Raises:
        ValueError: A directory cannot be read or written.
    """
    if source.tokenizer_directory.is_dir():
        with target.usable():
            shutil.copytree(source.tokenizer_directory, target.tokenizer_directory)


BATCHES = 8
BATCH_SIZE = 8
SEQUENCE_LENGTH = 128
"""Held-out batches, their sequences and their tokens, for models that were imported."""


def saved_config(path: str | os.PathLike[str], initial: str | None = None) -> PretrainConfig:
    """Return the configuration of a run directory, or of a directory of a Hugging Face model.

    Args:
        path: Directory.
        initial: Model that the adapter of the run was trained on, where it has moved; None: the one
            that the run names.

    Raises:
        ValueError: There is neither a run nor a model that this library computes, or `initial` is
            given for a run without an adapter.
    """
    if not is_huggingface(path):
        return _on_base(RunDirectory(path).load_config(PretrainConfig), path, initial)
    if initial is not None:
        raise ValueError(f"run.initial={initial}: {path} is no run with an adapter: leave it out")
    place = pathlib.Path(path)
    model, _ = open_huggingface(place)
    config = PretrainConfig(
        run=RunConfig(directory=str(place), name=place.resolve().name),
        model=model,
        data=bundled_data(place, read_fields(place)),
        training=TrainingConfig(batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH),
        evaluation=EvaluationConfig(batches=BATCHES),
    )
    shards = config.execution.mesh.resolve(jax.device_count()).batch_shards
    rows = -(-BATCH_SIZE // shards) * shards
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, batch_size=rows)
    )


def _on_base(config: PretrainConfig, path: Any, initial: str | None) -> PretrainConfig:
    """Return a configuration with another path of the model that the adapter was trained on."""
    if initial is None:
        return config
    if config.model.adapter is None:
        raise ValueError(
            f"run.initial={initial}: {path} has no adapter, its checkpoints hold all parameters:"
            " leave it out"
        )
    base = dataclasses.replace(config.checkpoint.initial or InitialConfig(), path=initial)
    # The step that its checkpoint names, if the model has it: it may have trained on.
    step = _step_of_base(RunDirectory(path))
    if is_huggingface(initial):
        base = dataclasses.replace(base, step=None)
    elif (RunDirectory(initial).checkpoints_directory / str(step)).is_dir():
        base = dataclasses.replace(base, step=step)
    checkpoint = dataclasses.replace(config.checkpoint, initial=base)
    return dataclasses.replace(config, checkpoint=checkpoint)


def _step_of_base(directory: RunDirectory) -> int | None:
    """Return the step of the model that the newest checkpoint of an adapter was trained on."""
    if not directory.checkpoints_directory.is_dir():
        return None
    manager = CheckpointManager(directory.checkpoints_directory, is_writer=False)
    try:
        manifest = manager.newest_readable_manifest()
    finally:
        manager.close()
    return None if manifest is None or manifest.base is None else manifest.base["step"]


def at_execution(
    config: PretrainConfig,
    path: str,
    mesh: MeshConfig | None = None,
    cache: CacheFormat = "compute",
) -> PretrainConfig:
    """Return the configuration of a trained run with another mesh or cache.

    Args:
        config: Configuration of the run.
        path: Run directory, for messages.
        mesh: Mesh to use; the one of the run when None.
        cache: Format of cached keys and values.

    Raises:
        ValueError: `cache` is given for a model that has no cache.
    """
    if cache != "compute" and not config.model.attention.is_causal:
        raise ValueError(
            f"cache={cache}: {path} holds a model that is not causal"
            " (model.attention.is_causal=False), which is computed without a cache: leave it out"
        )
    precision = dataclasses.replace(config.execution.precision, cache=cache)
    execution = dataclasses.replace(config.execution, precision=precision)
    if mesh is not None:
        # A fold and a pipeline belong to the mesh of the training.
        execution = dataclasses.replace(execution, mesh=mesh, fold=None, pipeline=None)
    return dataclasses.replace(config, execution=execution)


def on_task(model: ModelConfig, data: SourceKind, task: str | None) -> ModelConfig:
    """Return a model whose rows have a task, unless a batch names another.

    Args:
        model: Model with its adapter.
        data: Data of the training, which names the tasks.
        task: Name or number of a part of data.mix; the adapter's own when None.

    Raises:
        ValueError: The adapter has no tasks, or not this one.
    """
    if task is None:
        return model
    if model.adapter is None:
        raise ValueError(f"task={task}: the model has no adapter, and so no tasks: leave it out")
    names = data.traits.task_names
    if task not in names and not task.lstrip("-").isdecimal():
        tasks_text = f", or by name one of {', '.join(names)}" if names else ""
        raise ValueError(f"task={task} is unknown: give the number of a task{tasks_text}")
    number = names.index(task) if task in names else int(task)
    if "task" not in model.adapter.late_fields:
        raise ValueError(f"task={number}: adapter:{model.adapter.name} has no tasks: leave it out")
    changes: dict[str, Any] = {"task": number}
    return dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, **changes))


def on_data(
    config: PretrainConfig,
    directory: RunDirectory,
    data: SourceKind | None = None,
    sequence_length: int | None = None,
    batches: int | None = None,
) -> PretrainConfig:
    """Return the configuration of a trained run with other held-out data.

    Args:
        config: Configuration of the run.
        directory: Run directory.
        data: Data to evaluate on, all of it where it is files; the run's held-out data when None.
        sequence_length: Tokens of a sequence; those of a training row when None.
        batches: Number of held-out batches; that of the run when None.

    Raises:
        ValueError: The data has other tokens than the run.
    """
    if data is not None:
        tokenizer = own_data(config, directory).tokenizer
        reads_bytes = data.tokenizer is not None and data.tokenizer.is_bytes
        if tokenizer is not None and not tokenizer.is_bytes and reads_bytes:
            if not data.takes_tokenizer or tokenizer.is_trained:
                raise ValueError(
                    f"data:{data.name} is in bytes, and the tokens of this run are those of"
                    f" {tokenizer}: choose {TEXT_FILES}, and name the run's"
                    " tokenizer.json with --data.tokenizer.path if it was trained"
                )
            data = dataclasses.replace(data, tokenizer=tokenizer)
        config = dataclasses.replace(config, data=data.for_evaluation())
    training = config.training
    evaluation = config.evaluation
    if sequence_length is not None:
        training = dataclasses.replace(training, sequence_length=sequence_length)
    if batches is not None:
        evaluation = dataclasses.replace(evaluation, batches=batches)
    return dataclasses.replace(config, training=training, evaluation=evaluation)


Ends = Literal["auto", "stop", "ignore"]
"""Whether the end-of-text token ends a text; auto: only for models that were imported, and for runs
that began from one."""


def length_of(directory: RunDirectory, config: PretrainConfig) -> int:
    """Return the longest sequence of a run: of an imported model, or a training row.

    Args:
        directory: Run directory, or directory of a Hugging Face model.
        config: Configuration of the run.
    """
    if is_huggingface(directory.path):
        length = read_fields(directory.path).get("max_position_embeddings")
    else:
        length = _load_imported(directory, "max_length")
    return length or config.training.sequence_length


def first_token_of(directory: RunDirectory) -> int | None:
    """Return the id that begins a text; None unless an imported model has one.

    Args:
        directory: Run directory.
    """
    return _load_imported(directory, "bos_token_id")


def imported_ends(directory: RunDirectory, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text of a model, see `imported_generation`; none of other runs.

    Args:
        directory: Run directory, or directory of a Hugging Face model.
        vocab_size: Number of ids of the model, which never writes those beyond.
    """
    ids = eos_ids(*imported_generation(directory))
    if not all(isinstance(token, int) for token in ids):
        return ()
    return tuple(token for token in ids if token < vocab_size)


def imported_generation(directory: RunDirectory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return special token ids and generation_config.json of a model.

    Args:
        directory: Run directory of an imported model, or of a run that began from one and keeps
            these (`keep_generation`); or directory of a Hugging Face model. Both are empty for
            other runs.
    """
    if is_huggingface(directory.path):
        fields = read_fields(directory.path)
        special = {name: fields[name] for name in TOKENS if fields.get(name) is not None}
        return special, read_generation(directory.path)
    summary = directory.summary() or {}
    entries = [summary.get(name) for name in ("special_tokens", "generation")]
    special, generation = (entry if isinstance(entry, dict) else {} for entry in entries)
    if special or generation:
        return special, generation
    fields = read_generation(directory.tokenizer_directory)
    # The end of text of config.json is the separator of the tokenizer.
    names = [name for name in TOKENS if name != "eos_token_id" and fields.get(name) is not None]
    return {name: fields[name] for name in names}, fields


def keep_generation(directory: RunDirectory, config: PretrainConfig) -> None:
    """Keep special token ids and generation_config.json of the model that a run begins with.

    So text ends where that of the model does, wherever the run is opened. They stand beside the
    copy of the tokenizer, as they do in the directory of a model. A run that has them, or other
    tokens than the model, is left as it is.

    Args:
        directory: Run directory, held by this process.
        config: Configuration of the run.

    Raises:
        ValueError: A directory cannot be read or written.
    """
    place = directory.tokenizer_directory / GENERATION
    path = config.checkpoint.initial_path
    if path is None or place.exists():
        return
    write_generation(directory, *imported_generation(RunDirectory(path)))


def write_generation(
    directory: RunDirectory, special: Mapping[str, Any], generation: Mapping[str, Any]
) -> None:
    """Write special token ids as a generation_config.json beside the copy of the tokenizer.

    Args:
        directory: Run directory, held by this process.
        special: Special token ids of config.json.
        generation: Fields of generation_config.json, which hold where both name some.

    Raises:
        ValueError: The directory cannot be written.
    """
    fields = {name: value for name, value in special.items() if value is not None}
    fields.update(generation)
    if ends := eos_ids(special, generation):
        fields["eos_token_id"] = list(ends)
    if fields:
        with directory.usable():
            replace_file(directory.tokenizer_directory / GENERATION, json.dumps(fields))


def end_ids(
    directory: RunDirectory, config: PretrainConfig, source: Source, eos: Ends
) -> tuple[int, ...]:
    """Return the ids that end a text.

    Args:
        directory: Run directory, or directory of a Hugging Face model.
        config: Configuration of the run.
        source: Its data.
        eos: Whether the end-of-text token ends a text.

    Raises:
        ValueError: eos="stop", and the data has no end-of-text token.
    """
    if eos == "ignore":
        return ()
    ids = imported_ends(directory, config.model.vocab_size)
    if ids:
        data = config.data if is_huggingface(directory.path) else own_data(config, directory)
        answers = answer_end_ids(data, getattr(source, "tokenizer", None))
        ids = tuple(dict.fromkeys((*ids, *answers)))
    is_model = is_huggingface(directory.path)
    # Of a run that was imported with data of its own, the text goes on.
    is_tuned = bool(ids) and "special_tokens" not in (directory.summary() or {})
    if eos == "auto" and not (is_model or is_tuned or not config.data.traits.has_rows):
        return ()
    if ids or is_model:
        return ids
    separator = separator_of(source)
    if separator is None and eos == "stop":
        raise ValueError(
            "eos=stop: the data of this run has no token that ends a text: leave it out"
        )
    return () if separator is None else (separator,)


def _load_imported(directory: RunDirectory, field: str) -> int | None:
    value = (directory.summary() or {}).get(field)
    return value if isinstance(value, int) else None


@contextlib.contextmanager
def new_run(target: pathlib.Path, config: PretrainConfig) -> Iterator[RunDirectory]:
    """Create a run directory with its config, renamed into place if nothing was raised.

    Args:
        target: Path of the run directory; must not exist.
        config: Configuration of the run.

    Raises:
        ValueError: The directory cannot be written, or the target appeared meanwhile.
    """
    unfinished = RunDirectory(target.with_name(f"{target.name}.unfinished-{os.getpid()}"))
    try:
        unfinished.acquire()
        unfinished.check_config(config)
        yield unfinished
        unfinished.release()
        unfinished.clear_lock()
        if target.exists():
            raise ValueError(f"to={target} has appeared meanwhile: choose another with --to")
        unfinished.path.rename(target)
    finally:
        shutil.rmtree(unfinished.path, ignore_errors=True)
