# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ends a process that stands still, or whose peers are lost, with the cause: no wait is for ever.

    beat("step", 17)    what this process does now; costs less than a microsecond

Two threads see to it, neither of which computes anything:

    the watch    looks at the last beat. One that is older than `processes.watchdog` (a kind of
                 beat that is new: `processes.first`) ends the process with 124, the stacks of all
                 threads, and what each peer was doing when it was last heard.
    the pulse    with several processes: tells the coordination service what this one does, and
                 hears what has become of the others. A peer that raised, or is silent for
                 `processes.heartbeat`, ends this process with 69 and the peer's number.

A process that raises says so to the others and ends at once: the way out through `jax.distributed`
would wait for peers that wait for it. When process 0 is killed the service dies with it, and JAX
ends the others at once, in its own words. A thread of C that never lets go of the interpreter stops
the watch as well; its peers then hear nothing from it.

To have a new activity watched: call the beat before it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import jax

from jaxmoe.resilience.endings import Ending
from jaxmoe.resilience.processes_config import ProcessesConfig
from sharding.coordination import AbsentError, entries, publish, say_of

_POLL = 0.2
"""Seconds between looks."""
_PULSE = 2.0
"""Seconds between pulses, at most."""
_OWN_WORDS = 2.5
"""Seconds that a process has to end in its own words when a peer did."""
_MARGIN = _PULSE + _OWN_WORDS + 5 * _POLL
"""Seconds in which all have heard how a process ended, and have ended as well."""
_DONE = "done"
JAX_LATER = 10
"""Seconds after our own heartbeat at which that of JAX ends what is left."""


class Watchdog:
    """A context around a run, once `jax.distributed` has started. Beats come from the main thread.

    Args:
        config: how long anything may take.
        exit_code: Exit code of an ending; None: 1 for each.
    """

    def __init__(self, config: ProcessesConfig, exit_code: Callable[[Ending], int] | None = None):
        self._config = config
        self._exit_code = exit_code or (lambda ending: 1)
        self._now: tuple[str, int, float] = ("starting", 0, time.monotonic())
        self._seen: set[str] = set()
        self._is_new = True
        self._stop = threading.Event()
        self._ending = threading.Lock()
        self._peers: _Peers | None = None
        self._watch = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._watch.start()
        if jax.process_count() > 1:
            self._peers = _Peers(self)
            self._peers.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._peers is not None:
            self._peers.say(_DONE)
            self._peers.stop()
        self._stop.set()

    def beat(self, what: str, step: int = 0) -> None:
        """This process begins with something.

        Args:
            what: the kind, in words; when it is new it may take longer.
            step: of the run; 0: of none.
        """
        if what != self._now[0]:
            self._is_new = what not in self._seen
            self._seen.add(what)
        elif self._is_new and step != self._now[1]:
            self._is_new = False
        self._now = (what, step, time.monotonic())

    @contextlib.contextmanager
    def exit_on_error(self) -> Iterator[None]:
        """End this process at an exception in the context, and publish it to the other processes.

        Enter it inside every context whose exit waits for other processes. With one process, the
        exception is left alone.
        """
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    @property
    def config(self) -> ProcessesConfig:
        """How long anything may take."""
        return self._config

    def doing(self) -> str:
        """The last beat in words, with its age."""
        what, step, since = self._now
        place = f" (step {step})" if step else ""
        return f"{what}{place} for {time.monotonic() - since:.1f} s"

    def end(self, ending: Ending, text: str, *, has_stacks: bool = False) -> None:
        """Ends this process, unless another thread is about to; does not return if it does.

        Args:
            ending: Reason, which gives the exit code.
            text: the cause.
            has_stacks: writes where every thread is as well.
        """
        if not self._ending.acquire(blocking=False):
            return
        stream = sys.__stderr__ or sys.stderr
        print(f"error: {text}", file=stream, flush=True)
        if has_stacks:
            faulthandler.dump_traceback(file=stream, all_threads=True)
        leave_at_once(self._exit_code(ending))

    def _look(self) -> None:
        looked = time.monotonic()
        pause = 0.0
        while not self._stop.wait(_POLL):
            now = time.monotonic()
            if now - looked > 10 * _POLL:  # the process itself was stopped, or starved
                pause = now
            looked = now
            since = max(self._now[2], pause)
            allowed = self._config.first if self._is_new else self._config.watchdog
            if self._config.watchdog and now - since > allowed:
                peers = f"; {self._peers.in_words()}" if self._peers is not None else ""
                self.end(
                    Ending.HUNG,
                    f"nothing has moved for {allowed} s: {self.doing()}{peers}",
                    has_stacks=True,
                )
            if self._peers is not None and (lost := self._peers.lost(now, pause)):
                self.end(Ending.LOST, f"{lost}; this process ends, in {self.doing()}")

    def fail(self, error: BaseException) -> None:
        """The end of the main thread by an error: in its own words, or those of a lost peer.

        Args:
            error: with one process it is left alone.
        """
        peers = self._peers
        if peers is None:
            return
        if isinstance(error, jax.errors.JaxRuntimeError | AbsentError):
            # A collective that broke: most likely because a peer did, who is about to be named.
            peers.is_suspicious = True
            until = time.monotonic() + self._config.heartbeat + _OWN_WORDS + 1.0
            while time.monotonic() < until and not isinstance(error, AbsentError):
                time.sleep(_POLL)  # the watch ends this process
        ending = Ending.LOST if isinstance(error, AbsentError) else Ending.FAILED
        code = self._exit_code(ending)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
        with self._ending:
            if isinstance(error, AbsentError):
                print(f"error: {error}", file=sys.stderr, flush=True)
            elif not isinstance(error, SystemExit):
                traceback.print_exception(error)
            self._say_and_leave(type(error).__name__, code)

    def leave(self, ending: Ending) -> None:
        """End this process though nothing has failed, and publish the reason to the others.

        Args:
            ending: Reason, which gives the exit code.
        """
        with self._ending:
            self._say_and_leave(ending, self._exit_code(ending))

    def _say_and_leave(self, why: str, code: int) -> None:
        if self._peers is not None:
            self._peers.say(f"{why}: ended with {code}")
            if jax.process_index() == 0:  # the service dies with this process
                time.sleep(_MARGIN)
        leave_at_once(code)


