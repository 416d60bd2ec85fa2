# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts Hugging Face models to `ModelConfig` and parameters, and back.

    import jax.numpy as jnp
    from jaxmoe import Transformer
    from jaxmoe.checkpoint import from_huggingface, read_huggingface, to_huggingface

    model, params = from_huggingface("OLMoE-1B-7B-0924")         # directory of safetensors files
    tokens = jnp.asarray([[1, 2, 3]])
    logits = Transformer(model).apply({"params": params}, tokens).logits

    hf = transformers.OlmoeForCausalLM.from_pretrained(...)      # model in memory
    model, params = from_huggingface(hf.config.to_dict(), hf.state_dict())

    to_huggingface(model, params, "mine")                        # config.json and safetensors

    read_huggingface("Moonlight-16B-A3B")                        # and router state: DeepSeek-V3

    family.py     what a family is: the meaning of its config, rules for its tensors
    families/     one file for each family
    parts.py      parts of a model that families share
    rules.py      names of tensors that families share
    fields.py     fields of a config under their old and new names
    describe.py   normal form of a model, and the check that they describe it
    weights.py    tensors to parameters, with filling.py, and placing.py onto devices
    export.py     parameters to tensors
    modeling.py   modelling file for models of no family
    peft.py       adapters as files of PEFT, and peft_import.py their way back
    tokenizer.py  tokenizer.json and its companions
    files.py      safetensors files
    stored_weights.py  weights in few bits
    paths.py      plain files inside a directory
    validation.py types and sizes of a config

Config values that this library does not compute, and tensors that are missing, unexpected or of
another shape, are errors. A model is written as a family only if the family computes it. Parity
with `transformers` is tested for logits, balance loss and gradients in both directions.
"""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxmoe.checkpoint.huggingface.export import CONFIG
from jaxmoe.checkpoint.huggingface.export import to_huggingface as to_huggingface
from jaxmoe.checkpoint.huggingface.families.own import family_of
from jaxmoe.checkpoint.huggingface.family import (
    Family,
    text_fields,
    without_constants,
    without_copies,
)
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.checkpoint.huggingface.paths import check_plain, plain_file, read_object
from jaxmoe.checkpoint.huggingface.placing import load
from jaxmoe.checkpoint.huggingface.stored_weights import decode_weights
from jaxmoe.checkpoint.huggingface.validation import check_fields, check_sizes
from jaxmoe.checkpoint.huggingface.weights import Nonfinite, Tensors
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.predictor import Predictor
from sharding.rules import FULLY_SHARDED, LogicalAxisRules

logger = logging.getLogger(__name__)


class Imported(NamedTuple):
    """A model that was read from files of `transformers`."""

    model: ModelConfig
    params: dict[str, Any]
    router_state: Any
    """Router state stacked over MoE layers, as `Transformer` takes it; empty without state."""


def from_huggingface(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
    nonfinite: Nonfinite = "refuse",
    predictor: Predictor | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a model of `transformers`.

    Reads the layouts of versions 4 and 5, on disk (one tensor per expert) and in memory (experts
    stacked). Does not import `transformers` or PyTorch; reading files needs safetensors.

    Args:
        config: Fields of config.json, that file, or its directory.
        state_dict: Tensors by name (numpy, or PyTorch on any device), a safetensors file, or a
            directory of such files; the config's directory when None.
        mesh: Mesh of `sharding.make_mesh` on which `rules` place the parameters, one at a time;
            one device when None.
        rules: Rules from logical axes to mesh axes.
        nonfinite: Whether values that are NaN or infinite are refused or kept.
        predictor: Modules after the last layer to read; those of the files are left out when None.

    Returns:
        The model, and parameters with the structure, shapes and dtype (f32) of
        `init_params(model, key)`. The load-balancing coefficient is converted: in transformers the
        loss of a balanced router is K and covers all layers together; here it is 1 and is added
        over layers.

    Raises:
        CheckpointError: The family or a config value is not supported; tensors are missing,
            unexpected, of another shape, not floating point or not finite; or the routers have
            biases, which are state (use `read_huggingface`).
    """
    model = read_huggingface(
        config, state_dict, mesh=mesh, rules=rules, nonfinite=nonfinite, predictor=predictor
    )
    if model.router_state and np.any(model.router_state["bias"]):
        raise CheckpointError(
            "the routers of this model have biases (e_score_correction_bias), which are router"
            " state and not parameters: call read_huggingface, and pass its router_state to the"
            " Transformer"
        )
    return model.model, model.params


