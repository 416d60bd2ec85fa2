# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Examines devices: memory, mesh, collectives, kernels and compilation cache.

Collectives run over the devices of this process and are compared with numpy.

To add a check: a function in `experiments/doctor/devices.py`, and a line in its `examine_devices`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.doctor.software import GIGABYTE, Finding, writable
from jaxmoe.data import MarkovConfig
from jaxmoe.host_memory import machine_memory
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import LinearConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import assemble, describe_mesh
from jaxmoe.run.compile import compiler_options
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.training.measures.throughput import peak_flops
from jaxmoe.training.step import make_train_step
from pallas_kernels import OPERATIONS
from pallas_kernels.proof import choices_by_case, prove
from sharding import axes
from sharding.mesh import MeshConfig, make_mesh

AXIS = axes.DATA
"""The mesh axis of the collectives."""


def examine_devices() -> list[Finding]:
    """All checks of this file, in the order of what each needs of the others."""
    findings = [*devices()]
    if any(finding.level == "problem" for finding in findings):
        return findings
    return [
        *findings,
        *default_mesh(),
        *precision(),
        *collectives(),
        *ragged_exchange(),
        *kernels(),
        *compiler(),
        *cache(),
        *train_step(),
    ]


def devices() -> Iterator[Finding]:
    """Return the devices that JAX finds, and their memory."""
    try:
        local_devices = jax.devices()
    except RuntimeError as error:
        yield Finding(
            "problem",
            "devices",
            f"no backend starts: {_first_line(error)}",
            "see the plugins above, or set JAX_PLATFORMS=cpu",
        )
        return
    kinds = collections.Counter(
        f"{device.platform} ({device.device_kind})" for device in local_devices
    )
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if jax.process_count() > 1:
        text += f" in {jax.process_count()} processes"
    yield Finding("ok", "devices", text)
    first = local_devices[0]
    if first.platform == "cpu":
        text = f"{machine_memory() / GIGABYTE:.1f} GB of the machine, {os.cpu_count()} processors"
    else:
        limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local_devices]
        text = f"{min(limits) / GIGABYTE:.1f} GB that JAX may take on the smallest device"
    yield Finding("ok", "memory", text)
    dtype = PrecisionPolicy().compute_dtype.name
    peak = peak_flops(first.device_kind, dtype)
    text = f"{peak / 1e12:.0f} TFLOP/s a device in {dtype}: MFU is shown" if peak else ""
    text = text or f"not known for {first.device_kind}: MFU is not shown"
    yield Finding("ok", "peak", text)


def default_mesh() -> Iterator[Finding]:
    """Return the default mesh of a run."""
    mesh = make_mesh(MeshConfig(data=-1))
    text = " ".join(f"{axis}={size}" for axis, size in describe_mesh(mesh).items())
    yield Finding("ok", "default mesh", text)


def precision() -> Iterator[Finding]:
    """Return the dtype of products that a run takes by default, and why."""
    dtype = PrecisionPolicy().compute_dtype.name
    if jax.default_backend() != "cpu":
        reason = "as on every accelerator"
    elif dtype == "bfloat16":
        reason = "this processor has instructions for it, and this XLA uses them"
    else:
        reason = "bfloat16 is not faster on this processor, with this XLA and these devices"
    text = f"products in {dtype}: {reason}; execution.precision.compute sets another"
    yield Finding("ok", "precision", text)


def collectives() -> list[Finding]:
    """psum, all_gather, all_to_all and ppermute over the devices of this process."""
    local = jax.local_devices()
    mesh = make_mesh(MeshConfig(data=-1), local)
    n = len(local)
    # [n n]: row i is on device i, and no two numbers are equal.
    values = np.arange(n * n, dtype=np.float32).reshape(n, n)
    ring = [(i, (i + 1) % n) for i in range(n)]
    checks: dict[str, tuple[Callable[..., jax.Array], np.ndarray]] = {
        "psum": (
            lambda x: jax.lax.psum(x, AXIS) + 0.0 * x,
            np.broadcast_to(values.sum(0), (n, n)),
        ),
        "all_gather": (
            lambda x: jax.lax.all_gather(x, AXIS, tiled=True).T[jax.lax.axis_index(AXIS)][None],
            values.T,
        ),
        "all_to_all": (
            lambda x: jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=1, tiled=True),
            values.T,
        ),
        "ppermute": (lambda x: jax.lax.ppermute(x, AXIS, ring), np.roll(values, 1, axis=0)),
    }
    findings = []
    for name, (function, expected) in checks.items():
        finding = compare(name, _over(mesh, function), values, expected)
        if finding is not None:
            findings.append(finding)
    if not findings:
        seen = f"{', '.join(checks)} agree with numpy over {n} device{'s' * (n > 1)}"
        findings.append(Finding("ok", "collectives", seen))
    return findings


def compare(
    name: str, run: Callable[[np.ndarray], jax.Array], values: np.ndarray, expected: np.ndarray
) -> Finding | None:
    """Return a problem if a collective fails or gives another result than expected.

    Args:
        name: Name of the collective.
        run: Collective on a host array.
        values: Input.
        expected: Expected output.
    """
    remedy = "the devices or their connection are faulty, or the driver and the plugin do not fit"
    try:
        result = np.asarray(run(values))
    except (RuntimeError, ValueError) as error:
        text = f"{name} fails: {_first_line(error)}"
        return Finding("problem", "collectives", text, remedy)
    if np.array_equal(result, expected):
        return None
    text = f"{name} gives other numbers than numpy on {int((result != expected).sum())} places"
    return Finding("problem", "collectives", text, remedy)


