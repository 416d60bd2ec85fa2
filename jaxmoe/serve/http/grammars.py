# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that follow a grammar: JSON, JSON schemas, regular expressions, choices.

The grammars and their token masks are those of llguidance (extra `serve`), which has no
dependencies and reads JSON schemas, regular expressions and grammars alike.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.data.source import token_bytes
from jaxmoe.generation.text_stream import TextCodec
from jaxmoe.optional import require
from jaxmoe.serve.http.tools.call import CallSpelling

_ANSWER = "answer"
"""Name of a grammar that another one refers to."""
_ANSWER_SPACES = {"whitespace_pattern": r"[ ]?|\n[ ]{0,20}"}
"""Spaces within JSON of answers: none, one, or a line with an indent. Without a bound, small models
write spaces to their last token."""
_CALL_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces within the arguments of calls: those of the filter `tojson` of chat templates."""


_COMPOSED = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas")
    + ("patternProperties", "propertyNames", "unevaluatedProperties", "minProperties")
)
"""Keys of a schema beside which its properties are not all that an object may have."""


@dataclasses.dataclass(frozen=True, eq=False)
class LibraryMatcher:
    """How far the answer to one request follows its grammar; see `requests.Matcher`."""

    state: Any
    """Matcher of llguidance."""

    def mask(self) -> np.ndarray:
        """Return the tokens that may follow [ceil(V / 32)], a bit of a uint32 each."""
        return np.frombuffer(self.state.compute_bitmask(), np.uint32)

    def take(self, token: int) -> None:
        """Go on with a token of the answer."""
        self.state.consume_token(token)

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end may follow."""
        return self.state.is_stopped() and not self.failure

    @property
    def failure(self) -> str:
        """Why the grammar cannot go on; empty while it can."""
        return self.state.get_error()


@dataclasses.dataclass(frozen=True, eq=False)
class LibraryGrammar:
    """A grammar with the tokens of a model; see `requests.Grammar`."""

    tokens: Any
    """Tokens, as llguidance holds them."""
    text: str
    """Grammar, as llguidance writes it."""

    def start(self) -> LibraryMatcher:
        """Return a matcher at the begin of an answer."""
        library = require("llguidance", "serve")
        return LibraryMatcher(library.LLMatcher(self.tokens, self.text, log_level=0))


