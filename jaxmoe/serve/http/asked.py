# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the body of a completion or of a chat completion into requests of the engine.

The fields are those of OpenAI's API, and further ones of vLLM and SGLang: see `table.py`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, get_args

from jaxmoe.serve.http.errors import HTTPError, wrong
from jaxmoe.serve.http.fields import BodyFields
from jaxmoe.serve.http.messages import CallsFormat, MessageFormat, with_contents
from jaxmoe.serve.http.served import ChatFormat, Served
from jaxmoe.serve.http.structured import read_grammar, read_message_grammar
from jaxmoe.serve.http.table import STREAM_OPTIONS, RouteName, honoured_fields, honoured_names
from jaxmoe.serve.http.tools import TOOL_PARSERS
from jaxmoe.serve.http.tools.request import Tools, read_tools
from jaxmoe.serve.requests import PoolingType, Sampling

_MOST_STOPS = 16
_MOST_STOP_IDS = 128
_MOST_BIASES = 300
_MOST_ANSWERS = 128
_MOST_PROMPTS = 128
_SEEDS = 2**31 - 1 - _MOST_ANSWERS
"""Seeds of a first answer; the engine takes 31 bits, and the i-th answer has seed + i."""
_DRAWN_SEEDS = 2**31 - 1 - _MOST_ANSWERS * _MOST_PROMPTS
"""As many for requests without a seed, where i counts the answers to all prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of a client."""

    model: str
    """Name of the model, as the client gave it."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; each gets `number` answers."""
    number: int
    sampling: Sampling
    stop: tuple[str, ...]
    """Strings that end an answer."""
    is_streamed: bool
    """Whether answers are sent while they grow."""
    has_usage: bool
    """Whether a stream ends with the counts of tokens."""
    has_usage_of_parts: bool
    """Whether each part of a stream has the counts of its answer so far, with `has_usage`."""
    num_logprobs: int | None
    """Alternatives of each token; None sends no log-probabilities."""
    num_prompt_logprobs: int | None
    """Alternatives of each token of the prompt; None sends no `prompt_logprobs`."""
    has_echo: bool
    """Whether a text begins with its prompt."""
    has_answer: bool
    """Whether tokens of the answer are sent; without, one is drawn and thrown away."""
    has_token_ids: bool
    """Whether the ids of prompt and answer are sent."""
    given: dict[str, Any]
    """Further arguments of `Engine.submit`."""
    is_packed: bool = False
    """Whether an embedding is the base64 of its bytes."""
    is_normalized: bool = True
    """Whether the length of an embedding is 1."""
    message: MessageFormat | None = None
    """How an answer becomes a message; None where it is text."""

    @property
    def tells_of_tokens(self) -> bool:
        """Whether a stream has a part for each token, also for those without text of their own."""
        return self.num_logprobs is not None or self.has_token_ids or self.sampling.has_experts


def read_completion(body: Any, served: Served) -> Asked:
    """Return what a body of /v1/completions asks for.

    Args:
        body: JSON value.
        served: The model.

    Raises:
        HTTPError: A field is wrong or not computed.
    """
    fields = _body_fields(body, "completions")
    prompts = _prompts(fields.any("prompt"), served)
    most = fields.integer("logprobs", None, 0)
    length = _AnswerLength(prompt="prompt", has_answer=False)
    if fields.any("max_tokens") != 0:
        default = served.default("max_tokens", 16)
        length = _AnswerLength(prompt="prompt", names=("max_tokens",), default=default)
    request = _read_request(fields, served, prompts, most, length)
    request = dataclasses.replace(request, has_echo=fields.flag("echo"))
    sampling = dataclasses.replace(request.sampling, grammar=read_grammar(fields, served))
    if request.has_echo and most is not None:
        number = max(most, request.num_prompt_logprobs or 0)
        sampling = dataclasses.replace(sampling, num_prompt_logprobs=number)
    return dataclasses.replace(request, sampling=sampling)


