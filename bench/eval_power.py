"""Does a paired comparison keep its promises? Simulated studies through the code of `trueup eval compare`.

    python bench/eval_power.py [--studies 2000] [--seed 0] [--table null|power|coverage]

Three tables. *Null*: no difference; how often one is called (at most 5%), and how
often it is in exact arithmetic. *Power*: a difference exactly as large as the
smallest that the command says it would find, and as many problems as it says are needed; how often it is found (80%).
*Coverage*: how often the 95% interval of the difference holds the true one, and how often two engines that differ by a
margin are declared closer than it (at most 5%).

Problems have difficulties of their own (beta-distributed accuracies), so that pairs are correlated as they are in earnest.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from trueup.evaluate.power import items_needed, minimum_detectable, power
from trueup.evaluate.statistics import difference_interval, holm, sign_flip


def differences(rng: np.random.Generator, count: int, discordance: float, difference: float) -> np.ndarray:
    """One answer a problem: it is gained, lost or kept."""
    gain = (discordance + difference) / 2
    return rng.choice([1.0, -1.0, 0.0], size=count, p=[gain, discordance - gain, 1 - discordance])


def sampled(rng: np.random.Generator, count: int, samples: int, shift: float) -> np.ndarray:
    """K answers a problem from engines whose accuracy differs by `shift` on every problem that leaves room for it."""
    rate_I = rng.beta(0.6, 0.8, count) * (1 - shift)
    a_I, b_I = rng.binomial(samples, rate_I), rng.binomial(samples, rate_I + shift)
    return (b_I - a_I) / samples


def called(studies: list[np.ndarray], samples: int) -> float:
    return float(np.mean([sign_flip(study, samples) <= 0.05 for study in studies]))


def null_rows(rng: np.random.Generator, studies: int) -> None:
    print("| null | problems | K | discordance | called, at most 5% | exactly |\n|---|---|---|---|---|---|")
    for count, discordance in ((100, 0.1), (200, 0.2), (1319, 0.05), (1319, 0.2)):
        runs = [differences(rng, count, discordance, 0.0) for _ in range(studies)]
        print(
            f"| one pair | {count} | 1 | {discordance:.0%} | {called(runs, 1):.2%} | {power(count, discordance, 0.0):.2%} |"
        )
    for count, samples in ((100, 4), (200, 8)):
        runs = [sampled(rng, count, samples, 0.0) for _ in range(studies)]
        print(f"| one pair | {count} | {samples} | | {called(runs, samples):.2%} | |", flush=True)
    false = 0
    for _ in range(studies):  # three engines that flip the same answers at random
        right = rng.random((1, 300)) < 0.5
        engines = np.where(rng.random((3, 300)) < 0.08, rng.random((3, 300)) < 0.5, right).astype(float)
        false += min(holm([sign_flip(engines[b] - engines[a]) for a, b in ((0, 1), (0, 2), (1, 2))])) <= 0.05
    print(f"| three engines, any pair (Holm) | 300 | 1 | | {false / studies:.2%} | |\n")


def power_rows(rng: np.random.Generator, studies: int) -> None:
    print("| power | problems | K | discordance | difference | predicted | found |\n|---|---|---|---|---|---|---|")

    def row(kind: str, count: int, samples: int, discordance: float, difference: float, runs: list[np.ndarray]) -> None:
        predicted = power(count, discordance, difference, samples=samples)
        print(
            f"| {kind} | {count} | {samples} | {discordance:.1%} | {difference:.2%} | {predicted:.1%} "
            f"| {called(runs, samples):.1%} |",
            flush=True,
        )

    for count, discordance in ((100, 0.1), (200, 0.05), (200, 0.2), (1319, 0.05), (1319, 0.2)):
        smallest = minimum_detectable(count, discordance)
        runs = [differences(rng, count, max(discordance, smallest), smallest) for _ in range(studies)]
        row("smallest detectable", count, 1, discordance, smallest, runs)
    for discordance, difference in ((0.1, 0.05), (0.2, 0.05), (0.1, 0.02)):
        count = items_needed(discordance, difference)
        runs = [differences(rng, count, discordance, difference) for _ in range(studies)]
        row("problems needed", count, 1, discordance, difference, runs)
    for count, samples, shift in ((100, 4, 0.06), (200, 4, 0.05), (200, 8, 0.03)):
        # The truth of this world, from many problems.
        many = sampled(rng, 1_000_000, samples, shift)
        runs = [sampled(rng, count, samples, shift) for _ in range(studies)]
        row("as it is", count, samples, float((many**2).mean()), float(many.mean()), runs)
    # As it is used: a pilot study's own discordance predicts what the next study will find.
    for count, discordance, difference in ((200, 0.15, 0.07), (1319, 0.1, 0.025)):
        pilots = [differences(rng, count, discordance, difference) for _ in range(200)]
        guesses = [power(count, float((pilot**2).mean()), difference) for pilot in pilots]
        runs = [differences(rng, count, discordance, difference) for _ in range(studies)]
        print(
            f"| from pilots (mean, sd of 200) | {count} | 1 | {discordance:.1%} | {difference:.2%} "
            f"| {np.mean(guesses):.1%}, {np.std(guesses):.1%} | {called(runs, 1):.1%} |",
            flush=True,
        )
    print()


def coverage_rows(rng: np.random.Generator, studies: int) -> None:
    print("| coverage | problems | K | expected discordant | holds the truth | method | closer than they are |")
    print("|---|---|---|---|---|---|---|")
    cases = [(200, 1, 0.01, 0.0), (200, 1, 0.03, 0.02), (200, 1, 0.06, 0.03), (200, 1, 0.2, 0.05), (1319, 1, 0.1, 0.02)]
    for count, samples, discordance, difference in [*cases, (100, 4, math.nan, 0.04), (200, 8, math.nan, 0.02)]:
        hold, closer, methods = 0, 0, []
        many = sampled(rng, 1_000_000, samples, difference) if samples > 1 else None
        truth = difference if many is None else float(many.mean())
        for _ in range(studies):
            study = (
                sampled(rng, count, samples, difference)
                if samples > 1
                else differences(rng, count, discordance, difference)
            )
            low, high, method = difference_interval(study)
            ninety = difference_interval(study, 0.90)
            hold += low <= truth <= high
            closer += max(abs(ninety.low), abs(ninety.high)) < abs(truth)
            methods.append(method)
        bootstrap = methods.count("bootstrap") / studies
        expected = "" if samples > 1 else f"{count * discordance:.0f}"
        margin = f"{closer / studies:.2%}" if truth else ""
        print(
            f"| {truth:.2%} | {count} | {samples} | {expected} | {hold / studies:.1%} | bootstrap {bootstrap:.0%} | {margin} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies a row (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    tables = {"null": null_rows, "power": power_rows, "coverage": coverage_rows}
    parser.add_argument("--table", choices=tables, help="this one only")
    arguments = parser.parse_args()
    for name, rows in tables.items():
        if arguments.table in (None, name):
            rows(np.random.default_rng(arguments.seed), arguments.studies)


if __name__ == "__main__":
    main()
