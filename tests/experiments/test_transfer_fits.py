# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The fits of `transfer` on losses whose optimum, exponent and noise are known."""

import math

import numpy as np
import pytest

from experiments.cli.tables import markdown_table, student, text_table
from experiments.studies.transfer import picture as transfer_picture
from experiments.studies.transfer.coordinates import FALL, GROWTH, Coordinate, coordinates_of
from experiments.studies.transfer.fits import Curve, find_optimum, fit_transfer, loss_at, replicate
from experiments.studies.transfer.table import (
    arm_lines,
    arm_row,
    curve_of,
    point_lines,
    point_row,
    sentence,
)

RATES = tuple(1e-3 * 2.0**step for step in range(6))
NAN = math.nan


def curve(best, *, noise=0.0, seeds=3, rates=RATES, seed=0, floor=3.0, diverged=()):
    """Losses of an exact parabola with a minimum of `floor` at a rate."""
    random = np.random.default_rng(seed)
    x = np.log2(rates)
    losses = floor + 0.1 * (x - math.log2(best)) ** 2
    of_seed = 0.3 * random.standard_normal(seeds)  # paired: moves no optimum
    both = losses[:, None] + of_seed + noise * random.standard_normal((len(rates), seeds))
    both[[rate in diverged for rate in rates]] = NAN
    return Curve(rates=rates, losses=both)


@pytest.mark.parametrize("best", [2.5e-3, 4e-3, 1.1e-2])
def test_the_optimum_of_a_parabola_is_exact(best):
    found = find_optimum(curve(best))
    assert found is not None and found.edge is None
    assert found.rate == pytest.approx(best, rel=1e-6)
    mean = curve(best).losses.mean(1)
    assert found.loss < mean.min()


def test_finer_grids_have_more_rates_in_the_fit():
    """Within a factor of two of the best one: five rates a factor of sqrt(2) apart."""
    fine = tuple(1e-3 * 2.0 ** (step / 2) for step in range(9))
    one = curve(4.1e-3, rates=fine, noise=0.0)
    losses = one.losses.copy()
    losses[2] += 0.05  # two places below the best one
    moved = find_optimum(Curve(rates=fine, losses=losses))
    assert moved is not None and moved.rate != pytest.approx(4.1e-3, rel=1e-3)
    losses = one.losses.copy()
    losses[1] += 0.05  # three places
    same = find_optimum(Curve(rates=fine, losses=losses))
    assert same is not None and same.rate == pytest.approx(4.1e-3, rel=1e-6)


@pytest.mark.parametrize(
    ("best", "diverged", "edge", "rate"),
    [
        (1e-4, (), "lowest", RATES[0]),
        (1.0, (), "highest", RATES[-1]),
        (1.0, RATES[-2:], "divergence", RATES[-3]),
        (4e-3, RATES[-1:], None, 4e-3),
    ],
)
def test_edges_are_flagged_and_never_extrapolated(best, diverged, edge, rate):
    found = find_optimum(curve(best, diverged=diverged))
    assert found is not None and found.edge == edge
    assert found.rate == pytest.approx(rate)


def test_one_seed_that_diverges_takes_its_rate_out():
    losses = curve(4e-3).losses.copy()
    losses[2, 1] = NAN  # the best one
    one = Curve(rates=RATES, losses=losses)
    assert one.diverged_rates == (RATES[2],)
    assert find_optimum(one).rate == pytest.approx(4e-3, rel=1e-6)
    losses[3:] = NAN
    assert find_optimum(Curve(rates=RATES, losses=losses)) is None


def test_a_flat_curve_stays_where_it_is():
    losses = np.full((5, 2), 3.0)
    losses[2] -= 1e-12
    found = find_optimum(Curve(rates=RATES[:5], losses=losses))
    assert found.rate == pytest.approx(RATES[2], rel=0.5) and math.isfinite(found.loss)


def test_shift_exponent_and_regret_of_a_power_law():
    curves = {width: curve(8e-3 * (64 / width) ** 0.75) for width in (64.0, 128.0, 256.0)}
    found = fit_transfer(curves)
    assert found.shift == pytest.approx(-1.5, abs=1e-6) and found.shift_bound == "exact"
    assert found.exponent == pytest.approx(-0.75, abs=1e-6)
    assert found.verdict == "does not transfer"
    # Between rates straight lines lie above the parabola, by at most b / 4.
    assert 0.1 * 1.5**2 <= found.regret <= 0.1 * 1.5**2 + 0.1 / 4
    # Without noise between rates the intervals are points, whatever seeds add.
    for value, interval in (
        (found.shift, found.shift_interval),
        (found.exponent, found.exponent_interval),
        (found.regret, found.regret_interval),
    ):
        assert interval == pytest.approx((value, value), abs=1e-9)


