# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every field that clients of OpenAI and vLLM send, and what the endpoint does with it.

A field is honoured, ignored because it changes no answer, or refused because it would change the
answer and nothing computes it. A refused field is taken with the values that ask for nothing. The
table of the README is `markdown_table()`.

To add a field: a row of `FIELDS`, and, where it is honoured, `jaxmoe/serve/http/asked.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

from jaxmoe.configs import closest
from jaxmoe.serve.http.errors import wrong

logger = logging.getLogger(__name__)

RouteName = Literal["completions", "chat/completions", "responses", "embeddings"]
BOTH: tuple[RouteName, ...] = ("completions", "chat/completions")
TEXT: tuple[RouteName, ...] = ("completions",)
TALK: tuple[RouteName, ...] = ("chat/completions",)
RESPONSES: tuple[RouteName, ...] = ("responses",)
EMBEDDINGS: tuple[RouteName, ...] = ("embeddings",)
CONVERSATIONS: tuple[RouteName, ...] = (*TALK, *RESPONSES)
DRAWN: tuple[RouteName, ...] = (*BOTH, *RESPONSES)
"""Routes whose answers are drawn, token by token."""
ROUTES = (*DRAWN, *EMBEDDINGS)
_MOST_WARNINGS = 100
"""Unknown fields that the log names."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestField:
    """A field of a request."""

    name: str
    routes: tuple[RouteName, ...]
    """Routes that have it."""
    outcome: Literal["honoured", "ignored", "refused"]
    text: str
    """What it does, why it changes no answer, or why it is refused."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing, beside null."""


def _honour(routes: tuple[RouteName, ...], **texts: str) -> tuple[RequestField, ...]:
    return tuple(RequestField(name, routes, "honoured", text) for name, text in texts.items())


def _ignore(routes: tuple[RouteName, ...], **texts: str) -> tuple[RequestField, ...]:
    return tuple(RequestField(name, routes, "ignored", text) for name, text in texts.items())


def _refuse(
    name: str, text: str, *neutral: Any, routes: tuple[RouteName, ...] = DRAWN
) -> RequestField:
    return RequestField(name, routes, "refused", text, neutral)


FIELDS: tuple[RequestField, ...] = (
    *_honour(DRAWN, model="the model, or `MODEL:ADAPTER`"),
    *_honour(
        TEXT,
        prompt="a text, token ids, or a list of either",
        echo="the text begins with the prompt; `logprobs` are those of its tokens too",
    ),
    *_honour(
        TALK,
        messages="roles `system`, `developer` (the same), `user`, `assistant`, `tool`; content is a"
        " text or a list of text parts, joined by line ends; `tool_calls`, `tool_call_id`, `name`"
        " and `reasoning_content` go to the template",
        tools="up to 128 functions, which the chat template writes; calls of them are parsed into"
        " `message.tool_calls`",
        tool_choice="`none` leaves the tools out of the prompt, `auto`, `allowed_tools`; `required`"
        " and a named"
        " function follow a grammar of calls",
        add_generation_prompt="true begins the turn of the answer, which is the default",
        continue_final_message="the answer continues the content of the last message",
        reasoning_effort="a variable of the chat template",
        max_completion_tokens="wins over `max_tokens`",
    ),
    *_honour(
        RESPONSES,
        input="a text, or items: messages, `function_call`, `function_call_output`; `reasoning` of"
        " earlier turns is left out",
        instructions="a message of the system before the others",
        tools="functions, with the fields of `function` of a conversation beside `type`",
        tool_choice="`none`, `auto`, `required`, a function by its name, or `allowed_tools`",
        text="`format` is the `response_format` of a conversation, `verbosity` its `verbosity`",
        reasoning="`effort` is a variable of the chat template",
        max_output_tokens="tokens of the answer at most, clipped to the room",
        stream="events `response.*`",
    ),
    *_honour(
        CONVERSATIONS,
        parallel_tool_calls="false takes one call of an answer, the first",
        include_reasoning="false leaves the reasoning out of the answer",
        chat_template_kwargs="variables of the chat template of a tokenizer; `chatml` and `plain`"
        " have none",
    ),
    *_honour(
        BOTH,
        max_tokens="tokens of the answer at most, clipped to the room that the prompt leaves; 0 in"
        " completions sends none",
        n="answers of each prompt",
        stream="parts of the answer as events",
        stream_options="`include_usage`, `continuous_usage_stats`",
        response_format="`text`, `json_object` (with a `schema` or without), or `json_schema`",
        prompt_logprobs="log-probability and rank of each token of the prompt, as vLLM writes them;"
        " none of its pages are taken from others",
        logprobs="log-probabilities of the tokens under the model",
        return_token_ids="a choice has `token_ids`, and `prompt_token_ids` (in a stream with its"
        " first chunk)",
        return_routed_experts="a choice has `routed_experts` `[tokens, layers, K]`; needs"
        " `--engine.has_experts True`",
    ),
    *_honour(TALK, top_logprobs="most likely tokens, with `logprobs`"),
    *_honour(
        DRAWN,
        stop="up to 16 strings that end an answer",
        seed="answer i to each prompt has seed + i; without it all answers are drawn apart",
        temperature="0 takes the most likely token",
        top_p="filter of the sampling",
        top_k="filter of the sampling; 0 or -1 for all tokens",
        min_p="filter of the sampling",
        presence_penalty="taken from the logit of each token of the answer, from -2 to 2",
        frequency_penalty="taken for each time that the token was written, from -2 to 2",
        repetition_penalty="divides logits above 0 of tokens so far, multiplies those below",
        logit_bias="up to 300 token ids with biases from -100 to 100",
        min_tokens="tokens before which no stop id is drawn and no stop string ends the text",
        stop_token_ids="ids that end an answer, beside those of the model",
        ignore_eos="the answer goes on behind the ids and marks that end a text",
        include_stop_str_in_output="the text keeps the stop string or id that ends it",
        guided_json="a JSON schema that the answer follows",
        guided_regex="a regular expression that the whole answer matches",
        guided_choice="texts of which the answer is one",
        structured_outputs="one of `json`, `regex`, `choice`, `json_object`: as `guided_json` and"
        " the others, or any object",
        user="names the session of the request, for policies",
        priority="larger numbers are served first; above 0 with a key or `--has_priority True`",
        cache_salt="requests share pages with those of the same salt alone",
    ),
    *_ignore(
        DRAWN,
        service_tier="there is one tier",
        metadata="nothing is stored",
        store="nothing is stored",
        prompt_cache_key="equal beginnings are shared without a key",
        prompt_cache_retention="the pool decides",
        prompt_cache_options="the pool decides",
        safety_identifier="no user is reported",
        moderation="nothing is moderated",
        request_id="the server numbers requests itself",
        length_penalty="of beam search, which is refused",
        early_stopping="of beam search, which is refused",
        spaces_between_special_tokens="special tokens are not shown",
    ),
    *_ignore(TEXT, parallel_tool_calls="a text calls no tools"),
    *_ignore(TALK, prediction="it makes an answer faster, and changes none"),
    *_ignore(
        RESPONSES,
        stream_options="events have no padding",
        access_programs="there are no programs",
    ),
    _refuse("allowed_token_ids", "every token may be drawn", []),
    _refuse("bad_words", "every token may be drawn", []),
    _refuse("logits_processors", "code of a client is not run", []),
    _refuse("use_beam_search", "tokens are drawn one after the other", False),
    _refuse("truncate_prompt_tokens", "a prompt is taken whole: shorten it"),
    _refuse("prompt_embeds", "a prompt is text or token ids"),
    _refuse("skip_special_tokens", "special tokens are not shown", True),
    _refuse("return_tokens_as_token_ids", "use return_token_ids", False, routes=BOTH),
    _refuse("guided_grammar", "use guided_regex or guided_json", ""),
    _refuse("vllm_xargs", "there are no extensions of the sampling", {}),
    _refuse("kv_transfer_params", "pages of other servers are not read", {}),
    _refuse("echo", "the answer to a conversation is a message", False, routes=CONVERSATIONS),
    _refuse("best_of", "ask for n answers and choose", 1, routes=TEXT),
    _refuse("suffix", "nothing is written between two texts", "", routes=TEXT),
    _refuse("add_special_tokens", "the tokenizer decides what begins a prompt", True, routes=TEXT),
    _refuse(
        "add_special_tokens", "the template writes all special tokens", False, routes=CONVERSATIONS
    ),
    _refuse(
        "chat_template", "templates of clients are not run: see --template", routes=CONVERSATIONS
    ),
    _refuse("documents", "templates have no documents", [], routes=CONVERSATIONS),
    _refuse("mm_processor_kwargs", "models here read text alone", {}, routes=CONVERSATIONS),
    _refuse("audio", "models here write text alone", routes=CONVERSATIONS),
    _refuse("modalities", "models here write text alone", ["text"], routes=CONVERSATIONS),
    _refuse("functions", "use tools", [], routes=CONVERSATIONS),
    _refuse("function_call", "use tool_choice", "none", "auto", routes=CONVERSATIONS),
    _refuse("verbosity", "how much a model writes is not set", "medium", routes=CONVERSATIONS),
    _refuse("web_search_options", "nothing is searched", routes=CONVERSATIONS),
    _refuse("max_tokens", "use max_output_tokens", routes=RESPONSES),
    _refuse("max_completion_tokens", "use max_output_tokens", routes=RESPONSES),
    _refuse("n", "a response is one answer: send several requests", 1, routes=RESPONSES),
    _refuse("response_format", "use text.format", {"type": "text"}, routes=RESPONSES),
    _refuse("reasoning_effort", "use reasoning.effort", routes=RESPONSES),
    _refuse("add_generation_prompt", "use /v1/chat/completions", True, routes=RESPONSES),
    _refuse("continue_final_message", "use /v1/chat/completions", False, routes=RESPONSES),
    _refuse("logprobs", "use /v1/chat/completions", False, routes=RESPONSES),
    _refuse("top_logprobs", "use /v1/chat/completions", 0, routes=RESPONSES),
    _refuse("prompt_logprobs", "use /v1/chat/completions", routes=RESPONSES),
    _refuse("return_token_ids", "use /v1/chat/completions", False, routes=RESPONSES),
    _refuse("return_tokens_as_token_ids", "use /v1/chat/completions", False, routes=RESPONSES),
    _refuse("return_routed_experts", "use /v1/chat/completions", False, routes=RESPONSES),
    _refuse("background", "an answer is waited for", False, routes=RESPONSES),
    _refuse("background_options", "an answer is waited for", {}, routes=RESPONSES),
    _refuse("context_management", "a prompt is taken whole", [], routes=RESPONSES),
    _refuse("conversation", "nothing is stored: send all turns", routes=RESPONSES),
    _refuse("previous_response_id", "nothing is stored: send all turns", routes=RESPONSES),
    _refuse("prompt", "no prompts are stored: send input", routes=RESPONSES),
    _refuse("image", "models here write text alone", routes=RESPONSES),
    _refuse("include", "a response has no further parts", [], routes=RESPONSES),
    _refuse("max_tool_calls", "no tools are built in", routes=RESPONSES),
    _refuse("truncation", "a prompt is taken whole", "disabled", routes=RESPONSES),
    *_honour(
        EMBEDDINGS,
        model="the model, or `MODEL:ADAPTER`",
        input="a text, token ids, or a list of either",
        encoding_format="`float` or `base64`",
        pooling_type="`last` token or `mean` of all, whose pages are not taken from others;"
        " `--pooling_type` where it is left out",
        normalize="false leaves a vector as long as it is; the default is unit length",
        user="names the session of the request, for policies",
    ),
    *_ignore(EMBEDDINGS, request_id="the server numbers requests itself"),
    _refuse("dimensions", "a vector has the width of the model", routes=EMBEDDINGS),
    _refuse("truncate_prompt_tokens", "a text is taken whole: shorten it", routes=EMBEDDINGS),
    _refuse("messages", "send the text of a conversation as input", [], routes=EMBEDDINGS),
    _refuse(
        "add_special_tokens", "the tokenizer decides what begins a text", True, routes=EMBEDDINGS
    ),
    _refuse("embed_dtype", "numbers are float32", "float32", routes=EMBEDDINGS),
    _refuse("endianness", "bytes are little-endian", "native", "little", routes=EMBEDDINGS),
)
"""Fields of all requests."""
_BY_ROUTE = {
    route: {field.name: field for field in FIELDS if route in field.routes} for route in ROUTES
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
"""Fields of `stream_options` that are honoured; others are ignored."""
_warnings = collections.Counter[str]()


def honoured_names(route: RouteName) -> tuple[str, ...]:
    """Return the fields that a route reads."""
    fields = _BY_ROUTE[route].values()
    return tuple(field.name for field in fields if field.outcome == "honoured")


def honoured_fields(values: Mapping[str, Any], route: RouteName) -> dict[str, Any]:
    """Return the fields of a body that a route reads.

    Fields that no row names are ignored, as vLLM ignores them; the log names each of them once.

    Args:
        values: Fields of the body.
        route: Route of the request.

    Raises:
        HTTPError: A field would change the answer and is not computed.
    """
    honoured = {}
    for name, value in values.items():
        if value is None:
            continue
        field = _BY_ROUTE[route].get(name)
        if field is None:
            _check_foreign(name, value, route)
        elif field.outcome == "honoured":
            honoured[name] = value
        elif field.outcome == "refused" and value not in field.neutral:
            raise _refusal(field, value)
    return honoured


def _check_foreign(name: str, value: Any, route: RouteName) -> None:
    """Refuse a field of other routes that draw, unless it is empty; log one that no route has."""
    fields = FIELDS if route in DRAWN else ()
    matches = (field for field in fields if field.name == name and {*field.routes} & {*DRAWN})
    field = next(matches, None)
    if field is None:
        if name not in _warnings and len(_warnings) < _MOST_WARNINGS:
            hint = closest(name, honoured_names(route))
            logger.warning("the field %.60r of requests is unknown and ignored%s", name, hint)
            _warnings[name] += 1
    elif field.outcome != "ignored" and value not in ({}, [], *field.neutral):
        raise wrong(
            name, f" is a field of /v1/{field.routes[0]}, not of /v1/{route}", "unsupported_field"
        )


def _refusal(field: RequestField, value: Any) -> Exception:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    way_out = " or ".join(["leave it out", *(f"set it to {value!r}" for value in field.neutral)])
    return wrong(
        field.name, f"={shown} is not supported: {field.text}; {way_out}", "unsupported_field"
    )


def markdown_table() -> str:
    """Return the table of all fields, for the README."""
    order = ("honoured", "ignored", "refused")
    rows = sorted(FIELDS, key=lambda field: order.index(field.outcome))
    lines = ["| field | of | outcome | |", "| --- | --- | --- | --- |"]
    for field in rows:
        routes = ", ".join(route.partition("/")[0] for route in field.routes)
        text = field.text
        if field.neutral:
            values = ", ".join(f"`{value!r}`" for value in field.neutral)
            text = f"{text}; taken: {values}"
        lines.append(f"| `{field.name}` | {routes} | {field.outcome} | {text} |")
    return "\n".join(lines)
