# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize as vLLM answers them, keys in any case, and pages of other origins."""

import httpx2 as httpx
import openai
import pytest

from tests.support.endpoint import serving

TALK = [{"role": "user", "content": "hi"}]
ORIGIN = "http://localhost:3000"


@pytest.fixture(scope="module")
def address():
    with serving() as (found, _, _):
        yield found


def _post(address, route, headers=None, **body):
    return httpx.post(f"{address}/{route}", json=body, headers=headers, timeout=60)


def test_a_text_is_tokenized_and_back(address):
    answer = _post(address, "tokenize", model="speller", prompt="h\u00e9", further=1).json()
    assert answer == {
        "count": 3,
        "max_model_len": 128,
        "tokens": list("h\u00e9".encode()),
        "token_strs": None,
    }
    text = _post(address, "detokenize", model="speller", tokens=answer["tokens"]).json()
    assert text == {"prompt": "h\u00e9"}
    assert _post(address, "detokenize", tokens=[]).json() == {"prompt": ""}
    assert _post(address, "tokenize", prompt="").json()["count"] == 0
    strings = _post(address, "tokenize", prompt="ab", return_token_strs=True).json()["token_strs"]
    assert strings == ["a", "b"]


def test_a_conversation_is_tokenized_as_a_chat_reads_it(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        for extra in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
            answer = client.chat.completions.create(
                model="speller",
                messages=TALK,
                max_tokens=1,
                extra_body=extra | {"return_token_ids": True},
            )
            ids = _post(address, "tokenize", messages=TALK, **extra).json()["tokens"]
            assert ids == answer.choices[0].prompt_token_ids


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("tokenize", {}, "prompt or messages, one of them, must be given"),
        ("tokenize", {"prompt": "a", "messages": TALK}, "one of them, must be given"),
        ("tokenize", {"prompt": "a", "add_special_tokens": False}, "leave it out"),
        ("tokenize", {"messages": TALK, "add_special_tokens": True}, "leave it out"),
        ("tokenize", {"prompt": 3}, "prompt=3 must be a text"),
        ("detokenize", {"tokens": [-1]}, "must be a list of up to"),
        ("detokenize", {"tokens": "a"}, "must be a list of up to"),
        ("detokenize", {"tokens": [2**31]}, "which is no id of a token"),
        ("detokenize", {"tokens": [300]}, "no tokens of the model"),
    ],
)
def test_what_is_no_text_and_no_token_is_refused_in_words(address, route, body, message):
    answer = _post(address, route, **body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert _post(address, route, model="other").status_code == 404


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("BEARER  secret", 200),
        ("Bearer Secret", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer", 401),
        ("Bearer secret secret", 401),
    ],
)
def test_the_word_before_a_key_has_any_case(keyed, header, status):
    for route in ("v1/models", "stats"):
        answer = httpx.get(f"{keyed}/{route}", headers={"Authorization": header})
        assert answer.status_code == status


@pytest.fixture(scope="module")
def keyed():
    with serving(key="secret", origins=(ORIGIN,)) as (found, _, _):
        yield found


def test_pages_of_named_origins_may_ask(keyed, address):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    for origin, status in ((ORIGIN, 200), ("http://other", 400)):
        answer = httpx.options(f"{keyed}/v1/completions", headers=ask | {"Origin": origin})
        assert answer.status_code == status
        assert (answer.headers.get("access-control-allow-origin") == origin) == (status == 200)
    headers = {"Origin": ORIGIN, "Authorization": "Bearer secret"}
    answer = httpx.get(f"{keyed}/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    plain = httpx.get(f"{address}/v1/models", headers={"Origin": ORIGIN})
    assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers


def test_a_page_of_another_origin_changes_no_server():
    async def change(body):
        return {"changed": body}

    def routes(engine):
        return {"/change": change}

    for origins, origin, status in (
        ((), None, 200),
        ((), "http://other", 403),
        ((), "null", 403),
        ((ORIGIN,), ORIGIN, 200),
        (("*",), "http://other", 200),
    ):
        with serving(routes=routes, origins=origins) as (address, _, _):
            headers = {} if origin is None else {"Origin": origin}
            assert _post(address, "change", headers).status_code == status
            own = _post(address, "change", {"Origin": address})
            assert own.status_code == 200
