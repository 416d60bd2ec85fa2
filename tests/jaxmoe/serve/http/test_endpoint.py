# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The endpoint, spoken to by OpenAI's client and by plain requests; answers are spelled, not
computed: after a letter comes the next one."""

import asyncio
import json
import re
import socket
import threading
import time

import httpx2 as httpx
import openai
import pytest

from jaxmoe.data import TextOnlyConfig
from jaxmoe.data.tokenizer import FileConfig
from tests.support.endpoint import Speller, serving
from tests.support.sentencepiece_tokenizers import write_sentencepiece


@pytest.fixture(scope="module")
def address():
    with serving() as (found, _, _):
        yield found


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completions_of_openai(client):
    found = client.completions.create(model="speller", prompt="a", max_tokens=4, seed=0)
    assert found.choices[0].text == "bcde" and found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (1, 4)
    several = client.completions.create(
        model="speller", prompt=["a", "x"], max_tokens=3, n=2, seed=0, stop=["cd", "z"]
    )
    assert [one.text for one in several.choices] == ["b", "ceg", "y", ""]
    assert [one.finish_reason for one in several.choices] == ["stop", "length", "stop", "stop"]
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    long = client.completions.create(model="speller", prompt="a", seed=7 * (2**31 - 129) + 1)
    assert long.choices[0].text.startswith("ceg")  # that of seed 1
    ids = client.completions.create(model="speller", prompt=[97, 98], max_tokens=2, seed=0)
    assert ids.choices[0].text == "cd" and ids.usage.prompt_tokens == 2


def test_an_adapter_is_a_model_of_its_own():
    with serving(adapters={"sql": None}) as (found, _, executor):
        listed = httpx.get(f"{found}/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["speller", "speller:sql"]
        asked = {"model": "speller:sql", "prompt": "a", "max_tokens": 1, "seed": 0}
        answer = httpx.post(f"{found}/v1/completions", json=asked).json()
        assert answer["model"] == "speller:sql" and answer["choices"][0]["text"] == "b"
        assert executor.adapters == {"sql"}
        talk = {"model": "speller:sql", "max_tokens": 1} | {
            "messages": [{"role": "user", "content": "a"}]
        }
        assert httpx.post(f"{found}/v1/chat/completions", json=talk).status_code == 200
        assert executor.adapters == {"sql"}
        other = httpx.post(f"{found}/v1/completions", json=asked | {"model": "speller:law"})
        assert other.status_code == 404 and "'speller:law' does not exist" in other.text


def test_log_probabilities(client):
    found = client.completions.create(model="speller", prompt="a", max_tokens=3, seed=0, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs.tokens == ["b", "c", "d"] and logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5} and logprobs.text_offset == [0, 1, 2]
    for number, top in ((0, {"d": -0.5}), (1, {"a": -0.5, "d": -0.5})):  # the drawn one is there
        asked = {"model": "speller", "prompt": "c", "max_tokens": 1, "seed": 0, "logprobs": number}
        found = client.completions.create(**asked)
        assert found.choices[0].logprobs.top_logprobs == [top]
    talk = client.chat.completions.create(
        model="speller",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=1,
    )
    first = talk.choices[0].logprobs.content[0]
    assert first.logprob == -0.5 and first.bytes == list(first.token.encode())
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("a", -0.5)]


def _post(address, route, **asked):
    return httpx.post(f"{address}/v1/{route}", json=asked, timeout=60)


def test_bytes_of_tokens_spell_the_text():
    """Also of tokens that are parts of a character, which are named as OpenAI's API names them."""
    text = "\u00e9\U0001f600"
    asked = {"max_tokens": 6, "seed": 0}
    with serving(Speller(answer=text.encode())) as (address, _, _):
        talk = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        whole = _post(address, "chat/completions", **talk, **asked, top_logprobs=1).json()
        old = _post(address, "completions", prompt="a", logprobs=1, **asked).json()
    tokens = whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for one in tokens for byte in one["bytes"]).decode() == text
    assert [one["token"] for one in tokens[:2]] == ["\\xc3", "\\xa9"]
    found = old["choices"][0]["logprobs"]
    assert found["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found["text_offset"] == [0, 0, 1, 1, 1, 1]


def test_tokens_that_spell_alike_have_names_of_their_own(tmp_path):
    """A key of top_logprobs is one token's; the chosen token has the name that `tokens` has."""
    codec = TextOnlyConfig(
        tokenizer=FileConfig(path=str(write_sentencepiece(tmp_path, has_bos=False)))
    ).build()
    alike = int(codec.encode("e")[-1])  # a letter, and the byte of the same letter
    byte = next(one for one in range(259) if codec.token_bytes(one) == b"e")
    assert byte != alike and codec.token_bytes(alike) == b"e"
    speller = Speller(answer=[byte], top=((alike, -0.25), (byte, -0.5)), largest=999)
    with serving(speller, codec=codec) as (address, _, _):
        answer = _post(address, "completions", prompt="hello", max_tokens=1, logprobs=2).json()
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == ["e"]
    assert found["top_logprobs"] == [{f"token_id:{alike}": -0.25, "e": -0.5}]


def test_the_first_space_of_a_continuation_is_sent(tmp_path):
    """Tokenizers that mark spaces: in the text, in the parts of a stream, and in logprobs."""
    codec = TextOnlyConfig(tokenizer=FileConfig(path=str(write_sentencepiece(tmp_path)))).build()
    prompt, rest = "hello", " world \u00e9 and dogs"
    ids = codec.encode(prompt + rest)[len(codec.encode(prompt)) :].tolist()
    asked = {"prompt": prompt, "max_tokens": len(ids), "logprobs": 1}
    with serving(Speller(answer=ids, largest=999), codec=codec) as (address, _, _):
        whole = _post(address, "completions", **asked).json()["choices"][0]
        stream = _post(address, "completions", stream=True, **asked).text
        begin = asked | {"prompt": [1], "max_tokens": 1}
        first = _post(address, "completions", **begin).json()["choices"][0]
    assert whole["text"] == rest and whole["logprobs"]["tokens"][0].startswith(" ")
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [one["choices"][0] for one in parts]
    assert "".join(one["text"] for one in choices) == rest
    for name in ("tokens", "text_offset"):
        spelled = [value for one in choices for value in one["logprobs"][name]]
        assert spelled == whole["logprobs"][name]
    places = zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True)
    assert all(rest[at:].startswith(token) for token, at in places if "bytes:" not in token)
    assert (
        first["text"] == first["logprobs"]["tokens"][0] == whole["text"][1:][: len(first["text"])]
    )


