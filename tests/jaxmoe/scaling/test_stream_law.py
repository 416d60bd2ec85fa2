# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The law of the loss by parameters and streams: a fit of its own points returns its numbers."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxmoe.scaling.stream_law import StreamLaw, fit_stream_law

PUBLISHED = {
    "stack": StreamLaw(irreducible=0.691, scale=0.0113, exponent=0.189, gain=0.393),
    "pile": StreamLaw(irreducible=1.289, scale=0.197, exponent=0.196, gain=0.334),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_fit_of_the_law_returns_its_numbers(name):
    law = PUBLISHED[name]
    sizes = (0.5e9, 0.7e9, 1.1e9, 1.6e9, 2.8e9, 4.4e9)
    pairs = np.array(list(itertools.product(sizes, (1, 2, 4, 8))))
    found = fit_stream_law(pairs[:, 0], pairs[:, 1], law.loss(pairs[:, 0], pairs[:, 1]))
    for field in dataclasses.fields(StreamLaw):
        value = getattr(found, field.name)
        assert value == pytest.approx(getattr(law, field.name), rel=1e-3), field.name


def test_streams_are_worth_parameters():
    law = PUBLISHED["pile"]
    more = np.array([1e9 * (law.gain * np.log(8) + 1)])
    assert law.loss(np.array([1e9]), np.array([8])) == pytest.approx(law.loss(more, np.array([1])))


def test_too_few_models_are_refused():
    with pytest.raises(ValueError, match="5 models with 1 different numbers of streams"):
        fit_stream_law(np.full(5, 1e9), np.ones(5), np.ones(5))
