# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""An agent of OpenAI's library calls tools through the endpoint, in a loop, unchanged."""

import asyncio
import dataclasses
import functools
from typing import Any, Literal

import pytest

from jaxmoe.data import TextOnlyConfig
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.http.grammars import Grammars
from jaxmoe.serve.http.tools import TOOL_PARSERS
from jaxmoe.serve.plan import Shapes
from tests.jaxmoe.serve.http.test_tools import CHAT
from tests.support.endpoint import serving
from tests.support.serving import MODEL, params

CODEC = TextOnlyConfig().build()
ENDS = tuple(range(224, 256))
"""An eighth of the tokens ends an answer, so that one ends by itself."""


@functools.cache
def text_executor():
    model = dataclasses.replace(MODEL, vocab_size=CODEC.vocab_size)
    sizes = ExecutorConfig(
        num_pages=256,
        page_size=16,
        shapes=Shapes(singles=4, pieces=((1, 64),)),
        context_lengths=(1024,),
    )
    return ModelExecutor(model, params(model), config=sizes)


def _serving():
    return serving(
        text_executor(),
        codec=CODEC,
        chat=CHAT,
        eos_ids=ENDS,
        grammars=Grammars(CODEC, CODEC.vocab_size, ENDS),
        tool_parser=TOOL_PARSERS["hermes"](),
    )


async def _streamed(agents, agent, text):
    """Return the answer of an agent that reads events."""
    answer = agents.Runner.run_streamed(agent, text, max_turns=3)
    kinds = {event.type async for event in answer.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_a_tool_and_answers(kind, is_streamed):
    """The tool is required in the first turn; the model, which is not trained, writes any text."""
    agents: Any = pytest.importorskip(
        "agents", reason="openai-agents is not installed: pip install openai-agents"
    )
    agents.set_tracing_disabled(True)
    calls = []

    def count(thing: Literal["apples", "pears"], is_ripe: bool) -> str:
        """Count things."""
        calls.append((thing, is_ripe))
        return f"three {thing}"

    with _serving() as (address, _, _):
        client = agents.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        agent = agents.Agent(
            name="counter",
            instructions="count",
            tools=[agents.function_tool(count)],
            model=getattr(agents, kind)(model="speller", openai_client=client),
            model_settings=agents.ModelSettings(
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=400,
                temperature=1.0,
                extra_body={"seed": 3, "min_tokens": 8},
            ),
        )
        if is_streamed:
            answer = asyncio.run(_streamed(agents, agent, "How many?"))
        else:
            answer = agents.Runner.run_sync(agent, "How many?", max_turns=3)
    assert len(calls) == 1 and calls[0][0] in ("apples", "pears") and calls[0][1] in (True, False)
    names = [type(item).__name__ for item in answer.new_items]
    assert names == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert answer.new_items[1].output == f"three {calls[0][0]}"
    assert answer.final_output and len(answer.raw_responses) == 2