def test_experts_and_ids_of_tokens_are_sent_where_asked_for(client):
    """Whole, they are those of prompt and answer but its last token; so are a stream's together."""
    extra = {"return_routed_experts": True, "return_token_ids": True}
    asked = {"model": "speller", "prompt": ["a", "xy"], "max_tokens": 3, "seed": 0}
    whole = client.completions.create(**asked, n=2, stop="z", extra_body=extra)
    assert [one.prompt_token_ids for one in whole.choices] == [[97]] * 2 + [[120, 121]] * 2
    assert [one.token_ids for one in whole.choices] == [
        list(b"bcd"), list(b"ceg"), list(b"z"), list(b"ace")
    ]  # fmt: skip
    experts = [one.routed_experts for one in whole.choices]
    assert experts[1] == [[[i], [i + 100]] for i in range(3)]
    assert [len(one) for one in experts] == [3, 3, 2, 4]
    parts = list(client.completions.create(**asked, stop="z", stream=True, extra_body=extra))
    for index, place in ((0, 0), (1, 2)):
        own = [one.choices[0] for one in parts if one.choices[0].index == index]
        assert sum((one.routed_experts for one in own), []) == experts[place]
        assert sum((one.token_ids for one in own), []) == whole.choices[place].token_ids
        given = [one.prompt_token_ids for one in own if hasattr(one, "prompt_token_ids")]
        assert given == [whole.choices[place].prompt_token_ids]
    talk = client.chat.completions.create(
        model="speller", messages=[{"role": "user", "content": "a"}], max_tokens=2, extra_body=extra
    )
    (choice,) = talk.choices
    assert len(choice.routed_experts) == len(choice.prompt_token_ids) + 1
    plain = client.completions.create(**asked)
    assert not hasattr(plain.choices[0], "routed_experts")