def read_huggingface(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
    nonfinite: Nonfinite = "refuse",
    predictor: Predictor | None = None,
) -> Imported:
    """Read a model of `transformers` with its router state, such as DeepSeek-V3's biases.

    Takes the arguments of `from_huggingface`.

    Raises:
        CheckpointError: See `from_huggingface`.
    """
    model, tensors = open_huggingface(
        config, state_dict, rules=rules, nonfinite=nonfinite, predictor=predictor
    )
    params, state = load(tensors, mesh=mesh, axis_rules=rules)
    return Imported(model, params, state)


def open_huggingface(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    rules: LogicalAxisRules = FULLY_SHARDED,
    nonfinite: Nonfinite = "refuse",
    predictor: Predictor | None = None,
) -> tuple[ModelConfig, Tensors]:
    """Return a model and a reader of its parameters, one layer at a time.

    Types, sizes, names and shapes are checked at once, values when they are read. For models larger
    than memory, see `jaxmoe.checkpoint.streaming`.

    Raises:
        CheckpointError: See `from_huggingface`.
    """
    if state_dict is None and isinstance(config, Mapping):
        raise CheckpointError("from_huggingface needs tensors: give the model's state_dict")
    if isinstance(config, Mapping):
        fields = text_fields(config)
        where = ""
        check_fields(fields)
    else:
        fields = read_fields(config)
        where = f"{_config_file(config)}: "
    try:
        family = family_of(fields)
        if predictor is not None:
            family = predictor.family(family)
        model = family.model(fields)
    except ValueError as error:
        raise CheckpointError(f"{where}{error}") from error
    if state_dict is None:
        path = pathlib.Path(str(config))
        state_dict = path if path.is_dir() else path.parent
    tensors = state_dict if isinstance(state_dict, Mapping) else open_tensors(state_dict)
    if family.whole_model is not None:
        tensors = family.whole_model.text_tensors(tensors)
    tensors = decode_weights(fields, tensors)
    check_sizes(model, fields, tensors, family.rules, where)
    tensors = _compute(family, fields, tensors)
    tensors = without_constants(tensors, family.constants(model))
    tensors = without_copies(tensors, family.copies(model))
    opened = Tensors(model, family.rules, tensors, axis_rules=rules, nonfinite=nonfinite)
    return model, opened


def _compute(
    family: Family, fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the tensors without those that the family leaves out, with a warning."""
    prefixes = family.left_out(fields)
    matching = [name for name in tensors if name.startswith(prefixes)] if prefixes else []
    if not matching:
        return tensors
    logger.warning(
        "%d tensors of layers for multi-token prediction are left out, %s first",
        len(matching),
        matching[0],
    )
    return {name: tensor for name, tensor in tensors.items() if name not in set(matching)}


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a config.json, given as a file or its directory; of a model of text and
    images those of its text model.

    Raises:
        CheckpointError: The file cannot be read or is not a plain file, holds no JSON object, or a
            field has a wrong type.
    """
    place = pathlib.Path(path)
    file = plain_file(place, CONFIG) if place.is_dir() else check_plain(place)
    fields = dict(text_fields(read_object(file)))
    check_fields(fields, f"{file}: ")
    return fields


def _config_file(path: str | os.PathLike[str]) -> pathlib.Path:
    place = pathlib.Path(path)
    return place / CONFIG if place.is_dir() else place
