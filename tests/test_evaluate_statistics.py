"""Intervals, tests and power. Reference values: SciPy 1.17 and statsmodels 0.14, as named beside them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.evaluate import power, statistics
from trueup.evaluate.statistics import Interval


def paired(gained: int, lost: int, kept: int) -> np.ndarray:
    return np.array([1.0] * gained + [-1.0] * lost + [0.0] * kept)


@pytest.mark.parametrize(
    "successes, count, low, high",
    # statsmodels proportion_confint(method="wilson")
    [
        (0, 10, 0.0, 0.27753279986288915),
        (10, 10, 0.7224672001371109, 1.0),
        (37, 200, 0.13730192800616045, 0.24457062761151746),
        (655, 1319, 0.4696547252800556, 0.5235417383324293),
    ],
)
def test_wilson_interval(successes, count, low, high):
    assert statistics.wilson(successes, count)[:2] == pytest.approx((low, high), abs=1e-12)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one problem"):
        statistics.wilson(0, 0)


@pytest.mark.parametrize(
    "gained, lost, p",
    # statsmodels contingency_tables.mcnemar(exact=True)
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (5, 0, 0.0625),
        (0, 6, 0.03125),
        (12, 5, 0.143463134765625),
        (61, 40, 0.046044066929342806),
        (200, 150, 0.008720036530555949),
    ],
)
def test_mcnemar_exact_and_the_sign_flip_test_of_single_answers_are_one(gained, lost, p):
    assert statistics.mcnemar(gained, lost) == pytest.approx(p, rel=1e-12)
    assert statistics.sign_flip(paired(gained, lost, 20)) == pytest.approx(p, rel=1e-9)


def test_sign_flip_of_several_answers_is_exact():
    # scipy.stats.permutation_test(permutation_type="samples", n_resamples=inf) over the sum
    quarters = np.array([0, 0, -1, -1, -1, -4, -1, -4, -3, 4, 2, 0, 0, 3])
    assert statistics.sign_flip(quarters / 4, samples=4) == pytest.approx(0.578125, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_sign_flip_counts_all_sign_patterns(quarters):
    values = np.array(quarters)
    sums = [
        abs(sum(values * (1 - 2 * ((pattern >> np.arange(len(values))) & 1)))) for pattern in range(2 ** len(values))
    ]
    expected = np.mean(np.array(sums) >= abs(values.sum()))
    assert statistics.sign_flip(values / 4, samples=4) == pytest.approx(expected, abs=1e-12)


def test_long_sums_of_signs_have_the_same_law(monkeypatch):
    rng = np.random.default_rng(0)
    difference_I = (rng.binomial(16, 0.53, 300) - rng.binomial(16, 0.5, 300)) / 16
    convolved = statistics.sign_flip(difference_I, 16)
    monkeypatch.setattr(statistics, "CONVOLVED", 0)
    assert statistics.sign_flip(difference_I, 16) == pytest.approx(convolved, rel=1e-6)
    assert 1e-6 < convolved < 0.5
    assert 0 < statistics.sign_flip(np.ones(400)) < 1e-12


def test_graded_scores_are_tested_by_drawn_signs():
    rng = np.random.default_rng(3)
    graded = np.round(rng.normal(0.08, 0.3, 120), 3)
    # The normal limit: sum / sqrt(sum of squares).
    z = abs(graded.sum()) / math.sqrt((graded**2).sum())
    assert statistics.sign_flip(graded, samples=1) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.1)
    assert statistics.sign_flip(graded) == statistics.sign_flip(graded)
    assert statistics.sign_flip(np.full(40, 0.377), draws=1000) == 1 / 1001  # never 0


def test_holm_adjusts_step_down():
    # statsmodels multipletests(method="holm")
    assert statistics.holm([0.01, 0.04, 0.03, 0.005, 0.6]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.6])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


def test_bootstrap_agrees_with_resampling_rows():
    rng = np.random.default_rng(0)
    score_I = rng.integers(0, 5, 150) / 4
    means = rng.choice(score_I, (20_000, 150)).mean(1)
    found = statistics.bootstrap(score_I)
    assert found[:2] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.004)
    assert found.method == "bootstrap"


def test_accuracy_of_several_answers_is_clustered_by_problem():
    """All eight answers of a problem alike: the interval is that of 50 problems, not of 400 answers."""
    clustered = statistics.mean_interval(np.array([0.999] * 25 + [0.001] * 25))
    assert clustered.high - clustered.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(50), rel=0.1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(5, 300), st.sampled_from([0.9, 0.95]))
def test_score_interval_ends_where_its_statistic_reaches_z(gained, lost, kept, level):
    """Tango's interval against its definition: q found by maximising the likelihood on a grid instead of the root."""
    count = gained + lost + kept
    low, high, _ = statistics.tango(gained, lost, count, level)
    assert -1 <= low <= (gained - lost) / count <= high <= 1
    for end in (low, high):
        q = np.linspace(max(0.0, -end), (1 - end) / 2, 200_001)[1:-1]
        with np.errstate(divide="ignore"):
            likelihood = kept * np.log1p(-2 * q - end)
            if gained:
                likelihood = likelihood + gained * np.log(q + end)
            if lost:
                likelihood = likelihood + lost * np.log(q)
        best = q[np.nanargmax(likelihood)]
        z = (gained - lost - count * end) / math.sqrt(count * (2 * best + end - end * end))
        assert abs(z) == pytest.approx(statistics.z_value(level), rel=0.01)