def read_embedding(body: Any, served: Served) -> Asked:
    """Return what a body of /v1/embeddings asks for.

    Args:
        body: JSON value.
        served: The model.

    Raises:
        HTTPError: A field is wrong or not computed.
    """
    fields = _body_fields(body, "embeddings")
    prompts = _prompts(fields.any("input"), served, "input")
    length = _AnswerLength(prompt="input", has_answer=False)
    request = _read_request(fields, served, prompts, None, length)
    pooling: Any = fields.choice("pooling_type", get_args(PoolingType), served.pooling_type)
    form = fields.choice("encoding_format", ("float", "base64"), "float")
    return dataclasses.replace(
        request,
        sampling=dataclasses.replace(request.sampling, pooling=pooling),
        is_packed=form == "base64",
        is_normalized=fields.flag("normalize", True),
    )


def read_chat(body: Any, served: Served) -> Asked:
    """Return what a body of /v1/chat/completions asks for.

    Args:
        body: JSON value.
        served: The model.

    Raises:
        HTTPError: A field is wrong or not computed, or the model has no chat template.
    """
    fields = _body_fields(body, "chat/completions")
    adapter = served.adapter_of(fields.text("model", served.name))
    tools = read_tools(fields)
    prompt = read_conversation(fields, served, adapter, tools)
    message = _read_message(fields, served, prompt, tools)
    most = fields.integer("top_logprobs", 0, 0)
    if most and not fields.flag("logprobs"):
        raise wrong("top_logprobs", f"={most} needs logprobs=true")
    num_logprobs = most if fields.flag("logprobs") else None
    length = _AnswerLength(
        prompt="messages",
        names=("max_completion_tokens", "max_tokens"),  # the second is the deprecated name
        default=served.default("max_tokens", None),
    )
    request = _read_request(fields, served, (prompt,), num_logprobs, length)
    grammar = read_message_grammar(fields, served, message, tools)
    sampling = dataclasses.replace(request.sampling, grammar=grammar)
    request = dataclasses.replace(request, sampling=sampling, message=message)
    if fields.flag("ignore_eos"):
        return request
    ids, texts = _chat_of(served, adapter).ends
    sampling = dataclasses.replace(sampling, stop_ids=(*sampling.stop_ids, *ids))
    return dataclasses.replace(request, sampling=sampling, stop=(*request.stop, *texts))


def _read_message(
    fields: BodyFields, served: Served, prompt: tuple[int, ...], tools: Tools | None
) -> MessageFormat:
    """Return how the answers to a conversation become messages.

    Args:
        fields: Fields of the body.
        served: The model.
        prompt: Token ids of the conversation.
        tools: Functions that an answer may call; None without any.

    Raises:
        HTTPError: There are tools, and the server reads no calls.
    """
    form = MessageFormat(
        reasoning=served.reasoning,
        has_reasoning=fields.flag("include_reasoning", True),
        prompt=served.end_of(prompt),
    )
    if tools is None:
        return form
    if served.tool_parser is None:
        raise wrong(
            "tools",
            f" cannot be called: no parser of calls fits the chat template of {served.name}. Start"
            f" the server with --tool_parser, one of {', '.join(TOOL_PARSERS)}, or leave them out",
            "unsupported_field",
        )
    calls = CallsFormat(
        parser=served.tool_parser,
        names=tools.names,
        is_parallel=tools.is_parallel,
        is_spelled=tools.is_required,
    )
    return dataclasses.replace(form, calls=calls)


def _chat_of(served: Served, adapter: str) -> ChatFormat:
    """Return how a model reads conversations.

    Raises:
        HTTPError: It reads none.
    """
    chat = served.chat_of(adapter)
    if chat is None:
        raise HTTPError(
            400,
            f"{served.name} was not trained on conversations, and its tokenizer has no"
            " chat_template: use /v1/completions, or start the server with --template chatml",
            code="no_chat_template",
        )
    return chat


