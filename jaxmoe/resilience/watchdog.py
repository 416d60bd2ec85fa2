# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ends a process that hangs, or whose peers are lost, and prints the cause.

    beat("step", 17)    records the current activity; costs less than a microsecond

Two threads run beside the main one:

    watch    checks the last beat. If it is older than `processes.watchdog` (`processes.first` for
             the first activity of a kind), the process ends with `Ending.HUNG`, the stacks of all
             threads, and the last known activity of each peer.
    pulse    with several processes: publishes the current activity to the coordination service and
             reads the others'. A peer that raised, or is silent for `processes.heartbeat`, ends
             this process with `Ending.LOST` and the number of the peer.

A process that raises publishes this and ends at once, because the exit handlers of
`jax.distributed` would wait for peers that wait for it. If process 0 is killed, the service dies
with it and JAX ends the others with its own message. A C extension that never releases the
interpreter also stops the watch; its peers then receive no pulse.

To watch a new activity: call `Watchdog.beat` before it.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

import jax

from jaxmoe.resilience.processes_config import ProcessesConfig
from sharding.coordination import AbsentError, entries, publish, say_of

_POLL = 0.2
"""Seconds between checks."""
_PULSE = 2.0
"""Largest number of seconds between pulses."""
_OWN_WORDS = 2.5
"""Seconds that a process has to print its own error when a peer ended."""
_MARGIN = _PULSE + _OWN_WORDS + 5 * _POLL
"""Seconds within which all processes have seen how a process ended, and have ended."""
_DONE = "done"
JAX_LATER = 10
"""Seconds after our heartbeat timeout at which that of JAX ends the remaining processes."""


class Ending(enum.StrEnum):
    """Reasons for which `Watchdog` ends a process."""

    HUNG = "hung"
    """Nothing moved within the timeout; the stacks of all threads were written."""
    LOST = "lost"
    """Another process of the run ended or fell silent; its number was printed."""
    FAILED = "failed"
    """An exception left the run; its traceback was printed."""
    PREEMPTED = "preempted"
    """SIGTERM before the first step, when there is nothing to save."""
    INTERRUPTED = "interrupted"
    """Ctrl-C before the first step, when there is nothing to save."""


def _write_error(stream: TextIO, text: str) -> None:
    """Write the last words of a process that is ending, without the logging of its host program."""
    stream.write(f"error: {text}\n")
    stream.flush()


class Watchdog:
    """Context around a run, entered after `jax.distributed` has started.

    Args:
        config: Timeouts.
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
        self._peers: _PeerPulses | None = None
        self._watch = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._watch.start()
        if jax.process_count() > 1:
            self._peers = _PeerPulses(self)
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
        """Record that an activity begins; called by the main thread.

        Args:
            what: Name of the activity; its first occurrence may take longer.
            step: Step of the run; 0 for none.
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
        with contextlib.ExitStack() as stack:
            stack.push(self._fail_on_exit)
            yield

    def _fail_on_exit(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    @property
    def config(self) -> ProcessesConfig:
        """Timeouts."""
        return self._config

    def doing(self) -> str:
        """Return the last beat and its age as text."""
        what, step, since = self._now
        place = f" (step {step})" if step else ""
        return f"{what}{place} for {time.monotonic() - since:.1f} s"

    def end(self, ending: Ending, text: str, *, has_stacks: bool = False) -> None:
        """End this process, unless another thread is ending it.

        Args:
            ending: Reason, which gives the exit code.
            text: Error message.
            has_stacks: Whether to write the stacks of all threads.
        """
        if not self._ending.acquire(blocking=False):
            return
        stream = sys.__stderr__ or sys.stderr
        _write_error(stream, text)
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
        """End this process after an error in the main thread, unless it is the only process.

        Args:
            error: Printed, unless a lost peer is the cause, which is named instead.
        """
        peers = self._peers
        if peers is None:
            return
        if isinstance(error, jax.errors.JaxRuntimeError | AbsentError):
            # A collective failed, probably because of a peer: wait until the watch names it.
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
                _write_error(sys.stderr, str(error))
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


class _PeerPulses:
    """Exchanges activities with the other processes."""

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
        """Whether a collective failed: less silence is needed to name a peer."""
        self._thread = threading.Thread(target=self._pulse, name="pulse", daemon=True)

    def start(self) -> None:
        """Start to publish the activity of this process."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to publish."""
        self._stop.set()
        self._thread.join(timeout=_MARGIN)

    def say(self, text: str) -> None:
        """Publish how this process ends."""
        try:
            publish("ended", text)
        except jax.errors.JaxRuntimeError:
            return  # the service is gone

    def lost(self, now: float, pause: float) -> str | None:
        """Return which peer is lost and why, once it is time to end."""
        if self._lost is not None:
            return self._lost[0] if now > self._lost[1] else None
        silent = now - max(self._answered, pause)
        if silent > self._heartbeat + 1:
            return f"process 0, which coordinates the others, has not answered for {silent:.0f} s"
        return None

    def in_words(self) -> str:
        """Return the last known activities of the others, the longest silent first."""
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
        beats = 0
        before = time.monotonic()
        while not self._stop.wait(self._interval):
            beats += 1
            if time.monotonic() - before > 10 * self._interval:
                # This process itself was stopped: what it last received is out of date.
                self._heard.clear()
            before = time.monotonic()
            try:
                publish("pulse", json.dumps([beats, self._watchdog.doing()]))
                if self._own == 0:
                    self._listen()
                self._read_endings()
            except jax.errors.JaxRuntimeError:
                continue  # the watch ends the process when this lasts
            self._answered = time.monotonic()

    def _listen(self) -> None:
        """Read every pulse on process 0, and publish which peers fell silent."""
        now = time.monotonic()
        pulses = entries("pulse")
        for process in range(self._count):
            pulse = pulses.get(process, "")
            before = self._heard.get(process)
            text = json.loads(pulse)[1] if pulse else "starting"
            if process != self._own and (before is None or before[0] != text):
                self._heard[process] = (text, now)
        endings = entries("ended")
        allowed = 4 * self._interval if self.is_suspicious else self._heartbeat
        for process, (text, since) in self._heard.items():
            if now - since > allowed and process not in endings:
                message = f"has been silent for {now - since:.1f} s, last heard in {text}"
                say_of("ended", process, message)

    def _read_endings(self) -> None:
        for process, text in sorted(entries("ended").items()):
            if process == self._own or text == _DONE or self._lost is not None:
                continue
            # All processes refuse a bad config: give each time to print its own error.
            grace = 0.0 if text.startswith("has been") else _OWN_WORDS
            self._lost = (f"process {process} is lost: {text}", time.monotonic() + grace)


def leave_at_once(code: int) -> None:
    """Exit without the exit handlers; that of `jax.distributed` waits for other processes.

    Args:
        code: Exit code.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # the stream is closed
    os._exit(int(code))
