"""Everything the page shows of rollouts, gathered in one pass, a batch of responses at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np

from trueup.report.binned import POSITIONS, PROBABILITY_LOGITS, Binned, BySteps
from trueup.report.histogram import Histogram
from trueup.report.worst import Worst
from trueup.rollouts import Rollouts

_LOG_LIMIT = 300.0  # as in `mismatch.measure`: beyond any real ratio, and sums of squares stay finite
_WORST = 6


class Gathered:
    """Sums, histograms and the worst responses of all files so far. `stats` agrees with `mismatch.measure`."""

    def __init__(self):
        self.responses = self.chosen_tokens = self.unscored_responses = 0
        self.missing_sampler = self.missing_learner = 0
        self.above_zero = 0
        """Tokens whose "log-prob" is above 0: invented values, no probabilities."""
        self.stale_tokens = 0
        """Tokens that other weights sampled than those that scored them."""
        self.truncated_responses = 0
        self.reward_sum = self.rewarded = 0.0
        self.steps: set[int] = set()
        self.settings: Counter[tuple] = Counter()
        """(engine, temperature, top_p, top_k, min_p) -> responses."""
        self.ratio = Binned(1)  # of rho - 1: small numbers keep their digits
        self.histograms = {"token": Histogram(), "sequence": Histogram(), "geometric": Histogram()}
        self.by_probability = Binned(len(PROBABILITY_LOGITS) + 1)
        self.by_position = Binned(len(POSITIONS))
        self.ratio_by_position = Binned(len(POSITIONS))
        self.by_length = Binned(len(POSITIONS))
        self.kl_by_step, self.ratio_by_step = BySteps(), BySteps()
        self.worst_by_sum, self.worst_by_token = Worst(_WORST), Worst(_WORST)
        self._sums = dict.fromkeys(("kl_k1", "kl_k3", "prob_diff_mean", "log_rho_abs_mean"), 0.0)
        self._largest = {"prob_diff_max": 0.0, "log_rho_abs_max": 0.0, "rho_max": -np.inf}
        self._weight = {name: (-np.inf, -np.inf, 0) for name in ("token", "sequence")}

    @property
    def tokens(self) -> int:
        return int(self.ratio.tokens[0])

    def add(self, rollouts: Rollouts, place: str = "rollouts", first_row: int = 0) -> None:
        """One batch of whole responses."""
        self._describe(rollouts)
        if rollouts.learner_logprobs is None:
            self.unscored_responses += len(rollouts)
            return
        sampler_N = rollouts.sampler_logprobs.numpy().astype(np.float64)
        learner_N = rollouts.learner_logprobs.numpy().astype(np.float64)
        length_B = rollouts.lengths.numpy()
        chosen_N = rollouts.loss_mask.numpy()
        known_N = chosen_N & np.isfinite(sampler_N) & np.isfinite(learner_N)
        row_N = np.repeat(np.arange(len(length_B)), length_B)
        position_N = np.arange(len(row_N)) - rollouts.offsets.numpy()[row_N]
        version_N = rollouts.learner_version.numpy()[row_N]
        self.chosen_tokens += int(chosen_N.sum())
        self.missing_sampler += int((chosen_N & ~np.isfinite(sampler_N)).sum())
        self.missing_learner += int((chosen_N & ~np.isfinite(learner_N)).sum())
        self.above_zero += int((known_N & ((sampler_N > 1e-4) | (learner_N > 1e-4))).sum())
        self.stale_tokens += int((known_N & (version_N >= 0) & (version_N != rollouts.sampler_version.numpy())).sum())
        row_N, position_N = row_N[known_N], position_N[known_N]
        if not len(row_N):
            return
        sampler_N, learner_N = sampler_N[known_N], learner_N[known_N]
        log_rho_N = learner_N - sampler_N
        abs_B = self._measure(row_N, len(length_B), sampler_N, learner_N, log_rho_N)
        self._bin(row_N, position_N, length_B, sampler_N, log_rho_N)
        self._step(rollouts.step.numpy(), row_N, log_rho_N)
        peak_B = np.zeros(len(length_B))
        np.maximum.at(peak_B, row_N, np.abs(log_rho_N))
        self.worst_by_sum.add(abs_B, rollouts, place, first_row)
        self.worst_by_token.add(peak_B, rollouts, place, first_row)

    def _describe(self, rollouts: Rollouts) -> None:
        self.responses += len(rollouts)
        self.steps.update(rollouts.step.unique().tolist())
        self.truncated_responses += rollouts.finish_reason.count("length")
        rewarded_B = rollouts.reward[rollouts.reward.isfinite()]
        self.reward_sum += float(rewarded_B.double().sum())
        self.rewarded += len(rewarded_B)
        columns = (rollouts.temperature, rollouts.top_p, rollouts.top_k, rollouts.min_p)
        numbers = zip(*(column.tolist() for column in columns))
        self.settings.update((engine, *row) for engine, row in zip(rollouts.engine, numbers))

    def _measure(self, row_N, rows: int, sampler_N, learner_N, log_rho_N) -> np.ndarray:
        """Returns the sum of |log rho| of each response."""
        excess_N = np.expm1(np.minimum(log_rho_N, _LOG_LIMIT))  # rho - 1
        abs_N = np.abs(log_rho_N)
        moved_N = np.abs(np.exp(np.minimum(learner_N, 0)) - np.exp(np.minimum(sampler_N, 0)))
        self._moved_N = moved_N
        self.ratio.add(np.zeros_like(row_N), row_N, rows, excess_N)
        self._sums["kl_k1"] -= log_rho_N.sum()
        self._sums["kl_k3"] += (excess_N - log_rho_N).sum()
        self._sums["prob_diff_mean"] += moved_N.sum()
        self._sums["log_rho_abs_mean"] += abs_N.sum()
        self._largest["prob_diff_max"] = max(self._largest["prob_diff_max"], moved_N.max())
        self._largest["log_rho_abs_max"] = max(self._largest["log_rho_abs_max"], abs_N.max())
        self._largest["rho_max"] = max(self._largest["rho_max"], log_rho_N.max())
        length_B = np.bincount(row_N, minlength=rows)
        log_rho_B = np.bincount(row_N, weights=log_rho_N, minlength=rows)[length_B > 0]
        for level, values in (("token", log_rho_N), ("sequence", log_rho_B)):
            once, twice, count = self._weight[level]
            once, twice = np.logaddexp(once, _log_sum(values)), np.logaddexp(twice, _log_sum(2 * values))
            self._weight[level] = (once, twice, count + len(values))
            self.histograms[level].add(values)
        self.histograms["geometric"].add(log_rho_B / length_B[length_B > 0])
        return np.bincount(row_N, weights=abs_N, minlength=rows)

    def _bin(self, row_N, position_N, length_B, sampler_N, log_rho_N) -> None:
        rows, abs_N = len(length_B), np.abs(log_rho_N)
        probability_N = np.minimum(sampler_N, -1e-12)
        logit_N = probability_N - np.log(-np.expm1(probability_N))
        self.by_probability.add(np.searchsorted(PROBABILITY_LOGITS, logit_N, "right"), row_N, rows, self._moved_N)
        position_bin_N = np.searchsorted(POSITIONS, position_N + 1, "right") - 1
        self.by_position.add(position_bin_N, row_N, rows, abs_N)
        self.ratio_by_position.add(position_bin_N, row_N, rows, np.expm1(np.minimum(log_rho_N, _LOG_LIMIT)))
        length_bin_B = np.searchsorted(POSITIONS, np.maximum(length_B, 1), "right") - 1
        self.by_length.add(length_bin_B[row_N], row_N, rows, abs_N)

    def _step(self, step_B, row_N, log_rho_N) -> None:
        excess_N = np.expm1(np.minimum(log_rho_N, _LOG_LIMIT))
        self.ratio_by_step.add(step_B, row_N, excess_N)
        self.kl_by_step.add(step_B, row_N, excess_N - log_rho_N)

    def stats(self) -> dict[str, float]:
        """The statistics of `mismatch.measure` that need no sorting, under the same names; only tokens and missing
        ones where nothing was measured."""
        missing = 1 - self.tokens / self.chosen_tokens if self.chosen_tokens else 0.0
        found = {"missing_fraction": missing, "tokens": float(self.tokens)}
        if self.tokens:
            found |= {name: float(value / self.tokens) for name, value in self._sums.items()}
            found |= {name: float(value) for name, value in self._largest.items()}
            found["rho_max"] = float(np.exp(min(found["rho_max"], _LOG_LIMIT)))
            excess, half = (float(values[0]) for values in self.ratio.means())
            mean = 1 + excess
            low, high = (mean - half, mean + half) if np.isfinite(half) else (min(mean, 1.0), max(mean, 1.0))
            found |= {"rho_mean": mean, "rho_mean_low": low, "rho_mean_high": high}
            for level, (once, twice, count) in self._weight.items():
                found[f"ess_{level}"] = float(np.exp(2 * once - twice - np.log(count)))
        return {f"mismatch/{name}": value for name, value in found.items()}


def _log_sum(values: np.ndarray) -> float:
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))
