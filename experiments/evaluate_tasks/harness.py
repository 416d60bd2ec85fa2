# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapts a run to the model interface of the lm-evaluation-harness.

    model = harness_model(scorer, text)
    lm_eval.simple_evaluate(model, tasks=["arc_easy"])

The run's tokenizer encodes texts without separators. The separator between documents precedes a
text without context, and ends generated text. A model that was imported reads texts as its
tokenizer encodes them, with the token that begins a text, where that adds one; text ends at any of
the ids that its files name. Context and
continuation are split by the harness as for its own models, so that results are comparable.
Generation is greedy; the answers of a task are written together by the serving engine where it
serves the model, else one after the other.

The harness (extra `lm-eval`) is imported when a model is made.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.data import Source
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.optional import require
from jaxmoe.serve.engine import Executor
from jaxmoe.serve.offline import Prompt, answer_all
from jaxmoe.serve.requests import Sampling
from jaxmoe.training.score import Scorer

logger = logging.getLogger(__name__)

_MAX_WRITTEN = 256
"""Default length of an answer, tokens: the harness's default."""


class TextTokens(NamedTuple):
    """Converts text to token ids and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    separator: int
    """Id before and after every document."""
    begin: tuple[int, ...] = ()
    """Ids that `encode` puts before a text, unless it spells them."""
    ends: tuple[int, ...] = ()
    """Ids that end an answer, beside the separator."""

    def encode_rest(self, text: str) -> list[int]:
        """Return the ids of a text without those that begin one."""
        return self.encode(text)[len(self.begin) :]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return all ids that end an answer."""
        return tuple(dict.fromkeys((self.separator, *self.ends)))


class _HarnessCodec:
    """Text of tokens, as the engine reads it."""

    def __init__(self, text: TextTokens):
        self._text = text

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text)

    def decode(self, tokens: Any) -> str:
        return self._text.decode(tokens)


def text_tokens(source: Source, ends: Sequence[int] = ()) -> TextTokens:
    """Return the encoder and decoder of a run's data.

    Args:
        source: Data of the run.
        ends: Ids that end an answer, beside the separator.

    Raises:
        ValueError: The data is not text.
    """
    tokenizer = getattr(source, "tokenizer", None)
    if tokenizer is not None and tokenizer.is_text and getattr(source, "is_imported", False):
        return _imported_tokens(source, tokenizer, tuple(ends))
    if tokenizer is not None and tokenizer.is_text and tokenizer.separator is not None:
        begin = () if tokenizer.begin in (None, tokenizer.separator) else (tokenizer.begin,)
        return TextTokens(
            lambda text: [*begin, *map(int, tokenizer.encode_all([text])[0])],
            lambda tokens: source.decode(_array(tokens)),
            tokenizer.separator,
            begin,
            tuple(ends),
        )
    if tokenizer is None and source.bytes_per_token == 1.0:
        return TextTokens(
            lambda text: list(text.encode()),
            lambda tokens: source.decode(_array(tokens)),
            0,
            ends=tuple(ends),
        )
    raise ValueError(
        "the tasks of the harness are text, and the data of this run is token ids: evaluate it with"
        " experiments.evaluate"
    )


def _imported_tokens(source: Source, tokenizer: Tokenizer, ends: tuple[int, ...]) -> TextTokens:
    """Return the encoder and decoder of an imported model: its tokenizer's."""
    assert tokenizer.separator is not None  # of a text
    begin, num_behind = _add(tokenizer)

    def encode(text: str) -> list[int]:
        spelled = tokenizer.encode_controls(text).tolist()
        if tuple(spelled[: len(begin)]) == begin:  # not twice
            return spelled
        token_ids = tokenizer.encode_prompt(text).tolist()
        return token_ids[: len(token_ids) - num_behind]

    return TextTokens(
        encode, lambda tokens: source.decode(_array(tokens)), tokenizer.separator, begin, ends
    )


def _add(tokenizer: Tokenizer) -> tuple[tuple[int, ...], int]:
    """Return the ids that a tokenizer puts before a prompt, and the number of those behind it."""
    token_ids = tokenizer.encode_prompt("a").tolist()
    alone = tokenizer.encode_controls("a").tolist()
    for first in range(len(token_ids) - len(alone) + 1):
        if token_ids[first : first + len(alone)] == alone:
            return tuple(token_ids[:first]), len(token_ids) - len(alone) - first
    return (), 0


