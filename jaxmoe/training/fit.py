# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Training of somebody else's model from three functions (Redco, arXiv 2310.16355, section 3).

    collate(examples)        a list of examples to a pytree of arrays [B ...]
    loss(params, batch)      a mean over the batch
    predict(params, batch)   a pytree of arrays [B ...]

None of them speaks of devices. Here are the mesh, the specs by two rules (`sharding/foreign.py`),
the jitted step, the order of the examples and the predictions; the loss is that of one device.

It keeps no checkpoint, resumes nothing and runs in one process: for that, and for
mixtures of experts, there is `experiments.pretrain`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.axes import DATA, TENSOR
from sharding.foreign import foreign_mesh, foreign_specs
from sharding.specs import named_shardings


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What `fit` returns."""

    params: Any
    """Trained, laid out on the mesh."""
    losses: list[float]
    """Of each step, before its update."""
    predictions: Any
    """A pytree of numpy arrays [examples to predict ...] in their order; None without examples."""


def fit(
    collate: Callable[[Sequence[Any]], Any],
    loss: Callable[[Any, Any], Any],
    predict: Callable[[Any, Any], Any],
    *,
    params: Any,
    optimizer: optax.GradientTransformation,
    train: Sequence[Any],
    test: Sequence[Any] = (),
    steps: int,
    batch_size: int,
    tensor: int = 1,
    overrides: Mapping[str, PartitionSpec] | None = None,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
) -> Fit:
    """Trains parameters of any model, and predicts.

    >>> import jax.numpy as jnp
    >>> examples = [(float(x), 3.0 * x + 1.0) for x in range(8)]
    >>> result = fit(
    ...     collate=lambda rows: dict(zip("xy", jnp.array(rows).T)),
    ...     loss=lambda p, b: jnp.mean((p["w"] * b["x"] + p["b"] - b["y"]) ** 2),
    ...     predict=lambda p, b: p["w"] * b["x"] + p["b"],
    ...     params={"w": jnp.array(0.0), "b": jnp.array(0.0)},
    ...     optimizer=optax.sgd(0.03, momentum=0.9),
    ...     train=examples, test=[(10.0, 0.0)], steps=300, batch_size=8,
    ... )
    >>> float(result.predictions[0].round(1))
    31.0

    Args:
        collate: of training examples, and of those to predict, which may lack their answers.
        loss: differentiable in its first argument; a mean over the batch, f32.
        predict: of the trained parameters.
        params: tree of arrays; not donated.
        optimizer: whose state is laid out as the parameters it belongs to.
        train: drawn without replacement, in a new order when all have been drawn.
        test: to predict.
        steps: updates.
        batch_size: examples in a step; the devices that share the batch divide it.
        tensor: devices that share each layer.
        overrides: as for `sharding.foreign.foreign_specs`.
        seed: of the order of the examples.
        devices: all when None.

    Raises:
        ValueError: sizes that do not fit the devices or the examples; several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"fit runs in one process, and there are {jax.process_count()}: train with"
            " jaxmoe.make_train_step, whose loaders give each process its rows"
        )
    mesh = foreign_mesh(tensor=tensor, devices=devices)
    _check_sizes(mesh, batch_size, len(train), steps)
    lies = named_shardings(foreign_specs(params, tensor, overrides=overrides), mesh)
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    # A copy: the caller's arrays may lie where they shall, and would be donated.
    copy = jax.jit(lambda tree: jax.tree.map(lambda x: x.copy(), tree), out_shardings=lies)
    params = copy(params)
    opt_state, update = _make_update(loss, optimizer, params, lies, rows)
    losses = []
    for batch in itertools.islice(_batches(train, batch_size, seed), steps):
        params, opt_state, value = update(params, opt_state, collate(batch))
        losses.append(value)
    predictions = None
    if len(test):
        run = jax.jit(predict, in_shardings=(lies, rows))
        predictions = _predictions(run, params, collate, test, batch_size)
    return Fit(params, [float(value) for value in losses], predictions)


def _make_update(
    loss: Callable[[Any, Any], Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    lies: Any,
    rows: NamedSharding,
) -> tuple[Any, Callable[[Any, Any, Any], tuple[Any, Any, Any]]]:
    """The optimiser's first state, and the jitted step, which donates both trees."""
    whole = NamedSharding(rows.mesh, PartitionSpec())
    with jax.numpy_dtype_promotion("standard"):
        state_lies = optax.tree_map_params(
            optimizer,
            lambda _, like: like,
            jax.eval_shape(optimizer.init, params),
            lies,
            transform_non_params=lambda _: whole,
        )
        opt_state = jax.jit(optimizer.init, out_shardings=state_lies)(params)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

    update = jax.jit(
        step,
        in_shardings=(lies, state_lies, rows),
        out_shardings=(lies, state_lies, whole),
        donate_argnums=(0, 1),
    )
    return opt_state, update


def _check_sizes(mesh: Mesh, batch_size: int, num_examples: int, steps: int) -> None:
    data = mesh.shape[DATA]
    if batch_size < 1 or batch_size % data:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of the {data} devices that share a batch"
            f" ({data * mesh.shape[TENSOR]} devices, tensor={mesh.shape[TENSOR]}): choose a"
            f" multiple of {data}, or a larger tensor"
        )
    if steps > 0 and num_examples == 0:
        raise ValueError(f"train has no example for {steps} steps: pass some, or steps=0")


def _batches(examples: Sequence[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """Without end: the examples in a new order each time, cut into batches across the ends."""

    def drawn() -> Iterator[Any]:
        for epoch in itertools.count():
            order = np.random.default_rng((seed, epoch)).permutation(len(examples))
            yield from (examples[i] for i in order)

    stream = drawn()
    while True:
        yield list(itertools.islice(stream, size))


def _predictions(
    run: Callable[[Any, Any], Any],
    params: Any,
    collate: Callable[[Sequence[Any]], Any],
    examples: Sequence[Any],
    size: int,
) -> Any:
    """Batch by batch; the last is filled up with copies, whose predictions are left out."""
    found = []
    for first in range(0, len(examples), size):
        batch = [examples[min(i, len(examples) - 1)] for i in range(first, first + size)]
        found.append(jax.device_get(run(params, collate(batch))))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(examples)], *found)