class _Peers:
    """What is heard of the other processes."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog
        self._own, self._count = jax.process_index(), jax.process_count()
        self._heartbeat = watchdog.config.heartbeat
        self._interval = min(_PULSE, max(_POLL, self._heartbeat / 10))
        self._stop = threading.Event()
        self._answered = time.monotonic()
        self._lost: tuple[str, float] | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        self.is_suspicious = False
        """Something has broken: less silence is needed to name a peer."""
        self._thread = threading.Thread(target=self._pulse, name="pulse", daemon=True)

    def start(self) -> None:
        """From here on the others hear of this process."""
        self._thread.start()

    def stop(self) -> None:
        """No more than that."""
        self._stop.set()
        self._thread.join(timeout=_MARGIN)

    def say(self, text: str) -> None:
        """How this process ends."""
        try:
            publish("ended", text)
        except jax.errors.JaxRuntimeError:
            return  # nobody is left to hear it

    def lost(self, now: float, pause: float) -> str | None:
        """Which peer is lost and why, once it is time to end for it."""
        if self._lost is not None:
            return self._lost[0] if now > self._lost[1] else None
        silent = now - max(self._answered, pause)
        if silent > self._heartbeat + 1:
            return f"process 0, which coordinates the others, has not answered for {silent:.0f} s"
        return None

    def in_words(self) -> str:
        """What the others were doing when they were last heard; those behind first."""
        if not self._heard:  # only process 0 listens all the time
            return "what the others do is in the output of process 0"
        now = time.monotonic()
        parts = []
        for process, (text, since) in sorted(
            dict(self._heard).items(), key=lambda item: item[1][1]
        ):
            silent = now - since
            if silent > 3 * self._interval:
                parts.append(f"process {process} has been silent for {silent:.1f} s, in {text}")
            else:
                parts.append(f"process {process}: {text}")
        return "; ".join(parts[:5])

    def _pulse(self) -> None:
        beats, before = 0, time.monotonic()
        while not self._stop.wait(self._interval):
            beats += 1
            if time.monotonic() - before > 10 * self._interval:
                # This process itself was stopped: what it last heard says nothing of the others.
                self._heard.clear()
            before = time.monotonic()
            try:
                publish("pulse", json.dumps([beats, self._watchdog.doing()]))
                if self._own == 0:
                    self._listen()
                self._hear_of_ends()
            except jax.errors.JaxRuntimeError:
                continue  # without an answer the silence grows, and the watch ends the process
            self._answered = time.monotonic()

    def _listen(self) -> None:
        """Process 0 hears every pulse, and tells the others which one has stopped."""
        now = time.monotonic()
        found = entries("pulse")
        for process in range(self._count):
            pulse = found.get(process, "")
            before = self._heard.get(process)
            text = json.loads(pulse)[1] if pulse else "starting"
            if process != self._own and (before is None or before[0] != text):
                self._heard[process] = (text, now)
        ended = entries("ended")
        allowed = 4 * self._interval if self.is_suspicious else self._heartbeat
        for process, (text, since) in self._heard.items():
            if now - since > allowed and process not in ended:
                words = f"has been silent for {now - since:.1f} s, last heard in {text}"
                say_of("ended", process, words)

    def _hear_of_ends(self) -> None:
        for process, text in sorted(entries("ended").items()):
            if process == self._own or text == _DONE or self._lost is not None:
                continue
            # One that raised may not be alone: all refuse a bad config, each in its own words.
            grace = 0.0 if text.startswith("has been") else _OWN_WORDS
            self._lost = (f"process {process} is lost: {text}", time.monotonic() + grace)


def leave_at_once(code: int) -> None:
    """Without the exit handlers, of which that of `jax.distributed` waits for the other processes.

    Args:
        code: of the exit.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # nobody listens
    os._exit(int(code))
