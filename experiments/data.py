# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the data of a run before training: documents, lengths, rows and their borders.

    jaxmoe data inspect [recipe] --data.path docs/ [--training.sequence_length 512]

Takes the recipe and the flags of `jaxmoe pretrain`, and reads, tokenises and packs in the same
way, with the same cache. Of conversations (data:chat) it shows some with the text that is trained
in green, or in [[ ]] where the output is no terminal. Compiles nothing. Writes summary.json to
runs/data/<name>.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import write
from experiments.cli.process import configure_logging
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.data import Loader, Mixture, PackedSource, Row, Source, Split
from jaxmoe.errors import printable
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory

_BAR = 40
"""Width of the longest bar, characters."""
_SHOWN_ROWS = 3
_SHOWN_TOKENS = 60
_SHOWN_DOCUMENTS = 4
_SHOWN_LINES = 24
_BRACKETS = ("[[", "]]")
_COLOURS = ("\x1b[32m", "\x1b[0m")
"""What begins and ends trained text, in a file and on a terminal."""
_SPLITS: tuple[Split, Split] = ("train", "validation")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    arguments = list(argv)
    prog = "jaxmoe data inspect"
    if arguments[:1] in (["-h"], ["--help"]):
        arguments.insert(0, "inspect")
    if arguments[:1] != ["inspect"]:
        argument = repr(arguments[0]) if arguments else "nothing"
        cli.fail(f"jaxmoe data has one command, inspect, and was given {argument}: {prog}")
    recipe, config = cli.parse(RECIPES, DEFAULT, arguments[1:], prog, __doc__ or "")
    name = config.run.name or recipe
    directory = RunDirectory(config.run.directory or f"runs/data/{name}")
    configure_logging()  # shows how much of long data has been read
    with cli.exit_on_bad_configuration():
        directory.check_free_of_runs()
        with directory.held():
            source: Source = config.data.build(config.training.seed)
            text = page(config, source)
            directory.write_summary(summarise(config, source))
            write(text)
    write(f"\nsee {directory.summary_file}")
    return int(cli.ExitCode.DONE)


def summarise(config: PretrainConfig, source: Source) -> dict[str, Any]:
    """Return the content of summary.json."""
    length = config.training.sequence_length
    return {
        "status": "done",
        "sequence_length": length,
        "vocab_size": source.vocab_size,
        "bytes_per_token": source.bytes_per_token,
        **{split: _split_numbers(source, split, length) for split in _SPLITS},
        "parts": {
            name: {split: _split_numbers(part, split, length) for split in _SPLITS}
            for name, part in _parts(source).items()
        },
        **_weights(source, length),
        "data": source.fingerprint(),
    }


def page(config: PretrainConfig, source: Source) -> str:
    """Return the text to print."""
    training = config.training
    length = training.sequence_length
    size = training.batch_size
    lines = [source.describe(length), ""]
    for split in _SPLITS:
        rows = source.num_rows(split, length)
        lines.append(f"{split:10} {_numbers_in_words(source, split, length)}")
        if rows is not None and split == "train":
            share = training.batch_sizes.rows_before(training.steps) / max(1, rows)
            lines.append(f"{'':10} {training.steps} steps of {size} rows are {share:.3g} epochs")
    for name, part in _parts(source).items():
        lines += ["", f"part {name}"]
        lines += [f"{split:10} {_numbers_in_words(part, split, length)}" for split in _SPLITS]
    for name, part in (_parts(source) or {"": source}).items():
        if isinstance(part, PackedSource):
            heading = f"tokens in a document ({f'{name} train'.strip()})"
            lines += ["", heading, *_histogram(_lengths(part, "train"))]
    loader = Loader(source, batch_size=1, sequence_length=length, seed=training.seed)
    lines += ["", f"rows of {length} + 1 tokens, as training draws them ('|' is a separator)"]
    for number in range(_SHOWN_ROWS):
        lines += [f"row {number}", *_show(source, loader.row(number))]
    if isinstance(source, PackedSource):
        lines += _select_trained(source, length)
    return "\n".join(lines)


def _parts(source: Source) -> dict[str, Source]:
    """Return the parts of a mixture; empty for other sources."""
    return source.parts if isinstance(source, Mixture) else {}


def _numbers_in_words(source: Source, split: Split, length: int) -> str:
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {value:,.4g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value:,}"
        for name, value in _split_numbers(source, split, length).items()
        if value is not None
    )
    return numbers or "unlimited rows"


