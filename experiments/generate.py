# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generates text from a run, or from a Hugging Face model.

    jaxmoe generate runs/pretrain/tiny --prompt "def main("
    jaxmoe generate MODEL --prompt "def f(" "class A" --top_p 0.9
    jaxmoe generate MODEL --prompts questions.jsonl --to answers.jsonl
    jaxmoe generate allenai/OLMoE-1B-7B-0924 --prompt "Once"
    jaxmoe generate runs/finetune/tasks --task code
    jaxmoe generate runs/finetune/chats-lora --chat True

A single text appears while it is generated. `--top_k`, `--top_p` and `--min_p` leave out unlikely
tokens, `--stop` names strings that end a text. Lengths are rounded up, so that other prompts of
about the same length compile nothing.

`--chat True` talks: a line is a message, Ctrl-C ends an answer, Ctrl-D the conversation, and
`/reset` begins another. Turns are written by the template of the training (data:chat), by that of
the tokenizer, or by `--template`.

Works for quantised runs too (jaxmoe checkpoint convert); `--cache int4` keeps keys and values
in 4 bits. `--cache_pages 16` lets each token read 16 pages of them, chosen for it, beside the first
and the latest; `--reading.size`, `--reading.score` and others set how. `--layers window:4` keeps
four layers on the device, reads the others from host memory while it computes, and prints what was
moved. `--experts slots:16` does so with routed experts: the device holds sixteen, of any layer, and
the least recently used leaves (`slots:16:lfu` and others choose another). `--run.mesh.data 1` loads
the run on another number of devices than the training used.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.following import after_text, say_next
from experiments.cli.model import with_about, with_model
from experiments.cli.new_path import check_new_path
from experiments.cli.output import announce, dropped_output, say, warn, write
from experiments.cli.process import start_process
from experiments.evaluate import FinishedRunConfig, part_of_cache
from jaxmoe.catalog import choice
from jaxmoe.data.chat import ConversationError, TemplateName
from jaxmoe.errors import ConfigurationError
from jaxmoe.generation.chat import Chat
from jaxmoe.generation.prompts import read_prompts, write_samples
from jaxmoe.generation.text import GenerationConfig, Sample
from jaxmoe.models.decode import HostPrograms
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.run import Run
from jaxmoe.run.provenance.saved import Ends
from jaxmoe.run.provenance.tokens import open_chat
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import WHOLE_CACHE, CacheFormat, CacheReading

_PROMPT = ("def ",)
"""Prompts without a flag."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Run to sample from, and how."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Trained run and checkpoint."""
    prompt: tuple[str, ...] = _PROMPT
    """Text to continue; several texts, of any lengths, are continued together."""
    prompts: str | None = None
    """File with a prompt in each line, instead of --prompt; the field "prompt" of each object in
    a .jsonl file."""
    to: str | None = None
    """File for the samples, an object with "prompt" and "text" in each line; it must not exist.
    They are printed when None."""
    length: int = 300
    """Largest number of tokens to generate."""
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to choose from; all when None."""
    top_p: float | None = None
    """Probability that the most likely tokens to choose from have together; all when None."""
    min_p: float | None = None
    """Smallest probability of a token to choose from, divided by the largest; all when None."""
    seed: int = 0
    """Seed of the sampling."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which is cut before them."""
    eos: Ends = "auto"
    """Whether the end-of-text token ends a text: stop, ignore, or auto, which stops for Hugging
    Face models, runs that began from one, and those imported without data of their own."""
    cache: CacheFormat = "compute"
    """Format of cached keys and values: the compute dtype, or 8 or 4 bits with scales."""
    layers: str | None = None
    """Layers on the device, such as window:4, while the others stay in host memory; None: all."""
    experts: str | None = None
    """Routed experts on the device, such as slots:16 or slots:16:lfu; None: all."""
    drafts: bool = False
    """Whether the modules of the model (model.options.predictor) draft tokens that it checks
    together: the same text in fewer passes."""
    cache_pages: int | None = None
    """Pages of keys and values with the largest scores that a generated token reads, beside the
    first and the latest; all when None. It changes the text."""
    reading: CacheReading = WHOLE_CACHE
    """Part of the cache that a generated token reads: whole, or pages with their size, score and
    eviction; --cache_pages is the short form."""
    task: str | None = None
    """Part of data.mix, by name or number from 0, whose additions an adapter with tasks uses; that
    of adapter.task when None."""
    chat: bool = False
    """Whether to talk in the terminal, line by line, instead of continuing a prompt."""
    system: str | None = None
    """Message of the system with which --chat begins; none when None."""
    template: TemplateName | None = None
    """How --chat writes turns; that of the training data, or of the tokenizer, when None."""

    def __post_init__(self):
        if not self.prompt or not all(self.prompt):
            raise ValueError("prompt is empty: give at least one character")
        self._check_together()
        sampling = SamplingConfig(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )
        GenerationConfig(length=self.length, sampling=sampling, stop=self.stop)
        self.offload()
        part_of_cache(self.reading, self.cache_pages)

    def _check_together(self) -> None:
        """Refuse a flag of which another one makes nothing."""
        if self.prompts is not None and self.prompt != _PROMPT:
            raise ValueError(
                f"prompts={self.prompts} replaces prompt, which is given too: leave one of them out"
            )
        if self.chat:
            flags_of_prompts = {
                "prompt": self.prompt != _PROMPT,
                "prompts": self.prompts is not None,
                "to": self.to is not None,
            }
            if given := [name for name, is_given in flags_of_prompts.items() if is_given]:
                raise ValueError(
                    f"chat=True talks in the terminal and has no use for {', '.join(given)}: leave"
                    " out the one or the other"
                )
            return
        for name in ("system", "template"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for a conversation, and chat is False: add"
                    f" --chat True, or leave {name} out"
                )

    def offload(self) -> HostPrograms | None:
        """Return what keeps parameters in host memory; None where all are on the device.

        Raises:
            ValueError: A flag names nothing, or both are given.
        """
        if self.layers is not None and self.experts is not None:
            raise ValueError(
                f"layers={self.layers} and experts={self.experts} both keep parameters in host"
                " memory: choose one"
            )
        if self.drafts and (self.layers or self.experts):
            raise ValueError(
                "drafts are made by a model on the device, and layers or experts stay in host"
                " memory: leave one of them out"
            )
        if self.layers is not None:
            return choice("host_parameters", "window").parse(self.layers).build()
        if self.experts is not None:
            return choice("host_parameters", "slots").parse(self.experts).build()
        return None


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe generate"
    config = flags.parse_flags(GenerateConfig(), with_model(argv), prog, with_about(__doc__))
    announce(f"generating with {config.run.directory}: reading the checkpoint, compiling ...")
    with flags.exit_on_bad_configuration():
        prompts = list(config.prompt) if config.prompts is None else read_prompts(config.prompts)
        if config.to is not None:
            check_new_path("to", config.to, "file")
        start_process()
    with flags.exit_on_bad_configuration(ConfigurationError):
        offload = config.offload()
        run = Run.open(
            config.run.directory,
            mesh=config.run.mesh if offload is None else MeshConfig(data=1),
            is_on_host=offload is not None,
            cache=config.cache,
            initial=config.run.initial,
        )
        programs = _drafts(run) if config.drafts else offload
        settings = {
            "length": config.length,
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "seed": config.seed,
            "stop": config.stop,
            "eos": config.eos,
            "step": config.run.step,
            "programs": programs,
            "task": config.task,
            "reading": part_of_cache(config.reading, config.cache_pages),
        }
        if config.chat:
            _talk(open_chat(run, system=config.system, template=config.template), settings)
            return _end(config, run, programs)
        if len(prompts) == 1 and config.to is None:
            _print_streamed(run, prompts[0], settings)
            return _end(config, run, programs)
        samples = run.generate(prompts, **settings)
    if samples[0].precision:
        write(samples[0].precision)
    is_saved = config.to is not None and _save(samples, config.to)
    if not is_saved:
        for sample in samples:
            write(str(sample))
    code = _end(config, run, programs)
    return code if config.to is None or is_saved else int(ExitCode.NOT_SAVED)


