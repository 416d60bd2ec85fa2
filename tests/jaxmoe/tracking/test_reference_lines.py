# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The frame of a loss chart and the labels of its reference lines."""

import itertools

import numpy as np
import pytest

from jaxmoe.tracking import plots
from jaxmoe.tracking.charts import Line, line_chart
from jaxmoe.tracking.reference_lines import draw_references, loss_limits

STEPS = np.arange(1, 401)
BITS = 2.0 + 1.8 * np.exp(-STEPS / 150) + 5.0 * np.exp(-STEPS / 6)
REFERENCES = {"1-byte counts": 3.53, "2-byte counts": 2.64, "3-byte counts": 2.11, "xz": 1.83}


def limits(curve, references=None):
    found = loss_limits([(STEPS, curve)], references)
    assert found is not None
    return found


def test_the_first_steps_do_not_squeeze_the_curve():
    low, high = limits(BITS, REFERENCES)
    later = BITS[STEPS > 40]
    assert later.max() < high < 4.0 < BITS[0] and low < 1.83
    assert np.ptp(later) > 0.5 * (high - low)
    flat = 3.0 - 0.001 * STEPS
    assert limits(flat)[1] > flat[0]  # nothing is cut where nothing is gained
    assert loss_limits([(STEPS, np.full(400, np.nan))]) is None


@pytest.mark.parametrize("size", [(9.5, 5.0, 8.0), (960 / 72, 340 / 72, 11.0)])
@pytest.mark.parametrize("references", [REFERENCES, {"a": 2.0, "b": 2.01, "c": 2.02, "d": 3.9}])
def test_labels_of_reference_lines_overlap_neither_each_other_nor_the_curve(size, references):
    width, height, font = size
    figure, (axes,) = plots.figure_of_panels(width=width, height=height)
    (line,) = axes.plot(STEPS, BITS)
    axes.set_ylim(*limits(BITS, references))
    draw_references(axes, references, curves=[(STEPS, BITS)], color="gray", size=font)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(references)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    if references is REFERENCES:
        points = axes.transData.transform(line.get_xydata())
        assert not any(box.count_contains(points) for box in boxes)


@pytest.mark.parametrize("is_loss", [True, False])
def test_the_chart_of_the_report_says_where_a_cut_curve_begins(is_loss):
    chart = line_chart(
        [Line(label="", x=STEPS, y=BITS)], y_label="bits", references=REFERENCES, is_loss=is_loss
    )
    assert (f"from {BITS[0]:.2f} at step 1" in chart) is is_loss
