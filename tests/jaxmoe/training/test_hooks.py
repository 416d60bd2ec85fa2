# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks that know no model: refreshing a view, tracing steps."""

from __future__ import annotations

import inspect

import jax
import pytest

from jaxmoe.training.hooks import Hook, RefreshHook, Trace


def test_a_view_is_refreshed_about_once_a_second():
    time = [0.0]
    hook = RefreshHook(100, clock=lambda: time[0])
    assert isinstance(hook, Hook)
    run = inspect.unwrap(RefreshHook.run)  # no state is needed
    due = []
    for step in range(101, 161):
        time[0] += 0.1 if step <= 140 else 2.0
        if hook.is_due(step):
            due.append(step)
            run(hook, step, None)
    # The first step at once, then as many as a second holds; slower ones are noticed late.
    assert due == [101, 111, 121, 131, 141, *range(144, 161)]


def test_a_trace_begins_before_its_first_step_and_ends_after_its_last(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append(("start", path)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop",)))
    trace = Trace(tmp_path / "profile", 3, 5)
    assert [step for step in range(10) if trace.start.is_due(step)] == [2]
    assert [step for step in range(10) if trace.stop.is_due(step)] == [5]
    trace.close()
    assert calls == [] and not trace.is_written
    trace.start.run(2, None)
    trace.stop.run(5, None)
    trace.close()
    assert calls == [("start", str(tmp_path / "profile")), ("stop",)] and trace.is_written


@pytest.mark.parametrize("ends", ["in the loop", "within the trace"])
def test_a_trace_is_on_disk(tmp_path, ends):
    trace = Trace(tmp_path / "profile", 1, 2)
    trace.start.run(0, None)
    jax.block_until_ready(jax.numpy.ones(8) * jax.numpy.float32(2.0))
    if ends == "in the loop":
        trace.stop.run(2, None)
    trace.close()
    assert trace.is_written and list((tmp_path / "profile").rglob("*.xplane.pb"))
