# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A small training on any of seven meshes, for the matrix of restores; one mesh has two processes.

As a module it is that mesh's share: two processes restore what the others saved, save their own,
continue, and the first prints what became of it as JSON.

    python -m tests.support.restores DIRECTORY

To add a mesh: a row in MESHES.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import load_checkpoint, save_checkpoint
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.fingerprints import fingerprints
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.routing import LossFreeConfig, SigmoidTopKConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from sharding.coordination import barrier
from sharding.distributed import global_batch, start_processes
from sharding.mesh import make_mesh
from tests.support.models import ATTENTION, BATCH, MOE, TINY

ALONE, TOGETHER = "one", "two processes"
MESHES = {
    ALONE: MeshConfig(),
    "2x4": MeshConfig(data=2, tensor=4),
    "8 fully sharded": MeshConfig(data=8),
    "expert 4": MeshConfig(data=2, expert=4),
    "tensor 2": MeshConfig(tensor=2),
    "2 stages": MeshConfig(stage=2, data=2, tensor=2),
    TOGETHER: MeshConfig(data=4, expert=2),
}
STEPS, LENGTH = 20, 8

MODEL = dataclasses.replace(
    TINY,
    attention=dataclasses.replace(ATTENTION, num_kv_heads=4),
    moe=dataclasses.replace(
        MOE, expert_dim=12, router=SigmoidTopKConfig(bias=LossFreeConfig(rate=1e-3))
    ),
)
"""Router biases, which are state, and sizes that 4 devices of the tensor axis divide."""


class Training:
    """The training on one mesh.

    Args:
        name: a row of MESHES.
    """

    def __init__(self, name: str):
        self.execution = ExecutionConfig(mesh=MESHES[name])
        self.mesh = make_mesh(MESHES[name], jax.devices()[: math.prod(MESHES[name].sizes)])
        self.optimizer = AdamWConfig(learning_rate=3e-3).build(
            parameter_table(MODEL, rules=self.execution.axis_rules),
            LinearConfig(warmup_steps=2).build(100),
        )
        with jax.set_mesh(self.mesh):
            self.step = make_train_step(MODEL, self.optimizer, execution=self.execution)
        self._compiled: Any = None
        self.new = init_state(
            MODEL, self.optimizer, jax.random.key(0), execution=self.execution, mesh=self.mesh
        )
        self.target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.new,
        )

    def run(self, state: Any, steps: int) -> tuple[Any, list[float]]:
        """Return the state and the losses after more steps; the given state is donated."""
        losses = []
        with jax.set_mesh(self.mesh):
            rows = global_batch(_rows(int(state.step)), self.mesh)
            if self._compiled is None:
                self._compiled = self.step.lower(state, rows).compile()
            # One that compiles for longer than the other waits in a collective would be given up.
            barrier("the first step", 600)
            for _ in range(steps):
                rows = global_batch(_rows(int(state.step)), self.mesh)
                state, metrics = self._compiled(state, rows)
                losses.append(float(metrics.loss))
        return state, losses

    def restore(self, directory: Any) -> Any:
        """Return the verified state of a checkpoint on this mesh."""
        return load_checkpoint(directory, target=self.target)

    def continue_twice(self, directory: Any) -> dict[str, Any]:
        """Return the losses after a checkpoint, and the fingerprints of the final state."""
        ends = []
        for _ in range(2):
            state, losses = self.run(self.restore(directory), STEPS)
            ends.append((losses, fingerprints(state)))
        return {"losses": ends[0][0], "is_repeated": ends[0] == ends[1]}


def _rows(step: int) -> Batch:
    """The rows of this process, of a batch that depends on the step alone."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 8, (BATCH, LENGTH + 1)).cumsum(1) % MODEL.vocab_size
    share = BATCH // jax.process_count()
    first = share * jax.process_index()
    own = tokens[first : first + share].astype(np.int32)
    return Batch(
        tokens=own[:, :-1],
        targets=own[:, 1:],
        loss_weights=np.ones((share, LENGTH), np.float32),
    )


def main(directory: pathlib.Path) -> None:
    """Run one of two processes of the mesh."""
    start_processes()
    training = Training(TOGETHER)
    found, state = {}, None
    for source in MESHES:
        if source != TOGETHER:
            state = training.restore(directory / source)
            found[source] = fingerprints(state)
    save_checkpoint(directory / TOGETHER, state, step=3, config={})
    found[TOGETHER] = fingerprints(training.restore(directory / TOGETHER))
    told = {"fingerprints": found, **training.continue_twice(directory / TOGETHER)}
    if jax.process_index() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
