# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods that exchange gradients on the regression of tests/support/worker_runs.py."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.gradient_method import (
    Contribution,
    begin_gradients,
    exchange_gradients,
)
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from tests.support import worker_runs as wr

BY_PATH = {leaf.path: leaf for leaf in wr.LEAVES}


@dataclasses.dataclass
class Run:
    """A method on the regression, step by step."""

    config: Any
    optimizer: Any = wr.SGD
    workers: int = wr.WORKERS
    steps: int = wr.STEPS
    has_same_rows: bool = False
    """Whether all workers see the rows of worker 0."""
    params: Any = None

    def __post_init__(self):
        self.method = self.config.build(TrainingFacts(wr.LEAVES, self.workers, self.steps))
        self.over = Workers(self.workers, is_spread=False)
        self.params = wr.parameters() if self.params is None else self.params
        self.opt_state = self.optimizer.init(self.params)
        self.talk = begin_gradients(self.method, BY_PATH, self.params, self.over)
        self.number = 0
        self.mixed: Any = None
        self._step = jax.jit(self._one)

    def contributions(self, params, number, is_broken):
        """What each worker brings: the gradients of its parts, combined; NaN of broken ones."""
        code = self.method.code
        parts = 1 if code is None else code.parts

        def part(worker):
            return jax.grad(wr.loss)(params, *wr.rows(worker, number))

        def one(worker):
            places = [(worker + k) % self.workers for k in range(parts)]
            places = [0 * place for place in places] if self.has_same_rows else places
            grads = [part(place) for place in places]
            if code is None:
                return grads[0]
            factors = jnp.asarray(code.factors, jax.tree.leaves(params)[0].dtype)[worker]
            return jax.tree.map(lambda *g: sum(f * x for f, x in zip(factors, g)), *grads)  # noqa: B905

        grads = jax.vmap(one)(jnp.arange(self.workers))

        def spoil(g):
            return jnp.where(is_broken[(...,) + (None,) * (g.ndim - 1)], jnp.nan, g)

        grads = jax.tree.map(spoil, grads)
        tokens = jnp.ones((self.workers, parts))
        return Contribution(grads=grads, tokens=tokens, is_finite=~is_broken)

    def _one(self, params, opt_state, talk, number, alive, is_broken):
        agreed = None if self.method.agreed is None else self.method.agreed(opt_state)
        given = self.contributions(params, number, is_broken)
        mixed, talk, counted = exchange_gradients(
            self.method,
            BY_PATH,
            talk,
            given,
            params,
            self.over,
            number=number,
            key=jax.random.fold_in(jax.random.key(7), number),
            agreed=agreed,
            alive=alive,
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.optimizer.update(mixed, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, talk, mixed, given.grads, counted

    def step(self, dead=(), broken=()):
        """Take a step, some workers dead or with NaN; return the gradients that were brought."""
        alive, is_broken = (np.isin(range(self.workers), who) for who in (dead, broken))
        given = (self.params, self.opt_state, self.talk, jnp.int32(self.number), ~alive, is_broken)
        self.params, self.opt_state, self.talk, self.mixed, grads, self.counted = self._step(*given)
        self.number += 1
        return grads

    def go(self, steps=None, **flags):
        """Take steps, those of the run if no number is given."""
        for _ in range(self.steps if steps is None else steps):
            self.step(**flags)
        return self
