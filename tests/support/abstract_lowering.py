# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lowers a planned step for a platform without its devices."""

from jax.sharding import AbstractDevice

from jaxmoe.planning.abstract_step import StepPlan, trace_step

# One device kind of each platform.
_KINDS = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H100 80GB HBM3", "cpu": "cpu"}


def lower_abstractly(plan: StepPlan, platform: str):
    """Return the lowered step on an abstract mesh of as many devices as its sizes multiply to."""
    # The device decides the kernels and the dispatcher of the traced step.
    device = AbstractDevice(_KINDS[platform], None, platform)
    traced = trace_step(plan, plan.mesh.update(abstract_device=device))
    return traced.lower(lowering_platforms=(platform,))