def _split_numbers(source: Source, split: Split, length: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if isinstance(source, PackedSource):
        lengths = _lengths(source, split)
        numbers = {
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "shortest": int(lengths.min()),
            "median": int(np.median(lengths)),
            "longest": int(lengths.max()),
            "packing_efficiency": source.packed(split, length).efficiency(),
        }
    return {**numbers, "rows": source.num_rows(split, length)}


def _lengths(source: PackedSource, split: Split) -> np.ndarray:
    return source.documents[split].lengths


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """Yield a histogram of document lengths by powers of two."""
    powers = np.array([int(n).bit_length() - 1 for n in lengths.tolist() if n])
    counts = np.bincount(powers)
    first = int(powers.min())
    for power in range(first, len(counts)):
        bar = "#" * math.ceil(_BAR * counts[power] / counts.max())
        yield f"{2**power:>10,} to {2 ** (power + 1) - 1:>11,}  {counts[power]:>9,}  {bar}".rstrip()


def _show(source: Source, row: Row) -> Iterator[str]:
    """Yield position and beginning of each document of a row."""
    first = next(iter(_parts(source).values()), source)  # parts share one tokenizer
    separator = first.tokenizer.separator if isinstance(first, PackedSource) else None
    segments = np.ones(len(row.tokens), np.int32) if row.segment_ids is None else row.segment_ids
    for segment in range(1, int(segments.max()) + 1):
        places = np.flatnonzero(segments == segment)
        shown = row.tokens[places][:_SHOWN_TOKENS]
        parts = np.split(shown, np.flatnonzero(shown == separator) + 1)
        texts = ((source.decode(part), part[-1] == separator) for part in parts if len(part))
        text = " ".join(text + "|" * bool(is_end) for text, is_end in texts)
        dots = " ..." if len(places) > len(shown) else ""
        yield f"  {places[0]:>6} to {places[-1]:>6}  {text.encode('unicode_escape').decode()}{dots}"
    if padding := int((segments == 0).sum()):
        yield f"  {len(segments) - padding:>6} to {len(segments) - 1:>6}  (padding)"


def _weights(source: Source, length: int) -> dict[str, Any]:
    """Return what is trained of documents with loss weights; empty for other sources."""
    counts = source.weight_counts(length) if isinstance(source, PackedSource) else None
    return {} if counts is None else {"weights": dataclasses.asdict(counts)}


def _select_trained(source: PackedSource, length: int) -> Iterator[str]:
    """Yield what is trained and left out of documents with loss weights, and some of them."""
    counts = source.weight_counts(length)
    documents = source.documents["train"]
    if counts is None:
        return
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    marks = _COLOURS if is_terminal else _BRACKETS
    share = counts.trained / max(1, counts.tokens)
    yield from ("", f"{counts.documents:,} {source.unit}, {share:.1%} of their tokens are trained")
    reasons = {
        "records cannot be used": counts.skipped,
        f"{source.unit} without a token to train on": counts.untrained,
        f"{source.unit} without a trained token within a row": counts.unused,
        f"pieces of {source.unit} that are longer than a row": counts.pieces,
    }
    yield from (f"  left out: {count:,} {reason}" for reason, count in reasons.items() if count)
    if counts.long:
        yield f"  {counts.fate}: {counts.long:,} {source.unit} longer than {length + 1} tokens"
    where = "green" if is_terminal else " ".join(marks)
    yield from ("", f"{source.unit} of the train split, what is trained in {where}")
    for number in range(min(_SHOWN_DOCUMENTS, len(documents.lengths))):
        tokens = documents.document(number)
        weights = documents.document_weights(number)
        assert weights is not None  # there are counts
        yield f"{number}"
        lines = list(_mark(source, tokens, weights > 0, marks))
        yield from (f"  {line}".rstrip() for line in lines[:_SHOWN_LINES])
        if len(lines) > _SHOWN_LINES:
            yield f"  ... ({len(tokens):,} tokens)"


def _mark(
    source: PackedSource, tokens: np.ndarray, is_trained: np.ndarray, marks: tuple[str, str]
) -> Iterator[str]:
    """Yield the lines of a document, with marks around what is trained in each line."""
    borders = np.flatnonzero(np.diff(is_trained.astype(np.int8))) + 1
    line = ""
    for part, trained in zip(
        np.split(tokens, borders), is_trained[np.append(0, borders)], strict=True
    ):
        first, *following = source.tokenizer.spell(part).split("\n")
        for number, text in enumerate([first, *following]):
            if number:
                yield line
                line = ""
            shown = printable(text)
            line += f"{marks[0]}{shown}{marks[1]}" if trained and shown else shown
    if line:
        yield line


if __name__ == "__main__":
    run_command(main)
