# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads LoRA adapters of PEFT: adapter_config.json and adapter_model.safetensors.

Needs neither peft nor PyTorch. Our factors of a parameter have one rank and one scale, and gate and
up have one A. All of this is exact up to the rounding of a scale:

    gate_proj and up_proj with different A    one A of both, whose rank is the sum, and B with zeros
                                              where a half has no part in it
    ranks below the largest                   padded with zeros
    scales other than alpha / rank            multiplied into B
    matrices absent among those of a role     factors of zeros

Beside the factors PEFT stores the weights of embeddings and head where these are adapted. They are
the model's own, and left out; weights that were trained or resized are refused.

Import after export gives the same bits, but for the factors of layers that are not adapted, which
are zeros then.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from jaxmoe.adapters import LoraConfig, TargetsConfig
from jaxmoe.checkpoint.huggingface.families.own import OWN
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.checkpoint.huggingface.paths import plain_file
from jaxmoe.checkpoint.huggingface.peft import TENSORS, adapted_rows, check_lora, family_of_model
from jaxmoe.checkpoint.huggingface.peft_config import PeftFields, read_peft_fields
from jaxmoe.checkpoint.huggingface.peft_matrices import PREFIX, PeftFactors, PeftMatrix, matrices_of
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table
from sharding import axes as ax

logger = logging.getLogger(__name__)

_PICKLED = "adapter_model.bin"
_COPY = re.compile(re.escape(PREFIX) + r"(?:.*\.)?(lm_head|embed_tokens)(?:\.base_layer)?\.weight")
"""Weights of the model itself, as `save_embedding_layers` of peft stores them."""
_ROUNDING = 2.0**-7
"""Difference of equal weights at most, of which one file may be bfloat16."""
_SHOWN = 10


def read_peft(
    directory: str | os.PathLike[str],
    model: ModelConfig,
    params: Callable[[], Any] | None = None,
) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Read an adapter of PEFT.

    Args:
        directory: Directory with adapter_config.json and adapter_model.safetensors.
        model: Model that was adapted.
        params: Returns its parameters, to compare weights of the model that are stored beside the
            factors; None trusts them to be equal, with a warning.

    Returns:
        The adapter, and its factors and scales by path, f32.

    Raises:
        CheckpointError: It is not plain LoRA; a tensor is not of this model, of another shape or
            not finite; one factor of a matrix is missing; or weights are not those of the model.
    """
    place = pathlib.Path(directory)
    family = family_of_model(model)
    fields = read_peft_fields(place)
    if (place / _PICKLED).exists() and not (place / TENSORS).exists():
        raise CheckpointError(
            f"{place} holds {_PICKLED}, which executes code when it is read: save the adapter again"
            " with safe_serialization=True"
        )
    tensors = dict(open_tensors(plain_file(place, TENSORS)))
    table = parameter_table(model)
    read_keys = set[str]()
    factors_by_path = dict[str, list[tuple[PeftMatrix, PeftFactors, float]]]()
    for row in table:
        if row.declaration.matrix is None or row.declaration.role == "embedding":
            continue
        for matrix in _present(model, family, row, fields, tensors):
            keys = matrix.keys(_fused_names(matrix, fields))
            read_keys |= set(keys)
            down, up = (np.asarray(tensors[key]).astype(np.float32) for key in keys)
            rank = _rank_of(matrix, keys, down, up)
            scale = fields.scale_of(matrix, rank)
            factors = matrix.from_tensors(down, up)
            factors_by_path.setdefault(row.path, []).append((matrix, factors, scale))
    read_keys |= _copies(place, tensors, table, params)
    _check_known(place, tensors, read_keys)
    rows = {row.path: row for row in table}
    merged = {path: _merge(rows[path], parts) for path, parts in factors_by_path.items()}
    adapter = _adapter_of(model, fields, rows, merged)
    return adapter, _arrays_of(dataclasses.replace(model, adapter=adapter), merged)


def _copies(
    place: pathlib.Path,
    tensors: Mapping[str, Any],
    table: Iterable[ParameterSpec],
    params: Callable[[], Any] | None,
) -> set[str]:
    """Return the tensors that repeat the embeddings or the head of the model.

    Raises:
        CheckpointError: One has another shape or other values than the model.
    """
    rows = {row.declaration.role: row for row in table}
    copies = dict[str, ParameterSpec]()
    for key, tensor in tensors.items():
        if (match := _COPY.fullmatch(key)) is None:
            continue
        row = rows.get("head" if match[1] == "lm_head" else "embedding", rows["embedding"])
        if sorted(tensor.shape) != sorted(row.shape):
            raise CheckpointError(
                f"{place}: {key} has shape {list(tensor.shape)}, and the model has"
                f" {sorted(row.shape, reverse=True)}: its vocabulary was resized for the adapter."
                " Merge the adapter into its model with peft, and import that"
            )
        copies[key] = row
    if copies and params is None:
        logger.warning(
            "%s holds weights of the model beside the factors (%s): they are taken to be its own",
            place,
            ", ".join(copies),
        )
    flat = {} if params is None or not copies else traverse_util.flatten_dict(params(), sep="/")
    for key, row in copies.items() if flat else ():
        theirs = np.asarray(tensors[key], np.float32)
        ours = np.asarray(flat[row.path], np.float32)
        ours = ours if ours.shape == theirs.shape else ours.T
        if not np.allclose(theirs, ours, rtol=_ROUNDING, atol=_ROUNDING):
            raise CheckpointError(
                f"{place}: {key} are other weights than the model's: they were trained beside the"
                " factors. Merge the adapter into its model with peft, and import that"
            )
    return set(copies)


def _fused_names(matrix: PeftMatrix, fields: PeftFields) -> set[str]:
    """Return the parameters of the experts of a matrix's layer that are adapted."""
    block = matrix.name.rpartition(".")[0]
    names = {f"{block}.gate_up_proj", f"{block}.down_proj"}
    return {name for name in names if fields.names_parameter(name)}


