# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes LoRA adapters as PEFT does: adapter_config.json, adapter_model.safetensors.

Needs neither peft nor PyTorch.

gate_proj and up_proj of a dense layer have the same A, and one half of B each. Layers that are not
adapted are absent.

    peft_import.py      files to factors
    peft_config.py      fields of adapter_config.json
    peft_matrices.py    names and layouts of tensors
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxmoe.adapters import LoraConfig
from jaxmoe.adapters.lora import lora_of
from jaxmoe.checkpoint.huggingface.export import new_directory, suggest_family
from jaxmoe.checkpoint.huggingface.families.own import OWN
from jaxmoe.checkpoint.huggingface.family import FAMILIES, Family
from jaxmoe.checkpoint.huggingface.files import Planned, write_file
from jaxmoe.checkpoint.huggingface.peft_config import (
    ADAPTER_CONFIG,
    fields_of,
)
from jaxmoe.checkpoint.huggingface.peft_matrices import PeftFactors, PeftMatrix, matrices_of
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table

TENSORS = "adapter_model.safetensors"


def is_peft(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds an adapter of PEFT."""
    return (pathlib.Path(path) / ADAPTER_CONFIG).is_file()


def write_peft(
    directory: str | os.PathLike[str],
    model: ModelConfig,
    params: Mapping[str, Any],
    *,
    base: str = "",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> pathlib.Path:
    """Write an adapter to a directory that `PeftModel.from_pretrained` reads.

    Args:
        directory: Directory to make; must not exist, or be empty.
        model: Model with its adapter, a `LoraConfig`.
        params: Factors by path (`<path>:down`, `<path>:up`), and anything else.
        base: Directory, or name on the hub, of the adapted model; empty if it is in no such files.
        dtype: Dtype of the tensors.

    Returns:
        The directory.

    Raises:
        CheckpointError: The adapter is not LoRA, it adapts embeddings, no family computes the
            model, or the directory is not empty.
    """
    adapter = check_lora(model)
    family = family_of_model(plain := dataclasses.replace(model, adapter=None))
    chosen = list[tuple[PeftMatrix, int]]()
    every = list[PeftMatrix]()
    for row, scales in adapted_rows(model):
        rank = adapter.rank_of(row)
        for matrix in matrices_of(plain, family, row, has_fused_experts=family is not OWN):
            every.append(matrix)
            if scales[matrix.layer or 0]:
                chosen.append((matrix, rank))
    fields = fields_of(adapter, chosen, every, base)
    names = {matrix.name for matrix, _ in chosen if matrix.num_experts is not None}
    read: dict[str, tuple[PeftMatrix, int]] = {}
    planned: dict[str, Planned] = {}
    for matrix, rank in chosen:
        keys = matrix.keys(names)
        shapes = matrix.shapes(rank)
        read |= {key: (matrix, index) for index, key in enumerate(keys)}
        planned |= {key: Planned(s, dtype) for key, s in zip(keys, shapes, strict=True)}

    @functools.lru_cache(maxsize=1)
    def tensors(matrix: PeftMatrix) -> tuple[np.ndarray, np.ndarray]:
        return matrix.to_tensors(_factors_of(matrix, params))

    def values(key: str) -> np.ndarray:
        matrix, index = read[key]
        return tensors(matrix)[index]

    place = pathlib.Path(directory)
    with new_directory(place, sum(tensor.num_bytes for tensor in planned.values())) as partial:
        write_file(partial / TENSORS, planned, values)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (partial / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return place


def check_lora(model: ModelConfig) -> LoraConfig:
    """Return the adapter of a model, or raise if it is not LoRA."""
    if (adapter := lora_of(model.adapter)) is None:
        name = "none" if model.adapter is None else model.adapter.name
        raise CheckpointError(
            f"model.adapter={name}: PEFT files hold the factors of LoRA. Convert this run"
            " with --to_huggingface auto"
        )
    return adapter


def family_of_model(model: ModelConfig) -> Family:
    """Return the family of transformers that computes a model."""
    name, _ = suggest_family(model)
    return FAMILIES[name]() if name in FAMILIES else OWN


def adapted_rows(model: ModelConfig) -> list[tuple[ParameterSpec, tuple[float, ...]]]:
    """Return the adapted parameters of a model, and the scale of each of their layers."""
    rows = {row.path: row for row in parameter_table(model)}
    adapted = []
    for path, row in rows.items():
        if f"{path}:scale" not in rows:
            continue
        if row.declaration.role == "embedding":
            raise CheckpointError(
                f"adapter.targets.roles has embedding ({path}), which is not written for PEFT:"
                " convert with --fold True instead"
            )
        adapted.append((row, rows[f"{path}:scale"].declaration.init))
    return adapted


def _factors_of(matrix: PeftMatrix, params: Mapping[str, Any]) -> PeftFactors:
    """Return the factors of one matrix."""
    down = params[f"{matrix.path}:down"]
    up = params[f"{matrix.path}:up"]
    if matrix.layer is not None:
        down = down[matrix.layer]
        up = up[matrix.layer]
    down = np.asarray(down)
    up = np.asarray(up)
    if matrix.expert is not None:
        down = down[matrix.expert]
        up = up[matrix.expert]
    if matrix.half is not None:
        up = up[..., matrix.half, :]
    rank = down.shape[-1]
    batch = down.shape[:1] if matrix.num_experts is not None else ()
    return PeftFactors(
        down.reshape(*batch, matrix.fan_in, rank), up.reshape(*batch, rank, matrix.fan_out)
    )
