# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run whose replicas are jobs of their own: its rounds with the other sites.

A site trains alone. After the steps at which the method exchanges, it posts its message, waits
for those of the other members, updates the common parameters, and compares a fingerprint of them.
A site that differs takes the state of the majority; one that starts late, or again, takes the
state of a member, with its step. It joins when its programs are compiled: from then on the others
wait for its messages, for `grace` seconds at most.

A site that is asked to stop while it waits does not wait on: a round that is not whole within
seconds is left, and so are the steps since the last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxmoe.checkpoint import LeaseLostError
from jaxmoe.contrib.slow_links.fragments import Fragment
from jaxmoe.contrib.slow_links.sites import MessageSizes, Rounds, SiteConfig, connect
from jaxmoe.contrib.slow_links.sites.config import VARIABLE
from jaxmoe.contrib.slow_links.sites.errors import SiteError, StoppedError
from jaxmoe.contrib.slow_links.workers.between_jobs import (
    BetweenJobs,
    digest,
    from_bytes,
    is_finite,
    num_bytes,
    to_bytes,
)
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.errors import EndRunError
from jaxmoe.messages import say
from jaxmoe.run.assemble import Assembly, Setting
from jaxmoe.run.compile import CompiledStep
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.restore import StartingPoint
from jaxmoe.run.supervision import Supervision
from jaxmoe.training.state import TrainState
from sharding.mesh import MeshConfig

logger = logging.getLogger(__name__)

LAST_WAIT = 5.0
"""Seconds that a site which was asked to stop waits on, for a round that all others are in."""


class SiteLeftError(EndRunError):
    """The other sites went on without this one, or cannot be reached: a restart joins them."""

    status: ClassVar[str] = "preempted"


class SiteInterruptedError(SiteLeftError):
    """Ctrl-C came while the site waited for the others."""

    status: ClassVar[str] = "interrupted"


