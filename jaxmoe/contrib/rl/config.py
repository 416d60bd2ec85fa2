# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`RolloutsConfig`: how a run that learns from rewards gets its batches."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from jax.sharding import Mesh

from jaxmoe import combinations
from jaxmoe.contrib import rl
from jaxmoe.contrib.rl.rewards import ArithmeticConfig, RewardBase
from jaxmoe.data import Source
from jaxmoe.data.chat import TemplateName
from jaxmoe.data.tokenizer import TokenizerConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.run.config import PretrainConfig, TrainingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.saved import own_data
from jaxmoe.training.feed import FeedConfig

OldName = Literal["trainer", "engine"]
SyncName = Literal["copy", "exact", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutsConfig(FeedConfig):
    """Answers that the model in training writes, and their rewards."""

    name: ClassVar[str] = "rollouts"

    reward: RewardBase = ArithmeticConfig()
    """Prompts, and the reward of an answer."""
    group: int = 8
    """Answers to each prompt, which are compared with each other."""
    prompts: int = 16
    """Prompts of a step."""
    epochs: int = 2
    """Passes over the answers of a step. From the second update on the parameters are others than
    those that the ratios begin from, and the objective cuts ratios that go too far."""
    minibatches: int = 1
    """Updates of a pass, each with an equal part of the prompts, in an order drawn anew for each
    pass."""
    max_tokens: int = 16
    """Tokens of an answer at most; the prompt has the rest of training.sequence_length."""
    template: TemplateName | None = None
    """How a prompt is written as a turn of a conversation: chatml, plain, or tokenizer, the
    chat_template of the model. None leaves prompts as they are."""
    stop: tuple[str, ...] | None = None
    """Texts that end an answer, beside the ids that end a text or an answer of the model. None: the
    end of a line; of a conversation, none."""
    old: OldName = "trainer"
    """Log-probabilities of the drawn tokens that ratios begin from. trainer: computed again before
    the step, by the parameters of the first update. engine: as they were drawn, which also cuts
    ratios between trainer and engine."""
    truncation: float | None = None
    """Largest importance weight of a token for the difference between trainer and engine, with old
    trainer; None for no weights."""
    staleness: int = 0
    """Steps that answers may lag behind: they are drawn by earlier parameters while the model is
    trained. 0 draws them by the parameters that they train. Checkpoints begin with fresh ones."""
    sync: SyncName = "copy"
    """How the engine follows the training where staleness is above 0. copy: arrays are copied.
    exact: elements whose bits changed, as between two processes. bfloat16: likewise, rounded
    first."""
    scorers: int = 1
    """Threads that score answers; more help a function that waits, such as for a server."""
    replay: bool = False
    """Whether training takes the experts that the engine chose, so that both compute the same model
    (router replay); for routers that choose experts for tokens."""
    max_sequences: int = 128
    """Answers that are written together; the others wait."""
    page_size: int = 4
    """Tokens of a page of keys and values. Answers to one prompt share its full pages."""

    def __post_init__(self):
        at_least_one = ("prompts", "epochs", "minibatches", "max_tokens", "max_sequences")
        least_values = {"group": 2} | dict.fromkeys((*at_least_one, "page_size", "scorers"), 1)
        for field, least in least_values.items():
            if (value := getattr(self, field)) < least:
                raise ValueError(f"rl.{field}={value} must be at least {least}")
        if self.prompts % self.minibatches:
            raise ValueError(
                f"rl.prompts={self.prompts} must be divisible by rl.minibatches={self.minibatches}"
            )
        if self.staleness < 0:
            raise ValueError(f"rl.staleness={self.staleness} must be 0 or more")
        if not all(self.stops):
            raise ValueError(
                "rl.stop holds an empty text, which every answer contains: leave it out"
            )
        self.reward.check()
        combinations.check(rl=self)
        if self.truncation is not None and self.truncation <= 0.0:
            raise ValueError(f"rl.truncation={self.truncation} must be above 0, or None")

    @property
    def num_answers(self) -> int:
        """Answers of a step."""
        return self.prompts * self.group

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        if self.stop is not None:
            return self.stop
        return ("\n",) if self.template is None else ()

    @property
    def passes(self) -> int:
        """Passes over the answers of a step."""
        return self.epochs

    @property
    def updates_per_pass(self) -> int:
        """Updates of a pass."""
        return self.minibatches

    def build(
        self, plan: Any, execution: ExecutionConfig, mesh: Mesh, source: Source
    ) -> rl.RolloutFeed:
        """Return where the batches of a run come from; see the base class."""
        turns = None
        if self.template is not None:
            turns = rl.TurnCodec.of(source, _tokenizer(plan.config), self.template)
        return rl.RolloutFeed(
            rl.Learner.of(plan, execution, mesh),
            source,
            turns=turns,
            directory=plan.config.run.directory,
            every=plan.config.checkpoint.every,
            last_step=plan.config.training.steps,
        )

    def check_batches(self, training: TrainingConfig, batch_shards: int) -> None:
        """Refuse answers that devices, micro-batches and updates do not divide."""
        multiple = batch_shards * training.accumulation * self.minibatches
        if training.batch_size % multiple:
            raise ValueError(
                f"rl.prompts x rl.group = {training.batch_size} answers must be divisible by"
                f" rl.minibatches={self.minibatches} times the {batch_shards} devices"
                " that share a batch (mesh replica x data x expert) times training.accumulation="
                f"{training.accumulation}: choose a multiple of {multiple}"
            )

    def check_run(self, config: PretrainConfig) -> None:
        """Refuse rows shorter than an answer.

        Raises:
            ValueError: Names the fields.
        """
        training = config.training
        if training.sequence_length < self.max_tokens:
            raise ValueError(
                f"training.sequence_length={training.sequence_length} must be at least"
                f" rl.max_tokens={self.max_tokens}, and longer by the prompt"
            )


def _tokenizer(config: PretrainConfig) -> TokenizerConfig | None:
    """Return the config of the tokenizer of a run: of its own copy, if it keeps one."""
    if config.run.directory is None:
        return config.data.tokenizer
    return own_data(config, RunDirectory(config.run.directory)).tokenizer
