# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats the output of `plan`: memory, traffic and time of a step, or why nothing fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli.tables import text_table
from experiments.plan.kernels_part import kernels_part, predict_by_kernels
from experiments.plan.pipeline_part import pipeline_part
from experiments.plan.units import size_in_words
from jaxmoe.layers.sequences import choose_form
from jaxmoe.planning.attention_links import (
    by_ratio,
    crossover,
    direction_bandwidth,
    links_of,
)
from jaxmoe.planning.hardware import CHIPS, Chip, Topology
from jaxmoe.planning.nested import NestedSharding, best_nested
from jaxmoe.planning.network.page import NetworkConfig, network_lines
from jaxmoe.planning.search import Candidate, SearchResult, mesh_in_words
from jaxmoe.planning.search.verdicts import plan_in_words, why_not
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import predict_time
from jaxmoe.planning.traffic import step_traffic

_MOST_COLLECTIVES = 12
_MOST_FASTER = 3


def page_of_plan(
    topology: Topology,
    result: SearchResult,
    compiled: Mapping[str, Any] | None,
    summary: Mapping[str, Any],
    network: NetworkConfig,
) -> str:
    """Return the page of a plan that fits.

    Args:
        topology: Devices of the plan.
        result: Result of the search; its first plan was chosen.
        compiled: Figures of the compiler; None in closed form.
        summary: Summary of the plan.
        network: Network between the hosts.
    """
    chip = topology.chip
    candidate = result.fitting[0]
    plan = candidate.plan
    seconds = candidate.time
    head = [
        f"topology             {topology.text}, {topology.num_devices} devices of"
        f" {size_in_words(chip.available)}",
        f"mesh                 {mesh_in_words(candidate.mesh)}, of {summary['meshes']} meshes"
        f" ({summary['meshes_refused']} do not divide) in {result.num_arrangements} arrangements",
        f"choices              {plan_in_words(plan)}",
        f"step                 {plan.batch_size} x {plan.sequence_length} tokens,"
        f" {plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} of"
        f" {plan.batch_size // plan.accumulation}",
    ]
    head += [
        f"rejected             {rejection['plan']}: {_why(rejection['compiled'])}"
        for rejection in summary["rejected"]
    ]
    parts = [
        "\n".join(head),
        runners_up(result, chip),
        _memory(candidate, compiled, summary["calibrated"]),
    ]
    parts.append(_time(candidate))
    parts.append(_traffic(candidate))
    if candidate.mesh.seq > 1:
        parts.append(attention_links(candidate, chip))
    if candidate.mesh.stage > 1:
        parts.append(pipeline_part(candidate, chip))
    if text := three_levels(candidate, chip):
        parts.append(text)
    if lines := network_lines(network, plan, chip):
        parts.append("\n".join(lines))
    by_kernels = ""
    if compiled is not None:
        parts.append(_collectives(compiled))
        prediction = predict_by_kernels(compiled, dict(plan.mesh.shape), chip)
        if prediction is not None:
            parts.append(kernels_part(prediction, chip))
            by_kernels = (
                f"{prediction.step:.3g} s by its kernels, one after the other; closed form "
            )
        if "measured" in compiled:
            parts.append(measured_table(candidate, compiled))
    spread = f"{seconds.overlap_bound:.3g} s if all communication were hidden"
    spread += f", products at {chip.efficiency:.1%} of the peak"
    if chip.platform == "cpu":
        spread += ", by nominal rates of a core"
    parts.append(f"predicted step       {by_kernels}{seconds.step:.3g} s, {spread}")
    parts.append(f"flags for pretrain   {' '.join(summary['flags'])}")
    return "\n\n".join(parts)


