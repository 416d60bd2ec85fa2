# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`serving load`: what it sends to a server that spells its answers, and what it reports."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from experiments.cli.flags import ExitCode
from experiments.serving.__main__ import main
from jaxmoe.contrib.serving_lab.client import Client
from jaxmoe.contrib.serving_lab.load import prompt_of, report_load, send_load
from jaxmoe.contrib.serving_lab.simulation.workload import GammaConfig, SessionsConfig
from jaxmoe.serve.requests import LatencyObjective
from tests.support.endpoint import Speller, serving

SMALL = ("--workload.prompt_median", "20", "--workload.answer_median", "6")


def load(url, directory, *words):
    words = ["--url", url, "--run.directory", str(directory), *words]
    code = main(["load", *words])
    return code, json.loads((directory / "summary.json").read_text())


@pytest.fixture(scope="module")
def address():
    with serving(max_waiting=64) as (found, _, _):
        yield found


def test_every_request_is_answered_and_measured(address, tmp_path, capsys):
    words = ("workload:gamma", "--workload.rate", "200", "--requests", "20", *SMALL)
    words += ("--workload.prefixes", "1", "--workload.prefix_tokens", "16", "--slo.ttft", "9")
    code, found = load(f"{address}/v1", tmp_path, *words, "--slo.tpot", "9")
    assert (code, found["status"], found["model"]) == (ExitCode.DONE, "done", "speller")
    assert (found["requests"], found["failed"], found["failures"]) == (20, 0, {})
    measures = found["measures"]
    assert measures["finished"] == 20 and measures["within"] == 1.0
    assert measures["goodput"] == pytest.approx(20 / measures["seconds"])
    assert 0 < measures["ttft_p50"] <= measures["total_p50"] <= measures["total_p99"] < 9
    # The prompts after the first share 16 tokens, which are 4 pages.
    assert 16 * 10 <= found["cached_tokens"] < found["prompt_tokens"]
    arrivals = GammaConfig(
        requests=20, rate=200, prompt_median=20, answer_median=6, prefixes=1, prefix_tokens=16
    ).arrivals(LatencyObjective(), 128)
    assert found["prompt_tokens"] == sum(len(one.request.prompt) for one in arrivals)
    assert found["written_tokens"] == sum(len(one.answer) for one in arrivals)
    printed = capsys.readouterr().out
    assert "20 requests, 0 failed, " in printed and "(100.0% within SLO)" in printed


def test_text_is_sent_and_an_slo_that_is_missed_has_no_goodput(address, tmp_path):
    words = ("--vocab", "0", "--workload.rate", "200", "--requests", "3", *SMALL)
    code, found = load(address, tmp_path, *words, "--slo.ttft", "1e-9")
    assert code == ExitCode.DONE and found["failed"] == 0
    assert (found["measures"]["goodput"], found["measures"]["within"]) == (0.0, 0.0)


def test_turns_wait_for_the_turn_before_and_find_its_prompt_in_the_cache():
    workload = SessionsConfig(
        requests=6, rate=50.0, turns=3, pause=0.05, prompt_median=12, answer_median=4
    )
    arrivals = workload.arrivals(LatencyObjective(), 128)
    threads = threading.active_count()
    with serving() as (address, _, _):
        sent = send_load(Client(address), arrivals, {"seed": 0}, vocab=256, connections=2)
    assert threading.active_count() == threads
    by_id = {one.arrival.request.id: one for one in sent}
    assert len(sent) == len(by_id) == len(arrivals)
    for one in sent:
        assert not one.outcome.failure
        if one.arrival.after is not None:
            before = by_id[one.arrival.after]
            assert one.arrived >= before.outcome.last + one.arrival.time
            shared = len(before.arrival.request.prompt) // 4 * 4
            assert one.outcome.num_cached >= min(shared, len(before.arrival.request.prompt) - 4)


def test_waiting_for_a_connection_counts():
    arrivals = GammaConfig(requests=4, rate=1e4, prompt_median=4, answer_median=6).arrivals(
        LatencyObjective(), 64
    )
    with serving(Speller(0.01)) as (address, _, _):
        sent = send_load(Client(address), arrivals, {}, vocab=256, connections=1)
    sent.sort(key=lambda one: one.outcome.first)
    written = sum(one.outcome.num_written for one in sent[:-1])
    assert sent[-1].outcome.first - sent[-1].arrived >= 0.01 * written


