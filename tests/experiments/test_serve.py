# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: answers of a trained run, drained by a signal; what it refuses."""

import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2 as httpx
import pytest

from experiments import pretrain, serve
from experiments.cli.flags import ExitCode
from experiments.serving import load
from jaxmoe.contrib.diffusion.backend import RowsConfig
from jaxmoe.contrib.diffusion.config import DiffusionSizes
from jaxmoe.contrib.fleet.serving import FleetSizesConfig
from jaxmoe.contrib.serving_lab.timing import measure_run
from jaxmoe.run import Run
from tests.support.ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = ("--engine.max_sequences", "2", "--engine.pieces", "1x16", "--engine.num_logprobs", "1")


def _watch_health(port, statuses, process):
    """Note each status of /health once, in their order, until it is 200."""
    while process.poll() is None and 200 not in statuses:
        try:
            status = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code
        except httpx.TransportError:
            continue
        statuses += [status] if [status] != statuses[-1:] else []
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("fleet", [(), ("--engine.instances", "2", "engine.dispatch:dist_serve")])
def test_a_run_is_served_until_a_signal_drains_it(fleet, finished, tmp_path):
    """Its data is token ids, written as numbers. Before it is ready the port answers 503."""
    port = free_port()
    words = ["--run.directory", str(finished), "--port", str(port), "--to", str(tmp_path), *SIZES]
    words += ["--pooling_type", "mean", "--has_priority", str(bool(fleet)), *fleet]
    command = [sys.executable, "-m", "experiments.serve", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            statuses = []
            health = threading.Thread(target=_watch_health, args=(port, statuses, process))
            health.start()
            printed = []
            while "ready at" not in (line := process.stdout.readline()):
                assert line, "\n".join(printed)
                printed.append(line)
            address = re.search(r"http://\S+", line).group()
            health.join(60)
            assert statuses == [503, 200]
            eager = {"prompt": [1], "max_tokens": 1, "priority": 1}
            answer = httpx.post(f"{address}/completions", json=eager, timeout=60)
            assert answer.status_code == (200 if fleet else 400), answer.text
            vectors = [
                httpx.post(f"{address}/embeddings", json={"input": [1, 2, 3]} | more, timeout=60)
                for more in ({}, {"pooling_type": "mean"}, {"pooling_type": "last"})
            ]
            mean, same, last = (one.json()["data"][0]["embedding"] for one in vectors)
            assert mean == same != last
            asked = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
            found = [httpx.post(f"{address}/completions", json=asked, timeout=60) for _ in range(2)]
            words = ["--url", address, "--run.directory", str(tmp_path / "load"), "--vocab", "16"]
            words += ["--requests", "20", "--workload.rate", "50", "--workload.prompt_median", "6"]
            assert load.main([*words, "--workload.answer_median", "3"]) == ExitCode.DONE
            numbers = httpx.get(address.replace("/v1", "/metrics")).text
            assert ('instance="1"' in numbers) == bool(fleet)
            route = address.replace("/v1", "/reshard")
            kept, refused = (httpx.post(route, json={"expert": n}, timeout=60) for n in (1, 64))
            assert kept.status_code == 200 and kept.json()["weight_bytes"] == 0
            assert refused.status_code == 400 and "needs 64 devices" in refused.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == ExitCode.DONE
        finally:
            process.kill()
    texts = [one.json()["choices"][0]["text"] for one in found]
    assert texts[0] == texts[1] and len(texts[0].split()) == 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    num_ended = 26 if fleet else 25
    assert summary["num_ended"] == {"length": num_ended} and summary["pages_used"] == 0
    moved = [bool(one["num_moved"]) for one in summary["instances"]]
    assert moved == ([True, False] if fleet else [False])
    seen = json.loads((tmp_path / "load" / "summary.json").read_text())
    assert (seen["requests"], seen["failed"], seen["measures"]["finished"]) == (20, 0, 20)
    assert seen["cached_tokens"] <= summary["tokens_cached"]
    assert seen["written_tokens"] + 8 + num_ended - 22 == summary["tokens_generated"]


@pytest.mark.slow
@pytest.mark.vertical("diffusion")
def test_a_run_of_masked_diffusion_is_served_as_it_is_continued(tmp_path, capsys):
    run = tmp_path / "run"
    small = (
        "--model.num_layers",
        "1",
        "--model.embed_dim",
        "16",
        "--model.moe.expert_dim",
        "16",
        "--model.attention.num_heads",
        "1",
        "--model.attention.num_kv_heads",
        "1",
        "--training.steps",
        "4",
        "--evaluation.every",
        "0",
        "--evaluation.batches",
        "1",
        "--tracking.trackers",
        "tensorboard",
    )
    assert pretrain.main(["diffusion", "--run.directory", str(run), *small]) == ExitCode.DONE
    prompts = [[1, 2, 3], [0, 1]]
    alone = Run.open(run).generate([" ".join(map(str, one)) for one in prompts], length=5, seed=3)
    words = ["--run.directory", str(run), "--port", "0", "--to", str(tmp_path)]
    words += ["--engine.max_sequences", "2", "--engine.steps_per_token", "2"]
    command = [sys.executable, "-m", "experiments.serve", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = []
            while "ready at" not in (line := process.stdout.readline()):
                assert line, "\n".join(printed)
                printed.append(line)
            assert "rows     2 x 32 tokens, steps per token 2" in "".join(printed)
            address = re.search(r"http://\S+", line).group()
            for row, (prompt, wanted) in enumerate(zip(prompts, alone, strict=True)):
                asked = {"prompt": prompt, "max_tokens": 5, "seed": 3 + row, "temperature": 0.8}
                found = httpx.post(f"{address}/completions", json=asked, timeout=60).json()
                assert found["choices"][0]["text"] == wanted.text
            words = ["--url", address, "--run.directory", str(tmp_path / "load"), "--vocab", "4"]
            words += ["--requests", "20", "--workload.rate", "50", "--workload.prompt_median", "6"]
            assert load.main([*words, "--workload.answer_median", "3"]) == ExitCode.DONE
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == ExitCode.DONE
        finally:
            process.kill()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_ended"] == {"length": 22} and summary["pages_used"] == 0
    for more, message in (
        (["--engine.instances", "2"], "engine.instances=2 is of models that write from left to"),
        (["--engine.pages", "9"], "engine.pages=9 is of models"),
        (["--adapters", f"a={run}"], "is served on one device and without adapters"),
    ):
        with pytest.raises(SystemExit) as ended:
            serve.main(["--run.directory", str(run), "--port", "0", *more])
        assert ended.value.code == ExitCode.BAD_CONFIGURATION
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="the simulator plans pages"):
        measure_run(str(run), FleetSizesConfig(), 1)


@pytest.mark.vertical("diffusion")
def test_sizes_of_rows_and_of_pages_refuse_each_other():
    sizes = FleetSizesConfig(max_sequences=3, max_length=64, logit_budget=7)
    assert RowsConfig().sizes(sizes, 32) == DiffusionSizes(rows=3, lengths=(64,), budget=7)
    assert RowsConfig().sizes(FleetSizesConfig(), 2048).lengths == (512, 2048)
    with pytest.raises(ValueError, match=r"engine\.logit_budget=7 is of masked-diffusion models"):
        sizes.executor(32)
    with pytest.raises(ValueError, match=r"engine\.page_size=4 is of models that write from left"):
        RowsConfig().sizes(FleetSizesConfig(page_size=4), 32)
    with pytest.raises(ValueError, match=r"engine\.steps_per_token=0\.0 must be above 0"):
        FleetSizesConfig(steps_per_token=0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--run.directory", "nowhere"), "run.directory=nowhere"),
        (("--port", "99999"), "error: port=99999 must be from 0 to 65535"),
        (("--port", "{taken}"), "cannot be listened on"),
        (("--host", "0.0.0.0", "--port", "0"), "is open to other hosts: set a key"),
        (("--engine.pieces", "64"), "error: engine.pieces=64 must be number x tokens"),
        (("--engine.instances", "1", "engine.dispatch:dist_serve"), "must leave at least one"),
        (("engine.scaling:polca",), "scaling='polca' needs the power of devices"),
        (("--prot", "1"), "--port"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(words, message, capsys, monkeypatch):
    monkeypatch.delenv("JAXMOE_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        serve.main([word.format(taken=taken.getsockname()[1]) for word in words])
    assert ended.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err


def test_pages_that_hold_no_request_are_refused():
    sizes = FleetSizesConfig(pages=3, max_length=64)
    with pytest.raises(ValueError, match=r"engine\.pages=3 must be at least 4, to hold"):
        sizes.executor(1024)
    assert FleetSizesConfig().executor(2048).context_lengths == (512, 2048)
