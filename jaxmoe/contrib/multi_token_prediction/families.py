# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes modules as published weights have them, with the family of their model.

    deepseek_v3, glm4_moe    layers N, N + 1, ... behind the N of the model: enorm, hnorm, eh_proj,
                             shared_head.norm, and copies of embedding and head;
                             config.num_nextn_predict_layers is their number
    qwen3_next               one module mtp: pre_fc_norm_embedding, pre_fc_norm_hidden, fc,
                             layers.0, norm; no field of config.json

The weights of a module but these are those of a layer. To add a family: a class here, and its row
in FAMILIES_WITH_MODULES.

Sources: README_WEIGHTS.md of DeepSeek-V3, and the readers of vLLM (deepseek_mtp, glm4_moe_mtp,
qwen3_next_mtp).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.weights import EMBEDDING, HEAD, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig, ModelOptions
from jaxmoe.models.predictor import Predictor

_LAYER: Final = "model.layers.{layer}."
_COUNT: Final = "num_nextn_predict_layers"
_NUMBERED: Final = {
    "token_norm/gain": "enorm.weight",
    "state_norm/gain": "hnorm.weight",
    "projection/weight": "eh_proj.weight",
    "head_norm/gain": "shared_head.norm.weight",
}
_SINGLE: Final = {
    "token_norm/gain": "mtp.pre_fc_norm_embedding.weight",
    "state_norm/gain": "mtp.pre_fc_norm_hidden.weight",
    "projection/weight": "mtp.fc.weight",
    "head_norm/gain": "mtp.norm.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyWithModules(Family):
    """A family whose models have modules; it is read and written by the family without them.

    Attributes:
        base: The family without modules.
        predictor: The modules.
        depth: Their number.
    """

    base: Family
    predictor: Predictor
    depth: int

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`model_type` of its config."""
        return self.base.name

    @property
    def architecture(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name of its class in transformers."""
        return self.base.architecture

    @property
    def rules(self) -> tuple[Rule, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Rules of the model and of the modules."""
        return (*self.base.rules, *self.module_rules(self.base.rules))

    def module_rules(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """Return the rules of the modules.

        Args:
            rules: Rules of the family.
        """
        blocks = [rule for rule in rules if rule.keys[0].startswith(_LAYER)]
        numbered = [Rule(path=path, keys=(_LAYER + key,)) for path, key in _NUMBERED.items()]
        return tuple(dataclasses.replace(rule, is_further=True) for rule in (*blocks, *numbered))

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config, with the modules.

        Raises:
            CheckpointError: The config has another number of modules.
        """
        self.check_count(config)
        model = self.base.model(config)
        options = dataclasses.replace(model.options or ModelOptions(), predictor=self.predictor)
        return dataclasses.replace(model, options=options)

    def check_count(self, config: Mapping[str, Any]) -> None:
        """Refuse a config with another number of modules.

        Raises:
            CheckpointError: Names both fields.
        """
        count = config.get(_COUNT) or 0
        if count != self.depth:
            raise CheckpointError(
                f"config.{_COUNT}={count} and model.options.predictor.depth={self.depth}"
                " must be equal: these are the modules that the files have"
            )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model, and the number of modules."""
        return self.base.fields(model) | {_COUNT: self.depth}

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Return the names of the modules' copies of embedding and head."""
        copies = dict(self.base.copies(model))
        for layer in range(model.num_layers, model.num_layers + self.depth):
            place = _LAYER.format(layer=layer)
            copies[f"{place}embed_tokens.weight"] = EMBEDDING
            head = EMBEDDING if model.has_tied_embeddings else HEAD
            copies[f"{place}shared_head.head.weight"] = head
        return copies

    def constants(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the constants of the family."""
        return self.base.constants(model)


class SingleModuleFamily(FamilyWithModules):
    """A family with one module whose tensors have a prefix of their own."""

    def module_rules(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """Return the rules of the module."""
        module = [Rule(path=path, keys=(key,), is_further=True) for path, key in _SINGLE.items()]
        for rule in rules:
            if rule.keys[0].startswith(_LAYER):
                keys = tuple(key.replace(_LAYER, "mtp.layers.0.") for key in rule.keys)
                module.append(dataclasses.replace(rule, keys=keys, is_further=True))
        return tuple(module)

    def check_count(self, config: Mapping[str, Any]) -> None:
        """Refuse more than the one module of the family."""
        del config
        if self.depth != 1:
            raise CheckpointError(
                f"{self.base.name} has one module, and model.options.predictor.depth="
                f"{self.depth}: set it to 1"
            )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model, which do not say whether it has a module."""
        return self.base.fields(model)

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Return those of the family: the module has no embedding and no head."""
        return dict(self.base.copies(model))


FAMILIES_WITH_MODULES: Final[dict[str, type[FamilyWithModules]]] = {
    "deepseek_v3": FamilyWithModules,
    "glm4_moe": FamilyWithModules,
    "qwen3_next": SingleModuleFamily,
}
"""How each family has its modules."""


def with_modules(family: Family, predictor: Predictor, depth: int) -> FamilyWithModules:
    """Return a family with modules.

    Args:
        family: The family without them.
        predictor: The modules.
        depth: Their number.

    Raises:
        CheckpointError: It has none.
    """
    if family.name not in FAMILIES_WITH_MODULES:
        raise CheckpointError(
            f"model.options.predictor:{predictor.name} is read and written for"
            f" {', '.join(FAMILIES_WITH_MODULES)}, and not for {family.name}: leave it out"
        )
    return FAMILIES_WITH_MODULES[family.name](base=family, predictor=predictor, depth=depth)
