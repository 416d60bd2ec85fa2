# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executor whose weights and pages can be laid out on another mesh while it serves."""

from __future__ import annotations

import time
from typing import Any

import jax

from jaxmoe.contrib.fleet.layouts import Resharding, received_bytes, replicated_on, weights_on
from jaxmoe.execution import ExecutionConfig, ServedConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.layers import stack_layers


class MeshExecutor(ModelExecutor):
    """Computes steps of one model, and hands its pages over to one on another mesh."""

    _weight_bytes = 0
    """Bytes of weights that devices received for this executor."""

    def on_mesh(self, mesh: Any, execution: ExecutionConfig) -> MeshExecutor:
        """Return an executor with the same weights on another mesh, compiled, with empty pages.

        This one may run steps meanwhile; `adopt` then takes its pages over.

        Args:
            mesh: Mesh of `sharding.make_mesh` with tensor and expert axes.
            execution: The same execution with the config of that mesh.

        Raises:
            ValueError: The weights are quantised, or the mesh has other axes.
        """
        with self._in_mesh():
            stacked_params = stack_layers(self._params)
        params = weights_on(self.model, stacked_params, ServedConfig.of(execution), mesh)
        weight_bytes = received_bytes(stacked_params, params)
        del stacked_params  # a copy, where the layers are apart
        state = replicated_on(self._router_state, mesh)
        moved = MeshExecutor(
            self.model, params, state, config=self.config, execution=execution, mesh=mesh
        )
        moved._weight_bytes = weight_bytes
        return moved

    def adopt(self, executor: MeshExecutor) -> Resharding:
        """Take over the pages of an executor on another mesh, between two of its steps.

        Args:
            executor: Executor of the same model and sizes; it keeps its pages.

        Raises:
            ValueError: The sizes differ.
        """
        if executor.config != self.config:
            raise ValueError(
                f"the executors differ in their sizes: {executor.config}, {self.config}"
            )
        executor._collect_all()
        start_time = time.perf_counter()
        places = jax.tree.map(lambda part: part.sharding, self._pools)
        self._pools = {}  # empty pages, whose memory the others need
        self._pools = jax.block_until_ready(jax.device_put(executor._pools, places))
        self._drawn = jax.device_put(executor._drawn, self._drawn.sharding)
        self._rows = executor._rows
        self._matchers = executor._matchers
        self._host = executor._host.copy()
        self._load = executor._load
        self._experts.adopt(executor._experts)
        return Resharding(
            weight_bytes=self._weight_bytes,
            page_bytes=received_bytes(executor._pools, self._pools),
            seconds=time.perf_counter() - start_time,
        )
