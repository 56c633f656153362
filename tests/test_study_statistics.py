"""The statistics of studies against values by hand and from tables."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.study.results import compare
from trueup.study.statistics import (
    area,
    bootstrap_band,
    detectable,
    holm,
    interval,
    paired,
    sign_flip,
    t_quantile,
    t_two_sided,
)


def test_students_t_has_the_values_of_the_tables():
    for df, expected in ((1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227)):
        assert t_quantile(0.975, df) == pytest.approx(expected, rel=1e-5)
    assert t_quantile(0.8, 4) == pytest.approx(0.940965, rel=1e-5)
    assert t_two_sided(1, 1) == pytest.approx(0.5)
    assert t_two_sided(-math.sqrt(2), 2) == pytest.approx(1 - math.sqrt(0.5))
    assert t_two_sided(3.182446, 3) == pytest.approx(0.05, rel=1e-5)
    assert t_two_sided(0, 7) == 1


def test_a_paired_comparison_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2 sqrt(3) with 2 degrees of freedom, for which
    p = 1 - t / sqrt(t^2 + 2). Two of eight sign patterns reach a sum of 6."""
    found = paired([2, 4, 6], [1, 2, 3])
    assert (found.n, found.mean, found.sd) == (3, 2, 1)
    assert found.p_t == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(14))
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), rel=1e-5)
    assert found.p_flip == 0.25 == found.p_flip_least
    assert interval([5]) == (5, None, None)


def test_differences_without_scatter_have_no_t_test():
    alike = paired([1.5, 2.5], [1, 2])
    assert alike.p_t is None and alike.p_flip == 0.5
    assert paired([1, 2], [1, 2]).p_t == 1
    assert paired([1], [0]).p_t is None and paired([1], [0]).low is None
    with pytest.raises(ValueError, match="at least one"):
        paired([], [])


def test_sign_flips_by_hand():
    assert sign_flip([3, 1, 1]) == 0.25  # sums 5, 3, 3, 1 and their negatives
    assert sign_flip([1, 1, -1]) == 1
    assert sign_flip([0, 0]) == 1
    assert sign_flip([1] * 20) < 0.001  # drawn, not enumerated


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8))
def test_a_sign_flip_test_is_symmetric_and_never_below_its_least(differences):
    p = sign_flip(differences)
    assert 2 / 2 ** len(differences) - 1e-12 <= p <= 1
    assert p == sign_flip([-value for value in differences])


def test_holm_by_hand():
    assert holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert holm([0.9, 0.8]) == [1, 1]


def test_the_detectable_difference_by_hand():
    assert detectable(1.0, 5) == pytest.approx((2.776445 + 0.940965) / math.sqrt(5), rel=1e-5)
    assert detectable(None, 1) is None
    assert detectable(0.0, 3) is None  # a coarse measure is not one that sees everything


def test_the_band_of_two_seeds_is_exact():
    """Four resamples with means 0, 1/2, 1/2, 1, interpolated at 2.5% and 97.5%."""
    low, high = bootstrap_band(np.array([[0.0, 7.0], [1.0, 7.0]]))
    assert low == pytest.approx([0.0375, 7]) and high == pytest.approx([0.9625, 7])


def test_a_band_of_many_seeds_repeats_and_narrows():
    values = np.random.default_rng(1).normal(size=(40, 1))
    low, high = bootstrap_band(values)
    assert (low, high) == bootstrap_band(values)
    assert 1.96 * values.std() / math.sqrt(40) == pytest.approx(float(high[0] - low[0]) / 2, rel=0.15)


def test_the_area_is_the_mean_height():
    assert area([0, 10, 20], [0, 1, 1]) == 0.75
    assert area([0, 5, 20], [0.4, 0.4, 0.4]) == pytest.approx(0.4)
    assert area([3], [0.2]) == 0.2


def test_comparisons_use_common_seeds_and_share_one_family():
    arms = [
        {"name": "a", "runs": [{"seed": s, "final": v} for s, v in ((0, 0.5), (1, 0.7), (2, 0.9))]},
        {"name": "b", "runs": [{"seed": s, "final": v} for s, v in ((1, 0.6), (2, 0.7), (3, 0.1))]},
        {"name": "c", "runs": [{"seed": 9, "state": "failed"}]},
    ]
    first, none = compare(arms, (("a", "b"), ("a", "c")), "final")
    assert first["seeds"] == [1, 2] and first["differences"] == pytest.approx([0.1, 0.2])
    assert first["p_t_holm"] == first["p_t"]  # the pair without seeds tests nothing
    assert none == {"a": "a", "b": "c", "seeds": []}