def page_of_refusal(
    topology: Topology,
    closest: Candidate,
    ways: Mapping[str, float],
    rejected: Sequence[Mapping[str, Any]],
) -> str:
    """Return the page of a plan that does not fit: the closest mesh, and flags that would help.

    Args:
        topology: Devices of the plan.
        closest: Mesh that needs least memory.
        ways: Bytes that a device would need by flag.
        rejected: Meshes that only the compiler refused.
    """
    chip = topology.chip
    lines = [f"{refusal['plan']}: {_why(refusal['compiled'])}" for refusal in rejected]
    missing = closest.excess(chip)
    if missing > 0:
        lines.append(
            f"nothing fits {topology.text}: the closest mesh, {mesh_in_words(closest.mesh)}, needs"
            f" {size_in_words(closest.need)} of {size_in_words(chip.available)} on a device,"
            f" {size_in_words(missing)} too much (closed form, nothing was compiled)"
        )
    else:
        lines.append(
            f"nothing fits {topology.text} by its compiler; in closed form"
            f" {mesh_in_words(closest.mesh)} needs {size_in_words(closest.need)} of"
            f" {size_in_words(chip.available)}: raise --compiles to try the next plans"
        )
    lines.append(_memory(closest, None))
    for flag, need in sorted(ways.items(), key=lambda way: way[1]):
        verdict = "fits" if need <= chip.available else "still too much"
        lines.append(f"{flag}: {size_in_words(need)}, {verdict}")
    if not any(need <= chip.available for need in ways.values()):
        lines.append("several of these together, or more devices")
    return "\n".join(lines)


def runners_up(search_result: SearchResult, chip: Chip) -> str:
    """Return the best plans, why the others were not chosen, and faster ones that do not fit.

    Args:
        search_result: Result of the search.
        chip: Properties of each device.
    """
    best = search_result.fitting[0]
    rows: list[tuple[str, ...]] = [("best plans", "seconds", "memory")]
    for number, candidate in enumerate(search_result.fitting, 1):
        step = f"{candidate.time.step:.4g}"
        need = size_in_words(candidate.need)
        rows.append((f"  {number}  {plan_in_words(candidate.plan)}", step, need))
        if candidate is not best:
            rows.append((f"       {why_not(best, candidate)}",))
    if search_result.faster:
        rows.append(("faster, but they do not fit",))
    for candidate in sorted(search_result.faster, key=lambda candidate: candidate.need)[
        :_MOST_FASTER
    ]:
        step = f"{candidate.time.step:.4g}"
        need = size_in_words(candidate.need)
        rows.append((f"     {plan_in_words(candidate.plan)}", step, need))
        rows.append((f"       {size_in_words(candidate.excess(chip))} too much",))
    return "\n".join(line.rstrip() for line in text_table(rows).splitlines())


def _why(compiled: Mapping[str, Any]) -> str:
    if compiled["kind"] == "CompiledStep":
        return "compiles, and needs more than a device has"
    return str(compiled["text"])


def _memory(
    candidate: Candidate,
    compiled: Mapping[str, Any] | None,
    calibrated: Mapping[str, Any] | None = None,
) -> str:
    memory = candidate.memory
    by_line = {}
    if calibrated:
        by_line = {"temporaries": calibrated["predicted"], "total": candidate.need}
    rows = [("memory per device", "closed form", "from fewer layers", "compiled")]
    categories = memory.categories().items()
    rows += [(f"  {name}", size_in_words(size), "", "") for name, size in categories]
    for name in ("arguments", "temporaries", "total"):
        line = size_in_words(by_line[name]) if name in by_line else ""
        compiled_size = size_in_words(compiled[name]) if compiled else ""
        rows.append((name, size_in_words(getattr(memory, name)), line, compiled_size))
    apart = {"host memory": memory.host, "files on disk": memory.disk}
    rows += [(f"  {name}", size_in_words(size), "", "") for name, size in apart.items() if size]
    if not calibrated:
        rows = [(name, closed, compiled_size) for name, closed, _, compiled_size in rows]
    return text_table(rows) + f"\nlargest in the phase of the {memory.peak_phase}"


def _time(candidate: Candidate) -> str:
    seconds = candidate.time
    rows = [("time of a step", "seconds")]
    rows += [("  compute", f"{seconds.compute:.4g}"), ("  memory", f"{seconds.memory:.4g}")]
    rows += [(f"  {name}", f"{value:.4g}") for name, value in seconds.communication.items()]
    rows += [(f"  {name}, host memory", f"{value:.4g}") for name, value in seconds.host.items()]
    if seconds.disk:
        rows.append(("  moments, disk", f"{seconds.disk:.4g}"))
    if seconds.hidden:
        rows.append(("  hidden beside products", f"-{seconds.hidden:.4g}"))
    return text_table(rows)


def _traffic(candidate: Candidate) -> str:
    rows = [("sent per device and step", "closed form")]
    rows += [
        (f"  {operation.reason} over {' x '.join(operation.axes)}", size_in_words(operation.bytes))
        for operation in step_traffic(candidate.plan)
    ]
    return text_table(rows)


