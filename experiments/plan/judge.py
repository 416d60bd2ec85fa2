# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the plans of a search until one fits, and writes what was found as page and summary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from experiments.cli.output import write
from experiments.plan.chosen import chosen_execution, plan_summary
from experiments.plan.config import PlanConfig, step_plan
from experiments.plan.kernels_part import predict_by_kernels
from experiments.plan.page import page_of_plan, page_of_refusal
from jaxmoe.configs import to_json
from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.planning.compile_ahead import CompilerCrashError, CompilerRefusal, in_child
from jaxmoe.planning.corrections.calibration import Anchor, shallow_depth
from jaxmoe.planning.hardware import Topology
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.search import Candidate, SearchResult, mesh_in_words, remedies
from jaxmoe.planning.search.verdicts import plan_in_words
from jaxmoe.run.config import PretrainConfig

_REFUSED = CompilerRefusal.__name__


def judge(
    config: PlanConfig,
    topology: Topology,
    searching: Callable[..., SearchResult],
    defaults: ExecutionConfig,
) -> tuple[dict[str, Any], str]:
    """Return the summary and the page; compile until one plan fits.

    What the compiler finds for a plan that does not fit corrects the closed form of those with the
    same remat, and the search is repeated. A plan that the compiler refuses for another reason is
    left out, and those with its dispatcher come last: what compilers lack is most often one of the
    collectives that dispatchers differ in.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        searching: `find` for given factors.
        defaults: Execution of the recipe, whose flags need not be given.
    """
    factors = dict[Remat, float]()
    refused = set[str]()
    dispatchers = set[str]()
    rejected: list[dict[str, Any]] = []
    last: Candidate | None = None

    def search() -> SearchResult:
        """Return the plans that fit, without those that the compiler refused."""
        everything = searching(factors=factors)
        fitting = {
            _name(config, candidate_plan): candidate_plan for candidate_plan in everything.fitting
        }
        if dispatchers:
            fitting = _with_others(config, searching, factors, dispatchers) | fitting
        compilable = [
            candidate_plan for name, candidate_plan in fitting.items() if name not in refused
        ]
        return dataclasses.replace(everything, fitting=compilable)

    search_result = search()
    anchors: dict[Remat, Anchor] = {}
    if config.calibrate and search_result.fitting:
        best = search_result.fitting[0]
        if (anchor := _calibrate(config, topology, best)) is not None:
            remat = best.plan.execution.remat
            closed = best.memory.temporaries
            anchors[remat], factors[remat] = anchor, anchor.at(closed) / closed
            search_result = search()

    def about() -> dict[str, Any]:
        return {
            "topology": topology.text,
            "num_devices": topology.num_devices,
            "meshes": search_result.num_meshes,
            "meshes_refused": len(search_result.refused),
            "arrangements": search_result.num_arrangements,
            "rejected": rejected,
        }

    for _ in range(max(config.compiles, 1)):
        if not search_result.fitting:
            break
        candidate = search_result.fitting[0]
        compiled = None
        if config.compiles:
            compiled = _compile(config, topology, candidate)
            if not _fits(compiled, topology):
                rejected.append({"plan": plan_in_words(candidate.plan), "compiled": compiled})
                if compiled["kind"] == _REFUSED:
                    refused.add(_name(config, candidate))
                    dispatchers.add(candidate.plan.execution.dispatcher.name)
                else:
                    factors[candidate.plan.execution.remat] = _factor(candidate, compiled, topology)
                last = candidate
                search_result = search()
                continue
        if compiled is not None:
            mesh = dict(candidate.plan.mesh.shape)
            prediction = predict_by_kernels(compiled, mesh, topology.chip)
            if prediction is not None:
                compiled["step_seconds"] = prediction.step
        summary = about() | plan_summary(config, search_result, compiled, topology.chip, defaults)
        summary["calibrated"] = None
        if (anchor := anchors.get(candidate.plan.execution.remat)) is not None:
            predicted = candidate.factor * candidate.memory.temporaries
            summary["calibrated"] = dataclasses.asdict(anchor) | {"predicted": predicted}
        return summary, page_of_plan(topology, search_result, compiled, summary, config.network)
    closest = search_result.closest or next(iter(search_result.fitting), last)
    assert closest is not None  # something fitted in closed form, or is the closest
    ways = remedies(closest, topology.chip)
    summary = about() | {
        "status": "nothing fits",
        "closest": mesh_in_words(closest.mesh),
        "needed": closest.need,
        "available": topology.chip.available,
        "remedies": ways,
        "memory": closest.memory.categories(),
    }
    return summary, page_of_refusal(topology, closest, ways, rejected)


