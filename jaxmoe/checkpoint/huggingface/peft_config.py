# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads adapter_config.json of PEFT, as far as it describes plain LoRA."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmoe.adapters import LoraConfig
from jaxmoe.checkpoint.huggingface.paths import plain_file, read_object, show_value
from jaxmoe.checkpoint.huggingface.peft_matrices import PeftMatrix
from jaxmoe.checkpoint.manifest import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values that leave the weights of the model as they are."""
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "layer_replication",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "use_bdlora",
)
"""Fields that change what is computed, and that must be absent, null, false or empty."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeftFields:
    """Fields of adapter_config.json that the factors depend on."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    alpha_pattern: tuple[tuple[str, float], ...]
    """Pairs (regular expression of the end of a name, alpha instead of `alpha`)."""
    parameters: tuple[str, ...]
    """Ends of the names of adapted parameters (`target_parameters`)."""
    base: str | None
    """Model that was adapted: a directory, or a name on the hub."""

    def names_parameter(self, name: str) -> bool:
        """Return whether a parameter is among `target_parameters`."""
        return any(name == end or name.endswith(f".{end}") for end in self.parameters)

    def scale_of(self, matrix: PeftMatrix, rank: int) -> float:
        """Return the factor of the addition to a matrix.

        Args:
            matrix: Matrix, as a module or as a parameter.
            rank: Inner width of its tensors.
        """
        names = (matrix.target, matrix.name)
        alphas = (a for end, a in self.alpha_pattern if any(_matches(end, n) for n in names))
        alpha = next(alphas, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def fields_of(
    adapter: LoraConfig,
    matrices: Iterable[tuple[PeftMatrix, int]],
    every: Sequence[PeftMatrix],
    base: str,
) -> dict[str, Any]:
    """Return the fields of adapter_config.json.

    Args:
        adapter: Adapter to describe.
        matrices: Pairs (adapted matrix, its rank).
        every: Matrices of the adapted parameters in all layers, adapted or not.
        base: Path or name of the adapted model; empty if it is in no such files.
    """
    adapted = list(matrices)
    untargeted = list[PeftMatrix]()
    names = {matrix.name for matrix, _ in adapted}
    untargeted = [matrix for matrix in every if matrix.name not in names]
    modules = sorted({matrix.target for matrix, _ in adapted if not matrix.is_parameter})
    parameters = sorted({matrix.target for matrix, _ in adapted if matrix.is_parameter})
    left_out = {_LAYER.sub("", matrix.target) for matrix in untargeted}
    ranks = {_short(m.target, left_out): rank for m, rank in adapted if rank != adapter.rank}
    alpha = adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": adapter.is_rank_stabilized,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted({_short(name, left_out) for name in modules}),
        "target_parameters": sorted({_short(name, left_out) for name in parameters}) or None,
        "layers_to_transform": None,
        "rank_pattern": ranks,
        "alpha_pattern": {},
    }


def read_peft_fields(directory: pathlib.Path) -> PeftFields:
    """Return the fields of a directory of PEFT.

    Raises:
        CheckpointError: A field is missing or of another type, or the adapter is not plain LoRA.
    """
    file = plain_file(directory, ADAPTER_CONFIG)
    fields = read_object(file)
    _check_plain_lora(fields, file)
    patterns = fields.get("alpha_pattern") or {}
    target_parameters = fields.get("target_parameters") or []
    base = fields.get("base_model_name_or_path") or None
    rules = {
        "r": (fields.get("r"), _is_rank, "a whole number above 0"),
        "lora_alpha": (fields.get("lora_alpha"), _is_alpha, "a number above 0"),
        "alpha_pattern": (patterns, _are_patterns, "an object of numbers above 0 by pattern"),
        "target_parameters": (target_parameters, _are_names, "a list of names"),
        "base_model_name_or_path": (base, lambda x: x is None or isinstance(x, str), "a string"),
    }
    for name, (value, is_right, rule) in rules.items():
        if not is_right(value):
            raise CheckpointError(f"{file}: {name}={show_value(value)} must be {rule}")
    return PeftFields(
        rank=fields["r"],
        alpha=float(fields["lora_alpha"]),
        is_rank_stabilized=bool(fields.get("use_rslora")),
        alpha_pattern=tuple((end, float(alpha)) for end, alpha in patterns.items()),
        parameters=tuple(target_parameters),
        base=base,
    )


def _short(target: str, left_out: set[str]) -> str:
    """Return the name of a target without its layer, where all layers that have it are adapted."""
    short = _LAYER.sub("", target)
    return target if short in left_out else short


def _matches(end: str, target: str) -> bool:
    return re.match(rf"(.*\.)?({end})$", target) is not None


def _check_plain_lora(fields: Mapping[str, Any], file: pathlib.Path) -> None:
    """Refuse an adapter that computes anything but W + s A B."""
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file}: peft_type={show_value(fields.get('peft_type'))} must be LORA, the one that"
            f" is read"
        )
    wrong = [name for name in _UNSUPPORTED if fields.get(name)]
    if fields.get("bias", "none") != "none":
        wrong.append("bias")
    if wrong:
        fields_text = ", ".join(f"{name}={show_value(fields[name])}" for name in wrong)
        raise CheckpointError(
            f"{file}: {fields_text}: only factors of matrices are read. Merge the adapter into"
            f" its model"
            " with merge_and_unload() of peft, save that, and import it"
        )
    start = fields.get("init_lora_weights", True)
    if start not in _PLAIN_INITS:
        raise CheckpointError(
            f"{file}: init_lora_weights={show_value(start)} changes the weights of the model at the"
            " start: save the adapter again with path_initial_model_for_weight_conversion of peft"
        )


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_alpha(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _are_patterns(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    try:
        return all(re.compile(end) and _is_alpha(alpha) for end, alpha in value.items())
    except re.error:
        return False


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