def test_what_does_not_move_transfers_and_costs_nothing():
    found = fit_transfer({1.0: curve(4e-3, noise=0.003), 4.0: curve(4e-3, noise=0.003, seed=1)})
    assert found.verdict == "transfers" and abs(found.shift) < 0.2
    low, high = found.shift_interval
    assert low < found.shift < high
    assert 0.0 <= found.regret < 0.01


@pytest.mark.parametrize(
    ("small", "large", "verdict", "bound"),
    [
        (4e-3, 1e-4, "does not transfer", "at least"),  # at least two steps down
        (1e-4, 8e-3, "does not transfer", "at least"),  # from further down the way is longer
        (1.5e-3, 1e-4, "undecided", "at least"),
        (4e-3, 1.0, "does not transfer", "at least"),
        (1.0, 1.0, "undecided", "unknown"),
    ],
)
def test_an_edge_is_a_bound(small, large, verdict, bound):
    found = fit_transfer({64.0: curve(small), 256.0: curve(large)})
    assert (found.verdict, found.shift_bound) == (verdict, bound)


def test_an_edge_on_the_wrong_side_says_nothing():
    """The large point's optimum may lie further up, which would shorten a way down."""
    low, high = RATES[:3], RATES[2:]
    found = fit_transfer({64.0: curve(8e-3, rates=high), 256.0: curve(1.0, rates=low)})
    assert found.shift < -0.9 and found.verdict == "undecided"
    assert found.shift_interval is None  # that of two edges would be narrow, and of nothing


def test_one_seed_has_no_interval():
    found = fit_transfer({1.0: curve(4e-3, seeds=1), 2.0: curve(4e-3, seeds=1)})
    assert found.shift_interval is None and found.regret_interval is None
    assert replicate(curve(4e-3, seeds=1), np.random.default_rng(0)) is None
    assert found.verdict == "transfers"


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_the_optimum(seeds):
    """95% of them should; of 200, 90% leave room for chance and for so few residuals."""
    inside = 0
    for seed in range(200):
        one = curve(5e-3, noise=0.01, seeds=seeds, seed=seed)
        draws = replicate(one, np.random.default_rng(seed))[:400]
        low, high = find_optimum(one, draws).interval
        inside += low <= 5e-3 <= high
    assert 0.9 * 200 <= inside


def test_the_loss_between_rates():
    x, mean = np.arange(5.0), (np.arange(5.0) - 2) ** 2
    assert loss_at(x, mean, 2.5) == pytest.approx(0.25)  # the parabola
    assert loss_at(x, mean, 3.5) == pytest.approx(2.5)  # a straight line
    assert loss_at(x, mean, 4.1) is None and loss_at(x, mean, -0.1) is None


@pytest.mark.parametrize("per_octave", [1, 2, 4])
def test_the_loss_at_the_best_rate_is_the_best_loss(per_octave):
    """On finer grids too, where the fit takes more rates than the neighbours."""
    rates = tuple(1e-3 * 2.0 ** (step / per_octave) for step in range(4 * per_octave + 1))
    one = curve(4.4e-3, rates=rates, noise=0.02)
    found, mean = find_optimum(one), one.losses.mean(1)
    assert found.edge is None
    assert loss_at(np.log2(rates), mean, math.log2(found.rate)) == pytest.approx(found.loss)


def test_rates_that_miss_a_seed_wait():
    records = [
        {"rate": rate, "seed": seed, "bits": None if rate == 4.0 else rate}
        for rate in (1.0, 2.0, 4.0)
        for seed in (0, 1)
    ]
    one = curve_of(records[:-3], (0, 1))
    assert one.rates == (1.0,) and not one.diverged_rates
    whole = curve_of(records, (0, 1))
    assert whole.rates == (1.0, 2.0, 4.0) and whole.diverged_rates == (4.0,)
    assert curve_of(records, (0, 7)) is None


def rows_of(curves):
    found = fit_transfer(curves)
    points = [
        point_row("arm", value, one, found.optima.get(value), 0.5) for value, one in curves.items()
    ]
    return points, arm_row("arm", found, True, 1.0)


def test_tables_and_sentences():
    points, arm = rows_of({64.0: curve(8e-3), 256.0: curve(2e-3, diverged=RATES[-1:])})
    words = sentence(arm, "width", (64.0, 256.0), "bits per byte")
    assert words.startswith(
        "arm: does not transfer over width 64 to 256 (a factor of 4): the best rate changed by a"
        " factor of 2^-2.00 (95% 2^-2.00 to 2^-2.00); using the rate of 64 at 256 costs 0.4"
    )
    assert arm["regret_nats_per_token"] == pytest.approx(arm["regret"] * math.log(2.0))
    lines = point_lines(points, "width", "bits per byte")
    assert lines[2][1:3] == ["256", "0.002"] and lines[3] == ["", "diverged at 0.032"]
    for table in (lines[:3], arm_lines([arm])):
        (width,) = {len(line) for line in text_table(table).splitlines()}
        assert width <= 120
        page = markdown_table(table)
        assert len({line.count("|") for line in page.splitlines()}) == 1


