# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names the matrices of a model as PEFT does, and lays out factors as its tensors.

    PEFT                                            jaxmoe
    module     lora_A [r in], lora_B [out r]        down [in... r], up [r out...]
    experts    lora_A [E*r in]: experts outermost   down [E in... r]
               lora_B [out r*E]: experts innermost  up [E r out...]

A module is a matrix of one layer, or of one expert. In transformers 5 the experts of a layer are
one parameter, which `target_parameters` names. Where both gate_up_proj and down_proj of the experts
are adapted, the tensors of gate_up_proj are below `base_layer`, as PEFT wraps it first.

PEFT reads target modules named gate_proj, up_proj, down_proj or gate as the experts and the router
of these families. Dense and shared matrices are therefore written as target parameters, with the
tensors of a module.

Checked against peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxmoe.checkpoint.huggingface.export import InMemory
from jaxmoe.checkpoint.huggingface.families.own import OWN
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.filling import TensorPiece
from jaxmoe.checkpoint.huggingface.weights import pieces_of
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table
from sharding import axes as ax

PREFIX = "base_model.model."
DOWN = "lora_A.weight"
UP = "lora_B.weight"
_REMAPPED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_INNER = "gate_up_proj"
_OUTER = "down_proj"


class PeftFactors(NamedTuple):
    """Factors of one matrix, f32."""

    down: np.ndarray
    """A, [in r]; of all experts [E in r]."""
    up: np.ndarray
    """B, [r out]; of all experts [E r out]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeftMatrix:
    """A matrix of the model that PEFT adapts alone."""

    path: str
    """Path of our parameter."""
    name: str
    """Name of the module, or of the parameter that holds all experts of a layer."""
    is_parameter: bool
    """Whether `target_parameters` has it, rather than `target_modules`."""
    layer: int | None
    """Index into the stack of the parameter; None outside of layers."""
    expert: int | None
    """Number of the expert; None for all of them, or without experts."""
    half: int | None
    """Half of gate_up; None for all of the parameter."""
    num_experts: int | None
    """Number of experts in the tensors; None for a module."""
    fan_in: int
    fan_out: int

    @property
    def target(self) -> str:
        """Name in `target_parameters` or `target_modules`."""
        is_weight = self.is_parameter and self.num_experts is None
        return f"{self.name}.weight" if is_weight else self.name

    def keys(self, names: Iterable[str]) -> tuple[str, str]:
        """Return the names of A and B in files.

        Args:
            names: Targets of the adapter that are parameters with experts.
        """
        place = self.name
        if self.num_experts is not None:
            block, _, leaf = self.name.rpartition(".")
            is_inner = leaf == _INNER and f"{block}.{_OUTER}" in names
            place = f"{block}.base_layer" if is_inner else block
        return f"{PREFIX}{place}.{DOWN}", f"{PREFIX}{place}.{UP}"

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B in files."""
        width = rank * (self.num_experts or 1)
        return (width, self.fan_in), (self.fan_out, width)

    def to_tensors(self, factors: PeftFactors) -> tuple[np.ndarray, np.ndarray]:
        """Return A and B as in files."""
        if self.num_experts is None:
            return factors.down.T, factors.up.T
        down = factors.down.transpose(0, 2, 1)
        up = factors.up.transpose(2, 1, 0)
        return down.reshape(-1, self.fan_in), up.reshape(self.fan_out, -1)

    def from_tensors(self, down: np.ndarray, up: np.ndarray) -> PeftFactors:
        """Return A and B of files as factors."""
        if self.num_experts is None:
            return PeftFactors(down.T, up.T)
        experts = self.num_experts
        down = down.reshape(experts, -1, self.fan_in).transpose(0, 2, 1)
        up = up.reshape(self.fan_out, -1, experts).transpose(2, 1, 0)
        return PeftFactors(down, up)


def matrices_of(
    model: ModelConfig, family: Family, row: ParameterSpec, *, has_fused_experts: bool
) -> Iterator[PeftMatrix]:
    """Yield the matrices of one parameter, layer by layer.

    Args:
        model: Model without the adapter.
        family: Family of the model.
        row: Row of the model's table, a matrix.
        has_fused_experts: Whether the experts of a layer are one parameter.

    Raises:
        CheckpointError: The parameter is a part of a matrix of the family.
    """
    names = InMemory() if has_fused_experts else ()
    seen = set()
    rows = tuple(parameter_table(model))
    for piece in pieces_of(model, rows, family.rules, names)[row.path]:
        fused = piece.part != ()
        if fused and ax.EXPERTS not in row.declaration.axes:
            raise CheckpointError(
                f"{row.path} is a part of {piece.key}, and an adapter of PEFT is of the whole:"
                " write plain weights with --fold True, or leave these roles out of the targets"
            )
        if not (fused and piece.key in seen):
            seen.add(piece.key)
            yield _matrix(row, piece, family)


def _matrix(row: ParameterSpec, piece: TensorPiece, family: Family) -> PeftMatrix:
    """Return the matrix of a piece."""
    numbers = [index for index in piece.target if isinstance(index, int)]
    half = numbers.pop() if ... in piece.target else None
    layer = numbers.pop(0) if row.declaration.is_stacked else None
    fused = piece.part != ()
    name = piece.key.removesuffix(".weight")
    is_remapped = family is not OWN and name.endswith(_REMAPPED) and ".experts." not in name
    return PeftMatrix(
        path=row.path,
        name=name,
        is_parameter=fused or is_remapped or row.declaration.role == "router",
        layer=layer,
        expert=None if fused or not numbers else numbers[0],
        half=None if fused else half,
        num_experts=piece.shape[0] if fused else None,
        fan_in=piece.shape[-1],
        fan_out=piece.shape[-2],
    )
