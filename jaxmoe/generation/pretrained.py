# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads Hugging Face models to use in a program: text in, text out.

pretrained = from_huggingface("OLMoE-1B-7B-0924")
pretrained.generate("The capital of France is", length=20)
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.checkpoint.huggingface import read_fields, read_huggingface
from jaxmoe.checkpoint.huggingface.hub import is_huggingface, model_directory
from jaxmoe.checkpoint.huggingface.tokenizer import bundled_data, eos_ids, read_generation
from jaxmoe.checkpoint.huggingface.weights import Nonfinite
from jaxmoe.data import Source
from jaxmoe.errors import configuration_errors
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text import (
    GenerationConfig,
    LoadedModel,
    OnSample,
    continue_texts,
    encode_prompts,
)
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pretrained:
    """A model with its parameters and tokenizer."""

    model: ModelConfig
    params: Any = dataclasses.field(repr=False)
    """Parameters on one device, as `Transformer` takes them."""
    router_state: Any = dataclasses.field(repr=False)
    """Router state stacked over MoE layers; empty without state."""
    tokenizer: Source = dataclasses.field(repr=False)
    """Encodes prompts and decodes text; without a tokenizer.json, text is token ids as numbers."""
    eos_ids: tuple[int, ...] = ()
    """Token ids that end a text."""
    execution: ExecutionConfig = ExecutionConfig()
    """How the model is computed."""

    def generate(
        self,
        prompt: str | list[str] | list[int] | list[list[int]] | np.ndarray,
        *,
        length: int = 300,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignores_eos: bool = False,
        on_sample: OnSample | None = None,
    ) -> Any:
        """Continue a text, or several together.

        Args:
            prompt: Text to continue, or token ids; or a list of several of any lengths.
            length: Largest number of tokens to generate.
            temperature: Divisor of the logits; 0 takes the most likely token.
            top_k: Number of most likely tokens to choose from; all when None.
            top_p: Probability that the most likely tokens to choose from have together.
            min_p: Smallest probability to choose from, divided by the largest.
            seed: Seed of the sampling.
            stop: Strings that end a text, which is cut before them.
            ignores_eos: Whether a text goes on after the end-of-text token.
            on_sample: Called with the sample of a single prompt as its text grows.

        Returns:
            The continuation of each prompt: text for text, token ids for token ids.

        Raises:
            ConfigurationError: An argument is out of range, or a prompt cannot be encoded.
        """
        is_one = isinstance(prompt, str) or (
            len(prompt) > 0 and isinstance(prompt[0], int | np.integer)
        )
        prompts: Any = [prompt] if is_one else prompt
        is_text = len(prompts) > 0 and isinstance(prompts[0], str)
        with configuration_errors():
            sampling = SamplingConfig(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
            )
            config = GenerationConfig(
                length=length,
                sampling=sampling,
                seed=seed,
                eos_ids=() if ignores_eos else self.eos_ids,
                stop=tuple(stop),
            )
            rows = encode_prompts(self.tokenizer, prompts) if is_text else prompts
            samples = continue_texts(
                LoadedModel(
                    config=self.model,
                    params=self.params,
                    router_state=self.router_state or None,
                    execution=self.execution,
                ),
                self.tokenizer,
                rows,
                config,
                on_sample=on_sample,
            )
        results = [sample.text if is_text else list(sample.token_ids) for sample in samples]
        return results[0] if is_one else results


def from_huggingface(
    directory: str | os.PathLike[str],
    *,
    execution: ExecutionConfig | None = None,
    nonfinite: Nonfinite = "refuse",
) -> Pretrained:
    """Load a model of `transformers` with its tokenizer, on one device.

    For parameters alone, on a mesh or from memory, see `jaxmoe.checkpoint.from_huggingface`.

    Args:
        directory: Directory with config.json, safetensors files and optionally tokenizer.json; or a
            name on the Hugging Face hub, which is downloaded.
        execution: How the model is computed; defaults when None.
        nonfinite: Whether weights that are NaN or infinite are refused or kept.

    Raises:
        ConfigurationError: There is no such model, or this library does not compute it.
        MissingPackageError: A package that reads the files is not installed.
    """
    with configuration_errors():
        place = pathlib.Path(model_directory(directory, "directory"))
        if not is_huggingface(place):
            raise ValueError(
                f"directory={directory} holds no Hugging Face model (a config.json with"
                " model_type): open a run with jaxmoe.run.Run.open"
            )
        model = read_huggingface(place, nonfinite=nonfinite)
        fields = read_fields(place)
        return Pretrained(
            model=model.model,
            params=model.params,
            router_state=model.router_state,
            tokenizer=bundled_data(place, fields).build(),
            eos_ids=eos_ids(fields, read_generation(place)),
            execution=execution or ExecutionConfig(),
        )