def _present(
    model: ModelConfig,
    family: Family,
    row: ParameterSpec,
    fields: PeftFields,
    tensors: Mapping[str, Any],
) -> list[PeftMatrix]:
    """Return the matrices of a parameter that have tensors, as modules or as all experts."""
    matrices: dict[tuple[str, str], PeftMatrix] = {}
    for has_fused in (False, True) if family is not OWN else (False,):
        for matrix in matrices_of(model, family, row, has_fused_experts=has_fused):
            names = _fused_names(matrix, fields)
            if matrix.num_experts is not None and matrix.name not in names:
                continue
            keys = matrix.keys(names)
            is_present = [key in tensors for key in keys]
            if any(is_present) and not all(is_present):
                raise CheckpointError(
                    f"{keys[is_present.index(False)]} is missing: the other is there"
                )
            if all(is_present):
                matrices[keys] = matrix
    return list(matrices.values())


def _rank_of(matrix: PeftMatrix, keys: tuple[str, str], down: np.ndarray, up: np.ndarray) -> int:
    """Return the rank of tensors, or raise if their shapes or values are wrong."""
    rank = max(1, down.shape[0] // (matrix.num_experts or 1)) if down.ndim == 2 else 1
    shapes = matrix.shapes(rank)
    for key, array, shape in zip(keys, (down, up), shapes, strict=True):
        if array.shape != shape:
            raise CheckpointError(f"{key}: found {list(array.shape)}, expected {list(shape)}")
        if not np.isfinite(array).all():
            raise CheckpointError(f"{key} holds values that are NaN or infinite: save it again")
    return rank


def _check_known(place: pathlib.Path, tensors: Mapping[str, Any], read_keys: set[str]) -> None:
    """Raise if there are tensors that are not of the model, or none."""
    if not tensors:
        raise CheckpointError(f"{place / TENSORS} holds no tensors: save the adapter again")
    unread = sorted(tensors.keys() - read_keys)
    if unread:
        lines = [f"{key}: found {list(tensors[key].shape)}" for key in unread[:_SHOWN]]
        text = "\n  ".join([*lines, *(["..."] if len(unread) > _SHOWN else [])])
        raise CheckpointError(
            f"{place}: {len(unread)} tensors are not factors of this model's matrices"
            f"{closest(unread[0], read_keys)}\n  {text}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _MatrixPart:
    """Factors of one layer of a parameter, of one expert or of all."""

    layer: int | None
    expert: int | None
    down: np.ndarray
    """[(E) in r]."""
    up: np.ndarray
    """[(E) r out]."""
    scale: float


def _merge(
    row: ParameterSpec, triples: Iterable[tuple[PeftMatrix, PeftFactors, float]]
) -> list[_MatrixPart]:
    """Return the factors of one parameter, with the halves of gate_up as one."""
    by_place: dict[tuple[int | None, int | None], list[tuple[PeftMatrix, PeftFactors, float]]] = {}
    for matrix, factors, scale in triples:
        by_place.setdefault((matrix.layer, matrix.expert), []).append((matrix, factors, scale))
    parts = []
    for (layer, expert), experts in sorted(by_place.items(), key=lambda item: str(item[0])):
        down = experts[0][1].down
        up = experts[0][1].up
        scale = experts[0][2]
        if experts[0][0].half is not None:
            down, up = _halves({m.half or 0: (f, s / scale) for m, f, s in experts})
        parts.append(_MatrixPart(layer=layer, expert=expert, down=down, up=up, scale=scale))
    return parts


def _halves(halves: Mapping[int, tuple[PeftFactors, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return A [in R] and B [R 2*F] of the halves of gate_up.

    Args:
        halves: Factors of each half that has some, and its scale relative to that of the result.
    """
    downs = [factors.down for factors, _ in halves.values()]
    is_shared = all(np.array_equal(down, downs[0]) for down in downs)
    rank = downs[0].shape[-1] if is_shared else sum(down.shape[-1] for down in downs)
    width = next(iter(halves.values()))[0].up.shape[-1]
    up = np.zeros((rank, 2, width), np.float32)
    first = 0
    for half, (factors, scale) in halves.items():
        size = factors.up.shape[0]
        up[first : first + size, half] = factors.up if scale == 1 else scale * factors.up
        first += 0 if is_shared else size
    return downs[0] if is_shared else np.concatenate(downs, axis=-1), up.reshape(rank, -1)


def _adapter_of(
    model: ModelConfig,
    fields: PeftFields,
    rows: Mapping[str, ParameterSpec],
    merged: Mapping[str, list[_MatrixPart]],
) -> LoraConfig:
    """Return the config with the targets and the largest ranks of the factors."""
    ranks: dict[bool, int] = {}
    layers = set[int]()
    outside = False
    stacks = dict(model.layer_numbers)
    for path, parts in merged.items():
        has_experts = ax.EXPERTS in rows[path].declaration.axes
        largest = max(part.down.shape[-1] for part in parts)
        ranks[has_experts] = max(ranks.get(has_experts, 0), largest)
        numbers = next(
            (
                stack_numbers
                for stack, stack_numbers in stacks.items()
                if path.startswith(f"{stack}/")
            ),
            (),
        )
        layers |= {numbers[part.layer] for part in parts if part.layer is not None}
        outside |= not numbers
    roles: Any = tuple(dict.fromkeys(rows[path].declaration.role for path in merged))
    is_part = not outside and len(layers) < model.num_layers
    return LoraConfig(
        rank=ranks.get(False, fields.rank),
        expert_rank=ranks.get(True),
        alpha=fields.alpha,
        is_rank_stabilized=fields.is_rank_stabilized,
        targets=TargetsConfig(roles=roles, layers=tuple(sorted(layers)) if is_part else ()),
    )


def _arrays_of(
    model: ModelConfig, merged: Mapping[str, list[_MatrixPart]]
) -> dict[str, np.ndarray]:
    """Return the factors and scales of an adapted model by path."""
    adapter = check_lora(model)
    table = {row.path: row for row in parameter_table(model)}
    arrays = {}
    for row, scales in adapted_rows(model):
        scale = adapter.scale_of(row)
        shapes = [table[f"{row.path}:{name}"].shape for name in ("down", "up")]
        down, up = (np.zeros(shape, np.float32) for shape in shapes)
        for part in merged.get(row.path, ()):
            where = tuple(index for index in (part.layer, part.expert) if index is not None)
            rank = part.down.shape[-1]
            ratio = part.scale / scale
            inner = down[where].reshape(*part.down.shape[:-1], -1)
            outer = up[where].reshape(*part.up.shape[:-2], -1, part.up.shape[-1])
            inner[..., :rank] = part.down  # both are views
            outer[..., :rank, :] = part.up if ratio == 1 else ratio * part.up
        arrays |= {f"{row.path}:down": down, f"{row.path}:up": up}
        arrays[f"{row.path}:scale"] = np.asarray(scales, np.float32).reshape(
            table[f"{row.path}:scale"].shape
        )
    return arrays
