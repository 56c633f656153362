"""The choice between `prompt` and `weights`: its coefficients and how often it is right, from the bank's real variants."""

from __future__ import annotations

import zlib

import numpy as np
from explain_faults import NOISED, PROMPT, WEIGHTS, Bank, draw, quantise, rescore, to_sample

from trueup.explain.distribution import residual_gap
from trueup.explain.shape import NAMES, WITHOUT_IDS, describe_shape
from trueup.explain.significance import robust_scale
from trueup.explain.verdict import find_causes


def shapes(bank: Bank, seed: int, draws: int, prompts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shape numbers of single-step prompt and weights faults that are noticed -> (features, 1 for prompt, variants)."""
    rows, labels, names = [], [], []
    for label, table in ((1, PROMPT), (0, WEIGHTS)):
        for kind in ("bf16", NOISED, "int8", "t06"):
            run = "bf16" if kind == NOISED else kind
            for name in bank.names([n for part in table.values() for n in part], run):
                for number in range(draws):
                    rng = np.random.default_rng(zlib.crc32(repr((seed, number, name, kind)).encode()))
                    data = draw(bank, rng, run, prompts)
                    rescore(bank, data, name)
                    if kind == NOISED:
                        quantise(bank, rng, data)
                    sample = to_sample(data)
                    if not {"prompt", "weights"} & {found.cause for found in find_causes(to_sample(data))}:
                        continue
                    free = sample.free()
                    residual = residual_gap(sample, free)
                    rows.append(describe_shape(sample, free, residual, robust_scale(residual[free])))
                    labels.append(label)
                    names.append(name)
    return np.array(rows), np.array(labels), np.array(names)


def coefficients(x: np.ndarray, y: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Every variant counts as one observation, and both causes the same."""
    own = np.array([(names == name).sum() for name in names])
    both = np.array([len(set(names[y == label])) for label in y])
    return logistic(x, y, len(set(names)) / 2 / both / own)


def logistic(x: np.ndarray, y: np.ndarray, weight: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """Coefficients, intercept last: Newton's method with a ridge on the slopes of standardised features."""
    mean, spread = x.mean(0), x.std(0) + 1e-9
    z = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    beta, penalty = np.zeros(z.shape[1]), np.diag([ridge] * x.shape[1] + [0.0])
    for _ in range(50):
        p = 1 / (1 + np.exp(-z @ beta))
        hessian = (z * (weight * p * (1 - p))[:, None]).T @ z + penalty
        beta = beta + np.linalg.solve(hessian, z.T @ (weight * (y - p)) - penalty @ beta)
    slopes = beta[:-1] / spread
    return np.append(slopes, beta[-1] - slopes @ mean)


def fit(bank: Bank, arguments) -> None:
    """With token ids and without: fitted on the development part, tried on the held-out one; fitted on all, and each
    variant tried with a fit that did not see it."""
    data = {
        part: shapes(Bank(bank.folder, part), arguments.seed, arguments.draws, arguments.prompts)
        for part in ("dev", "held", "all")
    }
    for title, columns in (("with ids", list(range(len(NAMES)))), ("without ids", WITHOUT_IDS)):
        for part in ("dev", "all"):
            x, y, names = data[part]
            beta = coefficients(x[:, columns], y, names)
            print(
                f"\n{title}, {part}: {dict(zip([NAMES[c] for c in columns], np.round(beta, 2)))}, intercept {beta[-1]:.2f}"
            )
            if part == "dev":
                for tried in ("dev", "held"):
                    x, y, names = data[tried]
                    _tell(tried, x[:, columns] @ beta[:-1] + beta[-1], y, names)
                continue
            score = np.empty(len(y))
            for name in set(names):
                out = names == name
                other = coefficients(x[~out][:, columns], y[~out], names[~out])
                score[out] = x[out][:, columns] @ other[:-1] + other[-1]
            _tell("each variant left out", score, y, names)
            for name in dict.fromkeys(names) if title == "with ids" else ():
                at = names == name
                right = ((score[at] > 0) == (y[at] == 1)).mean()
                cause = "prompt " if y[at][0] else "weights"
                print(
                    f"  {cause} {name:24} {right:5.0%} of {at.sum():3} {score[at].mean():+5.1f} {np.round(x[at].mean(0), 2)}"
                )


def _tell(title: str, score: np.ndarray, y: np.ndarray, names: np.ndarray) -> None:
    right = (score > 0) == (y == 1)
    by_variant = np.mean([right[names == name].mean() for name in set(names)])
    sure = np.abs(score) > np.log(9)
    print(
        f"{title}: right {right.mean():.1%} of {len(y)}, {by_variant:.1%} by variant; claims 90% in {sure.mean():.0%}, "
        f"right {right[sure].mean():.1%}"
    )
