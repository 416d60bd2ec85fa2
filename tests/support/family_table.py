# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what works for each family of transformers, and writes the table of the documentation.

    python -m tests.support.family_table          # writes `.docs/concepts/families.md`
    python -m tests.support.family_table mixtral  # writes the rows of some families

The logits are compared with those that a model of transformers with the same tensors left in the
golden file of the family; parity of further variants is in `test_parity.py`.
"""

import dataclasses
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe import Transformer, generate
from jaxmoe.checkpoint import read_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface.family import family
from jaxmoe.checkpoint.huggingface.files import open_tensors
from jaxmoe.data.batch import Batch
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.planning.memory import least_memory
from jaxmoe.planning.sizes import Sizes
from jaxmoe.serve import Sampling
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from tests.jaxmoe.planning.test_planning import plan_of
from tests.support import huggingface_models
from tests.support.serving import SIZES, serve

PAGE = pathlib.Path(__file__).resolve().parents[2] / ".docs" / "concepts" / "families.md"
FIRST, LAST = "<!-- table of families -->", "<!-- end of the table -->"
COLUMNS = ("family", "layers", "logits", "packed", "cache", "files", "trains", "serves", "plans")
CLOSE = 1e-4
"""Largest difference of logits, relative to the largest, that counts as equal."""
LENGTH = 9


@dataclasses.dataclass
class Case:
    """A tiny model of a family, with its tensors read."""

    name: str
    model: ModelConfig
    params: Any
    state: Any
    golden: huggingface_models.Golden

    @classmethod
    def of(cls, name: str) -> "Case":
        golden = huggingface_models.read(name)
        model, params, state = read_huggingface(golden.config, golden.state)
        return cls(name, model, params, state or None, golden)

    def logits(self, tokens, **options) -> np.ndarray:
        """Return the logits of one forward pass."""
        model = Transformer(self.model)
        output = jax.jit(
            lambda params, tokens: (
                model.apply({"params": params}, tokens, router_state=self.state, **options).logits
            )
        )(self.params, jnp.asarray(tokens))
        return np.asarray(output)


def row(name: str) -> dict[str, str]:
    """Return the cells of a family by column."""
    case = Case.of(name)
    return {
        "family": f"`{name}`",
        "layers": layers_of(case.model),
        "logits": f"{logits_difference(case):.0e}",
        "packed": word(packs_documents(case)),
        "cache": word(decodes_with_a_cache(case)),
        "files": word(writes_the_same_tensors(case)),
        "trains": word(trains(case)),
        "serves": word(serves(case)),
        "plans": word(plans(case)),
    }


def word(holds: bool) -> str:
    """Return yes or no."""
    return "yes" if holds else "no"


def layers_of(model: ModelConfig) -> str:
    """Return the choices of the layers that are not those of a plain model, one after another."""
    names = []
    for mixer in model.mixers:
        names += [mixer.name, *options_of(getattr(mixer, "options", None))]
        if getattr(mixer, "window", None) is not None:
            names.append("window")
        if getattr(mixer, "chunks", None) is not None:
            names.append("chunks")
        if getattr(mixer, "qk_norm", None) == "unit":
            names.append("qk norm unit")
        if getattr(mixer, "query_temperature", None) is not None:
            names.append("query temperature")
        if getattr(mixer, "positions", "rotary") == "none":
            names.append("no positions")
    if model.moe is not None:
        names += [model.moe.router.name, *options_of(model.moe.options)]
        names += [model.moe.activation.name] if model.moe.activation.name != "swiglu" else []
        names += ["shared experts"] if model.moe.num_shared_experts else []
        names += ["idle experts"] if model.moe.zero_computation is not None else []
    fed = [kind.feed_forward.name for kind in model.kinds]
    names += [name for name in fed if name not in ("dense", "moe", "none")]
    names += [model.norm.name] if model.norm.name != "rms" else []
    names += [model.residual.name] if model.residual.name != "standard" else []
    names += options_of(model.options)
    return ", ".join(dict.fromkeys(names))


def options_of(options: Any) -> list[str]:
    """Return the fields of a record of options that are set, as words."""
    if options is None:
        return []
    words = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            kind = getattr(value, "name", value if isinstance(value, str) else None)
            text = field.name.removeprefix("has_").replace("_", " ")
            words.append(f"{text} {kind}" if kind else text)
    return words


def logits_difference(case: Case) -> float:
    """Return the largest difference of logits from those of transformers, over the largest."""
    logits = case.logits(case.golden.tokens)
    return float(np.abs(logits - case.golden.logits).max() / np.abs(case.golden.logits).max())


def packs_documents(case: Case) -> bool:
    """Return whether two documents of one row have the logits that they have alone."""
    first, second = case.golden.tokens[:, :5], case.golden.tokens[:, 5:]
    ids = np.repeat([[1] * 5 + [2] * 4], len(first), axis=0)
    places = np.repeat([[*range(5), *range(4)]], len(first), axis=0).astype(np.int32)
    packed = case.logits(
        case.golden.tokens, segment_ids=jnp.asarray(ids, jnp.int32), positions=jnp.asarray(places)
    )
    alone = np.concatenate([case.logits(first), case.logits(second)], axis=1)
    return is_close(packed, alone)


def is_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether logits are equal up to rounding."""
    return bool(np.abs(actual - expected).max() <= CLOSE * np.abs(expected).max())


