# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's threads: streams, ends, stop strings, errors, draining."""

import threading
import time

import pytest

from jaxmoe.serve import Sampling
from jaxmoe.serve.answers import Ended, Generated
from jaxmoe.serve.engine import Engine, EngineConfig
from tests.support.serving import MODEL, SIZES, Smaller, check_answers
from tests.support.texts import Letters


def read(stream):
    """Return the tokens, the text and the last event of a stream."""
    *generated, ended = stream
    assert isinstance(ended, Ended) and all(isinstance(one, Generated) for one in generated)
    assert [one.index for one in generated] == list(range(len(generated)))
    assert ended.num_generated == len(generated)
    text = "".join(one.text for one in generated) + ended.text
    return [one.token for one in generated], text, ended


def threads():
    return [one.name for one in threading.enumerate() if one.name.startswith("jaxmoe-engine")]


def test_streams_of_many_clients_equal_each_alone():
    given = {
        id_: ((id_ % 3, 4, 5, 6, 7), Sampling(max_tokens=3 + id_, temperature=0.9, seed=id_))
        for id_ in range(7)
    }
    found = {}
    with Engine(Smaller(9)) as engine:

        def ask(id_):
            found[id_] = read(engine.submit(*given[id_]))

        clients = [threading.Thread(target=ask, args=(id_,)) for id_ in given]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert engine.drain(timeout=60)
        metrics = engine.metrics
    check_answers(given, {id_: tokens for id_, (tokens, _, _) in found.items()})
    assert all(ended.reason == "length" for _, _, ended in found.values())
    assert metrics.num_ended == {"length": 7} and metrics.pages_used == 0
    assert metrics.tokens_generated == sum(len(tokens) for tokens, _, _ in found.values())
    assert len(metrics.ttft) == len(metrics.tpot) == 7 and min(metrics.tpot) > 0
    assert metrics.tokens_cached == sum(ended.num_cached for _, _, ended in found.values()) or (
        metrics.num_preempted > 0
    )
    assert not threads(), "the threads end with the engine"


def test_load_of_experts_counts_every_computed_token():
    with Engine(Smaller()) as engine:
        before = 0 if engine.expert_load is None else engine.expert_load.sum()
        read(engine.submit((1, 2, 3, 4, 5), Sampling(max_tokens=4)))
        computed = engine.metrics.tokens_computed
        load = engine.expert_load
    layers, experts = load.shape
    assert load.sum() - before == computed * layers * MODEL.moe.top_k
    assert experts == MODEL.moe.num_experts


def test_stop_strings_cut_across_tokens_and_stop_ids_end():
    with Engine(Smaller(), codec=Letters()) as engine:
        asked = Sampling(max_tokens=12, temperature=1.0, seed=1)
        tokens, text, ended = read(engine.submit((1, 2, 3), asked))
        assert ended.reason == "length" and text == Letters().decode(tokens)
        stop = text[4:6]
        cut = text.index(stop)
        written, shorter, ended = read(engine.submit((1, 2, 3), asked, stop=("zzz", stop)))
        assert ended.reason == "stop" and shorter == text[:cut]
        assert written == tokens[: cut + 2]
        end = Sampling(max_tokens=12, temperature=1.0, seed=1, stop_ids=(tokens[3],))
        written, shorter, ended = read(engine.submit((1, 2, 3), end))
        first = tokens.index(tokens[3])
        assert ended.reason == "stop" and written == tokens[: first + 1] and shorter == text[:first]
        # A beginning of a stop string is held back until it is certain.
        events = [*engine.submit((1, 2, 3), asked, stop=(text[2] + "!",))]
        shown = [event.text for event in events]
        assert shown[2] == "" and shown[3].startswith(text[2]) and "".join(shown) == text