def _with_others(
    config: PlanConfig,
    searching: Callable[..., SearchResult],
    factors: dict[Remat, float],
    dispatchers: set[str],
) -> dict[str, Candidate]:
    """Return the plans that fit with other dispatchers, by what tells them apart."""
    try:
        search_result = searching(factors=factors, without=dispatchers)
    except ValueError:  # no mesh divides the model without them
        return {}
    return {_name(config, candidate): candidate for candidate in search_result.fitting}


def _name(config: PlanConfig, candidate: Candidate) -> str:
    """Return what tells a plan from all others."""
    return json.dumps(to_json(run_of(config, candidate, None)), sort_keys=True)


def _factor(candidate: Candidate, compiled: dict[str, Any], topology: Topology) -> float:
    """Return compiled temporaries over those of the closed form, enough to refuse the plan."""
    memory = candidate.memory
    needed = compiled.get("total") or compiled.get("needed") or 0.0
    needed = max(needed, topology.chip.available * 1.01)
    return (needed - memory.arguments) / memory.temporaries


def _calibrate(config: PlanConfig, topology: Topology, candidate: Candidate) -> Anchor | None:
    """Return the temporaries of a plan with fewer layers, compiled.

    None if the model is not deeper than that, or it does not fit.
    """
    depth = shallow_depth(config.model, candidate.plan.execution)
    if depth is None:
        write(
            f"--calibrate: {config.model.num_layers} layers are too few to cut; the closed form is"
            " kept until the plan itself is compiled"
        )
        return None
    compiled = _compile(config, topology, candidate, depth)
    if compiled["kind"] != "CompiledStep":
        write(f"--calibrate: a model of {depth} layers does not fit; the closed form is kept")
        return None
    run = run_of(config, candidate, depth)
    plan = step_plan(run, topology, run.execution.mesh)
    closed = estimate_memory(plan, topology.chip.platform).temporaries
    return Anchor(depth=depth, compiled=compiled["temporaries"], closed=closed)


def run_of(config: PlanConfig, candidate: Candidate, layers: int | None) -> PretrainConfig:
    """Return the run that follows a plan, of all layers or of some.

    Args:
        config: Run to plan.
        candidate: Plan to follow.
        layers: Number of layers; None for all.
    """
    training = dataclasses.replace(config.training, accumulation=candidate.plan.accumulation)
    return dataclasses.replace(
        config.pretrain,
        execution=chosen_execution(config, candidate),
        training=training,
        model=dataclasses.replace(config.model, num_layers=layers or config.model.num_layers),
    )


def _compile(
    config: PlanConfig, topology: Topology, candidate: Candidate, layers: int | None = None
) -> dict[str, Any]:
    """Return the compiler's figures of a plan, of all layers or of some."""
    cut = "" if layers is None else f" with {layers} layers"
    write(f"compiling {plan_in_words(candidate.plan)}{cut} for {topology.text}")
    runs = topology.chip.platform == "cpu" and layers is None
    job = {
        "config": to_json(run_of(config, candidate, layers)),
        "topology": topology.text,
        "steps": config.measured_steps if runs else 0,
    }
    try:
        result = in_child("experiments.plan.child", job, topology, on_wait=_say_phase)
    except CompilerCrashError as error:
        return {"kind": _REFUSED, "text": f"the compiler crashed: {str(error).splitlines()[-1]}"}
    if "refused" in result:
        raise ValueError(result["refused"])
    return result


def _say_phase(seconds: float, phase: str) -> None:
    write(f"  {seconds:.0f} s: {phase}")


def _fits(compiled: dict[str, Any], topology: Topology) -> bool:
    return compiled["kind"] == "CompiledStep" and compiled["total"] <= topology.chip.available