def _save(samples: Sequence[Sample], path: str) -> bool:
    """Write the samples into a file, and return whether that was possible."""
    try:
        write_samples(samples, path)
    except OSError as error:
        reason = error.strerror or error
        warn(f"error: to={path} cannot be written ({reason}): the samples are printed")
        return False
    write(f"{len(samples)} samples are in {path}")
    return True


def _drafts(run: Run) -> HostPrograms:
    """Return programs in which modules of the model of a run draft.

    Raises:
        ValueError: It has none.
    """
    predictor = run.config.model.extras.predictor
    if predictor is None:
        raise ValueError(
            "drafts=True, and the model of the run has no modules that draft"
            " (model.options.predictor): leave it out"
        )
    return predictor.drafts()


def _end(config: GenerateConfig, run: Run, programs: HostPrograms | None) -> int:
    """Print what was moved or drafted, end the thread that moved it, and say what follows."""
    if programs is not None:
        programs.close()
        say(str(programs))
    has_adapter = run.config.model.adapter is not None
    say_next(after_text(config.run.directory, has_adapter=has_adapter))
    return int(ExitCode.DONE)


def _talk(chat: Chat, settings: dict[str, Any]) -> None:
    """Answer the lines of standard input until it ends."""
    first = chat.messages
    begin = "you> " if sys.stdin.isatty() else ""
    if begin:
        write("Ctrl-C ends an answer, Ctrl-D the conversation, /reset begins another")
    while True:
        try:
            line = input(begin).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/reset":
            chat.messages = first
        elif line:
            with dropped_output():
                print("model> " if begin else "", end="", flush=True)
            try:
                chat.answer(line, _print_now, **settings)
            except ConversationError as error:
                warn(f"error: {error}")
            write("")


def _print_now(text: str) -> None:
    with dropped_output():
        print(text, end="", flush=True)


def _print_streamed(run: Run, prompt: str, settings: dict[str, Any]) -> None:
    """Print the continuation of a prompt while it is generated."""
    shown: str | None = None

    def show(sample: Sample) -> None:
        nonlocal shown
        with dropped_output():
            if shown is None:
                head = f"{sample.precision}\n" if sample.precision else ""
                print(f"{head}{sample.head}", end="")
            print(sample.text[len(shown or "") :], end="")
        shown = sample.text

    show(run.generate(prompt, on_sample=show, **settings))
    write("\n")


if __name__ == "__main__":
    run_command(main)
