# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains any JAX model on a mesh from three functions (Redco, arXiv 2310.16355, section 3).

    collate(examples)        a list of examples to a pytree of arrays [B ...]
    loss(params, batch)      a mean over the batch
    predict(params, batch)   a pytree of arrays [B ...]

None of them mentions devices. `fit` makes the mesh, the partition specs (`specs.py`), the jitted
step, the order of the examples and the predictions; the losses equal those of one device.

It saves no checkpoint, cannot resume and runs in one process. For these, and for mixtures of
experts, use `jaxmoe.run.Run` or `jaxmoe pretrain`.
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

from jaxmoe.contrib.foreign_models.specs import foreign_mesh, foreign_specs
from sharding.axes import DATA, TENSOR
from sharding.mesh import named_shardings


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What `fit` returns."""

    params: Any
    """Trained parameters, laid out on the mesh."""
    losses: list[float]
    """Loss of each step, before its update."""
    predictions: Any
    """Pytree of numpy arrays [test examples ...], in their order; None without test examples."""


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
    """Train the parameters of any model, and predict.

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
        collate: Function from a list of training or test examples to a batch.
        loss: Mean over a batch, a scalar, differentiable in the parameters.
        predict: Function from trained parameters and a batch to predictions.
        params: Tree of arrays; not donated.
        optimizer: Optax transformation; its state is laid out like the parameters.
        train: Training examples, drawn without replacement and reshuffled every epoch.
        test: Examples to predict.
        steps: Number of updates.
        batch_size: Examples per step; a multiple of the devices that share the batch.
        tensor: Devices that share each layer.
        overrides: Partition specs by pattern; see `foreign_specs`.
        seed: Seed of the order of the examples.
        devices: Devices of the mesh; all when None.

    Returns:
        Trained parameters, losses and predictions.

    Raises:
        ValueError: Sizes that do not fit the devices or the examples, parameters that `loss` or
            `predict` reads and `params` lacks, a loss that is not a scalar, or several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"fit runs in one process, and there are {jax.process_count()}: train with"
            " jaxmoe.make_train_step, whose loaders give each process its rows"
        )
    mesh = foreign_mesh(tensor=tensor, devices=devices)
    _check_sizes(mesh, batch_size, len(train), steps)
    if len(test):
        _check("predict", predict, params, collate(test[:1]))
    layout = named_shardings(foreign_specs(params, tensor, overrides=overrides), mesh)
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    # A copy: the caller's arrays may already have this layout, and would be donated.
    copy = jax.jit(lambda tree: jax.tree.map(lambda x: x.copy(), tree), out_shardings=layout)
    params = copy(params)
    opt_state, update = _make_update(loss, optimizer, params, layout, rows)
    losses = []
    for examples in itertools.islice(_batches(train, batch_size, seed), steps):
        batch = collate(examples)
        if not losses:
            _check_loss(loss, params, batch)
        params, opt_state, value = update(params, opt_state, batch)
        losses.append(value)
    predictions = None
    if len(test):
        run = jax.jit(predict, in_shardings=(layout, rows))
        predictions = _predictions(run, params, collate, test, batch_size)
    return Fit(params, [float(value) for value in losses], predictions)


def _make_update(
    loss: Callable[[Any, Any], Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    layout: Any,
    rows: NamedSharding,
) -> tuple[Any, Callable[[Any, Any, Any], tuple[Any, Any, Any]]]:
    """Return the initial optimiser state and the jitted step, which donates both trees."""
    replicated = NamedSharding(rows.mesh, PartitionSpec())
    with jax.numpy_dtype_promotion("standard"):
        state_layout = optax.tree_map_params(
            optimizer,
            lambda _, like: like,
            jax.eval_shape(optimizer.init, params),
            layout,
            transform_non_params=lambda _: replicated,
        )
        opt_state = jax.jit(optimizer.init, out_shardings=state_layout)(params)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

    update = jax.jit(
        step,
        in_shardings=(layout, state_layout, rows),
        out_shardings=(layout, state_layout, replicated),
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


def _check(name: str, function: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
    """Return the shape of a function's result; raise ValueError if it reads what is not there."""
    try:
        return jax.eval_shape(function, params, batch)
    except KeyError as error:
        raise ValueError(
            f"{name} reads {error}, which is missing: params has {_names(params)}, the batch of"
            f" collate has {_names(batch)}"
        ) from error


def _check_loss(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> None:
    value = _check("loss", loss, params, batch)
    if getattr(value, "shape", None) != ():
        raise ValueError(
            f"loss returns {value}, which must be a scalar: take the mean over the batch"
        )


def _names(tree: Any) -> str:
    """Return the first paths of a tree, for messages."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") or "one array"
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "") if paths else "no arrays"


def _batches(examples: Sequence[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """Yield batches without end, reshuffling every epoch; batches may span two epochs."""

    def draw() -> Iterator[Any]:
        for epoch in itertools.count():
            order = np.random.default_rng((seed, epoch)).permutation(len(examples))
            yield from (examples[i] for i in order)

    stream = draw()
    while True:
        yield list(itertools.islice(stream, size))


def _predictions(
    run: Callable[[Any, Any], Any],
    params: Any,
    collate: Callable[[Sequence[Any]], Any],
    examples: Sequence[Any],
    size: int,
) -> Any:
    """Predict batch by batch; the last one is padded with copies, whose predictions are cut."""
    predictions = []
    for first in range(0, len(examples), size):
        batch = [examples[min(i, len(examples) - 1)] for i in range(first, first + size)]
        predictions.append(jax.device_get(run(params, collate(batch))))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(examples)], *predictions)
