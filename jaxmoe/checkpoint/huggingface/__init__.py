# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Weights from and to Hugging Face: config and tensors, `ModelConfig` and parameters.

    import jax.numpy as jnp
    from jaxmoe import Transformer
    from jaxmoe.checkpoint import from_huggingface, read_huggingface, to_huggingface

    model, params = from_huggingface("OLMoE-1B-7B-0924")         # a directory with safetensors
    tokens = jnp.asarray([[1, 2, 3]])
    logits = Transformer(model).apply({"params": params}, tokens).logits

    hf = transformers.OlmoeForCausalLM.from_pretrained(...)      # or a model in memory
    model, params = from_huggingface(hf.config.to_dict(), hf.state_dict())

    to_huggingface(model, params, "mine")                        # config.json and safetensors

    read_huggingface("Moonlight-16B-A3B")                        # and router state: DeepSeek-V3

    families.py   what each family's config means, and where each of its tensors belongs
    fields.py     the fields of a config, under their old and new names
    describe.py   the config of a model, and whether it says all
    weights.py    tensors into parameters by those rules, every one checked
    export.py     parameters into tensors, by the same rules
    files.py      a directory of safetensors, read and written

Nothing is guessed: a config that asks for what this library does not compute, and every tensor that
is missing, left over or of another shape, is an error that names it; and a model that is not what a
family computes is never written as one. Parity with `transformers` is tested in logits, balance
loss and gradients, both ways.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxmoe.checkpoint.huggingface.export import CONFIG
from jaxmoe.checkpoint.huggingface.export import to_huggingface as to_huggingface
from jaxmoe.checkpoint.huggingface.families import Family, family_of
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.checkpoint.huggingface.weights import Tensors, load
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig
from sharding.rules import FULLY_SHARDED, LogicalAxisRules

logger = logging.getLogger(__name__)


class Imported(NamedTuple):
    """A model of `transformers`, here."""

    model: ModelConfig
    params: dict[str, Any]
    router_state: Any
    """Stacked over MoE layers, as `Transformer` takes it; empty where routers keep none."""


def from_huggingface(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
) -> tuple[ModelConfig, dict[str, Any]]:
    """A model of `transformers`, as a model of this library.

    The layouts of versions 4 and 5 are read, on disk (a tensor per expert) and in memory (experts
    stacked). `transformers` and PyTorch are not imported; reading files needs safetensors.

    Args:
        config: the fields of config.json, that file, or its directory.
        state_dict: tensors by name (numpy, or PyTorch on any device), a safetensors file, or a
            directory of them; the config's directory when None.
        mesh: from `sharding.make_mesh`: parameters are placed on it by `rules`, one at a time. One
            device when None.
        rules: from logical axes to mesh axes.

    Returns:
        The model, and parameters of the structure, shapes and dtype (f32) of
        `init_params(model, key)`. The load-balancing coefficient is that of the config in this
        library's unit for a balanced router: there the loss is K times ours, and counts the tokens
        of all layers together, where ours are added.

    Raises:
        CheckpointError: a ValueError, for a family or a choice that is not supported, and for
            tensors that are missing, left over, of another shape or not of floating point; and
            for a model whose routers have biases, which are not parameters: `read_huggingface`.
    """
    found = read_huggingface(config, state_dict, mesh=mesh, rules=rules)
    if found.router_state and np.any(found.router_state["bias"]):
        raise CheckpointError(
            "the routers of this model have biases (e_score_correction_bias), which are state and"
            " not parameters, and without them it is another model: take read_huggingface, and give"
            " its router_state to the Transformer"
        )
    return found.model, found.params


def read_huggingface(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    mesh: Mesh | None = None,
    rules: LogicalAxisRules = FULLY_SHARDED,
) -> Imported:
    """`from_huggingface` with the state of routers, which DeepSeek-V3 has.

    Raises:
        CheckpointError: as there.
    """
    model, tensors = open_huggingface(config, state_dict, rules=rules)
    params, state = load(tensors, mesh=mesh, axis_rules=rules)
    return Imported(model, params, state)


def open_huggingface(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    rules: LogicalAxisRules = FULLY_SHARDED,
) -> tuple[ModelConfig, Tensors]:
    """The model, and its parameters as they may be read, one layer at a time.

    All names and shapes have been checked. For models larger than the memory: see
    `jaxmoe.checkpoint.streaming`.

    Raises:
        CheckpointError: as `from_huggingface`.
    """
    if state_dict is None and isinstance(config, Mapping):
        raise CheckpointError("from_huggingface needs tensors: give the model's state_dict")
    fields = config if isinstance(config, Mapping) else read_fields(config)
    family = family_of(fields)
    model = family.model(fields)
    if state_dict is None:
        path = pathlib.Path(str(config))
        state_dict = path if path.is_dir() else path.parent
    tensors = state_dict if isinstance(state_dict, Mapping) else open_tensors(state_dict)
    tensors = _computed(family, fields, tensors)
    return model, Tensors(model, family.rules, tensors, axis_rules=rules)


def _computed(
    family: Family, fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The tensors without those that the family leaves out, which are named in a warning."""
    prefixes = family.left_out(fields)
    others = [name for name in tensors if name.startswith(prefixes)] if prefixes else []
    if not others:
        return tensors
    logger.warning(
        "%d tensors of layers that predict further tokens are left out, %s first",
        len(others),
        others[0],
    )
    return {name: tensor for name, tensor in tensors.items() if name not in set(others)}


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a config.json, given by itself or by its directory.

    Raises:
        CheckpointError: it is not there, or no object.
    """
    place = pathlib.Path(path)
    file = place / CONFIG if place.is_dir() else place
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds no object of fields")
    return fields
