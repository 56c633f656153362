"""What numbers of a study are called and how they are said, the same in Markdown and HTML."""

from __future__ import annotations

from statistics import median

from trueup.report.scale import number
from trueup.study.results import OUTCOMES

ALPHA = 0.05
CEILING = 0.98
SHORT = {
    "eval/accuracy": "held-out accuracy",
    "reward/mean": "sampler's own reward",
    "mismatch/kl_k3": "KL(mu, pi), k3",
    "mismatch/prob_diff_mean": "mean |pi - mu|",
    "mismatch/ess_token": "ESS of tokens",
    "mismatch/ess_sequence": "ESS of responses",
    "correction/cut": "cut by correction",
    "policy/entropy": "entropy, nats",
    "response/length_mean": "length, tokens",
    "policy/kl_old": "KL(old, new), nats",
    "policy/clip_fraction": "clipped by PPO",
    "policy/grad_norm": "gradient norm",
    "staleness/mean": "staleness, steps",
}
SHARES = {"eval/accuracy", "mismatch/ess_token", "mismatch/ess_sequence", "correction/cut", "policy/clip_fraction"}


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def points(value: float | None) -> str:
    """A difference of accuracies, in percentage points with its sign."""
    return (
        "-"
        if value is None
        else f"{100 * value:+.1f}".replace("-", "\u2212").replace("\u22120.0", "0.0").replace("+0.0", "0.0")
    )


def quantity(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.3g}%" if name in SHARES else number(value)


def spread(summary: dict | None) -> str:
    """An accuracy with its interval, which cannot leave 0 to 100%."""
    if not summary:
        return "-"
    if summary["low"] is None:
        return percent(summary["mean"])
    low, high = (100 * min(1.0, max(0.0, summary[end])) for end in ("low", "high"))
    return f"{percent(summary['mean'])} [{low:.1f}, {high:.1f}]"


def p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def difference(row: dict) -> str:
    if not row["seeds"]:
        return "-"
    if row["low"] is None:
        return points(row["mean"])
    return f"{points(row['mean'])} [{points(row['low'])}, {points(row['high'])}]"


def differs(row: dict) -> bool:
    """Whether the paired t test, Holm-adjusted over the study's comparisons of this outcome, finds a difference."""
    return bool(row["seeds"]) and row["p_t_holm"] is not None and row["p_t_holm"] < ALPHA


def judged(row: dict) -> str:
    if not row["seeds"]:
        return "no common seed is done"
    if row["n"] < 2:
        return "one seed: no test"
    if differs(row):
        return "higher" if row["mean"] > 0 else "lower"
    if row["p_t"] is None:
        return "every seed differs alike: no test"
    return "not told apart"


def status(results: dict) -> str:
    failed = f", {results['failed']} failed" if results["failed"] else ""
    return f"{results['done']} of {results['runs']} runs done{failed}"


def headline(results: dict) -> str:
    """How many comparisons tell their arms apart."""
    said = []
    for outcome in ("final", "area"):
        rows = [row for row in results["comparisons"][outcome] if row["seeds"] and row["n"] > 1]
        if rows:
            said.append(f"{sum(map(differs, rows))} of {len(rows)} comparisons differ in {OUTCOMES[outcome]}")
    return f"{status(results)}. " + ("; ".join(said) + "." if said else "No two arms have two seeds in common yet.")


def findings(results: dict) -> list[tuple[str, str]]:
    """(comparison, sentence) for every difference that was found, final accuracy first."""
    found = []
    for outcome in ("final", "area"):
        for row in filter(differs, results["comparisons"][outcome]):
            found.append(
                (
                    f"{row['a']} against {row['b']}",
                    f"{OUTCOMES[outcome]} {judged(row)} by {points(abs(row['mean'])).lstrip('+')} points "
                    f"[{points(row['low'])}, {points(row['high'])}], p {p_value(row['p_t_holm'])} after Holm, {row['n']} seeds",
                )
            )
    return found


def resolution(results: dict) -> list[str]:
    """What this many seeds can show at all."""
    rows = [row for row in results["comparisons"]["final"] if row["seeds"]]
    if not rows:
        return []
    n = min(row["n"] for row in rows)
    said = [
        f"Sign flips: {n} pairs have {2**n} sign patterns, so the smallest p that the exact permutation test can give is "
        f"{number(2 / 2**n)}"
        + (
            f"; by itself it cannot reach {ALPHA}, whatever the difference (that takes 6 seeds)."
            if 2 / 2**n >= ALPHA
            else "."
        )
    ]
    for outcome in ("final", "area"):
        known = [
            (row["detectable"], row["detectable_holm"])
            for row in results["comparisons"][outcome]
            if row["seeds"] and row["detectable"] is not None
        ]
        if known:
            alone, strict = (100 * median(column) for column in zip(*known))
            said.append(
                f"Smallest detectable difference in {OUTCOMES[outcome]} (80% power, paired t test, median over the comparisons): "
                f"{alone:.1f} points for a comparison on its own, {strict:.1f} at the strictest step of Holm's."
            )
    finals = [arm["outcomes"]["final"]["mean"] for arm in results["arms"] if arm["outcomes"]]
    if high := sum(mean > CEILING for mean in finals):
        said.append(
            f"Ceiling: {high} of {len(finals)} arms end above {percent(CEILING, 0)}. There final accuracy can show a collapse but no "
            "finer difference; the area under the curve, which says how fast an arm got there, still can."
        )
    if n < 2:
        said.append("With one seed nothing can be tested: differences of arms and of seeds look alike.")
    problems = results["evaluation"]["problems"]
    said.append(
        f"Accuracies are greedy on {problems} held-out problems, the same for every arm and seed: a single one has a standard "
        f"error of up to {100 * (0.25 / problems) ** 0.5:.1f} points as a statement about other problems. Intervals over seeds "
        "do not hold that part; in differences between arms most of it cancels."
    )
    return said


def fairness(results: dict) -> list[str]:
    """What the arms of a seed are shown to have had in common."""
    shared = [row for row in results["shared"] if row["runs"] > 1]
    if not shared:
        return ["No seed has two runs yet, so there is nothing to compare."]
    said = []
    starts = {start for row in shared for start in row["starts"]}
    alike = all(len(row["starts"]) == 1 for row in shared)
    said.append(
        f"Same start: every run measured the same held-out accuracy before its first update, {percent(min(starts))}."
        if alike and len(starts) == 1
        else "NOT the same start: before the first update, held-out accuracies were "
        + "; ".join(f"seed {row['seed']}: {', '.join(percent(start, 2) for start in row['starts'])}" for row in shared)
        + ". The arms compute differently (dtype, evaluation), or the model's files changed between runs."
    )
    unlike = [str(row["seed"]) for row in shared if len(row["prompts"]) > 1]
    unknown = [str(row["seed"]) for row in shared if not row["prompts"]]
    if unlike:
        said.append(
            f"NOT the same prompts at the first step in seeds {', '.join(unlike)}: a batch size, a prompt limit or dynamic "
            "sampling differs between arms. Compare them as independent runs."
        )
    elif unknown:
        said.append(f"Prompts are not known for seeds {', '.join(unknown)}: no rollouts were written.")
    else:
        digests = ", ".join(f"seed {row['seed']}: {row['prompts'][0]}" for row in shared)
        said.append(f"Same prompts: the first step asked the same ones in every arm of a seed (digests: {digests}).")
    return said


def rerun(results: dict, arm: dict, seed: int) -> str:
    """The one command, in the study's folder, that makes a run again."""
    return f"trueup train {arm['config']} seed={seed} --out again/{arm['name']}-{seed}"