def test_experts_that_are_not_recorded_are_refused_in_words():
    with serving(has_experts=False) as (address, _, _):
        asked = {"prompt": "a", "return_routed_experts": True}
        found = httpx.post(f"{address}/v1/completions", json=asked)
        assert found.status_code == 400
        assert "start it with --engine.has_experts True" in found.json()["error"]["message"]


def test_text_that_is_no_text_ends_no_server(address):
    """Half of a surrogate pair cannot be encoded: not as a prompt, nor as the name of a page."""
    for field in ("prompt", "cache_salt", "user", "stop", "model"):
        body = json.dumps({"prompt": "a", "max_tokens": 1} | {field: "\ud83d"})
        found = httpx.post(f"{address}/v1/completions", content=body.encode())
        assert found.status_code == 400 and "half of a character" in found.text, field
    whole = json.dumps({"prompt": "\U0001f600", "max_tokens": 1})
    found = httpx.post(f"{address}/v1/completions", content=whole.encode())
    assert found.json()["usage"]["prompt_tokens"] == 4
    assert httpx.get(f"{address}/health").status_code == 200


def test_what_no_route_expects_is_an_error_object(monkeypatch):
    with serving() as (address, endpoint, _):
        monkeypatch.setattr(endpoint._served.engine, "submit_all", None)
        found = httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
        error = found.json()["error"]
        assert (found.status_code, error["type"], error["code"]) == (
            500,
            "server_error",
            "internal_error",
        )
        assert "TypeError" in error["message"]


def test_other_methods_are_refused_with_the_right_one(address):
    found = httpx.get(f"{address}/v1/completions")
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    error = found.json()["error"]
    assert error["message"] == "/v1/completions takes POST, not GET"
    assert error["type"] == "invalid_request_error"


