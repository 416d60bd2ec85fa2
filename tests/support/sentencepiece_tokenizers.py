# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer.json as those of SentencePiece become: a mark for spaces, bytes as fallback."""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, processors, trainers

BEGIN, END = "<s>", "</s>"
_SPACE = "\u2581"
_TEXT = "hello world this is a small text about cats and dogs The answer is 42"


def write_sentencepiece(place: pathlib.Path, *, has_bos: bool = True) -> pathlib.Path:
    """Write the file into a directory; its post-processor puts <s> before a prompt, if asked."""
    place.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", BEGIN, END]
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        initial_alphabet=[_SPACE],
        show_progress=False,
    )
    words = [f"{_SPACE}{word}" for word in _TEXT.split()]
    made.train_from_iterator(words * 9, trainer)
    before = [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    made.normalizer = normalizers.Sequence(before)
    if has_bos:
        one = [(BEGIN, made.token_to_id(BEGIN))]
        made.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=one
        )
    found = json.loads(made.to_str())
    found["added_tokens"] = [one for one in found["added_tokens"] if one["content"] in special]
    (place / "tokenizer.json").write_text(json.dumps(found))
    return place
