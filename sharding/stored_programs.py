# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps programs out of JAX's compilation cache that it does not give back whole."""

from __future__ import annotations

import math

import jax


def store_no_programs_on_cpus() -> None:
    """Keep what this process compiles from now on out of JAX's compilation cache, on CPUs.

    XLA orders all collectives of a program for CPUs, and stores that order for one sequence of
    operations at a time. From the cache (jaxlib 0.10.2 to 0.12.0), collectives in two loops or
    conditionals that do not depend on one another begin in another order on each device: the
    program hangs, or XLA ends the process.
    """
    if jax.default_backend() == "cpu":
        jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
