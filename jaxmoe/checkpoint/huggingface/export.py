# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters into tensors of `transformers`: config.json and safetensors, by the rules of a family.

The rules are those of the import, and the pieces too: what it would read into a parameter is read
out of it here. One layer of one parameter is on the host at a time, and one tensor of it; files are
written from front to back. They stand in a directory of their own until all is written, which then
gets its name: what has the name is whole.

A model is exported as a family only if the family computes the same (`describe.check_said`). Others
go with a modelling file of their own (modeling.py).
"""

from __future__ import annotations

import contextlib
import json
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
from jaxmoe.checkpoint.huggingface.describe import check_said
from jaxmoe.checkpoint.huggingface.families import FAMILIES, OWN, Family
from jaxmoe.checkpoint.huggingface.files import Planned, write_tensors
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE, Piece, pieces_of, state_table
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SHOWN = 20
_BY_NORM = {"full": "olmoe", "none": "mixtral", "head": "qwen3_moe"}


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
    texts: Mapping[str, str] | None = None,
) -> pathlib.Path:
    """Writes a model as one of `transformers`, which `from_pretrained` reads.

    Neither `transformers` nor PyTorch is needed. `from_huggingface` reads the same parameters back,
    bit for bit where `dtype` is theirs. The tokenizer's files are given in `texts`.

    Args:
        model: of the parameters.
        params: of the structure of `init_params(model, key)`; arrays on one process's devices, or
            any that numpy can slice.
        directory: to be made; must not be there, or be empty.
        router_state: of `TrainState`; needed where the model's routers have biases.
        family: a key of FAMILIES, the one with this attention when None; or "jaxmoe", for a model
            of none of them: its own modelling file then stands beside it, which `transformers`
            runs with trust_remote_code=True.
        dtype: of the tensors; biases of routers stay float32.
        experts: a tensor for each expert, which all readers know, or all of a layer in one.
        max_shard_bytes: of a file.
        max_length: positions that readers should provide for (max_position_embeddings).
        fields: further fields of config.json, such as bos_token_id.
        texts: further files by name, such as those of `tokenizer.tokenizer_files`.

    Returns:
        The directory.

    Raises:
        CheckpointError: a ValueError, for a model that is not what the family computes, naming all
            that differs; parameters that are missing, left over or of another shape; a directory
            that is not empty, or a disk without room.
    """
    name = family or _family_name(model)
    if name not in FAMILIES and name != modeling.NAME:
        raise CheckpointError(
            f"family={name!r} is not among {', '.join((*FAMILIES, modeling.NAME))}"
            + closest(name, FAMILIES)
        )
    chosen, place = OWN if name == modeling.NAME else FAMILIES[name], pathlib.Path(directory)
    config = _config(model, name, chosen, dtype, max_length) | dict(fields or {})
    if chosen is not OWN and not len(state_table(model)):
        read = chosen.model(config)
        if len(state_table(read)):  # a family that always has a bias, of zeros where there is none
            model, router_state = read, initial_router_state(read)
    arrays = _arrays(model, params, router_state)
    if experts == "stacked" and chosen is OWN:
        raise CheckpointError(f"{modeling.FILE} has a module for each expert: experts='each'")
    source = _Source(model, chosen, arrays, is_stacked=experts == "stacked")
    planned = source.planned(dtype)
    with _new_directory(place, sum(tensor.num_bytes for tensor in planned.values())) as partial:
        write_tensors(partial, planned, source.read, max_shard_bytes=max_shard_bytes)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / CONFIG).write_text(text, encoding="utf-8")
        if chosen is OWN:
            (partial / modeling.FILE).write_text(modeling.MODELING, encoding="utf-8")
            # It keeps no cache, which generation would take for granted; where there is such a
            # file generation asks nothing else.
            asked = {name: config[name] for name in _TOKENS if config[name] is not None}
            text = json.dumps({"use_cache": False} | asked, indent=2) + "\n"
            (partial / _GENERATION).write_text(text, encoding="utf-8")
        for file, content in (texts or {}).items():
            with open(partial / file, "x", encoding="utf-8") as stream:  # over none of the above
                stream.write(content)
    return place


def suggest_family(model: ModelConfig) -> tuple[str, str]:
    """A family that computes the same as a model, and why it is none of transformers' own.

    Args:
        model: with its forward multipliers.

    Returns:
        A key of FAMILIES and "", or "jaxmoe" and what the nearest family would say of the model.

    Raises:
        CheckpointError: neither computes it.
    """
    name = _family_name(model)
    try:
        _config(model, name, FAMILIES[name], "float32", 1)
    except CheckpointError as error:
        try:
            modeling.check_computed(model)
        except CheckpointError:
            raise error from None
        return modeling.NAME, str(error)
    return name, ""


def _family_name(model: ModelConfig) -> str:
    """The family that has this kind of attention."""
    attention: Any = model.attention
    if attention.name == "latent":
        return "deepseek_v3"
    return _BY_NORM[attention.qk_norm]


def _config(
    model: ModelConfig, name: str, family: Family, dtype: str, max_length: int
) -> dict[str, Any]:
    """The fields of config.json, which mean this model.

    Raises:
        CheckpointError: there are none.
    """
    tokens: dict[str, Any] = dict.fromkeys(_TOKENS)
    config = tokens | {"model_type": name, "max_position_embeddings": max_length}
    config |= {"torch_dtype": dtype, "architectures": [family.architecture], "use_cache": True}
    config |= family.fields(model)
    if family is OWN:
        modeling.check_computed(model)
        return config
    try:
        read = family.model(config)
    except ValueError as error:
        raise CheckpointError(
            f"the model cannot be said in the config of {name}: {error}"
        ) from error
    try:
        check_said(model, read, name)
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
    """Parameters and router state by path.

    Raises:
        CheckpointError: not those of the model; all of them are named.
    """
    table, states = parameter_table(model), state_table(model)
    found: dict[str, Any] = dict(traverse_util.flatten_dict(dict(params), sep="/"))
    if len(states) and not router_state:
        raise CheckpointError(
            "the model's routers have biases, which are state and not parameters: give"
            " router_state, from the TrainState (initial_router_state(model) has those of a model"
            " that was never trained)"
        )
    for path, leaf in traverse_util.flatten_dict(dict(router_state or {}), sep="/").items():
        found[f"{ROUTER_STATE}/{path}"] = leaf
    wanted = {row.path: row.shape for row in (*table, *states)}
    lines = [f"{path}: missing, expected {list(wanted[path])}" for path in wanted.keys() - found]
    lines += [
        f"{path}: found {list(found[path].shape)}, not in this model{closest(path, wanted)}"
        for path in found.keys() - wanted
    ]
    lines += [
        f"{path}: found {list(found[path].shape)}, expected {list(shape)}"
        for path, shape in wanted.items()
        if path in found and tuple(found[path].shape) != shape
    ]
    if lines:
        shown = "\n  ".join(sorted(lines)[:_SHOWN]) + ("\n  ..." if len(lines) > _SHOWN else "")
        text = f"these are not the model's parameters ({len(lines)} differ):\n  {shown}"
        raise CheckpointError(text)
    elsewhere = [
        path
        for path, leaf in found.items()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if elsewhere:
        raise CheckpointError(
            f"{elsewhere[0]} lies on devices of several processes, and one writes: save a"
            " checkpoint, which one process converts layer by layer (python -m"
            " experiments.checkpoint convert --to_huggingface auto)"
        )
    return found


class _Source:
    """The tensors of a family, made of parameters when they are asked for."""

    def __init__(
        self, model: ModelConfig, family: Family, arrays: dict[str, Any], *, is_stacked: bool
    ):
        rows = (*parameter_table(model), *state_table(model))
        self._arrays = arrays
        self._parts: dict[str, list[tuple[ParameterSpec, Piece]]] = {}
        names = _InMemory() if is_stacked else ()
        for row in rows:
            filled = 0
            for piece in pieces_of(model, row, family.rules, names):
                self._parts.setdefault(piece.key, []).append((row, piece))
                filled += _size(piece)
            assert filled == row.size, (row.path, filled)  # `check_said` has refused the others
        self._held: tuple[Any, np.ndarray] = (None, np.empty(0))

    def planned(self, dtype: str) -> dict[str, Planned]:
        """All tensors by name: layer by layer, so that a layer of a parameter is read once."""

        def layer(key: str) -> int:
            match = _LAYER.match(key)
            if match:
                return int(match[1])
            return -1 if "embed" in key else len(self._parts)

        return {
            key: Planned(
                self._parts[key][0][1].shape, "float32" if key.endswith("_bias") else dtype
            )
            for key in sorted(self._parts, key=layer)
        }

    def read(self, key: str) -> np.ndarray:
        """The values of a tensor, in the dtype of the parameter."""
        parts = self._parts[key]
        row, piece = parts[0]
        if len(parts) == 1:
            return self._part(row, piece)
        first = self._part(row, piece)
        tensor = np.empty(piece.shape, first.dtype)
        for row, piece in parts:
            tensor[piece.part] = self._part(row, piece)
        return tensor

    def _part(self, row: ParameterSpec, piece: Piece) -> np.ndarray:
        """What fills a part of a tensor."""
        target, offset = piece.target, None
        if target and isinstance(target[0], int):
            offset, target = target[0], target[1:]
        if self._held[0] != (row.path, offset):
            self._held = ((None, None), np.empty(0))  # not two of them at once
            self._held = ((row.path, offset), _layer(self._arrays[row.path], offset))
        values = self._held[1][target]
        if row.declaration.matrix is None:
            return values
        shape = _part_shape(piece)
        if not piece.is_transposed:
            return values.reshape(shape)
        return values.reshape(shape[::-1]).T


class _InMemory:
    """Of a rule's keys those of the layout in memory are the ones that there are."""

    def __contains__(self, key: object) -> bool:
        name = str(key)
        if name.endswith(".mlp.gate.weight"):
            return True
        return ".experts." in name and ".experts.0." not in name


def _part_shape(piece: Piece) -> tuple[int, ...]:
    """Of the part of the tensor that a piece speaks of."""
    shape = piece.shape
    if not piece.part:
        return shape
    span = piece.part[1]
    return (span.stop - span.start, shape[2])


def _size(piece: Piece) -> int:
    return int(np.prod(_part_shape(piece)))


def _layer(array: Any, offset: int | None) -> np.ndarray:
    """One layer of a stacked array on the host, or all of one that is not stacked."""
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
def _new_directory(place: pathlib.Path, num_bytes: int) -> Iterator[pathlib.Path]:
    """A directory beside the wanted one, which gets its name when all went well.

    Raises:
        CheckpointError: it is there with something in it, or the disk has no room.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place} is there already: give a new or an empty directory")
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free
    if free < num_bytes:
        raise CheckpointError(
            f"{place} would have {num_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB"
            " free: make room, choose another disk, or dtype='bfloat16'"
        )
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