def ragged_exchange() -> Iterator[Finding]:
    """Return whether `ragged_all_to_all` runs here; no path of the library needs it alone."""
    local = jax.local_devices()
    mesh = make_mesh(MeshConfig(data=-1), local)
    n = len(local)

    def exchange(x: jax.Array) -> jax.Array:
        row = x.reshape(n)
        ones = jnp.ones((n,), jnp.int32)
        places = jnp.arange(n, dtype=jnp.int32)
        rank = jnp.full((n,), jax.lax.axis_index(AXIS), jnp.int32)
        return jax.lax.ragged_all_to_all(
            row, jnp.zeros_like(row), places, ones, rank, ones, axis_name=AXIS
        )[None]

    values = np.arange(n * n, dtype=np.float32).reshape(n, n)
    try:
        result = np.asarray(_over(mesh, exchange)(values))
    except RuntimeError:  # NotImplementedError is one
        platform = local[0].platform
        text = f"ragged_all_to_all does not exist on {platform}: rows travel by all_to_all"
        yield Finding("ok", "ragged exchange", text)
        return
    if np.array_equal(result, values.T):
        yield Finding("ok", "ragged exchange", "ragged_all_to_all works")
        return
    text = "ragged_all_to_all gives wrong numbers"
    remedy = "do not choose a dispatcher that uses it"
    yield Finding("warning", "ragged exchange", text, remedy)


def kernels() -> Iterator[Finding]:
    """Return the implementation of each kernel that runs, and why."""
    for name, operation in OPERATIONS.items():
        by_case = choices_by_case(name, operation)
        chosen = {choice.implementation: choice for choice in by_case.values()}
        alternatives = [
            alternative for alternative in operation.runnable() if alternative not in chosen
        ]
        for implementation, choice in chosen.items():
            cases = [case for case, row in by_case.items() if row.implementation == implementation]
            which = f" for {', '.join(cases)}" if len(chosen) > 1 else ""
            text = f"{name}{which}: {implementation}, {choice.reason}"
            text += f"; also {', '.join(alternatives)}" if alternatives else ""
            yield Finding("ok", "kernel", text)
    for verdict in prove(scales=(1, 3, 8)):
        level, remedy = ("ok", "") if verdict.is_right else ("warning", "xla runs in its place")
        yield Finding(level, "kernel", str(verdict), remedy)


def compiler() -> Iterator[Finding]:
    """Return the options of XLA that a train step is compiled with, where there are any."""
    if options := compiler_options():
        options_text = ", ".join(f"{name}={value}" for name, value in options.items())
        yield Finding("ok", "compiler", f"the train step is compiled with {options_text}")


def cache() -> Iterator[Finding]:
    """Return the directory of compiled programs."""
    where = getattr(jax.config, "jax_compilation_cache_dir", None)
    if where is None:
        yield Finding(
            "warning",
            "compilation cache",
            "none: every start compiles again",
            "set JAX_COMPILATION_CACHE_DIR",
        )
        return
    if "://" in where:
        text = f"{where} (not examined: no local directory)"
        yield Finding("ok", "compilation cache", text)
        return
    yield from writable(pathlib.Path(where), "compilation cache")


def train_step() -> Iterator[Finding]:
    """One step of a tiny model on the default mesh, over all processes."""
    started = time.perf_counter()
    try:
        assembly = assemble(tiny_config(jax.device_count()))
        plan = assembly.plan
        with jax.set_mesh(assembly.mesh):
            step = make_train_step(plan.model, plan.optimizer, execution=assembly.execution)
            _, metrics = step(assembly.new_state(), assembly.feed.batch(0))
            loss = float(metrics.loss)
            is_skipped = bool(metrics.is_skipped)
    except (RuntimeError, ValueError) as error:
        yield Finding(
            "problem",
            "train step",
            f"a tiny model cannot be trained: {_first_line(error)}",
            "fix the problems above first; otherwise report this as a bug",
        )
        return
    if not math.isfinite(loss) or is_skipped:
        yield Finding(
            "problem",
            "train step",
            f"the first loss of a tiny model is {loss}",
            "the devices compute wrong numbers: try JAX_PLATFORMS=cpu",
        )
        return
    seconds = time.perf_counter() - started
    text = f"a tiny model trains: loss {loss:.3f}, {seconds:.1f} s with compiling"
    yield Finding("ok", "train step", text)


def tiny_config(num_devices: int) -> PretrainConfig:
    """Return a run whose sizes divide by the number of devices."""
    model = ModelConfig(
        vocab_size=8,
        num_layers=1,
        embed_dim=num_devices * math.ceil(16 / num_devices),
        attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=16),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=16),
    )
    return dataclasses.replace(
        PretrainConfig(),
        model=model,
        data=MarkovConfig(vocab_size=8),
        training=TrainingConfig(steps=1, batch_size=num_devices, sequence_length=16),
        schedule=LinearConfig(),
        evaluation=EvaluationConfig(batches=1),
    )


def _over(mesh: Mesh, function: Callable[..., jax.Array]) -> Callable[[np.ndarray], jax.Array]:
    """Return a function of local rows as one of host arrays."""
    spec = PartitionSpec(AXIS)
    # check_vma off: whether a result varies over the axis is not the question here.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return lambda operand: jax.jit(mapped)(jax.device_put(operand, NamedSharding(mesh, spec)))


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