def harness_model(
    scorer: Scorer, text: TextTokens, make_executor: Callable[[], Executor] | None = None
) -> Any:
    """Return an `lm_eval.api.model.LM` that computes with a scorer.

    Args:
        scorer: Scorer of the model.
        text: Encoder and decoder of its tokens.
        make_executor: Returns an executor that writes answers, called with the first of them; None
            writes them with the scorer.

    Raises:
        MissingPackageError: The harness is not installed.
    """
    base = require("lm_eval.api.model", extra="lm-eval").TemplateLM
    tools = require("lm_eval.utils", extra="lm-eval")
    utils = require("lm_eval.models.utils", extra="lm-eval")

    executor: Executor | None = None

    class HarnessModel(base):
        """Answers the harness's requests in token ids."""

        tokenizer_name = "jaxmoe"

        @property
        def eot_token_id(self) -> int:
            return text.separator

        @property
        def prefix_token_id(self) -> int:
            return text.begin[0] if text.begin else text.separator

        @property
        def max_length(self) -> int:
            return scorer.max_length

        @property
        def max_gen_toks(self) -> int:
            return min(_MAX_WRITTEN, scorer.max_length // 2)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            del kwargs
            return text.encode_rest(string) if add_special_tokens is False else text.encode(string)

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            del kwargs
            before = scorer.num_truncated
            answers = scorer.continuations(
                [(context, continuation) for _, context, continuation in requests]
            )
            for (pair, _, _), answer in zip(requests, answers, strict=True):
                if pair is not None:
                    self.cache_hook.add_partial("loglikelihood", pair, answer)
            _warn(scorer.num_truncated - before, len(requests), scorer.max_length)
            return answers

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            del disable_tqdm
            windows = [
                [
                    tools.make_disjoint_window(window)
                    for window in tools.get_rolling_token_windows(
                        token_list=text.encode(request.args[0]),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=scorer.max_length,
                        context_len=1,
                    )
                ]
                for request in requests
            ]
            answers = iter(
                scorer.continuations([pair for window_group in windows for pair in window_group])
            )
            return [sum(next(answers)[0] for _ in window_group) for window_group in windows]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            before = scorer.num_truncated
            if make_executor is not None:
                answers = self._written_together([request.args for request in requests])
            else:
                answers = [self._written(*request.args) for request in requests]
            for request, answer in zip(requests, answers, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, answer)
            _warn(scorer.num_truncated - before, len(requests), scorer.max_length)
            return answers

        def _read_request(self, request: dict[str, Any]) -> tuple[list[str], int]:
            """Return the stop texts and the largest number of tokens of an answer."""
            arguments = utils.normalize_gen_kwargs(request, self.max_gen_toks)
            if arguments.get("do_sample"):
                raise ValueError(
                    "a task asks for sampling (do_sample), and generation is greedy here: set"
                    " do_sample: false in its generation_kwargs"
                )
            return [end for end in arguments["until"] if end], arguments["max_gen_toks"]

        def _written_together(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
            """Return the answers up to their first stop texts, written by the engine."""
            nonlocal executor
            prompts = []
            for context, request in requests:
                ends, most = self._read_request(request)
                tokens = scorer.cut(text.encode(context) or [text.separator], most)
                sampling = Sampling(max_tokens=most, temperature=0.0, stop_ids=text.stop_ids)
                prompts.append(Prompt(tokens=tuple(tokens), sampling=sampling, stop=tuple(ends)))
            assert make_executor is not None  # the caller has looked
            executor = executor or make_executor()
            answers = answer_all(executor, prompts, _HarnessCodec(text))
            return [
                answer_of(text, answer.tokens, prompt.stop)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]

        def _written(self, context: str, request: dict[str, Any]) -> str:
            """Return the answer up to the first stop text."""
            ends, most = self._read_request(request)

            def is_done(written: list[int]) -> bool:
                if written[-1] in text.stop_ids:
                    return True
                return any(end in text.decode(written) for end in ends)

            tokens = text.encode(context) or [text.separator]
            return answer_of(text, scorer.greedy(tokens, most, is_done), ends)

    return HarnessModel()


def answer_of(text: TextTokens, written: Sequence[int], ends: Sequence[str]) -> str:
    """Return the text of an answer up to its first stop text, decoded as the harness does it.

    Args:
        text: Decoder of the tokens.
        written: Token ids; the first of the ids that end an answer ends them.
        ends: Stop texts.
    """
    answer = text.decode([*itertools.takewhile(lambda token: token not in text.stop_ids, written)])
    for end in ends:
        answer = answer.partition(end)[0]
    return answer


def _warn(num_truncated: int, num_requests: int, max_length: int) -> None:
    if num_truncated:
        logger.warning(
            "%d of %d requests are longer than %d tokens: the start of their context is cut off."
            " Raise --max_length up to the length the model was trained on",
            num_truncated,
            num_requests,
            max_length,
        )


def _array(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)