def test_a_client_that_does_not_send_its_body_is_given_up():
    with serving(body_seconds=0.2) as (address, _, _):
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{"
            connection.sendall(head.encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 408") and "within 0.2 s" in answer


def test_streams_end_with_usage(client):
    chunks = list(
        client.chat.completions.create(
            model="speller",
            messages=[{"role": "user", "content": "a"}],
            max_completion_tokens=5,
            seed=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    whole = "".join(one.choices[0].delta.content for one in chunks if one.choices)
    assert len(whole) == 5 and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5 and not chunks[-1].choices
    assert {one.id for one in chunks} == {chunks[0].id}


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ("\U0001f600b!", {"max_tokens": 9, "logprobs": True, "stop": ["!"]}),
        ("xyzw", {"max_tokens": 2, "stop": ["xyQ"]}),
        ("xyzw", {"max_tokens": 4, "stop": ["x"]}),
        ("xyzw", {"max_tokens": 4, "n": 3}),
    ],
    ids=["parts of a character", "held back until the end", "stopped at once", "several answers"],
)
def test_a_stream_names_the_role_in_its_first_part_alone(answer, asked):
    """Also where that part has no text, or is the last one."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True} | asked
    with serving(Speller(answer=answer.encode())) as (address, _, _):
        text = httpx.post(f"{address}/v1/chat/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for index in range(asked.get("n", 1)):
        own = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        assert [one["delta"].get("role") for one in own] == ["assistant"] + [None] * (len(own) - 1)


def test_a_limit_that_is_not_given_is_not_too_large(client):
    """Without a limit a prompt gets up to 16 tokens, or what it leaves of 128."""
    whole = client.completions.create(model="speller", prompt=["p" * 120, "p"], seed=0)
    assert [one.finish_reason for one in whole.choices] == ["length", "length"]
    assert [len(one.text) for one in whole.choices] == [8, 16]
    talk = [{"role": "user", "content": "p" * 20}]
    answer = client.chat.completions.create(model="speller", messages=talk, seed=0)
    assert answer.usage.total_tokens == 128


def test_the_newer_name_of_the_limit_of_a_chat_holds(client):
    talk = {"model": "speller", "messages": [{"role": "user", "content": "hi"}], "seed": 0}
    both = client.chat.completions.create(**talk, max_completion_tokens=2, max_tokens=5)
    assert both.usage.completion_tokens == 2
    old = client.chat.completions.create(**talk, max_tokens=5)
    assert old.usage.completion_tokens == 5
    large = client.chat.completions.create(**talk, max_completion_tokens=128, max_tokens=5)
    assert large.usage.total_tokens == 128  # clipped to the room that is left


def test_a_chat_ends_at_the_mark_of_its_template():
    answer = "h\u00e9<|im_end|>never".encode()
    with (
        serving(Speller(answer=answer)) as (address, _, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"model": "speller", "messages": [{"role": "user", "content": "hi"}]}
        whole = client.chat.completions.create(**asked, max_tokens=20)
        assert whole.choices[0].message.content == "h\u00e9"
        assert whole.choices[0].finish_reason == "stop"
        parts = client.chat.completions.create(**asked, max_tokens=20, stream=True)
        texts = [one.choices[0].delta.content for one in parts]
        assert "".join(texts) == "h\u00e9" and "\ufffd" not in "".join(texts)


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("completions", {"prompt": ""}, 400, "prompt has no token"),
        ("completions", {"prompt": []}, 400, "prompt must be a text, token ids, or a list"),
        ("completions", {"prompt": ["a", 1]}, 400, "prompt must be a text, token ids, or a list"),
        ("completions", {"prompt": [300]}, 400, "prompt holds ids above 255"),
        ("completions", {"prompt": "a" * 128}, 400, "the prompt has 128 tokens, and this"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature=-1 must be a"),
        ("completions", {"prompt": "a", "temperature": True}, 400, "temperature=True must be a"),
        ("completions", {"prompt": "a", "temperature": 1e-9}, 400, "or at least 1e-05"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n=0 must be an integer from 1 to 128"),
        ("completions", {"prompt": "a", "logprobs": 3}, 400, "logprobs=3 exceeds the 2"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "none empty"),
        ("completions", {"prompt": "a", "seed": 2**63}, 400, "to 9223372036854775807"),
        ("completions", {"prompt": "a", "stream_options": 3}, 400, "stream_options must be a JSON"),
        ("completions", {"prompt": "a", "model": "x"}, 404, "the model 'x' does not exist"),
        ("completions", [1], 400, "the body must be a JSON object, found list"),
        ("completions", b"{", 400, "the body is not JSON"),
        ("completions", {"prompt": "a" * 3000}, 413, "the body has more than 2000 bytes"),
        ("chat/completions", {"messages": []}, 400, "field 'messages' is empty"),
        ("chat/completions", {"messages": [{"role": "usr", "content": ""}]}, 400, "has the role"),
        ("chat/completions", {"prompt": "a"}, 400, "prompt is a field of /v1/completions"),
        ("nowhere", {}, 404, "POST /v1/nowhere is not a route"),
    ],
)
def test_wrong_requests_are_refused_in_words(limited, route, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = httpx.post(f"{limited}/v1/{route}", content=content)
    error = found.json()["error"]
    assert (found.status_code, message in error["message"]) == (status, True), error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def limited():
    with serving(max_body=2000) as (found, _, _):
        yield found


def test_a_key_is_asked_for():
    with serving(key="secret") as (address, _, _):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="this server needs a key"):
                client.models.list()
        with openai.OpenAI(base_url=f"{address}/v1", api_key="secret") as client:
            assert [one.id for one in client.models.list()] == ["speller"]
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        assert httpx.get(f"{address}/?key=secret").status_code == 200
        assert httpx.get(f"{address}/stats").status_code == 401


def test_a_model_without_template_refuses_chats():
    with serving(has_chat=False) as (address, _, _):
        found = httpx.post(f"{address}/v1/chat/completions", json={"messages": []})
        assert found.status_code == 400 and "--template chatml" in found.json()["error"]["message"]


def _wait(condition):
    for _ in range(400):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_client_that_goes_away_cancels_its_answer():
    with serving(Speller(0.05)) as (address, endpoint, _):
        engine = endpoint._served.engine
        for streams in (True, False):
            asked = {"prompt": "a", "max_tokens": 60, "stream": streams}
            with pytest.raises(httpx.ReadTimeout):
                if streams:
                    with httpx.stream("POST", f"{address}/v1/completions", json=asked) as parts:
                        next(parts.iter_lines())
                        raise httpx.ReadTimeout("enough")
                httpx.post(f"{address}/v1/completions", json=asked, timeout=0.3)
            assert _wait(lambda: not engine.metrics.num_running)
        assert engine.metrics.num_ended == {"cancelled": 2}


def test_a_full_queue_and_draining_are_answered_at_once():
    with serving(Speller(0.05), max_waiting=1) as (address, endpoint, _):
        asked, found = {"prompt": "a", "max_tokens": 30}, []

        def ask():
            found.append(httpx.post(f"{address}/v1/completions", json=asked, timeout=60))

        clients = [threading.Thread(target=ask) for _ in range(9)]
        for client in clients:
            client.start()
        engine = endpoint._served.engine
        assert _wait(lambda: engine.metrics.num_running)
        drained = []
        drain = threading.Thread(target=lambda: drained.append(asyncio.run(endpoint.drain(60))))
        assert _wait(lambda: engine.metrics.num_submitted == 9)
        drain.start()
        assert _wait(lambda: endpoint.is_draining)
        late = httpx.post(f"{address}/v1/completions", json=asked)
        assert late.status_code == 503 and late.headers["retry-after"] == "30"
        assert httpx.get(f"{address}/health").status_code == 503
        for client in (*clients, drain):
            client.join()
    codes = sorted(one.status_code for one in found)
    assert set(codes) == {200, 429} and drained == [True]
    refused = next(one for one in found if one.status_code == 429)
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"


def test_a_failed_step_is_an_error_of_the_server_and_it_goes_on():
    with serving() as (address, _, executor):
        executor.fails = True
        found = httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
        assert found.status_code == 500 and "no device" in found.json()["error"]["message"]
        executor.fails = False
        asked = {"prompt": "a", "max_tokens": 1, "seed": 0}
        again = httpx.post(f"{address}/v1/completions", json=asked)
        assert again.json()["choices"][0]["text"] == "b"


def test_a_slow_client_does_not_stall_others():
    with serving(Speller(0.002)) as (address, _, _):
        asked = {"prompt": "a", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked) as slow:
            lines = slow.iter_lines()
            next(lines)
            other = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "seed": 0})
            assert other.json()["choices"][0]["text"] == "bcdefghijklmnopq"
            assert sum(line.startswith("data: {") for line in lines) >= 58


def test_numbers_and_the_page(address, client):
    client.completions.create(model="speller", prompt="a", max_tokens=3)
    text = httpx.get(f"{address}/metrics").text
    assert 'jaxmoe_tokens_generated_total{model="speller"}' in text
    assert 'jaxmoe_drafts_checked_total{model="speller"} 0.0' in text
    assert 'jaxmoe_drafts_accepted_total{model="speller"} 0.0' in text
    assert 'jaxmoe_requests_ended_total{model="speller",reason="length"}' in text
    ended = int(re.search(r'reason="length"} (\d+)', text).group(1))
    for name in ("ttft", "tpot", "total"):
        series = rf'^jaxmoe_{name}_seconds_bucket{{le="([^"]+)",model="speller"}} (\d+)'
        found = re.findall(series, text, re.MULTILINE)
        reached = [int(count) for _, count in found]
        assert reached == sorted(reached) and found[-1][0] == "+Inf"
        assert f'jaxmoe_{name}_seconds_count{{model="speller"}} {reached[-1]}.0' in text
        assert reached[-1] >= ended or name == "tpot"  # an answer of one token has none
    stats = httpx.get(f"{address}/stats").json()
    assert stats["pages_total"] == 64 and stats["has_chat"]
    assert stats["expert_load"] == [[1.0, 3.0], [2.0, 2.0]]
    assert 'jaxmoe_expert_load_ratio{layer="0",model="speller"} 1.5' in text
    assert "<title>jaxmoe</title>" in httpx.get(address).text
    assert client.models.retrieve("speller").max_model_len == 128
    with pytest.raises(openai.NotFoundError, match="the model 'none' does not exist"):
        client.models.retrieve("none")
    assert [one.id for one in client.models.list()] == ["speller"]
