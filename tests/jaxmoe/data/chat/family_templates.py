# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that write turns, tools and thoughts in the ways of published families.

They are written for the tests, with the constructs of the language that the published ones use:
namespaces that are set in loops, macros, slices of the messages, methods of texts, loop controls,
the date, and white space that is trimmed.
"""

from __future__ import annotations

from typing import NamedTuple


class FamilyTemplate(NamedTuple):
    """A template, and the tokenizer that it needs."""

    source: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None


THINKING = """
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set place = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string %}
        {%- set ns.open = false %}{%- set ns.last = place %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- "<|im_start|>system\\nTools:" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- "<|im_start|>user" }}
        {%- endif %}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- "<|im_end|>\\n" }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content %}{%- set thoughts = "" %}
    {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
        {%- set thoughts = message.reasoning_content %}
    {%- elif "</think>" in content %}
        {%- set thoughts = content.split("</think>")[0].split("<think>")[-1].strip("\\n") %}
        {%- set content = content.split("</think>")[-1].lstrip("\\n") %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" and loop.index0 > ns.last %}
        {{- "<think>\\n" + thoughts + "\\n</think>\\n\\n" }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- '\\n<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
        {%- if call.arguments is string %}{{- call.arguments }}
        {%- else %}{{- call.arguments | tojson }}{%- endif %}{{- "}</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}"""
"""As Qwen3: thoughts of the last turn alone; a prompt may close them."""

NEXT_ROLE = """[gMASK]<sop>
{%- macro visible(content) -%}
    {%- if content is string -%}{{- content }}
    {%- else -%}{%- for item in content -%}{{- item.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{% for m in messages %}
{%- if m.role == "assistant" -%}<|assistant|>
{%- if m.reasoning_content %}{{ "\\n<think>" + m.reasoning_content.strip() + "</think>" }}
{%- endif -%}
{{- "\\n" + visible(m.content) if m.content else "" }}
{%- for tc in m.tool_calls or [] %}
{{ "\\n<tool_call>" + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}
<arg>{{ k }}</arg>{{ v | tojson if v is not string else v }}
{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- "<|observation|>" }}{% endif %}
{{ "\\n" + m.content }}
{%- else -%}<|{{ m.role }}|>
{{ visible(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""As GLM-4.5: an answer ends where the user or a tool speaks."""

CHANNELS = """{%- macro describe(tool) -%}
type {{ tool.function.name }} = (_: {
{%- for name, spec in tool.function.parameters.properties|default({}, true)|items %}
{{ name }}{{ "" if name in (tool.function.parameters.required or []) else "?" }}: {{ spec.type }},
{%- endfor %}
}) => any;
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{{- "Reasoning: " + (reasoning_effort or "medium") + "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set instructions = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set instructions = "" %}{%- set turns = messages %}{%- endif %}
{%- if instructions or tools %}
    {{- "<|start|>developer<|message|>" + instructions }}
    {%- for tool in tools or [] %}{{- "\\n" + describe(tool) }}{%- endfor %}{{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns -%}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary<|message|>" }}
        {{- call.arguments|tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}
        {%- set is_last = loop.last and not add_generation_prompt %}
        {%- if is_last and "thinking" in message %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if is_last else "<|end|>" }}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("a tool speaks first") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""
"""As gpt-oss: the date, thoughts in a channel, another end behind the last answer."""

INSTRUCTIONS = """{{ bos_token }}
{%- if messages[0].role == "system" %}{%- set first = messages[0].content + "\\n\\n" %}
    {%- set turns = messages[1:] %}
{%- else %}{%- set first = "" %}{%- set turns = messages %}{%- endif %}
{%- for m in turns %}
    {%- if m.role == "user" %}
        {{- "[INST] " + (first if loop.first else "") + m.content + "[/INST]" }}
    {%- elif m.role == "tool" %}
        {{- '[RESULT]{"content": ' + m.content|string + ', "call_id": "' + m.tool_call_id + '"}' }}
    {%- elif m.tool_calls is defined %}{{- "[CALLS][" }}
        {%- for call in m.tool_calls %}
            {%- set text = call.function|tojson(separators=(",", ":"), sort_keys=true) %}
            {{- text[:-1] + ',"id":"' + call.id + '"}' + ("," if not loop.last else "]") }}
        {%- endfor %}{{- eos_token }}
    {%- elif m.role == "assistant" %}{{- " " + m.content|trim + eos_token }}
    {%- else %}{{- raise_exception("Only user, tool and assistant: " + m.role) }}{%- endif %}
{%- endfor %}"""
"""As Mixtral: the system within the first turn, a prompt that adds nothing."""

SPLIT = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}"
    "{% set ns = namespace(system='', is_tool=false) %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}"
    "{% endfor %}{{ bos_token }}{{ ns.system }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' and m.get('tool_calls') %}"
    "{% if not ns.is_tool %}{{ '<|Assistant|></think>' }}{% endif %}{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] %}{{ '<|call|>' + call['function']['name'] + '<|sep|>' }}"
    "{{ call['function']['arguments'] | tojson }}{% endfor %}{{ eos_token }}"
    "{% elif m['role'] == 'assistant' %}{% if not ns.is_tool %}{{ '<|Assistant|></think>' }}"
    "{% endif %}{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>', 1)[1] %}{% endif %}{{ content + eos_token }}"
    "{% elif m['role'] == 'tool' %}{% set ns.is_tool = true %}{{ '<|out|>' + m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}"
    "{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"
)
"""As DeepSeek-V3.1: on one line; a prompt opens or closes thoughts, none behind a tool."""

FAMILIES = {
    "thinking": FamilyTemplate(THINKING, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "next role": FamilyTemplate(
        NEXT_ROLE,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<end>"),
        "<end>",
    ),
    "channels": FamilyTemplate(
        CHANNELS,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|return|>",
    ),
    "instructions": FamilyTemplate(
        INSTRUCTIONS, ("<s>", "</s>", "[INST]", "[/INST]", "[CALLS]", "[RESULT]"), "</s>", "<s>"
    ),
    "split": FamilyTemplate(
        SPLIT,
        ("<|begin|>", "<|stop|>", "<|User|>", "<|Assistant|>", "<|call|>", "<|sep|>", "<|out|>"),
        "<|stop|>",
        "<|begin|>",
    ),
}
"""Templates by what is special about them."""
