# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of where and how a model is computed: two steps and the collectives of the compiled step."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from tests.support.hashes.digests import digest_of_tree
from tests.support.hashes.rows import Row, steps


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from tests.support.meshes import EXECUTIONS, LAYOUTS, MESHES

    laid_out = {(mesh, "fully_sharded") for mesh in MESHES} | set(LAYOUTS)
    for mesh, layout in sorted(laid_out):
        yield f"mesh/{mesh}/{layout}", functools.partial(_on_mesh, mesh, layout)
    for name in EXECUTIONS:
        yield f"execution/{name}", functools.partial(_execution, name)
    for name in _members("sequence_parallel"):
        yield f"sequence_parallel/{name}", functools.partial(_sequence_parallel, name)
    for name in _members("dispatcher"):
        yield f"dispatcher/{name}", functools.partial(_dispatcher, name)
    for name in _STEPS:
        yield f"step/{name}", functools.partial(_step, name)


def _members(field: str) -> dict[str, Any]:
    from jaxmoe.configs import registry_of
    from sharding.expert_parallel import Dispatcher
    from sharding.sequence_parallel import SequenceParallelism

    choices = {"sequence_parallel": SequenceParallelism, "dispatcher": Dispatcher}
    return dict(registry_of(choices[field]))


def _execution_of(*, mesh: dict[str, int] | None = None, **fields: Any) -> Any:
    from jaxmoe import ExecutionConfig
    from sharding import MeshConfig

    return ExecutionConfig(mesh=MeshConfig(**(mesh or {})), **fields)