def test_cancelled_refused_and_failed_streams_end_once():
    with Engine(Smaller(), EngineConfig(max_waiting=1)) as engine:
        endless = Sampling(max_tokens=25)
        streams = [engine.submit((1, 2, 3), endless) for _ in range(3)]
        for stream in streams[1:]:
            stream.cancel()
        ends = [read(stream)[2] for stream in streams]
        assert ends[0].reason == "length"
        assert {end.reason for end in ends[1:]} <= {"cancelled", "length", "refused"}
        refused = read(engine.submit((1,) * 32, endless))[2]
        assert refused.reason == "refused" and "31" in refused.message
    ended = read(engine.submit((1,), endless))[2]
    assert ended.reason == "refused" and "draining" in ended.message


@pytest.mark.parametrize("method", ["launch", "collect"])
def test_a_failed_step_ends_all_streams_and_the_engine_goes_on(method):
    class Failing(Smaller):
        """Fails in its third step."""

        def _count(self, name):
            object.__setattr__(self, "steps", getattr(self, "steps", 0) + (name == method))
            if self.steps == 3 and name == method:
                raise RuntimeError("device lost")

        def launch(self, step):
            self._count("launch")
            return Smaller.launch(self, step)

        def collect(self, launched):
            self._count("collect")
            return Smaller.collect(self, launched)

    asked = Sampling(max_tokens=9)
    with Engine(Failing()) as engine:
        ends = [read(stream)[2] for stream in [engine.submit((1, 2), asked) for _ in range(4)]]
        failed = [end for end in ends if end.reason == "error"]
        assert failed and all("RuntimeError: device lost" in end.message for end in failed)
        tokens, _, ended = read(engine.submit((1, 2), asked))
        assert ended.reason == "length" and engine.metrics.pages_used == 0
    check_answers({0: ((1, 2), asked)}, {0: tokens})


def test_an_engine_that_fails_itself_ends_all_streams():
    class Broken(Smaller):
        """Does not even begin again."""

        def launch(self, step):
            raise RuntimeError("device lost")

        def reset(self):
            raise RuntimeError("no memory")

    engine = Engine(Broken())
    ended = read(engine.submit((1, 2), Sampling()))[2]
    assert ended.reason == "error" and "no memory" in ended.message
    while not engine.failure:
        time.sleep(0.01)
    ended = read(engine.submit((1, 2), Sampling()))[2]
    assert ended.reason == "refused" and "no memory" in ended.message
    assert not engine.drain(timeout=60)  # its answers have ended, but not as they should
    engine.close()


def test_several_answers_share_the_pages_of_their_prompt():
    prompt, sampling = tuple(range(10)), Sampling(max_tokens=4, temperature=1.0, seed=5)
    with Engine(Smaller()) as engine:
        found = [read(one) for one in engine.submit_samples(prompt, sampling, 3)]
    seeds = {id_: Sampling(max_tokens=4, temperature=1.0, seed=5 + id_) for id_ in range(3)}
    answers = {id_: tokens for id_, (tokens, _, _) in enumerate(found)}
    check_answers({id_: (prompt, one) for id_, one in seeds.items()}, answers)
    assert [ended.num_cached for _, _, ended in found] == [0, 8, 8]


def test_what_the_executor_lacks_is_refused_at_once():
    with Engine(Smaller()) as engine:
        wrong = {
            "ids 0 to 23": ((1, 24), Sampling(), {}),
            "logit_bias names the ids": ((1,), Sampling(logit_bias=((24, 1.0),)), {}),
            "stop_ids names the ids": ((1,), Sampling(min_tokens=1, stop_ids=(3, 2**31)), {}),
            r"stop_ids names the ids \[-1\]": ((1,), Sampling(stop_ids=(-1,)), {}),
            "seed=-1": ((1,), Sampling(seed=-1), {}),
            f"exceeds the {SIZES.num_logprobs}": ((1,), Sampling(num_logprobs=9), {}),
            "adapter='sql'": ((1,), Sampling(), {"adapter": "sql"}),
            "codec": ((1,), Sampling(), {"stop": ("a",)}),
            "at least one token": ((), Sampling(), {}),
        }
        for message, (prompt, sampling, given) in wrong.items():
            with pytest.raises(ValueError, match=message):
                engine.submit(prompt, sampling, **given)