def test_sentences_of_doubt():
    points, arm = rows_of({64.0: curve(1.0), 256.0: curve(1.0)})
    words = sentence(arm, "width", (64.0, 256.0), "bits per byte")
    assert "undecided" in words and "--extend" in words
    assert "at the edge: the highest rate" in point_lines(points, "width", "x")[2][-1]
    given = {"shift": 0.9, "shift_interval": (0.5, 1.3), "verdict": "transfers"}
    words = sentence(arm | given | {"shift_bound": "exact"}, "width", (64.0, 256.0), "bits")
    assert "the interval exceeds the limit of 2^1" in words
    given = {"shift": -1.4, "shift_interval": (-2.0, -1.1), "verdict": "does not transfer"}
    words = sentence(arm | given | {"shift_bound": "exact"}, "width", (64.0, 256.0), "bits")
    assert "reaches over" not in words
    _, lost = rows_of({64.0: curve(1.6e-2), 256.0: curve(2e-3, diverged=RATES[3:])})
    words = sentence(lost, "width", (64.0, 256.0), "bits")
    assert "outside the rates that ended at 256" in words


def test_an_arm_that_was_stopped_says_what_it_covers():
    _, arm = rows_of({64.0: curve(4e-3), 128.0: curve(4e-3)})
    words = sentence(arm, "width", (64.0, 128.0), "bits", unfinished=(256.0,))
    assert words.startswith("arm: transfers over width 64 to 128 (a factor of 2)")
    assert words.endswith("; not finished: rates are missing at width 256")
    _, arm = rows_of({64.0: curve(4e-3), 128.0: curve(4e-3, rates=RATES[:2])})
    words = sentence(arm, "width", (64.0, 128.0), "bits", unfinished=(128.0,))
    assert "edge" not in words
    assert (
        "undecided over width 64 to 128" in words and "fewer than three rates ended at 128" in words
    )


def test_students_quantile():
    """Against the printed table; beyond it an expansion."""
    known = {1: 12.706, 4: 2.776, 9: 2.262, 10: 2.228, 12: 2.179, 30: 2.042, 120: 1.980}
    for degrees, quantile in known.items():
        assert student(degrees) == pytest.approx(quantile, abs=5e-3)


def measured(value_power, change_power, points=(64.0, 128.0, 256.0)):
    """Sizes [points seeds steps+1 2] that are powers of the axis."""
    x = np.asarray(points)[:, None, None] * np.ones((1, 2, 4))
    change = x**change_power
    change[:, :, 0] = 0.0
    return np.stack([x**value_power, change], -1)


@pytest.mark.parametrize(
    ("value", "change", "problem"),
    [
        (0.0, 0.0, None),
        (-0.5, 0.1, None),  # logits under muP
        (0.0, 0.5, "change grows as ^0.50 after step 1"),
        (0.5, 0.0, "grows as ^0.50 at step 0"),
        (0.0, -1.0, "change falls as ^-1.00"),
    ],
)
def test_the_rule_of_the_coordinate_check(value, change, problem):
    (one,) = coordinates_of((64.0, 128.0, 256.0), {"logits": measured(value, change)})
    assert one.problem == problem
    assert one.value_slopes == pytest.approx((value,) * 4)
    assert one.change_slopes == pytest.approx((change,) * 3)


def test_the_coordinate_check_refuses_what_is_not_finite():
    array = measured(0.0, 0.0)
    array[1, 0, 2, 1] = NAN
    (one,) = coordinates_of((64.0, 128.0, 256.0), {"stream": array})
    assert one.problem == "not finite"
    assert Coordinate(quantity="x", value_slopes=(GROWTH,), change_slopes=(FALL,)).problem is None


def test_the_picture_shows_whole_intervals(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(transfer_picture, "save_figure", lambda figure, path: drawn.append(figure))
    row = {"arm": "a", "edge": None, "diverged_rates": [], "rates": [1.0, 2.0, 4.0], "loss": 1.0}
    row |= {"losses": [2.0, 1.0, 2.0], "best_rate": 2.0}
    points = [
        {**row, "value": 1.0, "interval": None},
        {**row, "value": 2.0, "interval": (0.1, 9.0)},
    ]
    given = {"axis": "width", "words": "embed_dim", "unit": "bits per byte"}
    transfer_picture.draw_transfer(tmp_path / "picture.png", points, [], **given)
    low, high = drawn[0].axes[1].get_ylim()
    assert low < 0.1 and high > 9.0
