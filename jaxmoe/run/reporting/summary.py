# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers of summary.json and the closing message of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Shaped

from jaxmoe.data import ngram_bits_per_byte, xz_bits_per_byte
from jaxmoe.resilience import goodput
from jaxmoe.routing.balancers import conversions
from jaxmoe.routing.telemetry import LoadWindow
from jaxmoe.run.assemble import Assembly, describe_mesh, entropy_floor
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.reporting.header import sequence_form
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    DROPPED_FRACTION,
    LOAD_BALANCE,
    LOSS,
    MAX_VIOLATION,
)
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.measures.throughput import peak_memory
from pallas_kernels import OPERATIONS, Implementation
from pallas_kernels.backend import Choices, choices
from sharding.axes import BATCH_AXES, pieces

logger = logging.getLogger(__name__)


def summarise(
    assembly: Assembly,
    reporter: Reporter,
    facts: Mapping[str, Any],
    references: Mapping[str, float],
) -> dict[str, Any]:
    """Return the numbers of summary.json.

    Args:
        assembly: Plan, devices and data of the run.
        reporter: Reporter with the last metrics.
        facts: Status, steps, times, checkpoint step, and the rows of the parts of the run.
        references: Losses of reference predictors, by label.
    """
    plan = assembly.plan
    last = reporter.last
    training = plan.config.training
    moe = plan.model.moe
    skipping = None
    if training.skipping is not None:
        skipping = training.skipping.row(assembly.execution, training.accumulation)
    active = plan.table.active(*(moe.top_k, moe.num_experts) if moe else (0, 0))
    balance = last.get(LOAD_BALANCE)
    pooled = last.get("router/load_balance_pooled")
    units = conversions(balance, top_k=moe.top_k, pooled=pooled) if moe and balance else {}
    memory, measured_on = peak_memory(jax.local_devices())
    entries = {
        "status": facts["status"],
        "steps": facts["steps"],
        "tokens": training.tokens_before(facts["steps"]),
        "final_loss": last.get(LOSS),
        "eval_bits_per_byte": last.get(BITS_PER_BYTE),
        "eval_bits_per_token": last.get(BITS_PER_TOKEN),
        "tokens_per_second": reporter.tokens_per_second,
        "parameters_total": plan.table.total,
        "parameters_active": active,
        "compile_seconds": facts["compile_seconds"],
        "wall_seconds": facts["wall_seconds"],
        "trained_seconds": reporter.trained_seconds,
        "mfu": reporter.mfu,
        "model_flops_per_token": reporter.flops_per_token,
        "peak_memory_bytes": memory,
        "peak_memory_of": measured_on,
        "router_max_violation": last.get(MAX_VIOLATION),
        "router_dropped_fraction": last.get(DROPPED_FRACTION),
        "router_local_activation": last.get("router/local_activation"),
        "checkpoint_step": facts["checkpoint_step"],
        "restored_from": facts.get("restored_from"),
        "skipped_steps": reporter.skipped,
        "rollbacks": len(assembly.loader.skipped.windows),
        "mesh": describe_mesh(assembly.mesh),
        "replicas": None,
        "skipping": skipping,
        "implementations": implementations(assembly),
        "references_bits": dict(references),
        "bytes_per_token": assembly.source.bytes_per_token,
        "load_balance_units": units,
        "data": assembly.source.fingerprint(),
        "profile": facts.get("profile"),
        "goodput": facts.get("goodput"),
        "warnings": facts.get("warnings", []),
        "resizes": [],
    }
    return with_rows(entries, facts["parts"])


