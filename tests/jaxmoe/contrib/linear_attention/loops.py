# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each mixer as a loop over the positions of each row: slow, in float32, by its equations."""

import jax.numpy as jnp


def by_position(segments, step, state=None):
    """Return the outputs of `step` at each position, zeros at padding [B S ...].

    Args:
        x: Arrays [B S ...] by name.
        segments: Documents [B S], 0 for padding, as numpy has them.
        step: Function from the state, the row and the places of a document up to now to the new
            state and the output.
        state: State before a document.
    """
    rows = []
    for row in range(segments.shape[0]):
        outputs = []
        document = current = None
        places = []
        for place, segment in enumerate(segments[row]):
            if segment == 0:
                outputs.append(jnp.zeros_like(outputs[-1]))
                continue
            if segment != document:
                document, current, places = segment, state, []
            places = [*places, place]
            current, output = step(current, row, places)
            outputs.append(output)
        rows.append(jnp.stack(outputs))
    return jnp.stack(rows)


def convolved(x, taps, row, places, bias=0.0):
    """Return the convolution at the last place of a document."""
    length = taps.shape[0]
    return bias + sum(
        taps[length - 1 - back] * x[row, place]
        for back, place in enumerate(reversed(places[-length:]))
    )


def short_convolution(config, params, x, segments):
    b, c, x = (x @ params[name] + params[f"{name}_in_bias"] for name in "bcx")
    product = b * x

    def step(state, row, places):
        y = convolved(product, params["taps"], row, places, params["bias"])
        return state, c[row, places[-1]] * y

    y = by_position(segments, step)
    return y @ params["o"] + params["o_bias"]


LOOPS = {"short_convolution": short_convolution}