def attention_links(candidate: Candidate, chip: Chip) -> str:
    """Return the form of attention, and the link loads of ring and token ring.

    Args:
        candidate: Mesh that shards sequences.
        chip: Properties of each device.
    """
    plan = candidate.plan
    links = links_of(chip)
    sizes = Sizes.of(plan).attention()
    mesh = dict(plan.mesh.shape)
    ratios = by_ratio(sizes, links)
    rows: list[tuple[str, ...]]
    rows = [("query heads per key head", "ring", "ring, both ways", "token_ring")]
    for row in ratios:
        numbers = (row.ring, row.both, row.token_ring)
        mark = " (this model)" if row.ratio == sizes.ratio else ""
        rows.append((f"  {row.ratio}{mark}", *(_link_time(size, chip) for size in numbers)))
    turn = crossover(ratios)
    ends = "token_ring loads the links less at every ratio"
    if turn is not None:
        ends = f"from {turn} query head{'s' * (turn > 1)} per key head on ring loads the links less"
    form = choose_form(plan.model.context, plan.execution, sizes.length, mesh).reason
    return (
        f"attention over seq   {form}\n"
        f"one layer, forward and backward, over the busiest link in its busiest direction ({links},"
        f" {direction_bandwidth(chip) / 1e9:.0f} GB/s)\n{text_table(rows)}\n{ends}"
    )


def three_levels(candidate: Candidate, chip: Chip) -> str:
    """Return what sharding by three levels would send; empty unless all devices are copies of data.

    Args:
        candidate: Mesh of the plan.
        chip: Properties of each device.
    """
    plan = candidate.plan
    devices = candidate.plan.mesh.size
    if candidate.mesh.batch_shards < devices or not 0 < chip.domain < devices:
        return ""
    parameters = float(sum(row.size for row in plan.table))
    arguments = parameters, Sizes.of(plan).itemsize, devices
    memory = candidate.memory
    room = chip.available - memory.batch - memory.temporaries + memory.gradients + memory.copies
    best = best_nested(*arguments, chip, room)
    if best is None:
        return ""
    fully_sharded = NestedSharding(weights=devices, gradients=devices, state=devices)
    return (
        f"three levels         weights over {best.weights}, gradients over {best.gradients}, state"
        f" over {best.state} devices would send for {best.seconds(*arguments, chip):.3g} s,\n"
        f"                     over all devices {fully_sharded.seconds(*arguments, chip):.3g} s;"
        " closed form; --execution.rules nested has weights over expert x seq, all else over all"
    )


def _link_time(size: float | None, chip: Chip) -> str:
    if size is None:
        return "-"
    return f"{size_in_words(size)} {1e3 * size / direction_bandwidth(chip):.3g} ms"


def _collectives(compiled: Mapping[str, Any]) -> str:
    if compiled["traffic"] is None:
        return "collectives: this jaxlib cannot read the compiled program back"
    rows = [("collectives (compiled)", "executions", "results", "sent")]
    rows += [
        (
            f"  {collective['kind']} over {' x '.join(collective['axes'])}",
            str(collective["count"]),
            size_in_words(collective["result_bytes"]),
            size_in_words(collective["wire_bytes"]),
        )
        for collective in compiled["traffic"][:_MOST_COLLECTIVES]
    ]
    return text_table(rows) + f"\ncompiled in {compiled['seconds']:.0f} s"


def measured_table(candidate: Candidate, compiled: Mapping[str, Any]) -> str:
    """Return predictions beside measurements, with their error.

    Args:
        candidate: Mesh that was run.
        compiled: Figures of the child process, with `measured`.
    """
    measured = compiled["measured"]
    rate = measured["matmul_rate"] / math.prod(candidate.mesh.sizes)
    this_machine = dataclasses.replace(CHIPS["cpu"], flops=rate)
    step = predict_time(candidate.plan, this_machine).step
    memory = candidate.memory.total
    seconds = measured["step_seconds"]
    grown = measured["memory"]
    rows = [
        ("predicted and measured", "predicted", "measured", "error"),
        ("  step, seconds", f"{step:.3g}", f"{seconds:.3g}", _error(step, seconds)),
        ("  memory per device", size_in_words(memory), size_in_words(grown), _error(memory, grown)),
    ]
    note = (
        "error: prediction over measurement, less one. The step is predicted from the rate of\n"
        "matrix products measured here; memory is the growth of the process at its peak over the\n"
        "number of devices. Fake devices share the cores: only ratios between plans carry over."
    )
    return text_table(rows) + f"\n{note}"


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f}%" if measured > 0 else ""
