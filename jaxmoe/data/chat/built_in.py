# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Templates that need no file.

    ChatML   <|im_start|>user\\n...<|im_end|>\\n for each turn. The marks are tokens where the
             vocabulary has them, and text where it has not
    Plain    User:\\n...\\n\\n for a question, Assistant:\\n... and the separator for an answer

Both begin with the id that begins every document, mostly the separator. The pieces of a turn are
encoded one by one, so that its ids do not depend on the turns after it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from jaxmoe.data.chat.messages import ANSWER, ConversationError, Message
from jaxmoe.data.chat.template import ChatPiece
from jaxmoe.data.source import TemplateName
from jaxmoe.data.tokenizer import Tokenizer

_FIRST = ChatPiece("begin")
_SEPARATOR = ChatPiece("separator")
_BEGIN = ChatPiece("control", "<|im_start|>")
_END = ChatPiece("control", "<|im_end|>")
_BEGINNING = re.compile(r"\{\{ ('(?:[^'\\\n]|\\.)*') \}\}")
"""What a built-in template begins with, in the language of jinja2."""
_NO_TOOLS = (
    "the template {name!r} writes no tools: take a tokenizer of a model that was made for calls,"
    " with its chat_template (--template tokenizer)"
)

_Template = TypeVar("_Template", bound="BuiltInTemplate")


class BuiltInTemplate:
    """Base class of the templates without variables and tools."""

    __slots__ = ()

    name: ClassVar[TemplateName]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """No further ids."""
        return ()

    def with_variables(self: _Template, values: Mapping[str, Any]) -> _Template:
        """Return itself: it has no variables."""
        del values
        return self

    def with_tools(self, tools: str) -> NoReturn:
        """Refuse tools: it writes none."""
        raise ConversationError(_NO_TOOLS.format(name=self.name))


@dataclasses.dataclass(frozen=True, slots=True)
class ChatML(BuiltInTemplate):
    """Marks of begin and end around each turn."""

    name: ClassVar[TemplateName] = "chatml"

    @property
    def end(self) -> ChatPiece:
        """The mark of the end of a turn."""
        return _END

    def pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Iterator[ChatPiece]:
        """Yield the pieces of a conversation."""
        yield _FIRST
        for message in messages:
            _check_calls(message)
            yield from (_BEGIN, ChatPiece("text", f"{message.role}\n"))
            yield from (ChatPiece("text", message.content), _END, ChatPiece("text", "\n"))
        if add_generation_prompt:
            yield from (_BEGIN, ChatPiece("text", f"{ANSWER}\n"))

    def reserved_texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the marks that are not distinct from the same text in a message."""
        marks = (_BEGIN.text, _END.text)
        return [
            mark
            for mark, ids in zip(marks, tokenizer.encode_all(marks), strict=True)
            if np.array_equal(ids, tokenizer.encode_controls(mark))
        ]

    def jinja(self, separator: str, begin: str | None = None) -> str:
        """Return the template in the language of jinja2; see `ChatTemplate.jinja`."""
        turn = f"'{_BEGIN.text}' + message.role + '\\n' + message.content + '{_END.text}\\n'"
        return _written(begin or separator, turn, f"'{_BEGIN.text}{ANSWER}\\n'")

    def identity(self) -> dict[str, Any]:
        """Return name and version."""
        return {"template": self.name, "version": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Plain(BuiltInTemplate):
    """The role in words before each turn; the separator after an answer."""

    name: ClassVar[TemplateName] = "plain"

    @property
    def end(self) -> ChatPiece:
        """The separator."""
        return _SEPARATOR

    def pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> Iterator[ChatPiece]:
        """Yield the pieces of a conversation."""
        yield _FIRST
        for message in messages:
            _check_calls(message)
            yield ChatPiece("text", f"{message.role.capitalize()}:\n")
            yield ChatPiece("text", message.content)
            yield _SEPARATOR if message.role == ANSWER else ChatPiece("text", "\n\n")
        if add_generation_prompt:
            yield ChatPiece("text", f"{ANSWER.capitalize()}:\n")

    def reserved_texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return nothing: there are no marks but words."""
        del tokenizer
        return ()

    def jinja(self, separator: str, begin: str | None = None) -> str:
        """Return the template in the language of jinja2; see `ChatTemplate.jinja`."""
        end = f"({_quote(separator)} if message.role == '{ANSWER}' else '\\n\\n')"
        turn = f"message.role | capitalize + ':\\n' + message.content + {end}"
        return _written(begin or separator, turn, f"'{ANSWER.capitalize()}:\\n'")

    def identity(self) -> dict[str, Any]:
        """Return name and version."""
        return {"template": self.name, "version": 1}


def read_built_in(source: str, separator: str | None) -> ChatML | Plain | None:
    """Return the built-in template whose text in the language of jinja2 this is; None for others.

    A tokenizer that was exported with it does not say where its answers end if the end is no token.

    Args:
        source: Text of a template.
        separator: Text of the id between documents; what the template begins with when None.
    """
    match = _BEGINNING.match(source)
    if match is None:
        return None
    begin = ast.literal_eval(match[1])
    texts = [begin if separator is None else separator, begin]
    for template in (ChatML(), Plain()):
        if any(template.jinja(text, begin) == source for text in texts):
            return template
    return None


def _check_calls(message: Message) -> None:
    """Raise a ConversationError if a message calls tools."""
    if message.calls:
        raise ConversationError(
            "a message calls a tool, which the templates chatml and plain do not write: put the"
            " text of the call into 'content', or take --template tokenizer"
        )


def _written(begin: str, turn: str, prompt: str) -> str:
    """Return a template of jinja2 that writes a begin, turns, and the begin of an answer."""
    return (
        f"{{{{ {_quote(begin)} }}}}"
        f"{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}"
    )


def _quote(text: str) -> str:
    """Return a literal of jinja2, whose escapes are those of Python."""
    return "'" + text.encode("unicode_escape").decode().replace("'", "\\'") + "'"