class Site(RunPart):
    """Rounds of one site with the others.

    Args:
        config: Configuration of the run.
        directory: Unused.
        supervision: Watchdog and signals of this process.
    """

    _training: WorkerTraining
    _between: BetweenJobs
    _like: dict[int, Any]
    _layout: TrainState
    _rounds: Rounds

    def __init__(self, config: PretrainConfig, directory: RunDirectory, supervision: Supervision):
        del config, directory
        site = SiteConfig.from_environment()
        assert site is not None  # or the run has no such part
        self._config = site
        self._stop_request = supervision.stop
        self._beat = supervision.watchdog.beat
        self._stops: float | None = None
        self._is_connected = False
        self._step = self._exchanged = 0

    def fit(self, setting: Setting) -> Setting:
        """Let the job take its part of each batch."""
        config = setting.config
        site = self._config
        _check_site(config, site, config.execution.mesh.resolve(len(setting.devices)))
        return replace(setting, job=(site.member % site.of, site.of))

    def restore(self, start: StartingPoint) -> None:
        """Find the other sites, which this one has not joined yet."""
        assembly = start.assembly
        state = start.state
        if start.step >= assembly.plan.config.training.steps:
            return
        training = assembly.workers.training
        assert isinstance(training, WorkerTraining)  # checked by `fit`
        with jax.set_mesh(assembly.mesh):
            self._training = training
            self._between = BetweenJobs(training)
            self._like = {
                part.number: self._between.like(part, state) for part in training.fragments
            }
            self._layout = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
            )
            sizes = MessageSizes(
                update=max(map(num_bytes, self._like.values())), state=num_bytes(state)
            )
            self._rounds = connect(self._config, sizes, check=self._check)
        self._is_connected = True

    def join(self, start: StartingPoint, compile_step: Callable[[], None]) -> StartingPoint:
        """Take the site's place among the others, with their state or its own.

        All is compiled before, and what can fail has failed: the others do not wait long for an
        site that has joined.
        """
        with jax.set_mesh(start.assembly.mesh):
            compile_step()
            self.compile(start.state)
            self._beat("waiting for the other sites")
            step, state = self.start(start.step, start.state)
        if state is not start.state:
            jax.tree.map(lambda leaf: leaf.delete(), start.state)  # others hold a reference
        return replace(start, step=step, state=state)

    def compile(self, state: TrainState) -> None:
        """Compile the exchanges, with messages of this site in place of all.

        Args:
            state: Any state of the run.
        """
        for fragment in self._training.fragments:
            message, after = self._between.encode(fragment, state)
            messages = [jax.device_get(message)] * self._config.of
            jax.block_until_ready(self._between.merge(fragment, after, messages))

    def start(self, step: int, state: TrainState) -> tuple[int, TrainState]:
        """Return step and state to begin with: the own ones, or those of the other sites.

        Args:
            step: Number of steps done.
            state: State after them.

        Raises:
            EndRunError: The others cannot be reached, did not admit this site in time, or the run
                is to stop.
        """
        say(f"site     {self._config.member} of {self._config.of}: waiting for the others")
        try:
            start = self._rounds.start(self._between.rounds_before(step))
        except SiteError as error:
            raise self._end_error(error) from error
        if start is not None:
            state = self._place(start)
            step = int(state.step)
            say(f"site     joined the others at step {step}")
        self._step = self._exchanged = step
        return step, state

    def around(self, step_function: CompiledStep, assembly: Assembly, step: int) -> CompiledStep:
        """Return the step of a worker with the exchanges after it."""
        del assembly, step

        def step_and_exchange(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            state, metrics = step_function(state, batch)
            self._step += 1
            for fragment in self._between.due(self._step):
                try:
                    state = self._exchange(fragment, state)
                except SiteError as error:
                    raise self._end_error(error) from error
            return state, metrics

        return step_and_exchange

    def close(self) -> None:
        """Leave the other sites."""
        if self._is_connected:
            self._rounds.close()

    def _check(self) -> None:
        """End a wait for the others some seconds after the run was asked to stop."""
        if (reason := self._stop_request.reason) is None:
            return
        now = time.monotonic()
        self._stops = now if self._stops is None else self._stops
        if now - self._stops >= LAST_WAIT:
            raise StoppedError(f"{reason} while it waited for the others")

    def _end_error(self, error: SiteError) -> EndRunError:
        """Return the error that ends the run in order."""
        text = f"site {self._config.member}: {error}"
        if not isinstance(error, StoppedError):
            return SiteLeftError(f"{text}; it joins when it is started again")
        reason = self._stop_request.reason
        if reason == "taken_over":
            return LeaseLostError(text)
        kind = SiteInterruptedError if reason == "interrupted" else SiteLeftError
        return kind(f"{text}; it goes on from its last checkpoint when it is started again")

    def _exchange(self, fragment: Fragment, state: TrainState) -> TrainState:
        message, state = self._between.encode(fragment, state)
        closed = self._rounds.exchange(to_bytes(message), partial(self._before, state))
        like = self._like[fragment.number]
        updates = {member: from_bytes(data, like) for member, data in closed.payloads.items()}
        # All members have the same bytes, and leave out the same messages.
        messages = [message for message in updates.values() if is_finite(message)]
        if len(messages) < len(updates):
            odd = [member for member, message in updates.items() if not is_finite(message)]
            logger.warning("round %d: messages of sites %s are not finite", closed.number, odd)
        if messages:
            state = self._between.merge(fragment, state, messages)
        agreement = self._rounds.agree(digest(state))
        if agreement.sends_state:
            self._rounds.post_state(to_bytes(state))
        if not agreement.is_same:
            logger.warning("site %d takes the state of the majority", self._config.member)
            state = self._place(self._rounds.fetch_state())
        self._exchanged = self._step
        return state

    def _before(self, state: TrainState) -> bytes:
        """Return the state after the last exchange, for sites that still wait for it.

        The common arrays are as they were; the optimiser is as it is now.
        """
        local = replace(local_of(state), params=self._training.workers.stack(state.params))
        step = jnp.asarray(self._exchanged, state.step.dtype)
        return to_bytes(with_local(replace(state, step=step), local))

    def _place(self, data: bytes) -> TrainState:
        """Return a state from its bytes, laid out as that of this run."""
        arrays = from_bytes(data, self._layout)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), arrays, self._layout)


def _check_site(config: PretrainConfig, site: SiteConfig, mesh: MeshConfig) -> None:
    """Refuse what a run whose replicas are jobs of their own cannot do."""
    where = f"{VARIABLE} makes this run site {site.member} of {site.of}"
    if config.replicas.exchanges != "parameters":
        raise ValueError(
            f"{where}, and replicas {config.replicas.name!r} exchanges {config.replicas.exchanges}:"
            " choose replicas:diloco"
        )
    if mesh.replica > 1 or jax.process_count() > 1:
        raise ValueError(
            f"{where}, and a site is one worker in one process: execution.mesh.replica="
            f"{mesh.replica} must be 1, and {jax.process_count()} processes must be 1"
        )
    parts = site.of * config.training.accumulation
    if config.training.batch_size % (parts * mesh.batch_shards):
        raise ValueError(
            f"{where}: training.batch_size={config.training.batch_size} must be divisible by the"
            f" sites times micro-batches times devices that share a batch"
            f" ({parts * mesh.batch_shards})"
        )
    if config.part("recomputation") is not None:
        raise ValueError(
            f"{where}, and parts:recomputation repeats steps with their exchanges: leave"
            " recomputation out of parts"
        )
