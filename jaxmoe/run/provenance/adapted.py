# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the model that a run adapts, and reads its parameters.

It is the run or the Hugging Face model of `checkpoint.initial`. Checkpoints of the run leave its
parameters out: see `jaxmoe.checkpoint.base_model`.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from flax import traverse_util

from jaxmoe.adapters import is_factor
from jaxmoe.checkpoint.base_model import BaseModel, fingerprint_of
from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.checkpoint.restore import restore_part
from jaxmoe.fingerprints import fingerprints
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.provenance.huggingface_values import huggingface_values
from jaxmoe.run.provenance.warm_start import adapted_by, initial_directory, initial_manifest


def base_of(assembly: Assembly) -> BaseModel | None:
    """Return the model that a run adapts; None for a run whose checkpoints hold all parameters.

    Args:
        assembly: Plan, devices and data of the run.

    Raises:
        ValueError: `checkpoint.initial` is missing, or holds no model.
    """
    plan = assembly.plan
    config = plan.config.checkpoint
    if plan.model.adapter is None:
        return None
    left_out = frozenset(
        row.path for row in plan.table if row.is_frozen and not is_factor(row.path)
    )
    if not left_out:
        return None
    if config.initial is None:
        raise ValueError(
            f"model.adapter={plan.model.adapter.name} trains a part of a model that is there: name"
            " it with --checkpoint.initial, a run directory or one of a Hugging Face model"
        )
    if plan.model.adapter.moves_base:
        return None
    if not is_huggingface(config.initial):
        first = initial_manifest(config)
        config = config if first.base is None else adapted_by(config, first)
    assert config.initial is not None  # a manifest names its model
    if is_huggingface(config.initial):
        read = functools.partial(_read_huggingface, assembly, config.initial)
        whole = {row.path: None for row in plan.table if row.path in left_out}
        prints = fingerprints(traverse_util.unflatten_dict(read(whole), sep="/"))
        step = 0
    else:
        manifest = initial_manifest(config)
        step, prints = manifest.step, _of_params(manifest.fingerprints, left_out)
        read = functools.partial(_read_run, initial_directory(config), manifest.step, config.verify)
    return BaseModel(
        path=config.initial,
        step=step,
        fingerprint=fingerprint_of(prints),
        left_out=left_out,
        load=read,
    )


def _of_params(prints: Mapping[str, str], paths: frozenset[str]) -> dict[str, str]:
    """Return the fingerprints of parameters, by their paths; of all parts of quantised ones."""
    own = {path.removeprefix("params/"): value for path, value in prints.items()}
    return {
        path: value
        for path, value in own.items()
        if path in paths or path.rpartition("/")[0] in paths
    }


def _read_run(
    directory: pathlib.Path, step: int, verify: Any, target: dict[str, Any]
) -> dict[str, Any]:
    nested = {"params": traverse_util.unflatten_dict(target, sep="/")}
    found = restore_part(directory, nested, step=step, verify=verify)["params"]
    return traverse_util.flatten_dict(found, sep="/")


def _read_huggingface(assembly: Assembly, path: str, target: dict[str, Any]) -> dict[str, Any]:
    params, _ = huggingface_values(path, assembly.execution, assembly.mesh)
    flat = traverse_util.flatten_dict(params, sep="/")
    return {name: flat[name] for name in target}