def _on_mesh(mesh: str, layout: str, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe import ExecutionConfig
    from tests.support.meshes import MESHES
    from tests.support.models import FULL

    return steps.two_steps(FULL, execution=ExecutionConfig(mesh=MESHES[mesh], rules=layout))


def _execution(name: str, directory: pathlib.Path) -> dict[str, str]:
    from tests.support.meshes import EXECUTIONS
    from tests.support.models import WIDE

    return steps.two_steps(WIDE, execution=EXECUTIONS[name])


def _sequence_parallel(name: str, directory: pathlib.Path) -> dict[str, str]:
    """The member with its defaults, on four devices in a row."""
    from sharding import MoEMesh
    from tests.support.models import WIDE

    if name == "none":
        return steps.two_steps(WIDE, execution=_execution_of(mesh={"data": 4}))
    if name == "levels":
        return _levels()
    member = _members("sequence_parallel")[name]()
    fold = MoEMesh(seq_inner=2) if hasattr(member, "ulysses") else None
    execution = _execution_of(mesh={"data": 2, "seq": 4}, fold=fold, sequence_parallel=member)
    return steps.two_steps(WIDE, execution=execution)


def _levels() -> dict[str, str]:
    """Rows packed by level, with each assigner."""
    from jaxmoe.optim import adamw
    from tests.jaxmoe.contrib.levels import test_levels as levels

    parts = {}
    for name in levels.ASSIGNERS:
        batch = levels.packed(name, 0)
        parts[f"batch of {name}"] = digest_of_tree(batch.arrays())
        model = dataclasses.replace(levels.TINY, num_layers=1)
        options = {"accumulation": levels.MICRO_BATCHES, "optimizer": adamw(1e-2)}
        if name == "buckets":
            parts |= steps.two_steps(model, execution=levels.SPREAD, rows=batch, **options)
    return parts


def _dispatcher(name: str, directory: pathlib.Path) -> dict[str, str]:
    """The member on four devices that share the experts."""
    from tests.support.models import WIDE

    member = steps.fitting(_members("dispatcher")[name], {"borrowed": 1, "min_rows": 1})
    execution = _execution_of(mesh={"data": 2, "expert": 4}, dispatcher=member)
    return steps.two_steps(WIDE, execution=execution)


def _step(name: str, directory: pathlib.Path) -> dict[str, str]:
    model, options = _STEPS[name]()
    return steps.two_steps(model, **options)


def _single(**fields: Any) -> tuple[Any, dict[str, Any]]:
    return steps.tiny_model(), {"execution": _execution_of(**fields)}


def _precision(**fields: Any) -> tuple[Any, dict[str, Any]]:
    from jaxmoe.precision import PrecisionPolicy

    return _single(precision=PrecisionPolicy(**fields))


def _halo(**fields: Any) -> tuple[Any, dict[str, Any]]:
    from jaxmoe.contrib.few_bits.halo import HaloConfig

    return _precision(matmul=HaloConfig(block=8, **fields))


def _gathered_codes() -> tuple[Any, dict[str, Any]]:
    from jaxmoe.contrib.few_bits.halo import HaloConfig
    from jaxmoe.precision import PrecisionPolicy

    precision = PrecisionPolicy(matmul=HaloConfig(block=8))
    return _single(mesh={"data": 8}, precision=precision, remat="full")


def _accumulated(**options: Any) -> tuple[Any, dict[str, Any]]:
    return steps.tiny_model(), {"accumulation": 2, **options}


def _watched() -> tuple[Any, dict[str, Any]]:
    from jaxmoe.training.parts.worker_losses import WorkerLosses

    return steps.tiny_model(), {"parts": (WorkerLosses(workers=2),)}


def _skipping() -> tuple[Any, dict[str, Any]]:
    from jaxmoe.contrib.depth.skipping import PartialBackprop, SkippingConfig

    moe = dataclasses.replace(steps.tiny_moe(), balancers=())
    model = dataclasses.replace(steps.tiny_model(), num_layers=4, dense_layers=(), moe=moe)
    skipping = SkippingConfig(groups=2, ratio=0.5)
    return model, {"accumulation": 2, "gradients": PartialBackprop(skipping=skipping)}


def _on_host(offload: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, dict[str, Any]]:
    from jaxmoe.execution import OffloadConfig
    from jaxmoe.optim import adamw
    from tests.support.models import WIDE

    fields["offload"] = OffloadConfig(**offload or {})
    execution = _execution_of(mesh={"data": 4, "tensor": 2}, **fields)
    return WIDE, {"execution": execution, "optimizer": adamw(1e-2, epsilon=1e-2)}


def _pipeline(name: str, stages: int = 2, **fields: Any) -> tuple[Any, dict[str, Any]]:
    from jaxmoe import catalog

    model = dataclasses.replace(steps.tiny_model(), num_layers=4, dense_layers=())
    mesh = {"stage": stages, "data": 2}
    execution = _execution_of(mesh=mesh, pipeline=catalog.choice("pipeline", name)(**fields))
    return model, {"execution": execution, "accumulation": 4}


def _guarded() -> tuple[Any, dict[str, Any]]:
    from jaxmoe.optim import adamw

    return steps.tiny_model(), {"optimizer": adamw(1e-2), "max_norm_ratio": 1.01, "clip": 0.1}


def _replayed() -> tuple[Any, dict[str, Any]]:
    import numpy as np

    rows = steps.batch()
    model = steps.with_parts()
    shape = (*rows.tokens.shape, model.num_layers, model.moe.top_k)
    experts = np.arange(np.prod(shape)).reshape(shape) % model.moe.num_experts
    return model, {"rows": dataclasses.replace(rows, extra={"experts": experts.astype(np.int32)})}


_STEPS = {
    **{
        f"remat_{remat}": functools.partial(_single, mesh={"data": 2}, remat=remat)
        for remat in ("none", "dots", "kernels", "attention", "full", "offload")
    },
    "remat_dense": lambda: _single(mesh={"data": 2}, remat="none", remat_dense="full"),
    "unrolled": lambda: _single(unroll=2),
    "loss_in_chunks": lambda: _single(loss_chunk=8),
    "detailed_telemetry": lambda: _single(telemetry="detailed"),
    "bfloat16": lambda: _precision(compute="bfloat16"),
    "int8_products": _halo,
    "float8_products": lambda: _halo(dtype="float8_e4m3fn", level=1),
    "int8_products_gathered": _gathered_codes,
    "accumulated_buffer": lambda: _accumulated(accumulated_balance="buffer"),
    "accumulated_two_pass": lambda: _accumulated(accumulated_balance="two_pass"),
    "skipped_layers": _skipping,
    "optimizer_on_host": lambda: _on_host(remat="offload"),
    "optimizer_on_host_in_parts": lambda: _on_host({"parts": 2}, rules="zero1"),
    "parameters_on_host": lambda: _on_host({"parts": 2, "parameters": "host"}, remat="offload"),
    "interleaved": lambda: _pipeline("interleaved"),
    "interleaved_chunks": lambda: _pipeline("interleaved", chunks=2),
    "interleaved_late_weights": lambda: _pipeline("interleaved", weight_gradients="deferred"),
    "gpipe": lambda: _pipeline("gpipe"),
    "four_stages": lambda: _pipeline("gpipe", stages=4),
    "clipped_and_guarded": _guarded,
    "workers_watched": _watched,
    "replayed_experts": _replayed,
}
"""Model and options of further choices of a step."""