def test_an_interval_of_few_flips_is_not_without_width():
    none = statistics.difference_interval(paired(0, 0, 200))
    assert none.low == pytest.approx(-none.high) and 0.015 < none.high < 0.02  # about z^2 / (n + z^2)
    assert none.high == pytest.approx(1.96**2 / (200 + 1.96**2), rel=1e-3)
    many = statistics.difference_interval(paired(30, 18, 152))
    assert (none.method, many.method) == ("score", "bootstrap")
    halves = statistics.difference_interval(np.array([0.5] * 6 + [0.0] * 194))
    assert isinstance(halves, Interval) and halves.low <= 0.015 <= halves.high


def test_pass_at_k_is_unbiased():
    assert statistics.pass_at_k(np.array([0, 1, 2, 4]), 4, 2) == pytest.approx([0, 1 / 2, 5 / 6, 1])
    assert statistics.pass_at_k(np.array([3]), 10, 1) == pytest.approx(0.3)
    # Its mean over drawn samples is the chance of at least one right answer in k.
    drawn = np.random.default_rng(0).binomial(8, 0.2, 50_000)
    assert statistics.pass_at_k(drawn, 8, 3).mean() == pytest.approx(1 - 0.8**3, abs=0.005)
    with pytest.raises(ValueError, match="pass@5 needs between 1 and K=4"):
        statistics.pass_at_k(np.array([1]), 4, 5)


@pytest.mark.parametrize(
    "count, discordance, difference, expected",
    # Summed over all tables with scipy.stats.binom and binomtest.
    [
        (50, 0.3, 0.1, 0.17872574443961312),
        (200, 0.12, 0.06, 0.6327392894974404),
        (200, 0.05, 0.05, 0.9376575049574004),
        (30, 0.9, 0.4, 0.5739874562259022),
    ],
)
def test_power_is_exact(count, discordance, difference, expected):
    assert power.power(count, discordance, difference) == pytest.approx(expected, abs=1e-8)


def test_exact_and_normal_power_meet():
    for count, discordance, difference in ((4000, 0.2, 0.02), (9000, 0.1, 0.01), (1319, 0.5, 0.05)):
        exact = power._mcnemar_power(count, discordance, difference, 0.05)
        assert power._normal_power(count, discordance, difference, 0.05, 1.0) == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize("count, discordance", [(100, 0.0), (200, 0.05), (1319, 0.2), (30_000, 0.1)])
def test_smallest_detectable_difference_has_power_of_80_percent(count, discordance):
    smallest = power.minimum_detectable(count, discordance)
    assert power.power(count, discordance, smallest) >= 0.8
    assert power.power(count, discordance, smallest - 2e-4) < 0.8
    assert smallest > power.minimum_detectable(4 * count, discordance)
    assert smallest < power.minimum_detectable(count, discordance, alpha=0.01)


def test_five_problems_are_too_few():
    """Five flips of one direction have p = 1/16."""
    assert power.minimum_detectable(5, 0.2) is None
    assert power.minimum_detectable(8, 0.2) is not None


def test_problems_needed_undoes_the_smallest_detectable():
    for count, discordance in ((200, 0.2), (1319, 0.05), (30_000, 0.1)):
        smallest = power.minimum_detectable(count, discordance)
        assert power.items_needed(discordance, smallest) == pytest.approx(count, rel=0.01)
    assert power.items_needed(0.1, 0.0) is None
    assert power.items_needed(0.1, -0.02) == power.items_needed(0.1, 0.02)
    # A tenth of the size, about a hundred times the problems.
    assert power.items_needed(0.1, 0.002) / power.items_needed(0.1, 0.02) == pytest.approx(100, rel=0.05)


def sampled(rng, count, samples, shift):
    rate_I = rng.beta(0.6, 0.8, count) * (1 - shift)
    return (rng.binomial(samples, rate_I + shift) - rng.binomial(samples, rate_I)) / samples


@pytest.mark.parametrize("samples", [1, 4])
def test_no_difference_is_called_at_most_5_times_in_100(samples):
    """800 studies; three standard errors above 5%. The full table: bench/eval_power.py."""
    rng = np.random.default_rng(samples)
    called = sum(statistics.sign_flip(sampled(rng, 120, samples, 0.0), samples) <= 0.05 for _ in range(800))
    assert called / 800 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 800)


@pytest.mark.parametrize("samples, shift", [(1, 0.08), (4, 0.05)])
def test_a_difference_is_found_as_often_as_predicted(samples, shift):
    rng = np.random.default_rng(7)
    truth = sampled(rng, 200_000, samples, shift)
    predicted = power.power(200, float((truth**2).mean()), float(truth.mean()), samples=samples)
    found = np.mean([statistics.sign_flip(sampled(rng, 200, samples, shift), samples) <= 0.05 for _ in range(800)])
    assert 0.2 < predicted < 0.95
    assert found == pytest.approx(predicted, abs=0.03 + 3 * math.sqrt(predicted * (1 - predicted) / 800))