def read_conversation(
    fields: BodyFields, served: Served, adapter: str, tools: Tools | None
) -> tuple[int, ...]:
    """Return the token ids of the messages of a body, as its fields say how to render them.

    Args:
        fields: Fields of the body.
        served: The model.
        adapter: Adapter that answers; empty for the model itself.
        tools: Functions that an answer may call; None without any.

    Raises:
        HTTPError: A field is wrong, or the model has no chat template.
    """
    chat = _chat_of(served, adapter)
    variables = fields.any("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise wrong("chat_template_kwargs", " must be a JSON object")
    effort = fields.any("reasoning_effort")
    is_continued = fields.flag("continue_final_message")
    adds_prompt = fields.flag("add_generation_prompt", not is_continued)
    if is_continued and adds_prompt:
        raise wrong(
            "add_generation_prompt",
            "=True begins a new turn, and continue_final_message=True continues the last one:"
            " set one of them",
        )
    return chat.prompt(
        with_contents(fields.any("messages")),
        variables if effort is None else {"reasoning_effort": effort, **variables},
        tools=None if tools is None else tools.text,
        add_generation_prompt=adds_prompt,
        is_continued=is_continued,
    )


def _body_fields(body: Any, route: RouteName) -> BodyFields:
    """Return the fields of a body that are honoured."""
    values = honoured_fields(body, route) if isinstance(body, Mapping) else body
    return BodyFields(values, honoured_names(route))


def _prompts(value: Any, served: Served, name: str = "prompt") -> tuple[tuple[int, ...], ...]:
    """Return the ids of a text, of ids, or of a list of either."""
    is_several = isinstance(value, list) and value and isinstance(value[0], str | list)
    several = value if is_several else [value]
    if len(several) > _MOST_PROMPTS:
        raise wrong(name, f" has {len(several)} prompts, at most {_MOST_PROMPTS} are taken")
    return tuple(_prompt(item, served, name) for item in several)


def _prompt(value: Any, served: Served, name: str) -> tuple[int, ...]:
    if isinstance(value, str):
        return served.encode(value, name)
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not is_ids or not value:
        raise wrong(name, " must be a text, token ids, or a list of either, none empty")
    return tuple(value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _AnswerLength:
    """How a route says how many tokens an answer has at most."""

    prompt: str
    """Field of the prompt."""
    names: tuple[str, ...] = ()
    """Fields of the largest number of tokens; the first that is given holds."""
    default: int | None = None
    """Tokens without any of them; None is all that a prompt leaves. The instance ends an answer
    when prompt and answer have `Facts.max_length` tokens."""
    has_answer: bool = True
    """Whether tokens are sent; without, one is drawn and thrown away."""


def _read_request(
    fields: BodyFields,
    served: Served,
    prompts: tuple[tuple[int, ...], ...],
    num_logprobs: int | None,
    length: _AnswerLength,
) -> Asked:
    """Return the request.

    Args:
        fields: Fields of the body.
        served: The model.
        prompts: Token ids.
        num_logprobs: Alternatives of each token.
        length: Length of the answer.
    """
    model = fields.text("model", served.name)
    adapter = served.adapter_of(model)
    if num_logprobs is not None and num_logprobs > served.max_logprobs:
        raise wrong(
            "logprobs",
            f"={num_logprobs} exceeds the {served.max_logprobs} that the server was started with:"
            " start it with --engine.num_logprobs",
        )
    limit = _limit(fields, length, prompts, served.engine.facts.max_length)
    sampling = _sampling(fields, served, limit, length)
    options = fields.any("stream_options")
    if isinstance(options, Mapping):
        options = {name: options[name] for name in STREAM_OPTIONS if name in options}
    options = BodyFields({} if options is None else options, STREAM_OPTIONS, "stream_options")
    number = fields.integer("n", 1, 1, _MOST_ANSWERS)
    return Asked(
        model=model,
        prompts=prompts,
        number=number,
        sampling=dataclasses.replace(sampling, num_logprobs=num_logprobs or 0),
        stop=fields.texts("stop", _MOST_STOPS),
        is_streamed=fields.flag("stream"),
        has_usage=options.flag("include_usage"),
        has_usage_of_parts=options.flag("continuous_usage_stats"),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        has_echo=False,
        has_answer=length.has_answer,
        has_token_ids=fields.flag("return_token_ids"),
        given={
            "adapter": adapter,
            "session": fields.text("user"),
            "salt": fields.text("cache_salt"),
            "priority": _priority(fields, served),
            "seed_stride": number if fields.any("seed") is None else 0,
        },
    )


def _sampling(fields: BodyFields, served: Served, limit: int, length: _AnswerLength) -> Sampling:
    """Return how the tokens of a request are drawn.

    Args:
        fields: Fields of the body.
        served: The model.
        limit: Tokens of an answer at most.
        length: How the route says it.
    """
    has_experts = fields.flag("return_routed_experts")
    if has_experts and not served.has_experts:
        raise wrong(
            "return_routed_experts",
            "=True asks for the experts of each token, which this server does not record: start it"
            " with --engine.has_experts True",
            "unsupported_field",
        )
    repetition = served.default("repetition_penalty", 1.0)
    eos_ids = () if fields.flag("ignore_eos") else served.eos_ids
    values: dict[str, Any] = {
        "temperature": fields.number("temperature", served.default("temperature", 1.0), 0.0, 100.0),
        "top_k": max(fields.integer("top_k", served.default("top_k", 0), -1), 0),
        "top_p": fields.number("top_p", served.default("top_p", 1.0), 1e-9, 1.0),
        "min_p": fields.number("min_p", served.default("min_p", 0.0), 0.0, 1.0),
        "seed": _seed(fields),
        "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "repetition_penalty": fields.number("repetition_penalty", repetition, 1e-3, 1e3),
        "logit_bias": fields.biases("logit_bias", _MOST_BIASES),
        "min_tokens": _min_tokens(fields, length.names, limit),
        "stop_ids": (*eos_ids, *fields.ids("stop_token_ids", _MOST_STOP_IDS)),
        "has_answer": length.has_answer,
        "has_stop": fields.flag("include_stop_str_in_output"),
        "num_prompt_logprobs": fields.integer("prompt_logprobs", None, 0, served.max_logprobs),
    }
    try:
        return Sampling(max_tokens=limit, has_experts=has_experts, **values)
    except ValueError as error:
        raise HTTPError(400, str(error)) from error


def _limit(
    fields: BodyFields,
    length: _AnswerLength,
    prompts: tuple[tuple[int, ...], ...],
    most: int,
) -> int:
    """Return the largest number of tokens of an answer, at most the room that a prompt leaves.

    The instance ends the answers to longer prompts of the request earlier.

    Args:
        fields: Fields of the body.
        length: How the route says the number.
        prompts: Token ids.
        most: Tokens of a prompt and its answer that the server holds.
    """
    longest = max(map(len, prompts))
    limits = {name: fields.integer(name, None, 1) for name in length.names}
    if longest + length.has_answer > most:
        answer = " with its answer" if length.has_answer else ""
        raise HTTPError(
            400,
            f"the prompt has {longest} tokens, and this server holds {most} tokens of a request"
            f"{answer}: shorten the prompt",
            param=length.prompt,
            code="context_length_exceeded",
        )
    if not length.has_answer:
        return 1
    limit = next((limit for limit in limits.values() if limit is not None), length.default)
    most_room = most - min(map(len, prompts))
    return most_room if limit is None else min(limit, most_room)


def _min_tokens(fields: BodyFields, names: tuple[str, ...], limit: int) -> int:
    """Return the least number of tokens of an answer, at most the limit where that was clipped."""
    least = fields.integer("min_tokens", 0, 0)
    limits = [most for name in names if (most := fields.any(name)) is not None]
    if limits and least > limits[0]:
        raise wrong("min_tokens", f"={least} exceeds {limits[0]}, the most tokens of the answer")
    return min(least, limit)


def _priority(fields: BodyFields, served: Served) -> int:
    """Return the priority of a request.

    Raises:
        HTTPError: It would go before those of others, and the server does not know who asks.
    """
    priority = fields.integer("priority", 0, -1000, 1000)
    if priority > 0 and not served.takes_priority:
        raise wrong(
            "priority",
            f"={priority} would go before the requests of others, and this server lets anyone ask:"
            " start it with a key (JAXMOE_API_KEY) or with --has_priority True",
            "unsupported_field",
        )
    return priority


def _seed(fields: BodyFields) -> int:
    """Return the seed that was given, of 64 bits modulo `_SEEDS`, or a random one.

    A given one holds for each prompt, so that an answer does not depend on the prompts beside it;
    without one all answers are independent.
    """
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    return secrets.randbelow(_DRAWN_SEEDS) if seed is None else seed % _SEEDS
