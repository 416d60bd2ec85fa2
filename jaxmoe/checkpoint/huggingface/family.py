# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines `Family`: how the config and the tensors of an architecture of `transformers` are read.

A family has a function from the fields of config.json to `ModelConfig`, its inverse, and rules from
tensors to parameters that serve import and export. Config values that this library does not compute
are an error; unknown fields are logged as a warning.

To add a family: see "How to add" of `jaxmoe/checkpoint/huggingface/README.md`.
"""

from __future__ import annotations

import abc
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from jaxmoe.catalog import Registry
from jaxmoe.checkpoint.huggingface.filling import tensor_values
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.weights import Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import ModelConfig

logger = logging.getLogger(__name__)

_OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
_ROUNDING = 2.0**-7
"""Difference of constants that their dtype explains, bfloat16 included."""


class Constant(NamedTuple):
    """A tensor that follows from the config, which `transformers` stores with the parameters."""

    shape: tuple[int, ...]
    """Its shape."""
    values: Callable[[], np.ndarray]
    """Function that computes it, f32."""
    is_read: bool = True
    """Whether `transformers` reads it; the values of another are not compared."""


class WholeModel(NamedTuple):
    """A model of text and images around the text model of a family, which alone is read."""

    name: str
    """`model_type` of its config, whose `text_config` is that of the family."""
    prefix: str
    """Start of the names of the text model's tensors."""
    replacement: str
    """What they start with in the family."""
    left_out: tuple[str, ...]
    """Starts of the names of all other parts' tensors."""

    def text_tensors(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors of the text model by their names in the family, with a warning.

        Args:
            tensors: Tensors by name, of the whole model or of the text model alone.
        """
        if not any(name.startswith(self.prefix) for name in tensors):
            return tensors
        unread = [name for name in tensors if name.startswith(self.left_out)]
        if unread:
            message = "%d tensors beside the text model are left out, %s first"
            logger.warning(message, len(unread), unread[0])
        return {
            re.sub(f"^{re.escape(self.prefix)}", self.replacement, name): tensor
            for name, tensor in tensors.items()
            if not name.startswith(self.left_out)
        }


class Family(abc.ABC):
    """One architecture of `transformers`."""

    __slots__ = ()

    name: ClassVar[str]
    """`model_type` of its config."""
    architecture: ClassVar[str]
    """Name of its class in transformers."""
    attention: ClassVar[tuple[str, str | None]]
    """Name of the attention config, and its `qk_norm`; None where it has none, or any is read."""
    recurrent: ClassVar[str | None] = None
    """Name of the mixer of its recurrent layers, if it has any."""
    whole_model: ClassVar[WholeModel | None] = None
    """Model of text and images whose text model this is."""
    rules: ClassVar[tuple[Rule, ...]]
    """Rules from tensors to parameters."""

    @abc.abstractmethod
    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config.

        Args:
            config: Fields of config.json.

        Raises:
            CheckpointError: A value is not supported.
        """

    @abc.abstractmethod
    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model, under their names in versions 4 and 5 of transformers.

        They may describe another model where the family has no field for a property: the exporter
        reads them back and compares (`describe.check_described`).

        Args:
            model: Model in its normal form.

        Raises:
            CheckpointError: The family has no fields for the model.
        """

    def of_files(self, config: Mapping[str, Any]) -> Family:
        """Return the family of a config with this `model_type`; several architectures may have it.

        Args:
            config: Fields of config.json, of any type.
        """
        del config
        return self

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of tensors that are not computed here.

        Args:
            config: Fields of config.json.
        """
        del config
        return ()

    def copies(self, model: ModelConfig) -> Mapping[str, str]:
        """Return the tensors by name that repeat another one, and its name; files may lack them.

        Args:
            model: Model in its normal form.
        """
        del model
        return {}

    def constants(self, model: ModelConfig) -> Mapping[str, Constant]:
        """Return the tensors by name that follow from the config; files may lack them.

        Args:
            model: Model in its normal form.
        """
        del model
        return {}


FAMILIES: Final = Registry("family")
"""Classes of the families by `model_type`."""


def family(name: str) -> Family:
    """Return the family of a `model_type`.

    Args:
        name: Value of `model_type`.

    Raises:
        CheckpointError: It is unknown.
    """
    if name not in FAMILIES:
        raise CheckpointError(
            f"config.model_type={show_value(name)} is not among {', '.join(FAMILIES)}"
            + closest(str(name)[:100], FAMILIES)
        )
    return FAMILIES[name]()


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model of a model of text and images; others as they are.

    Token ids and the format of the weights are those of the whole model, where it has them.

    Args:
        fields: Fields of config.json.
    """
    text: Any = fields.get("text_config")
    name: Any = text.get("model_type") if isinstance(text, Mapping) else None
    if name not in FAMILIES or FAMILIES[name].whole_model is None:
        return fields
    if FAMILIES[name].whole_model.name != fields.get("model_type"):
        return fields
    return {**text, **{key: fields[key] for key in _OF_WHOLE if fields.get(key) is not None}}


def without_constants(
    tensors: Mapping[str, Any], constants: Mapping[str, Constant]
) -> Mapping[str, Any]:
    """Return the tensors without constants, whose values are compared with what is computed here.

    Args:
        tensors: Tensors by name.
        constants: Constants of the family by name.

    Raises:
        CheckpointError: A constant has another shape or other values.
    """
    for name in constants.keys() & tensors.keys():
        shape = tuple(tensors[name].shape)
        if shape != constants[name].shape:
            raise CheckpointError(
                f"{name}: found {list(shape)}, expected {list(constants[name].shape)}"
            )
        if not constants[name].is_read:
            continue
        expected = constants[name].values()
        values = tensor_values(tensors[name]).astype(np.float32)
        if not np.allclose(values, expected, rtol=_ROUNDING, atol=1e-6):
            raise CheckpointError(
                f"{name} is computed from the config here, and the stored values differ by up to"
                f" {np.abs(values - expected).max():.3g}: give the config.json that was saved with"
                " the tensors"
            )
    if not constants:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name not in constants}


def without_copies(tensors: Mapping[str, Any], copies: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the tensors without those that repeat others, with which they are compared.

    Args:
        tensors: Tensors by name.
        copies: Name of the repeated tensor, by name of the copy.

    Raises:
        CheckpointError: A copy differs.
    """
    for copy in copies.keys() & tensors.keys():
        original = copies[copy]
        if original not in tensors:
            continue  # the error about missing tensors names it
        pair = (tensor_values(tensors[copy]), tensor_values(tensors[original]))
        if not np.array_equal(*pair, equal_nan=True):
            raise CheckpointError(
                f"{copy} is not {original}, with which it shares its values here: leave the modules"
                " out (predictor None), or train them with the model"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in copies}