def decodes_with_a_cache(case: Case) -> bool:
    """Return whether greedy tokens from a cache are those of whole passes."""
    prompts = case.golden.tokens[:, :5]
    tokens = generate(
        case.model,
        case.params,
        jnp.asarray(prompts),
        num_tokens=4,
        key=jax.random.key(0),
        temperature=0.0,
        router_state=case.state,
    )
    whole = case.logits(np.concatenate([prompts, np.asarray(tokens)], axis=1))
    return bool(np.array_equal(whole[:, 4:-1].argmax(-1), tokens))


def writes_the_same_tensors(case: Case) -> bool:
    """Return whether an export has the tensors of transformers, bit for bit.

    Tensors that follow from the config are computed, and compared in `test_huggingface.py`.
    """
    constants = family(case.name).constants(case.model)
    with tempfile.TemporaryDirectory() as folder:
        place = to_huggingface(
            case.model,
            case.params,
            pathlib.Path(folder) / "it",
            router_state=case.state,
            family=case.name,
        )
        tensors = {name: np.asarray(tensor) for name, tensor in open_tensors(place).items()}
    state = case.golden.state
    names = tensors.keys() - constants
    return tensors.keys() == state.keys() and all(
        np.array_equal(tensors[name], state[name]) for name in names
    )


def trains(case: Case) -> bool:
    """Return whether five steps of AdamW lower the loss, and every matrix has moved."""
    optimizer = optax.adamw(3e-3)
    params = jax.tree.map(jnp.array, case.params)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        router_state=initial_router_state(case.model),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
    tokens = case.golden.tokens
    batch = Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_weights=np.ones((len(tokens), LENGTH - 1), np.float32),
        segment_ids=np.ones((len(tokens), LENGTH - 1), np.int32),
    )
    step = make_train_step(case.model, optimizer)
    losses = []
    for _ in range(5):
        with jax.numpy_dtype_promotion("standard"):  # for optax
            state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), case.params, state.params)
    return losses[-1] < losses[0] and all(jax.tree.leaves(moved))


def serves(case: Case) -> bool:
    """Return whether the engine answers with the tokens of whole passes."""
    try:
        executor = ModelExecutor(case.model, case.params, case.state, config=SIZES)
    except ValueError:  # refused in words: recurrent states have no pages
        return False
    prompts = case.golden.tokens[:2, :5].tolist()
    requests = {
        index: (tuple(prompt), Sampling(max_tokens=4, temperature=0.0))
        for index, prompt in enumerate(prompts)
    }
    answers = serve(requests, dict.fromkeys(requests, 0), run=executor.run).answers
    rows = np.asarray([prompt + answers[index] for index, prompt in enumerate(prompts)], np.int32)
    whole = case.logits(rows)
    return bool(np.array_equal(whole[:, 4:-1].argmax(-1), rows[:, 5:]))


def plans(case: Case) -> bool:
    """Return whether the memory of a step is known without a device."""
    plan = plan_of(case.model, MeshConfig(), batch_size=2, length=8)
    return least_memory(Sizes.of(plan), "cpu").total > 0


def line_of(cells: dict[str, str]) -> str:
    """Return a line of the table."""
    return f"| {' | '.join(cells.values())} |"


def written_rows() -> dict[str, dict[str, str]]:
    """Return the rows of the page by family."""
    text = PAGE.read_text(encoding="utf-8")
    lines = re.search(f"{FIRST}\n(.*?)\n{LAST}", text, re.DOTALL)[1].split("\n")[2:]
    rows = [dict(zip(COLUMNS, line.strip("| ").split(" | "), strict=True)) for line in lines]
    return {cells["family"].strip("`"): cells for cells in rows}


def main(names: Sequence[str]) -> None:
    """Write the rows of families, of all of them where none is named."""
    text = PAGE.read_text(encoding="utf-8")
    rows = written_rows() if names else {}
    for name in names or huggingface_models.CONFIGS:
        rows[name] = row(name)
        print(line_of(rows[name]), file=sys.stderr, flush=True)
    rows = {name: rows[name] for name in huggingface_models.CONFIGS if name in rows}
    lines = [line_of(dict.fromkeys(COLUMNS, "---")), *map(line_of, rows.values())]
    lines.insert(0, line_of({column: column for column in COLUMNS}))
    body = "\n".join(lines)
    text = re.sub(f"{FIRST}\n.*?{LAST}", f"{FIRST}\n{body}\n{LAST}", text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
