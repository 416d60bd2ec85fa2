# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `ParameterView`: the parameters that a part of a model computes with.

    rewrite(params, shared, part)        parameters of a layer, or of a module outside the layers
    mix(own, half, placement, train)     what each token has of several additions to matrices

A `ParameterView` belongs to a model: its adapter. A `View` is made for one call, by estimators and
probes:

    rewrite(parameters of one part, own parameters of the view there, name of part) -> parameters

A part is one layer of a scan, or a module outside the scans (embedding, final norm, head). In a
scan the rewriting happens inside the loop over layers, so that the rewritten parameters of one
layer exist at a time. The remat policy `SaveOutsideViews` stores nothing that is computed between
two checkpoint names (`VIEWING`, `VIEWED`): a backward pass rewrites the parameters again.

A user of the seam makes a `View` and calls `view_outside` before the forward pass, which then takes
what remains as `view`. Arrays that all layers read may be closed over by the function; gradients
reach them. An adapter of the view form has its rewriting applied by `forward` itself, after that of
a `View`: see `jaxmoe/adapters/view.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final

import jax
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from jaxmoe.declarations import Declaration, Deferred
from jaxmoe.execution import ExecutionConfig
from sharding.constrain import Placement
from sharding.products.low_rank import Mix
from sharding.products.quantized import Packed

Tree = dict[str, Any]
Losses = dict[str, Float[Array, ""]]
Rewrite = Callable[[Tree, Any, str], Tree]
"""(parameters of a part, own parameters of the view for the part, name of the part) -> parameters
that the part computes with. The name is that of a module below the root, such as `layers` or
`embedding`; for a place in a period of layers `<scan>/<place>`. A part without own parameters is
given {}."""

VIEW: Final = "view"
"""Collection of the view's own parameters beside "params"."""
VIEWING: Final = "viewing"
"""Checkpoint name of parameters before they are rewritten."""
VIEWED: Final = "viewed"
"""Checkpoint name of rewritten parameters."""
_RESHAPES: Final = frozenset(("reshape", "transpose", "squeeze", "expand_dims"))


# Not checked at run time: tree functions also fill records with shapes and specs.
@typing.no_type_check
@struct.dataclass
class HalfInputs:
    """What the mix of the tokens in half a layer may depend on."""

    x: Float[Array, "B S D"]
    """Normed input of the half."""
    token_mask: Bool[Array, "B S"]
    """False for padding."""
    context: dict[str, Array]
    """Further [B S] arrays: `index`, the number of each token in the batch, and those of
    `ParameterView.reads` that the batch has."""
    key: Key[Array, ""] | None
    """PRNG key of this half of the layer and step; None without noise."""


class ParameterView:
    """What a model's own view of its parameters does; each method is neutral by default."""

    __slots__ = ()

    reads: ClassVar[tuple[str, ...]] = ()
    """Names of arrays of `Batch.extra` that `mix` finds in `HalfInputs.context`."""

    def rewrite(self, params: Tree, shared: Tree, part: str) -> Tree:
        """Return the parameters that one layer, or one module outside the layers, computes with.

        They may have factors (`:down`, `:up`, `:scale`), with which the products multiply. What is
        not rewritten is returned as it came, so that a second call changes nothing.

        Args:
            params: Parameters of the part, nested dicts, with the view's own beside the matrices
                (`q:name` beside `q`).
            shared: Own parameters at the root of the model's, by name.
            part: Path of the stack of the layer, or name of the module.
        """
        del shared, part
        return params

    def mix(
        self, own: dict[str, Array], half: HalfInputs, placement: Placement, *, train: bool
    ) -> tuple[Mix | None, Losses]:
        """Return what each token has of the additions to the matrices of half a layer, and weighted
        losses of the layer to add in training.

        Args:
            own: Parameters `<half>:<name>` of this half, by name, without a dimension of layers;
                empty where there are none.
            half: Input of the half.
            placement: Layout rules.
            train: Whether the step is of training.
        """
        del own, half, placement, train
        return None, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """A function that rewrites parameters, and its own parameters."""

    rewrite: Rewrite
    own: Tree
    """Own parameters by module below the root; those of a scan have a leading [layers], and in a
    period of layers are by place in it first. Modules without any are left out."""


def view_outside(params: Tree, view: View, layers: Collection[str]) -> tuple[Tree, View]:
    """Return parameters with those outside the layers rewritten, and the view of the layers.

    Args:
        params: Parameters of the model.
        view: View of all parameters.
        layers: Names of the scans of layers.
    """

    def use(name: str) -> Any:
        if name in layers or not isinstance(params[name], dict):
            return params[name]
        return view.rewrite(params[name], view.own.get(name, {}), name)

    of_layers = {name: arrays for name, arrays in view.own.items() if name in layers}
    return {name: use(name) for name in params}, View(rewrite=view.rewrite, own=of_layers)


def rewritten(block: Any, rewrite: Rewrite, part: str, dtype: Any) -> Any:
    """Return the block of a layer with parameters that are rewritten before it uses them.

    Args:
        block: Module class of a layer, inside the scan.
        rewrite: Function of its parameters.
        part: Name of the part.
        dtype: Dtype of matrices in products, in which they are given to the layer: its copies in
            that dtype are a part of the rewriting.
    """

    def read(leaf: Array, declaration: Declaration) -> Array:
        if declaration.role == "adapter":
            return leaf
        return checkpoint_name(declaration.as_used(checkpoint_name(leaf, VIEWING), dtype), VIEWED)

    def view(variables: Tree) -> Tree:
        params = _name_activations(variables["params"], VIEWING)
        params = rewrite(params, variables.get(VIEW, {}), part)
        params = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, Packed) else Deferred(leaf, read=read),
            _name_activations(params, VIEWED),
            is_leaf=lambda node: isinstance(node, Packed),
        )
        return {"params": params, VIEW: {}}

    return nn.map_variables(block, ["params", VIEW], trans_in_fn=view)


def _name_activations(params: Tree, name: str) -> Tree:
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), params)


class SaveOutsideViews:
    """Remat policy that stores what another policy does, but nothing of a rewriting.

    A policy is asked for each operation in the order of the program, so that it knows from the
    checkpoint names whether it is inside of a rewriting. JAX's policies know names alone, and would
    store the value that has been named. Other shapes of a value are not stored either: a kernel may
    ask for them of a rewritten parameter.
    """

    def __init__(self, policy: Callable[..., Any]):
        self._policy = policy
        self._is_inside = False

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """Return whether the result of an operation is stored."""
        name = params.get("name") if primitive.name == "name" else None
        if name in (VIEWING, VIEWED):
            self._is_inside = name == VIEWING
            return False
        if self._is_inside or primitive.name in _RESHAPES:
            return False
        return self._policy(primitive, *avals, **params)


def check_view(execution: ExecutionConfig) -> None:
    """Refuse an execution that uses other arrays than the parameters that a view rewrites.

    Args:
        execution: How the model is computed.

    Raises:
        ValueError: The layout gathers parameters itself, or keeps them in host memory.
    """
    if execution.parameter_memory == "host":
        raise ValueError(
            "execution.offload.parameters=host fetches each layer by itself, and rewritten"
            " parameters are made where they are used: set execution.offload.parameters to device"
        )
    if execution.state_layout.gathered != "layer":
        raise ValueError(
            f"execution.rules={execution.rules} gathers parameters before they are used, and"
            " rewritten parameters are made where they are used: set execution.rules to"
            " fully_sharded or data_parallel"
        )
