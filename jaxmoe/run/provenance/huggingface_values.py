# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads parameters and router state of a Hugging Face model onto the mesh of a run."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmoe.checkpoint.huggingface import open_huggingface
from jaxmoe.checkpoint.huggingface.weights import load
from jaxmoe.execution import ExecutionConfig


def huggingface_values(
    path: str | os.PathLike[str], execution: ExecutionConfig, mesh: Mesh
) -> tuple[Any, Any]:
    """Return the parameters, in the dtype of the run, and the router state; {} without any.

    Args:
        path: Directory of the model.
        execution: Rules and dtype of the parameters.
        mesh: Mesh to place them on.

    Raises:
        ValueError: The weights cannot be read, or do not fit the mesh.
    """
    rules = execution.axis_rules
    _, tensors = open_huggingface(pathlib.Path(path), rules=rules)
    params, router_state = load(tensors, mesh=mesh, axis_rules=rules)
    dtype = jax.numpy.dtype(execution.precision.parameter_dtype)
    return jax.tree.map(lambda value: value.astype(dtype), params), router_state