def test_failures_are_counted_by_reason(tmp_path, capsys):
    with serving() as (address, _, executor):
        executor.fails = True
        words = ("--requests", "3", "--workload.rate", "100", *SMALL)
        code, found = load(address, tmp_path, *words)
        assert (code, found["status"], found["failed"]) == (ExitCode.LOST, "failed", 3)
        assert list(found["failures"].values()) == [3] and "no device" in str(found["failures"])
        assert "failed 3 x: status 500: " in capsys.readouterr().out
        executor.fails = False
        client = Client(address)
        assert (
            client.complete({"prompt": [300]}).failure == "status 400: prompt holds ids above 255"
        )
        assert client.complete({"prompt": "a"}).num_written == 16


class _Broken(Client):
    """Fails at the second request."""

    count = 0

    def complete(self, body):
        self.count += 1
        if self.count == 2:
            time.sleep(0.1)  # the first one waits for its answer by then
            raise KeyboardInterrupt
        return super().complete(body)


def test_an_interruption_ends_what_waits_for_the_server():
    arrivals = GammaConfig(requests=2, rate=1e4, prompt_median=4, answer_median=6).arrivals(
        LatencyObjective(), 64
    )
    started, threads = time.monotonic(), threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = _Broken(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=60)
        with pytest.raises(KeyboardInterrupt):
            send_load(client, arrivals, {}, vocab=256, connections=2)
    assert time.monotonic() - started < 20 and threading.active_count() == threads


def _answering(text):
    """Return the address of a server that answers one connection with a text and closes it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listening, listening.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(text.encode())
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closing with unread bytes would reset the connection
                continue

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("", "Remote end closed connection"),
        ('HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{}]}\n\n', "the stream broke off"),
        ("HTTP/1.1 200 OK\r\n\r\ndata: {\n\n", "Expecting property name"),
        ("HTTP/1.1 200 OK\r\n\r\ndata: 3\n\n", "is not"),
        ("HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "no token or no usage"),
        ('HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "full"}}\n\n', "stream: full"),
        ("HTTP/1.1 502 Bad\r\n\r\n<html>", "status 502: <html>"),
    ],
)
def test_what_breaks_off_is_a_failure_in_words(text, failure):
    started = time.monotonic()
    assert failure in Client(_answering(text), timeout=20).complete({"prompt": "a"}).failure
    assert time.monotonic() - started < 10


def test_a_server_without_a_byte_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        assert client.complete({"prompt": "a"}).failure == "no byte within the timeout"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "url=http://127.0.0.1:1 cannot be reached (Connection"),
        (["--url", "127.0.0.1:8000"], "url=127.0.0.1:8000 must be an address such as http://"),
        (["--url", "http://a:b"], "url=http://a:b has a wrong port"),
        (["--requests", "0"], "requests=0 must be at least 1"),
        (["--slo.ttft", "0"], "slo.ttft=0.0 must be more than 0 seconds"),
        (["--vocab", "1"], "vocab=1 must be 0 (text) or at least 2"),
        (["--connections", "0"], "connections=0"),
        (["--sl.ttft", "1"], "--slo.ttft"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["load", "--run.directory", str(tmp_path / "run"), *words])
    assert stop.value.code == ExitCode.BAD_CONFIGURATION
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_key_of_the_environment_is_sent(tmp_path, capsys, monkeypatch):
    words = ("--requests", "2", "--workload.rate", "100", *SMALL)
    with serving(key="secret") as (address, _, _):
        monkeypatch.delenv("JAXMOE_API_KEY", raising=False)
        with pytest.raises(SystemExit):
            load(address, tmp_path, *words)
        assert "status 401: this server needs a key" in capsys.readouterr().err
        monkeypatch.setenv("JAXMOE_API_KEY", "secret")
        assert load(address, tmp_path, *words)[1]["failed"] == 0


def test_equal_beginnings_stay_equal_and_nothing_sent_is_no_load():
    one, other = GammaConfig(requests=2, prefixes=1, prefix_tokens=8).arrivals(
        LatencyObjective(), 64
    )
    for vocab in (0, 256):
        assert prompt_of(one, vocab)[:8] == prompt_of(other, vocab)[:8]
        assert prompt_of(one, vocab) != prompt_of(other, vocab)
        assert len(prompt_of(one, vocab)) == len(one.request.prompt)
    assert report_load([]).measures is None