def with_rows(entries: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a summary with the rows of parts of the run.

    A row takes the place of an empty entry, and not of another.

    Args:
        entries: Entries of the run itself.
        rows: Rows of its parts, by name.
    """
    clashes = [name for name in rows if entries.get(name)]
    if clashes:
        logger.warning(
            "parts of the run have rows %s, which summary.json has of the run itself: the rows of"
            " the parts are left out",
            ", ".join(clashes),
        )
    return {**entries, **{name: row for name, row in rows.items() if name not in clashes}}


def load_window(
    steps: Shaped[np.ndarray, " n"], load: Float[np.ndarray, "n L E"], length: int = 100
) -> dict[str, Any] | None:
    """Return the load of the last steps together, of the worst layer; None without a step.

    The load of a single batch is uneven by chance; what remains over many steps is the router's.

    Args:
        steps: Numbers of the steps.
        load: Share of the assignments of each expert.
        length: Number of steps in the window.
    """
    if not load.size:
        return None
    window = LoadWindow.empty(jax.numpy.asarray(load[0]))
    for row in load[-length:]:
        window = window.add(jax.numpy.asarray(row))
    worst = {name: float(values.max()) for name, values in window.summarise().items()}
    return {"steps": [int(steps[-length:][0]), int(steps[-1])], **worst}


def reference_lines(assembly: Assembly) -> dict[str, float]:
    """Return bits per byte (or token) of reference predictors, by label."""
    floor = entropy_floor(assembly)
    source = assembly.source
    if floor is not None:
        return {"exact entropy": floor}
    train = source.text("train")
    held_out = source.text("validation")
    if train is None or held_out is None:
        return {}
    orders = ngram_bits_per_byte(train, held_out, orders=(1, 2, 3))
    lines = {f"{order}-byte context counts": bits for order, bits in orders.items()}
    return {**lines, "xz": xz_bits_per_byte(held_out)}


def implementations(assembly: Assembly, mesh: AbstractMesh | None = None) -> dict[str, str]:
    """Return the implementation of each kernel, and of the expert transport, that was used.

    An operation that chooses by its arguments may run several, which are all named.

    Args:
        assembly: Plan, devices and data of the run.
        mesh: Described mesh for which kernels are chosen; None is the mesh of the run.
    """
    mesh = assembly.mesh.abstract_mesh if mesh is None else mesh
    kernels = assembly.execution.implementations
    requests: dict[str, Implementation | None]
    if assembly.execution.encoded_product is None:
        requests = {"grouped_swiglu": kernels.grouped_swiglu}
    else:
        names = ("quantized_matmul", "grouped_matmul")
        requests = {name: getattr(kernels, name) for name in names}
    operations = (kind.mixer.operation for kind in assembly.plan.model.kinds)
    requests |= {name: kernels.by_operation[name] for name in operations if name is not None}
    chosen: dict[str, str]
    with jax.sharding.use_abstract_mesh(mesh):
        chosen = {name: OPERATIONS[name].choose(requests[name]).implementation for name in requests}
        by_arguments = [name for name in requests if OPERATIONS[name].depends_on_arguments()]
        traced = _traced_choices(assembly, mesh) if by_arguments else {}
    chosen |= {name: ", ".join(traced[name]) for name in by_arguments if name in traced}
    if choice := assembly.execution.dispatcher.transport_choice():
        chosen["expert_transport"] = choice.transport
    if assembly.mesh.shape.get("seq", 2) > 1:  # a fold may have split the axis
        chosen["sequence_parallel"] = sequence_form(assembly)
    return chosen


def _traced_choices(assembly: Assembly, mesh: AbstractMesh) -> Choices:
    """Return what the operations of a forward pass over a batch choose; nothing is computed.

    Nothing, with a warning, if the pass cannot be traced.
    """
    state = assembly.world_shapes()
    parts = 1
    if assembly.reads_data:
        _, parts = assembly.batch_part
        rows = assembly.loader.batch(0, process_index=0, process_count=parts)
    else:
        rows = assembly.feed.batch(0)
    batch_axes = pieces(mesh.axis_names, BATCH_AXES)

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        layout = NamedSharding(mesh, leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)

    def whole(array: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(batch_axes, *(None,) * (array.ndim - 1))
        shape = (parts * array.shape[0], *array.shape[1:])
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

    params, router_state = jax.tree.map(describe, (state.params, state.router_state))
    try:
        eval_step = make_eval_step(
            assembly.plan.model,
            execution=assembly.execution,
            objective=assembly.plan.config.training.objective,
        )
        with choices() as record:
            jax.eval_shape(eval_step, params, router_state, jax.tree.map(whole, rows))
    except (TypeError, ValueError) as error:  # a run that has ended keeps its summary
        logger.warning("kernels are named without the shapes of the model: %s", error)
        return {}
    return record


def closing_message(
    directory: RunDirectory, summary: Mapping[str, Any], references: Mapping[str, float]
) -> str:
    """Return the end of the run in a few lines."""
    lines = [f"{summary['status']} at step {summary['steps']}"]
    if summary["checkpoint_step"] is not None and summary["status"] != "done":
        lines[0] += f"; the same command continues from step {summary['checkpoint_step']}"
    bits = summary["eval_bits_per_byte"]
    unit = "bits/byte"
    if bits is None:
        bits = summary["eval_bits_per_token"]
        unit = "bits/token"
    if bits is not None:
        beside = ", ".join(f"{label} {value:.3f}" for label, value in references.items())
        lines.append(f"held out {bits:.4f} {unit}" + (f"   ({beside})" if beside else ""))
    stability = summary.get("stability", {})
    if (
        len(stability) > 1 and len(set(stability.values())) == 1
    ):  # a short run has one verdict for all
        stability = {"indicators": next(iter(stability.values()))}
    lines += [f"{name:24} {sentence}" for name, sentence in stability.items()]
    if summary.get("goodput"):
        lines.append(goodput.format_goodput(summary["goodput"]))
    if summary["profile"] is not None:
        lines.append(
            f"trace in {summary['profile']}: open it with `xprof --logdir {summary['profile']}`"
            " (pip install xprof), or its *.trace.json.gz at https://ui.perfetto.dev"
        )
    lines.append(f"see {directory.report_file}")
    return "\n".join(lines)
