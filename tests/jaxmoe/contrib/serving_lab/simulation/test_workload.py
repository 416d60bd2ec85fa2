# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Workloads: distribution of the arrivals, sessions, trace files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxmoe.contrib.serving_lab.simulation import WORKLOADS
from jaxmoe.contrib.serving_lab.simulation.traces import read_trace
from jaxmoe.serve import LatencyObjective

BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log
5,s1,1.0,ChatGPT,472,18,490,Conversation log
45.5,s2,1.0,ChatGPT,1087,0,1087,API log
118,,1.0,GPT-4,417,276,693,Conversation log
"""
SHORT_BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 9, 10]},
]


def drawn(name, max_length=4096, **fields):
    return WORKLOADS[name](**fields).arrivals(LatencyObjective(), max_length)


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variance_of_their_distribution(shape):
    times = [a.time for a in drawn("gamma", shape=shape, rate=5.0, requests=2500, max_length=4)]
    gaps = np.diff(times)
    assert abs(gaps.mean() - 0.2) < 0.03
    assert abs(gaps.var() / (0.04 / shape) - 1) < 0.3


def test_the_same_seed_gives_the_same_requests():
    assert drawn("gamma", requests=5) == drawn("gamma", requests=5)
    assert drawn("gamma", requests=5) != drawn("gamma", requests=5, seed=1)


def test_prompts_begin_with_a_shared_prefix():
    prompts = [a.request.prompt for a in drawn("gamma", requests=20, prefixes=2, prefix_tokens=9)]
    assert len({prompt[:9] for prompt in prompts}) == 2
    assert len({prompt[9:] for prompt in prompts}) == 20


@pytest.mark.parametrize("name", ["gamma", "sessions"])
def test_sequences_are_cut_to_the_longest(name):
    found = drawn(name, max_length=500, requests=40)
    assert all(len(a.request.prompt) + len(a.answer) <= 500 for a in found)
    assert [a.request.id for a in found] == list(range(len(found)))


def test_a_turn_repeats_what_was_said_and_follows_it():
    found = {a.request.id: a for a in drawn("sessions", requests=12, turns=3)}
    later = [a for a in found.values() if a.after is not None]
    assert len(later) == 8
    for arrival in later:
        before = found[arrival.after]
        said = before.request.prompt + before.answer
        assert arrival.request.prompt[: len(said)] == said
        assert arrival.request.session == before.request.session


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (BURST, [(5.0, 472, 18, "s1"), (118.0, 417, 276, "")]),
        (SHORT_BURST, [(5.0, 472, 18, "")]),
        (AZURE, [(0.0, 374, 44, ""), (4.314579, 396, 109, "")]),
    ],
)
def test_csv_traces_are_read(text, rows, tmp_path):
    found = read_trace(written(tmp_path / "t.csv", text))
    first = found[0].time - rows[0][0]
    read = [(round(o.time - first, 6), o.prompt, o.answer, o.session) for o in found]
    assert read == rows


def test_the_blocks_of_mooncake_become_equal_tokens(tmp_path):
    path = written(tmp_path / "t.jsonl", "\n".join(map(json.dumps, MOONCAKE)))
    first, second = (a.request.prompt for a in drawn("file", path=path, rate=4.0))
    assert (len(first), len(second)) == (1000, 1030)
    assert first[:512] == second[:512] and first[512] != second[512]


def test_a_trace_runs_at_the_given_rate(tmp_path):
    found = drawn("file", path=written(tmp_path / "t.csv", BURST), rate=4.0)
    assert [a.time for a in found] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "has the columns .'a', 'b'.: expected those of BurstGPT"),
        ("t.jsonl", '{"timestamp": 1}\n', "is not a trace of a known form"),
        ("t.jsonl", "nonsense\n", "is not a trace of a known form"),
        (None, "", "is not a file: give a trace"),
        ("t.csv", BURST.splitlines()[0], "has no request with an answer"),
    ],
)
def test_other_files_are_refused_with_the_known_forms(name, text, message, tmp_path):
    path = written(tmp_path / name, text) if name else str(tmp_path / "absent")
    with pytest.raises(ValueError, match=message):
        drawn("file", path=path)


def test_a_trace_needs_a_path():
    with pytest.raises(ValueError, match="path of the workload is empty"):
        drawn("file")
