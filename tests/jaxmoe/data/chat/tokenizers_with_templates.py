# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with chat templates, in directories as Hugging Face writes them."""

import json
import pathlib

from tests.support.huggingface_directories import END, tokenizer_json

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if not message.role in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n\n' + message.content | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n\n' }}
{%- endif %}"""
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}"
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes the last answer in another way than the others, as templates of reasoning models do."""
MARKS = ("<|im_start|>", "<|im_end|>")


def write_tokenizer(place: pathlib.Path, template: str | None = CHATML, **fields) -> pathlib.Path:
    """Write a tokenizer with the marks as tokens, and a template in tokenizer_config.json."""
    place.mkdir(exist_ok=True)
    found = tokenizer_json()
    first = found["added_tokens"][0]
    for number, mark in enumerate(MARKS, start=1):
        found["added_tokens"].append({**first, "id": first["id"] + number, "content": mark})
    (place / "tokenizer.json").write_text(json.dumps(found))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": END, "__type": "AddedToken", "special": True},
        "eos_token": END if template == LLAMA else MARKS[1],
        **({} if template is None else {"chat_template": template}),
        **fields,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place