class Grammars:
    """Makes the grammars of one model. The tokens are read with the first of them."""

    def __init__(self, codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]):
        """Keep what the tokens are read from.

        Args:
            codec: Source or tokenizer of the model.
            vocab_size: Number of its ids.
            eos_ids: Ids that end a text, which are drawn where the grammar allows an end.
        """
        self._codec, self._vocab_size, self._eos_ids = codec, vocab_size, tuple(eos_ids)

    def schema(self, schema: Any) -> LibraryGrammar:
        """Return the grammar of a JSON schema.

        Args:
            schema: JSON value of the schema.

        Raises:
            ValueError: It is no schema that the library follows.
        """
        matcher = require("llguidance", "serve").LLMatcher
        if isinstance(schema, dict):
            schema = {"x-guidance": _ANSWER_SPACES, **schema}
        return self._checked(matcher.grammar_from_json_schema(json.dumps(schema)))

    def regex(self, pattern: str) -> LibraryGrammar:
        """Return the grammar of a regular expression.

        Args:
            pattern: The expression, which the whole answer matches.

        Raises:
            ValueError: It is none, or no token of the model begins an answer that matches it.
        """
        matcher = require("llguidance", "serve").LLMatcher
        grammar = self._checked(matcher.grammar_from_regex(pattern))
        begin = grammar.start()
        is_allowed = np.unpackbits(begin.mask().view(np.uint8), bitorder="little")
        if begin.failure:
            raise ValueError(f"{pattern!r:.60} matches no text")
        if not is_allowed[: self._vocab_size].any():
            raise ValueError(
                f"{pattern!r:.60} matches the empty text alone, and this model has no token that"
                " ends a text: ask for at least a character"
            )
        return grammar

    def choice(self, texts: Sequence[str]) -> LibraryGrammar:
        """Return the grammar of one of several texts.

        Args:
            texts: The texts.

        Raises:
            ValueError: There are too many for the library.
        """
        matcher = require("llguidance", "serve").LLMatcher
        lark = " | ".join(json.dumps(text) for text in texts)
        return self._checked(matcher.grammar_from_lark(f"start: {lark}"))

    def calls(
        self,
        spelling: CallSpelling,
        schemas: Mapping[str, Any],
        *,
        is_parallel: bool,
        answer: LibraryGrammar | None = None,
    ) -> LibraryGrammar:
        """Return the grammar of calls of functions.

        Args:
            spelling: How calls are spelled.
            schemas: JSON schema of the arguments of each function. Objects have no properties
                beside those that it names, unless it says so: a function takes no others.
            is_parallel: Whether there may be several calls.
            answer: What an answer without calls follows; None where it must call.

        Raises:
            ValueError: The library does not follow a schema.
        """
        rules = []
        names = [f"call_{number}" for number in range(len(schemas))]
        for rule, (name, schema) in zip(names, schemas.items(), strict=True):
            before = _literal(spelling.before_arguments(name))
            schema = {"type": "object", "x-guidance": _CALL_SPACES, **_close(schema)}
            rules.append(f"{rule}: {before} %json {json.dumps(schema)} {_literal(spelling.after)}")
        repeats = f"({_literal(spelling.between)} call)*" if is_parallel else ""
        rules.append(f"call: {' | '.join(names)}")
        rules.append(f"calls: {_literal(spelling.begin)} call {repeats} {_literal(spelling.end)}")
        start = "start: calls" if answer is None else f"start: calls | @{_ANSWER}"
        return self._before_grammar("\n".join([start, *rules]), answer)

    def behind(self, rules: str, answer: LibraryGrammar) -> LibraryGrammar:
        """Return the grammar of an answer that has something else before what a grammar describes.

        Args:
            rules: Rules of what precedes, whose first is `reasoning`; see
                `ReasoningParserConfig.lark`.
            answer: What follows.
        """
        return self._before_grammar(f"start: reasoning @{_ANSWER}\n{rules}", answer)

    def _before_grammar(self, lark: str, answer: LibraryGrammar | None) -> LibraryGrammar:
        """Return a grammar of rules, which may name another grammar `_ANSWER`."""
        if answer is None:
            return self._checked(lark)
        grammars = [{"lark_grammar": answer.text}]
        if answer.text.startswith("{"):
            grammars = json.loads(answer.text)["grammars"]
        number = sum(grammar.get("name", "").startswith(_ANSWER) for grammar in grammars)
        name = f"{_ANSWER}_{number}"
        grammars[0]["name"] = name
        lark = lark.replace(f"@{_ANSWER}", f"@{name}", 1)
        return self._checked(json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]}))

    def _checked(self, text: str) -> LibraryGrammar:
        matcher = require("llguidance", "serve").LLMatcher
        is_error, messages = matcher.validate_grammar_with_warnings(text, self._tokens)
        if is_error:
            raise ValueError(" ".join(messages))
        return LibraryGrammar(self._tokens, text)

    @functools.cached_property
    def _tokens(self) -> Any:
        """The tokens as llguidance holds them; the last id is an end that no model draws.

        An end has no text: a string would allow it as text, and the answer would end within.
        """
        library = require("llguidance", "serve")
        ends = [token for token in self._eos_ids if token < self._vocab_size]
        contents = [
            b"" if token in ends else token_bytes(self._codec, token)
            for token in range(self._vocab_size)
        ]
        contents.append(b"")
        wrapper = library.TokenizerWrapper(_Vocabulary(contents, self._vocab_size))
        eos = ends or [self._vocab_size]
        return library.LLTokenizer(wrapper, n_vocab=len(contents), eos_token=eos)


def _close(schema: Any) -> Any:
    """Return a schema whose objects have no properties beside those that it names.

    Objects that are composed of several schemas, or need more than they name, stay as they are.
    """
    if not isinstance(schema, dict) or not _COMPOSED.isdisjoint(schema):
        return schema
    inner = {}
    if isinstance(schema.get("items"), dict):
        inner["items"] = _close(schema["items"])
    properties = schema.get("properties")
    if isinstance(properties, dict):
        inner["properties"] = {name: _close(part) for name, part in properties.items()}
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in properties for name in map(str, required)):
            inner["additionalProperties"] = schema.get("additionalProperties", False)
    return {**schema, **inner}


def _literal(text: str) -> str:
    """Return a text as llguidance spells it; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_id: int):
        self.tokens = tokens
        self.eos_token_id = eos_id
        self.special_token_ids = [token for token, content in enumerate(tokens) if not content]
        self._by_content = {content: token for token, content in enumerate(tokens) if content}

    def __call__(self, text: bytes | str) -> list[int]:
        """Return ids that spell a text, the longest token first."""
        content = text.encode() if isinstance(text, str) else text
        ids = []
        longest = max(map(len, self._by_content), default=0)
        while content:
            sizes = range(min(longest, len(content)), 0, -1)
            size = next((size for size in sizes if content[:size] in self._by_content), 0)
            if not size:
                break
            ids.append(self._by_content[content[:size]])
            content = content[size:]
        return ids
