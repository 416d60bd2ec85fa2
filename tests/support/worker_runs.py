# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Workers on a linear regression: the methods of jaxmoe/contrib/slow_links without a model.

Four workers see different rows. Parameters: a matrix, a vector, and a stack of two matrices of
four experts, which adds to the same prediction.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts
from jaxmoe.contrib.slow_links.method import mask_foreign
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import count_step, exchange_late, exchange_now
from jaxmoe.training.guard import select
from jaxmoe.training.state import TrainState

WORKERS, STEPS, INPUTS, OUTPUTS = 4, 12, 8, 3
SGD = optax.sgd(0.05)
LEAVES = (
    Leaf("a", (INPUTS, OUTPUTS), ("embed", "mlp"), "mlp_in", False),
    Leaf("b", (OUTPUTS,), ("norm",), "norm", False),
    Leaf(
        "experts",
        (2, 4, INPUTS, OUTPUTS),
        ("layers", "experts", "expert_embed", "expert_mlp"),
        "expert_in",
        True,
    ),
)


def parameters(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {leaf.path: jnp.asarray(0.5 * rng.standard_normal(leaf.shape), dtype) for leaf in LEAVES}


@functools.cache
def data():
    """Inputs [W, 32, INPUTS] and targets [W, 32, OUTPUTS] of the workers."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((WORKERS, 32, INPUTS)) + 0.3 * np.arange(WORKERS)[:, None, None]
    return x, rng.standard_normal((WORKERS, 32, OUTPUTS))


def rows(worker, step):
    """Inputs and targets of a worker in a step; both may be traced."""
    x, y = (jnp.asarray(part[worker] if isinstance(worker, int) else part) for part in data())
    if not isinstance(worker, int):
        x, y = x[worker], y[worker]
    start = (step * 8) % 32
    return tuple(jax.lax.dynamic_slice_in_dim(part, start, 8, 0) for part in (x, y))


def loss(params, x, y, size=None):
    """Mean loss of the rows, or of the first `size` of them, which may be traced."""
    matrix = params["a"] + jnp.sum(params["experts"], axis=(0, 1)) / 8
    error = x.astype(matrix.dtype) @ matrix + params["b"][None] - y.astype(matrix.dtype)
    losses = jnp.sum(error**2, axis=-1)
    if size is None:
        return 0.5 * jnp.mean(losses)
    is_in = jnp.arange(len(losses), dtype=jnp.float32) < size
    return 0.5 * jnp.sum(jnp.where(is_in, losses, 0.0)) / size


def facts(workers=WORKERS, steps=STEPS):
    """What methods are built from."""
    return TrainingFacts(LEAVES, workers, steps)


def training_of(config, workers=WORKERS, steps=STEPS):
    """The method of a config on the parameters of this file."""
    method = config.build(facts(workers, steps)).until(steps)
    return WorkerTraining(
        method=method,
        workers=Workers(workers, is_spread=False),
        leaves={leaf.path: leaf for leaf in LEAVES},
        fragments=method.fragments(LEAVES),
    )


def new_state(params, inner):
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=inner.init(params),
        router_state={},
        rng=jax.random.key(7),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


def train(
    config,
    *,
    steps=STEPS,
    inner=SGD,
    params=None,
    workers=WORKERS,
    watch=None,
    state=None,
    run=None,
    sizes=None,
    absent=None,
):
    """State of all workers after some steps.

    Args:
        config: of the method.
        steps: local steps.
        inner: optimiser of each worker.
        params: initial values; those of this file when None.
        workers: number of workers.
        watch: called with the state after every step.
        state: state to go on from; a new one when None.
        run: steps of the whole run that the method is built for; `steps` when None.
        sizes: rows of each worker in a step, of the 8; all when None.
        absent: [steps, W], the steps that each worker refuses; none when None.
    """
    training = training_of(config, workers, run or steps)
    if state is None:
        state = training.begin(new_state(parameters() if params is None else params, inner))
    step = jax.jit(functools.partial(one_step, training, inner, sizes), static_argnums=2)
    for number in range(int(state.step), steps):
        refused = None if absent is None else jnp.asarray(absent[number])
        state = step(state, refused, training.method.timing.sent(number))
        if watch is not None:
            watch(state)
    return state


def one_step(training, inner, sizes, state, absent=None, sent=()):
    """A local step of every worker, and the exchanges around it."""
    if training.method.timing.delay:
        state = exchange_late(training, state, sent)
    local, number = local_of(state), training.workers.number

    def one(worker, params, opt_state):
        size = None if sizes is None else jnp.asarray(sizes, jnp.float32)[worker]
        grads = jax.grad(loss)(params, *rows(worker, state.step), size)
        own = functools.partial(mask_foreign, training.method, training.leaves, worker)
        grads = own(grads, jax.tree.map(jnp.zeros_like, grads))
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = inner.update(grads, opt_state, params)
        return own(optax.apply_updates(params, updates), params), opt_state

    params, opt_state = jax.vmap(one)(jnp.arange(number), local.params, local.opt_state)
    refused = jnp.zeros(number, bool) if absent is None else absent
    if absent is not None:
        new, old = (params, opt_state), (local.params, local.opt_state)
        params, opt_state = jax.vmap(lambda no, *two: select(~no, *two))(absent, new, old)
    tokens = jnp.asarray((8,) * number if sizes is None else sizes, jnp.float32)
    talks = count_step(training, local.talks, tokens, refused)
    local = dataclasses.replace(local, params=params, opt_state=opt_state, talks=talks)
    state = with_local(dataclasses.replace(state, step=state.step + 1), local)
    return exchange_now(training, state)


def own_step(inner, params, opt_state, worker, step):
    """Parameters and optimiser state of one worker after a step of its own."""
    grads = jax.grad(loss)(params, *rows(worker, step))
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = inner.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def alone(worker, *, steps=STEPS, inner=SGD, params=None):
    """Parameters of one worker that never exchanges anything."""
    params = parameters() if params is None else params
    opt_state = inner.init(params)
    for step in range(steps):
        params, opt_state = own_step(inner, params, opt_state, worker, step)
    return params


def synchronous(*, steps=STEPS, inner=SGD, workers=WORKERS, owned=None):
    """Parameters after synchronous steps: the mean gradient of all workers in each.

    Args:
        steps: number of steps.
        inner: optimiser.
        workers: number of workers.
        owned: parameter [L, W, ...] whose row w has the gradient of worker w alone.
    """
    params = parameters()
    opt_state = inner.init(params)
    for step in range(steps):
        grads = [jax.grad(loss)(params, *rows(worker, step)) for worker in range(workers)]
        mean = jax.tree.map(lambda *g: sum(g) / workers, *grads)
        if owned is not None:
            mean[owned] = jnp.stack([g[owned][:, w] for w, g in enumerate(grads)], axis=1)
        updates, opt_state = inner.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def distance(one, other):
    """Largest difference of two trees."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def spread(stacked):
    """Largest difference between workers, of arrays [W ...]."""
    return max(
        float(np.abs(np.asarray(x) - np.asarray(x)[:1]).max()) for x in jax.tree.leaves(stacked)
    )
