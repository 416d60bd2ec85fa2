# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the chat template that a tokenizer of Hugging Face brings (extra `chat`).

It is the file chat_template.jinja beside the tokenizer.json, or the field chat_template of
tokenizer_config.json. jinja2 evaluates it in its immutable sandbox with the names that
`transformers` gives it: messages, add_generation_prompt, tools, documents (None), the special
tokens, raise_exception and the filter tojson. The ids are those of `apply_chat_template(...,
tokenize=True)`. strftime_now is left undefined where a template looks whether it is defined, so
that the text does not depend on the day. Others (gpt-oss) write the day: of conversations to train
on one that is fixed, so that a run which resumes reads the same tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxmoe.data.batch import DataError
from jaxmoe.data.chat.messages import REASONING_FIELDS, ConversationError, Message
from jaxmoe.data.chat.template import ChatPiece
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.disk import kind_of_special_file
from jaxmoe.json_bounds import MAX_JSON_BYTES, parse_json
from jaxmoe.optional import require

SETTINGS = "tokenizer_config.json"
JINJA = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of the templates beside that file, by name."""
SPECIAL = "special_tokens_map.json"
"""Further special tokens; those of SETTINGS are taken first."""
_ASKS_FOR_DAY = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
_ASKS_FOR_NULL = re.compile(r"content['\"\])]*\s*(is\s+(not\s+)?|[!=]=\s*)none\b", re.IGNORECASE)
_ENDS = ("generation_config.json", "config.json")
"""Files with the ids that end a text, of the model beside the tokenizer; the first that has any."""
_VALUES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
"""Names of the values that every template is given."""
_LONGEST_TEXT = 2**25
"""Characters of a rendered conversation above which a template is stopped."""
_WAY_OUT = "Choose data.template chatml or plain, or a tokenizer of a model that was made for chats"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerTemplate:
    """The chat_template of a tokenizer."""

    source: str
    """Its text, in the language of jinja2."""
    special: tuple[tuple[str, str], ...]
    """Names and texts of special tokens, such as ("eos_token", "</s>")."""
    where: str
    """File, for messages."""
    end_ids: tuple[int, ...] = ()
    """Ids that end a text of the model beside the tokenizer, ascending."""
    variables: str = "{}"
    """JSON object of further values by name, which the template may read."""
    tools: str = "null"
    """JSON list of functions that an answer may call; null without any."""
    source_with_tools: str = ""
    """Text of the template `tool_use`, which is taken with tools; empty without one."""
    day: datetime.date | None = None
    """Day that it writes, if it writes any; today when None."""

    @property
    def end(self) -> ChatPiece | None:
        """The tokenizer's end of text."""
        text = dict(self.special).get("eos_token")
        return None if text is None else ChatPiece("control", text)

    def pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Iterator[ChatPiece]:
        """Yield the whole conversation as one piece."""
        written = [_message_values(message) for message in messages]
        text = self._text(written, add_generation_prompt)
        calls = [call.name for message in messages for call in message.calls]
        if not all(name in text for name in calls) and _ASKS_FOR_NULL.search(self.source):
            for values in written:
                if "tool_calls" in values and not values["content"]:
                    values["content"] = None  # by which this template knows that an answer calls
            text = self._text(written, add_generation_prompt)
        yield ChatPiece("control", text)

    def _text(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Return what the template makes of messages.

        Raises:
            ConversationError: It refuses them, or writes too much.
        """
        template, errors = _compile_programs(self.source, self.where)
        values = {**dict(self.special), **json.loads(self.variables)}
        if self._writes_day:
            values.setdefault("strftime_now", self._format_day)
        parts = []
        size = 0
        try:
            for part in template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=json.loads(self.tools),
                documents=None,
                **values,
            ):
                parts.append(part)
                size += len(part)
                if size > _LONGEST_TEXT:
                    raise ValueError(f"it writes more than {_LONGEST_TEXT:,} characters")
        except errors as error:
            raise ConversationError(
                f"the chat template of {self.where} refuses messages 1 to {len(messages)}: {error}"
            ) from error
        return "".join(parts)

    @property
    def _writes_day(self) -> bool:
        return "strftime_now" in self.source and _ASKS_FOR_DAY.search(self.source) is None

    def _format_day(self, form: str) -> str:
        """Return the day, or the time of now, in a format of `strftime`."""
        if self.day is None:
            return datetime.datetime.now().strftime(form)
        return datetime.datetime.combine(self.day, datetime.time()).strftime(form)

    def with_variables(self, values: Mapping[str, Any]) -> TokenizerTemplate:
        """Return the template with further values by name."""
        if reserved := sorted(_VALUES & values.keys()):
            raise ConversationError(
                f"the variable {reserved[0]!r} of a chat template is given by the conversation:"
                " leave it out"
            )
        return dataclasses.replace(self, variables=json.dumps(values, sort_keys=True))

    def with_tools(self, tools: str) -> TokenizerTemplate:
        """Return the template with functions that an answer may call."""
        source = self.source_with_tools or self.source
        if "tools" not in source:
            raise ConversationError(
                f"the chat template of {self.where} writes no tools: take a model that was made for"
                " calls, or leave tools out"
            )
        return dataclasses.replace(self, source=source, tools=tools)

    def reserved_texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return all special tokens, because text and control are one piece."""
        return tokenizer.special_tokens

    def jinja(self, separator: str, begin: str | None = None) -> str:
        """Return its own text."""
        del separator, begin
        return self.source

    def identity(self) -> dict[str, Any]:
        """Return name and sha256."""
        parts: list[Any] = [self.source, self.special, *([self.end_ids] if self.end_ids else [])]
        if self._writes_day:
            parts.append(str(self.day))
        content = json.dumps(parts).encode()
        return {"template": "tokenizer", "sha256": hashlib.sha256(content).hexdigest()}


class _Arguments(dict[str, Any]):
    """Arguments of a call for templates: an object, and where it is joined to a text its JSON."""

    def __str__(self) -> str:
        return _to_json(self)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


def _message_values(message: Message) -> dict[str, Any]:
    """Return a message as templates read it; what it has not is left out."""
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _Arguments(json.loads(call.arguments)),
                },
            }
            for call in message.calls
        ]
    optional = {
        "tool_call_id": message.call_id,
        "name": message.name,
        **dict.fromkeys(REASONING_FIELDS, message.reasoning),
    }
    return values | {name: text for name, text in optional.items() if text}


