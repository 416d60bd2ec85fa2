# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens of texts and conversations, and texts of tokens: /tokenize and /detokenize of vLLM.

/tokenize     {"prompt": TEXT}      -> {"count", "max_model_len", "tokens", "token_strs"}
              {"messages": [...]}   the fields of a chat that say how it is rendered
/detokenize   {"tokens": [1, 2]}    -> {"prompt": TEXT}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.data.source import token_bytes
from jaxmoe.serve.http.asked import read_conversation
from jaxmoe.serve.http.errors import wrong
from jaxmoe.serve.http.fields import BodyFields
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.tools.request import read_tools

_RENDERING = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "tool_choice",
)
_TOKENIZE = ("model", "prompt", "add_special_tokens", "return_token_strs", *_RENDERING)
_DETOKENIZE = ("model", "tokens")
_MOST_IDS = 2**20


def tokenize(body: Any, served: Served) -> dict[str, Any]:
    """Return the token ids of a text or of a conversation.

    Args:
        body: JSON value.
        served: The model.

    Raises:
        HTTPError: A field is wrong, or there is neither a prompt nor messages.
    """
    fields = _fields(body, _TOKENIZE)
    adapter = served.adapter_of(fields.text("model", served.name))
    is_chat = fields.any("messages") is not None
    if is_chat == (fields.any("prompt") is not None):
        raise wrong("prompt", " or messages, one of them, must be given")
    if fields.flag("add_special_tokens", not is_chat) == is_chat:
        raise wrong(
            "add_special_tokens",
            f"={is_chat} is not supported: the tokenizer decides what begins a prompt, and the"
            " template writes that of a conversation; leave it out",
            "unsupported_field",
        )
    if is_chat:
        ids = read_conversation(fields, served, adapter, read_tools(fields))
    else:
        text = fields.text("prompt")
        ids = served.encode(text, "prompt") if text else ()
    strings = None
    if fields.flag("return_token_strs"):
        strings = [token_bytes(served.codec, token).decode(errors="replace") for token in ids]
    return {
        "count": len(ids),
        "max_model_len": served.engine.facts.max_length,
        "tokens": list(ids),
        "token_strs": strings,
    }


def detokenize(body: Any, served: Served) -> dict[str, Any]:
    """Return the text of token ids.

    Args:
        body: JSON value.
        served: The model.

    Raises:
        HTTPError: The tokens are no ids of the model.
    """
    fields = _fields(body, _DETOKENIZE)
    served.adapter_of(fields.text("model", served.name))
    ids = fields.ids("tokens", _MOST_IDS)
    if max(ids, default=0) >= 2**31:
        raise wrong("tokens", f" holds {max(ids)}, which is no id of a token")
    try:
        return {"prompt": served.codec.decode(np.asarray(ids, np.int32))}
    except (ValueError, LookupError) as error:
        raise wrong("tokens", f" holds ids that are no tokens of the model: {error}") from error


def _fields(body: Any, names: tuple[str, ...]) -> BodyFields:
    """Return the fields that are read; others are ignored."""
    values = body
    if isinstance(body, Mapping):
        values = {name: value for name, value in body.items() if name in names}
    return BodyFields(values, names)
