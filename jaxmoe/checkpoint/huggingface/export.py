# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a model as config.json and safetensors files of `transformers`.

Export uses the rules of the import in the other direction. One layer of one parameter and one
tensor are in host memory at a time, and files are written sequentially. All files are written to a
temporary directory, which is renamed when it is complete.

A model with `model.layers` is exported in its normal form (`describe.normal_form`). A
model is exported as a family only if the family computes the same logits
(`describe.check_described`). Other models are exported with their own modelling file (modeling.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import traverse_util

from jaxmoe.checkpoint.huggingface import modeling
from jaxmoe.checkpoint.huggingface.describe import check_described, normal_form
from jaxmoe.checkpoint.huggingface.families.own import OWN
from jaxmoe.checkpoint.huggingface.family import FAMILIES, Family
from jaxmoe.checkpoint.huggingface.files import Planned, write_tensors
from jaxmoe.checkpoint.huggingface.tokenizer import GENERATION
from jaxmoe.checkpoint.huggingface.weights import (
    EMBEDDINGS,
    ROUTER_STATE,
    TensorPiece,
    pieces_of,
    state_table,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import ModelConfig, ModelOptions
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table

logger = logging.getLogger(__name__)

CONFIG = "config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LAYER = re.compile(r"(?:model\.layers|transformer\.blocks|backbone\.layers)\.(\d+)\.")
_SHOWN = 20
_IN_MEMORY = (
    ".mlp.gate.weight",
    ".mlp.e_score_correction_bias",
    ".block_sparse_moe.router.weight",
)
"""Ends of names in memory of tensors that have other names on disk."""


def to_huggingface(
    model: ModelConfig,
    params: Any,
    directory: str | os.PathLike[str],
    *,
    router_state: Any = None,
    family: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    experts: Literal["each", "stacked"] = "each",
    max_shard_bytes: int = 5_000_000_000,
    max_length: int = 4096,
    fields: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> pathlib.Path:
    """Write a model to a directory that `from_pretrained` of `transformers` reads.

    Needs neither `transformers` nor PyTorch. `from_huggingface` reads the same parameters back,
    bit for bit if `dtype` is their dtype.

    Args:
        model: Model of the parameters.
        params: Tree with the structure of `init_params(model, key)`: arrays on devices of this
            process, or anything that numpy can slice.
        directory: Directory to make; must not exist, or be empty.
        router_state: State from `TrainState`; required if the model's routers have biases.
        family: Key of FAMILIES; the family with this attention when None. "jaxmoe" writes any
            model with its own modelling file, which `transformers` runs with
            trust_remote_code=True.
        dtype: Dtype of the tensors; biases of routers stay float32.
        experts: One tensor per expert ("each", which all readers support), or one per layer.
        max_shard_bytes: Largest size of a file.
        max_length: Positions that readers should support (max_position_embeddings).
        fields: Further fields of config.json, such as bos_token_id.
        generation: Fields of generation_config.json, such as several ids that end a text.
        texts: Further files by name, such as those of `tokenizer.tokenizer_files`.

    Returns:
        The directory.

    Raises:
        CheckpointError: The family does not compute this model, with all differences; layers of
            `model.layers` have several mixers or dense widths; parameters are missing, unexpected
            or of another shape; the directory is not empty, or the disk has not enough space.
    """
    model, params, router_state = _named_part(model, params, router_state, family)
    described = normal_form(model)
    name = family or _family_name(described)
    if name not in FAMILIES and name != modeling.NAME:
        raise CheckpointError(
            f"family={name!r} is not among {', '.join((*FAMILIES, modeling.NAME))}"
            + closest(name, FAMILIES)
        )
    chosen = OWN if name == modeling.NAME else _family(described, name)
    config = _config(described, name, chosen, dtype, max_length) | dict(fields or {})
    if chosen is not OWN and not len(state_table(model)):
        read = chosen.model(config)
        if len(state_table(read)):  # a family that always has a bias, of zeros where there is none
            model = read
            router_state = initial_router_state(read)
    arrays = _arrays(model, params, router_state)
    if experts == "stacked" and chosen is OWN:
        raise CheckpointError(f"{modeling.FILE} has a module for each expert: experts='each'")
    source = _ExportSource(model, chosen, arrays, is_stacked=experts == "stacked")
    planned = source.plan_tensors(dtype)
    size = sum(tensor.num_bytes for tensor in planned.values())
    with new_directory(pathlib.Path(directory), size) as partial:
        write_tensors(partial, planned, source.read, max_shard_bytes=max_shard_bytes)
        _write_json(partial / CONFIG, config, sort_keys=True)
        settings = dict(generation or {})
        if chosen is OWN:
            (partial / modeling.FILE).write_text(modeling.MODELING, encoding="utf-8")
            settings["use_cache"] = False  # the modelling file has none, generation's default
        if settings:  # generation reads token ids from this file alone if it exists
            settings = {n: config[n] for n in TOKENS if config[n] is not None} | settings
            _write_json(partial / GENERATION, settings)
        _write_texts(partial, texts or {})
    return pathlib.Path(directory)


def _write_texts(directory: pathlib.Path, texts: Mapping[str, str]) -> None:
    """Write files that are not there yet, by name."""
    for name, content in texts.items():
        (directory / name).parent.mkdir(exist_ok=True)
        with open(directory / name, "x", encoding="utf-8") as stream:
            stream.write(content)


def _write_json(path: pathlib.Path, fields: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=sort_keys) + "\n", encoding="utf-8")


def suggest_family(model: ModelConfig) -> tuple[str, str]:
    """Find a family that computes a model.

    Args:
        model: Model with its forward multipliers.

    Returns:
        A key of FAMILIES and "", or "jaxmoe" and the differences from the nearest family.

    Raises:
        CheckpointError: No family computes the model.
    """
    if not _has_names(model, None):
        model = _plain(model)
    model = normal_form(model)
    name = _family_name(model)
    try:
        _config(model, name, _family(model, name), "float32", 1)
    except CheckpointError as error:
        try:
            modeling.check_computed(model)
        except CheckpointError:
            raise error from None
        return modeling.NAME, str(error)
    return name, ""


def _family_name(model: ModelConfig) -> str:
    """Return the family with the recurrent mixer of a model, or else with its attention.

    Of several the first that describes the model, or else the first: families with recurrent
    layers also have models without any.

    Raises:
        CheckpointError: No family has it.
    """
    kind = model.attention.name
    qk_norms = (None, getattr(model.attention, "qk_norm", None))
    recurrent = next((one.mixer.name for one in model.kinds if one.mixer.is_recurrent), None)
    names = [
        name
        for name, family in FAMILIES.items()
        if (
            family.recurrent == recurrent
            if recurrent
            else family.attention[0] == kind and family.attention[1] in qk_norms
        )
    ]
    for name in names:
        with contextlib.suppress(CheckpointError):
            _config(model, name, _family(model, name), "float32", 1)
            return name
    if names:
        return names[0]
    raise CheckpointError(f"no family has the attention {kind}: {', '.join(FAMILIES)}")


def _has_names(model: ModelConfig, family: str | None) -> bool:
    """Return whether a family has names for the modules after the last layer, if there are any.

    Args:
        model: Model, with modules or without.
        family: Key of FAMILIES; the first that describes the model when None.
    """
    if model.further_scan is None:
        return True
    described = normal_form(model)
    try:
        name = family or _family_name(described)
        return name in FAMILIES and bool(_family(described, name))
    except CheckpointError:
        return False


def _plain(model: ModelConfig) -> ModelConfig:
    """Return the model without modules after the last layer; its logits are the same."""
    options = dataclasses.replace(model.extras, predictor=None)
    return dataclasses.replace(model, options=None if options == ModelOptions() else options)


def _named_part(
    model: ModelConfig, params: Any, router_state: Any, family: str | None
) -> tuple[ModelConfig, Any, Any]:
    """Return a model, its parameters and router state: without the modules after the last layer,
    and with a warning, where the family has no names for them."""
    scan = model.further_scan
    if scan is None or _has_names(model, family):
        return model, params, router_state
    logger.warning(
        "the family has no names for modules after the last layer, and %s is left out", scan.name
    )
    few = {name: leaf for name, leaf in dict(params).items() if name != scan.name}
    count = model.num_moe_layers
    state = jax.tree.map(lambda leaf: np.asarray(leaf)[:count], router_state or {})
    return _plain(model), few, state or None


def _family(model: ModelConfig, name: str) -> Family:
    """Return a family, with the modules that the model has after its last layer.

    Raises:
        CheckpointError: It has no names for them.
    """
    predictor = model.extras.predictor
    return FAMILIES[name]() if predictor is None else predictor.family(FAMILIES[name]())


def _config(
    model: ModelConfig, name: str, family: Family, dtype: str, max_length: int
) -> dict[str, Any]:
    """Return the fields of config.json that describe a model.

    Raises:
        CheckpointError: The family has no fields for it.
    """
    tokens: dict[str, Any] = dict.fromkeys(TOKENS)
    config = tokens | {"model_type": name, "max_position_embeddings": max_length}
    config |= {"torch_dtype": dtype, "architectures": [family.architecture], "use_cache": True}
    if family is OWN:
        modeling.check_computed(model)
    if model.attention.is_recurrent:
        raise CheckpointError(
            f"model.attention is {model.attention.name}, and families of transformers have heads of"
            " attention, used or not: name the recurrent mixer in model.layers"
        )
    config |= family.fields(model)
    if family is OWN:
        return config
    try:
        read = family.model(config)
    except ValueError as error:
        raise CheckpointError(f"the config of {name} cannot describe the model: {error}") from error
    try:
        check_described(model, read, name)
    except CheckpointError as error:
        way = (
            f"family={modeling.NAME!r} writes it with a modelling file of its own ({modeling.FILE})"
        )
        try:
            modeling.check_computed(model)
        except CheckpointError as own:
            way = str(own)
        raise CheckpointError(f"{error}\n{way}") from error
    return config


def _arrays(model: ModelConfig, params: Any, router_state: Any) -> dict[str, Any]:
    """Return parameters and router state by path.

    Raises:
        CheckpointError: They are not those of the model, with all differences.
    """
    table = parameter_table(model)
    states = state_table(model)
    arrays: dict[str, Any] = dict(traverse_util.flatten_dict(dict(params), sep="/"))
    if len(states) and not router_state:
        raise CheckpointError(
            "the model's routers have biases, which are state and not parameters: give"
            " router_state, from the TrainState (initial_router_state(model) has those of a model"
            " that was never trained)"
        )
    for path, leaf in traverse_util.flatten_dict(dict(router_state or {}), sep="/").items():
        arrays[f"{ROUTER_STATE}/{path}"] = leaf
    shapes = {row.path: row.shape for row in (*table, *states)}
    lines = [f"{path}: missing, expected {list(shapes[path])}" for path in shapes.keys() - arrays]
    lines += [
        f"{path}: found {list(arrays[path].shape)}, not in this model{closest(path, shapes)}"
        for path in arrays.keys() - shapes
    ]
    lines += [
        f"{path}: found {list(arrays[path].shape)}, expected {list(shape)}"
        for path, shape in shapes.items()
        if path in arrays and tuple(arrays[path].shape) != shape
    ]
    if lines:
        shown = "\n  ".join(sorted(lines)[:_SHOWN]) + ("\n  ..." if len(lines) > _SHOWN else "")
        text = f"these are not the model's parameters ({len(lines)} differ):\n  {shown}"
        raise CheckpointError(text)
    elsewhere = [
        path
        for path, leaf in arrays.items()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if elsewhere:
        raise CheckpointError(
            f"{elsewhere[0]} is on devices of several processes, and only one process writes: save"
            " a checkpoint and convert it in one process (jaxmoe checkpoint convert"
            " --to_huggingface auto)"
        )
    return arrays


class _ExportSource:
    """Tensors of a family, computed from parameters when they are read."""

    def __init__(
        self, model: ModelConfig, family: Family, arrays: dict[str, Any], *, is_stacked: bool
    ):
        rows = (*parameter_table(model), *state_table(model))
        self._arrays = arrays
        self._constants = {
            name: constant
            for name, constant in family.constants(model).items()
            if not (is_stacked and ".experts." in name)  # rows of a tensor of all experts
        }
        self._parts: dict[str, list[tuple[ParameterSpec, TensorPiece]]] = {}
        names = InMemory() if is_stacked else ()
        pieces = pieces_of(model, rows, family.rules, names)
        for row in rows:
            filled = 0
            for piece in pieces[row.path]:
                self._parts.setdefault(piece.key, []).append((row, piece))
                filled += _size(piece)
            assert filled == row.size, (row.path, filled)  # guaranteed by `check_described`
        for copy, original in family.copies(model).items():
            self._parts[copy] = self._parts[original]
        self._held: tuple[Any, np.ndarray] = (None, np.empty(0))

    def plan_tensors(self, dtype: str) -> dict[str, Planned]:
        """Return all tensors by name, ordered by layer so that each layer is read once."""

        def layer(key: str) -> int:
            match = _LAYER.match(key)
            if match:
                return int(match[1])
            return -1 if key in EMBEDDINGS else len(self._parts)

        def dtype_of(row: ParameterSpec) -> str:
            return "float32" if row.path.startswith(f"{ROUTER_STATE}/") else dtype

        planned = {
            key: Planned(parts[0][1].shape, dtype_of(parts[0][0]))
            for key, parts in self._parts.items()
        }
        for key, constant in self._constants.items():
            planned[key] = Planned(constant.shape, dtype)
        return {key: planned[key] for key in sorted(planned, key=layer)}

    def read(self, key: str) -> np.ndarray:
        """Return the values of a tensor, in the dtype of the parameter."""
        if key in self._constants:
            return self._constants[key].values()
        parts = self._parts[key]
        row, piece = parts[0]
        if not piece.part:
            return self._part(row, piece)
        first = self._part(row, piece)
        tensor = np.zeros(piece.shape, first.dtype)
        for row, piece in parts:
            tensor[piece.part] = self._part(row, piece)
        return tensor

    def _part(self, row: ParameterSpec, piece: TensorPiece) -> np.ndarray:
        """Return the values of a part of a tensor."""
        target = piece.target
        offset = None
        if target and isinstance(target[0], int):
            offset = target[0]
            target = target[1:]
        if self._held[0] != (row.path, offset):
            self._held = ((None, None), np.empty(0))  # frees the previous layer first
            self._held = ((row.path, offset), _layer(self._arrays[row.path], offset))
        values = self._held[1][target]
        shape = _part_shape(piece)
        if row.declaration.matrix is None:
            return values.reshape(shape)
        if not piece.is_transposed:
            return values.reshape(shape)
        return values.reshape(shape[::-1]).T


class InMemory:
    """A set of tensor names that selects the keys of the layout in memory."""

    def __contains__(self, key: object) -> bool:
        name = str(key)
        if name.endswith(_IN_MEMORY):
            return True
        return ".experts." in name and ".experts.0." not in name


def _part_shape(piece: TensorPiece) -> tuple[int, ...]:
    """Return the shape of the part of the tensor that a piece fills."""
    return np.broadcast_to(np.float32(), piece.shape)[piece.part].shape  # a view of one value


def _size(piece: TensorPiece) -> int:
    return int(np.prod(_part_shape(piece)))


def _layer(array: Any, offset: int | None) -> np.ndarray:
    """Return one layer of a stacked array on the host, or a whole array that is not stacked."""
    if not isinstance(array, jax.Array):
        return np.asarray(array if offset is None else array[offset])
    shape = array.shape if offset is None else array.shape[1:]
    values = np.empty(shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        if offset is None:
            values[shard.index] = np.asarray(shard.data)
            continue
        first, last, _ = shard.index[0].indices(array.shape[0])
        if first <= offset < last:
            values[shard.index[1:]] = np.asarray(shard.data[offset - first])
    return values


@contextlib.contextmanager
def new_directory(place: pathlib.Path, num_bytes: int) -> Iterator[pathlib.Path]:
    """Yield a temporary directory that is renamed to `place` on success.

    Raises:
        CheckpointError: `place` is not empty, or the disk has not enough space.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place} exists already: give a new or an empty directory")
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free
    if free < num_bytes:
        raise CheckpointError(
            f"{place} needs {num_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free:"
            " free space, choose another disk, or set dtype='bfloat16'"
        )
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
