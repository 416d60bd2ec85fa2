# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Model that an endpoint serves: its engine, its tokens and its chat template."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.data import DataError
from jaxmoe.data.chat import (
    ChatTemplate,
    ConversationError,
    first_control,
    read_messages,
    render,
)
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.generation.chat import answer_ends
from jaxmoe.generation.text_stream import TextCodec, context_of
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.errors import HTTPError, wrong
from jaxmoe.serve.http.grammars import Grammars
from jaxmoe.serve.http.reasoning import NoReasoningConfig, ReasoningParserConfig
from jaxmoe.serve.http.tools.base import ToolParserConfig
from jaxmoe.serve.requests import PoolingType, Sampling

_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json, and those of a request; the ones that vLLM reads."""
_END_TOKENS = 64
"""Tokens of a prompt that hold what a template writes last; a byte may be a token."""
Route = Callable[[Any], Awaitable[dict[str, Any]]]
"""Takes the JSON value of a body, returns that of the answer; raises HTTPError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a model reads conversations."""

    template: ChatTemplate
    """How turns are written."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""

    def prompt(
        self,
        messages: object,
        variables: Mapping[str, Any] | None = None,
        *,
        tools: str | None = None,
        add_generation_prompt: bool = True,
        is_continued: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation that waits for an answer.

        Args:
            messages: JSON value of the field.
            variables: Values by name, for templates that have variables.
            tools: JSON list of the functions that the answer may call; None without any.
            add_generation_prompt: Whether to end with what comes before an answer.
            is_continued: Whether to end with the content of the last message instead.

        Raises:
            HTTPError: They are no messages, or the template cannot write them.
        """
        try:
            turns = read_messages(messages)
            template = self.template.with_variables(variables) if variables else self.template
            template = template if tools is None else _with_tools(template, tools, self.tokenizer)
            ids = render(
                turns,
                template,
                self.tokenizer,
                add_generation_prompt=add_generation_prompt,
                is_continued=is_continued,
            )
        except DataError as error:
            raise HTTPError(400, str(error), param="messages") from error
        return tuple(ids.tolist())

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ids and texts that end an answer."""
        return answer_ends(self.template, self.tokenizer)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of fields of the sampling that a model comes with.

    Args:
        generation: Fields of its generation_config.json.

    Raises:
        ValueError: One of them is no value of its field.
    """
    defaults = {
        field: generation[name]
        for name, field in _DEFAULTS.items()
        if generation.get(name) is not None
    }
    for field, value in defaults.items():
        types = (int,) if field in ("top_k", "max_tokens") else (int, float)
        if type(value) not in types:
            raise ValueError(
                f"generation_config.json: {field}={value!r} must be a number ("
                f"{' or '.join(kind.__name__ for kind in types)}): mend the file, or start the"
                " server with --sampling plain"
            )
    try:
        Sampling(**defaults)
    except ValueError as error:
        raise ValueError(
            f"generation_config.json: {error}: mend the file, or start the server with --sampling"
            " plain"
        ) from error
    return defaults


def _with_tools(template: ChatTemplate, tools: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a template with functions that an answer may call.

    Raises:
        HTTPError: The template writes none, or they spell its marks.
    """
    try:
        template = template.with_tools(tools)
    except ConversationError as error:
        raise HTTPError(400, f"tools: {error}", param="tools") from error
    if control := first_control(tools, template, tokenizer):
        raise wrong(
            "tools", f" spell {control!r}, which the template would read as control: remove it"
        )
    return template


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A model behind the endpoint."""

    name: str
    """Name of the model in requests."""
    engine: Engine
    """Engine, made with the codec."""
    codec: TextCodec
    """Encoder and decoder of text."""
    chat: ChatFormat | None = None
    """How it reads conversations; None refuses them."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end every text."""
    adapters: Mapping[str, ChatFormat | None] = dataclasses.field(default_factory=dict)
    """How each adapter reads conversations, by its name; its model is called `<name>:<adapter>`."""
    grammars: Grammars | None = None
    """Makes the grammars of answers; None refuses them."""
    tool_parser: ToolParserConfig | None = None
    """How calls in answers are written; None refuses tools."""
    reasoning: ReasoningParserConfig = dataclasses.field(default_factory=NoReasoningConfig)
    """How the reasoning of answers is told from their content."""
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Values of fields of the sampling that a request leaves out; see `sampling_defaults`."""
    pooling_type: PoolingType = "last"
    """How hidden states become an embedding, where a request does not say."""
    takes_priority: bool = False
    """Whether a request may go before others: where all who may ask are known."""
    max_logprobs: int = 0
    """Most likely tokens whose log-probabilities may be asked for."""
    has_experts: bool = False
    """Whether the experts of each token may be asked for."""
    pool_bytes: int = 0
    """Bytes of the pages of all instances."""
    compile_seconds: float = 0.0
    """Time of the compilation of their steps."""
    routes: Mapping[str, Route] = dataclasses.field(default_factory=dict)
    """Further POST routes by their path."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """Time of the start, in seconds since 1970."""

    @property
    def models(self) -> dict[str, str]:
        """Adapter of each model that a request may name; empty for the model itself."""
        return {self.name: ""} | {f"{self.name}:{adapter}": adapter for adapter in self.adapters}

    def adapter_of(self, model: str) -> str:
        """Return the adapter of a model that a request names.

        Args:
            model: Name of the model.

        Raises:
            HTTPError: There is no such model.
        """
        if model in self.models:
            return self.models[model]
        raise HTTPError(
            404,
            f"the model {model!r} does not exist: this server has"
            f" {', '.join(map(repr, self.models))}",
            param="model",
            code="model_not_found",
        )

    def chat_of(self, adapter: str) -> ChatFormat | None:
        """Return how an adapter reads conversations, or the model itself."""
        return self.adapters[adapter] or self.chat if adapter else self.chat

    def default(self, name: str, value: Any) -> Any:
        """Return the value of a field that a request leaves out.

        Args:
            name: Field of the sampling.
            value: Value where the model has none.
        """
        return self.defaults.get(name, value)

    def encode(self, text: str, param: str) -> tuple[int, ...]:
        """Return the token ids of a prompt.

        Args:
            text: Text of the prompt.
            param: Field of the request.

        Raises:
            HTTPError: It is empty or cannot be encoded.
        """
        try:
            ids = tuple(np.asarray(self.codec.encode(text)).tolist())
        except DataError as error:
            raise HTTPError(400, f"{param}: {error}", param=param) from error
        if not ids:
            raise wrong(param, " has no token: give more text")
        return ids

    def end_of(self, prompt: Sequence[int]) -> str:
        """Return the text of the last tokens of a prompt, where a template begins the answer."""
        return self.codec.decode(np.asarray(prompt[-_END_TOKENS:], np.int32))

    def has_text(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with text, behind which an answer is written."""
        return bool(self.codec.decode(np.asarray(context_of(prompt), np.int32)))