def read_template(place: pathlib.Path, *, day: datetime.date | None = None) -> TokenizerTemplate:
    """Return the chat template of a tokenizer.

    Args:
        place: Directory of its tokenizer.json.
        day: Day that it writes, if it writes any; today when None.

    Raises:
        DataError: There is none, or it cannot be read.
    """
    source, settings, where = _source(place)
    if not isinstance(source, str):
        raise DataError(
            f"data.template=tokenizer: {place} has no {JINJA}, and no text chat_template in "
            f"{SETTINGS}: its tokenizer brings no chat template. {_WAY_OUT}"
        )
    special = _special_tokens(_object(place / SPECIAL)) | _special_tokens(settings)
    template = TokenizerTemplate(
        source,
        tuple(sorted(special.items())),
        str(where),
        _end_ids(place),
        source_with_tools=_source(place, "tool_use")[0] or "",
        day=day,
    )
    _compile_programs(template.source, template.where)
    return template


def has_template(place: pathlib.Path) -> bool:
    """Return whether a tokenizer brings a chat template.

    Args:
        place: Directory of its tokenizer.json.

    Raises:
        DataError: A file cannot be read.
    """
    return isinstance(_source(place)[0], str)


def _source(place: pathlib.Path, name: str = "default") -> tuple[Any, dict[str, Any], pathlib.Path]:
    """Return the text of the template, if there is one, the settings, and the template's file.

    Args:
        place: Directory of the tokenizer.
        name: Which of several templates; one alone has the name `default`.
    """
    settings = _object(place / SETTINGS)
    source = _read(place / JINJA)
    where = place / (SETTINGS if source is None else JINJA)
    if source is None:
        source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        matches = [
            template
            for template in source
            if isinstance(template, dict) and template.get("name") == name
        ]
        source = matches[0].get("template") if matches else None
    elif name != "default":
        source = None
    if name != "default" and (text := _read(place / MORE_TEMPLATES / f"{name}.jinja")) is not None:
        source = text
    return source, settings, where


def _object(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a file; empty without the file."""
    if (text := _read(path)) is None:
        return {}
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object, found {text[:40]!r}")
    return content


def _end_ids(place: pathlib.Path) -> tuple[int, ...]:
    """Return the ids that end a text of the model beside a tokenizer; none without a model."""
    for name in _ENDS:
        ids = _object(place / name).get("eos_token_id")
        tokens = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if tokens and all(type(token) is int for token in tokens):
            return tuple(sorted(set(tokens)))
    return ()


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the text of each special token in a file that names them."""
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in tokens.items() if isinstance(text, str)}


def _read(path: pathlib.Path) -> str | None:
    """Return the content of a file; None if it does not exist."""
    try:
        if (kind := kind_of_special_file(path)) is not None:
            raise DataError(f"{path} is {kind}: expected a regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path} has more than {MAX_JSON_BYTES} bytes: it is no template")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


@functools.lru_cache(maxsize=8)
def _compile_programs(source: str, where: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the compiled template, and the exceptions that its evaluation raises.

    Args:
        source: Its text.
        where: File, for messages.

    Raises:
        DataError: It is not in the language of jinja2.
    """
    jinja2 = require("jinja2", "chat")
    sandbox = require("jinja2.sandbox", "chat")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_tag(require("jinja2.ext", "chat"))],
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = _to_json
    try:
        compiled = environment.from_string(source)
    except (jinja2.exceptions.TemplateError, RecursionError) as error:
        raise DataError(f"{where} is no chat template: {error}. {_WAY_OUT}") from error
    errors = (jinja2.exceptions.TemplateError, TypeError, ValueError, ArithmeticError)
    return compiled, (*errors, LookupError, AttributeError, RecursionError)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON without the escapes for HTML of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _generation_tag(extensions: Any) -> Any:
    """Return an extension that reads `{% generation %}...{% endgeneration %}` as its content."""

    class Generation(extensions.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Return the nodes between the tags."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
