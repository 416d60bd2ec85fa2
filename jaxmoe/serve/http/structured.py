# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the fields by which an answer follows a grammar: those of OpenAI and of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxmoe.json_bounds import parse_json
from jaxmoe.optional import MissingPackageError
from jaxmoe.serve.http.errors import HTTPError, wrong
from jaxmoe.serve.http.fields import BodyFields
from jaxmoe.serve.http.grammars import Grammars, LibraryGrammar
from jaxmoe.serve.http.messages import MessageFormat
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.http.tools.request import Tools

_KINDS = ("json", "regex", "choice", "json_object")
_MOST_CHOICES = 1000
_OBJECT = {"type": "object"}


def read_grammar(fields: BodyFields, served: Served) -> LibraryGrammar | None:
    """Return the grammar that a body asks for; None without one.

    Args:
        fields: Fields of the body.
        served: The model.

    Raises:
        HTTPError: A field is wrong, there are several, or the grammar cannot be followed.
    """
    values = _values(fields)
    if not values:
        return None
    if len(values) > 1:
        raise wrong(list(values)[1], f" and {next(iter(values))} both give a grammar: send one")
    ((name, (kind, value)),) = values.items()
    if served.grammars is None:
        raise wrong(name, " asks for a grammar, and this server makes none", "unsupported_field")
    try:
        return _grammar(served.grammars, kind, value)
    except MissingPackageError as error:
        raise HTTPError(400, f"{name}: {error}", param=name, code="unsupported_field") from error
    except (TypeError, ValueError) as error:
        raise wrong(name, f" cannot be followed: {error}") from error


def read_message_grammar(
    fields: BodyFields, served: Served, form: MessageFormat, tools: Tools | None
) -> LibraryGrammar | None:
    """Return the grammar of a message: of its calls, or of its content; behind its reasoning.

    Args:
        fields: Fields of the body.
        served: The model.
        form: How answers become messages.
        tools: Functions of the request.

    Raises:
        HTTPError: A field is wrong, there are several, or the grammar cannot be followed.
    """
    grammar = read_grammar(fields, served)
    if form.calls is not None and tools is not None and (tools.is_required or grammar is not None):
        if tools.is_required and grammar is not None:
            field = next(iter(_values(fields)))
            raise wrong(
                "tool_choice", f" and {field} both say what the answer is made of: send one"
            )
        grammar = _calls_grammar(served, form, tools, grammar)
    rules = form.reasoning.lark(form.prompt)
    if grammar is None or not rules or served.grammars is None:
        return grammar
    return served.grammars.behind(rules, grammar)


def _calls_grammar(
    served: Served, form: MessageFormat, tools: Tools, answer: LibraryGrammar | None
) -> LibraryGrammar:
    """Return the grammar of calls of the tools, or of another answer."""
    assert form.calls is not None  # the caller has looked
    name = "tool_choice" if tools.is_required else "tools"
    if served.grammars is None:
        raise wrong(name, " asks for a grammar, and this server makes none", "unsupported_field")
    schemas = {name: tools.parameters(name) for name in form.calls.names}
    spelling = form.calls.parser.spelling
    try:
        for path, schema in schemas.values():
            try:
                served.grammars.schema(schema)
            except (TypeError, ValueError) as error:
                message = f"{path} cannot be followed: {error}"
                raise HTTPError(400, message, param="tools") from error
        return served.grammars.calls(
            spelling,
            {name: schema for name, (_, schema) in schemas.items()},
            is_parallel=tools.is_parallel and tools.choice != "named",
            answer=answer,
        )
    except MissingPackageError as error:
        raise HTTPError(400, f"{name}: {error}", param=name, code="unsupported_field") from error
    except ValueError as error:
        raise wrong("tools", f" cannot be followed: {error}") from error


def _values(fields: BodyFields) -> dict[str, tuple[str, Any]]:
    """Return kind and value of each grammar that a body gives, by the field."""
    values = dict[str, tuple[str, Any]]()
    for kind in ("json", "regex", "choice"):
        if (value := fields.any(f"guided_{kind}")) not in (None, "", []):
            values[f"guided_{kind}"] = (kind, value)
    options = fields.any("structured_outputs") or {}
    if not isinstance(options, Mapping):
        raise wrong("structured_outputs", " must be a JSON object")
    for kind, value in options.items():
        if value in (None, False) or (
            kind not in _KINDS and kind.startswith(("disable_", "white"))
        ):
            continue
        if kind not in _KINDS or "structured_outputs" in values:
            raise wrong("structured_outputs", f" must have one of {', '.join(_KINDS)}, not {kind}")
        values["structured_outputs"] = (kind, value)
    if (form := fields.any("response_format")) is not None:
        kind, schema = _response_format(form)
        if kind != "text":
            values["response_format"] = (kind, schema)
    return values


def _response_format(form: Any) -> tuple[str, Any]:
    """Return the kind of a response format, and its schema."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "json_object" and form.get("schema") is not None:
        return "json", form["schema"]  # as clients of several other servers write it
    if kind in ("text", "json_object"):
        return kind, True
    if kind == "json_schema":
        holder = form.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if schema is None:
            raise wrong("response_format", " of type json_schema must have json_schema.schema")
        return "json", schema
    raise wrong("response_format", ".type must be text, json_object or json_schema")


def _grammar(grammars: Grammars, kind: str, value: Any) -> LibraryGrammar:
    """Return a grammar.

    Raises:
        ValueError: The value is none of its kind.
    """
    if kind == "json_object":
        return grammars.schema(_OBJECT)
    if kind == "json":
        schema = parse_json(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"{json.dumps(schema)[:60]} is no JSON schema: give an object")
        return grammars.schema(schema)
    if kind == "regex":
        if not isinstance(value, str):
            raise ValueError("it must be a text")
        return grammars.regex(value)
    is_list = isinstance(value, list) and 0 < len(value) <= _MOST_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"it must be a list of up to {_MOST_CHOICES} texts, none empty")
    return grammars.choice(value)
