"""How often `trueup explain` names the right cause, on real rollouts with real and injected faults.

    python bench/explain_confusion.py BANK --draws 200 --part held          # BANK: bench/explain_bank.py
    python bench/explain_confusion.py BANK --draws 1000 --only healthy      # false alarms
    python bench/explain_confusion.py BANK --fit                            # the choice between prompt and weights

A draw is a random part of the prompts of one sampling run of the bank, with one fault: rescored under another prompt, other
weights or another cut of the text; sampled so by the engine; or injected into values and positions. Temperatures and
truncations of other strengths come from explain_synthetic.py, marked so. Prints a Markdown row a fault and strength: how many
draws were named right (first beside the floor) and what the others were called.

`--part dev` uses the first half of the prompts of each run and the variants in DEVELOPMENT; `held` the others; `all` both.
Statistics and bounds were chosen on `dev` (and on the labelled cases, which are not in the bank).
"""

from __future__ import annotations

import argparse
import collections
import zlib
from pathlib import Path

import numpy as np
from explain_faults import HEALTHY, NOISED, Bank, faulty, to_sample
from explain_fit import coefficients, fit, shapes

from trueup.explain.shape import COEFFICIENTS, NAMES, WITHOUT_IDS
from trueup.explain.verdict import find_causes

FLOORS = ("precision", "quantised")


def plan() -> list[tuple[str, object, tuple[str, ...]]]:
    """(fault, strength, causes that must be named, the first of them first)."""
    rows: list[tuple[str, object, tuple[str, ...]]] = [("healthy", kind, ()) for kind in HEALTHY]
    rows += [(f"healthy-{how}", kind, ()) for how in ("steps", "few", "single") for kind in ("bf16", "int8", "t06")]
    rows += [("synthetic-healthy", 0.0, ())]
    rows += [("temperature-raw", kind, ("temperature",)) for kind in ("t09", "t06", "t13")]
    rows += [("temperature-learner", kind, ("temperature",)) for kind in ("t09", "t06", "t13")]
    rows += [(f"synthetic-temperature-{side}", t, ("temperature",)) for side in ("raw", "learner") for t in (0.9, 1.2)]
    kinds = ("topp95", "topp80", "topk20", "topk5", "minp02", "minp05")
    rows += [("truncated", kind, ("truncated-support",)) for kind in kinds]
    for kind, strengths in (("top-p", (0.95, 0.9, 0.8)), ("top-k", (16, 8, 4)), ("min-p", (0.02, 0.05, 0.1))):
        rows += [(f"synthetic-truncated-{kind}", s, ("truncated-support",)) for s in strengths]
    rows += [("misaligned", s, ("misaligned",)) for s in (0.1, 0.5, 1.0)]
    rows += [("placeholder-end", s, ("placeholder",)) for s in (0.0, 1.0, -1.0)]
    rows += [("placeholder-scattered", s, ("placeholder",)) for s in (0.01, 0.02, 0.1)]
    rows += [("missing", s, ("missing",)) for s in (0.005, 0.03, 0.3)]
    rows += [("observation", s, ("observation",)) for s in (8, 16, 32)]
    rows += [("observation-plausible", s, ("observation",)) for s in (8, 16, 32)]
    rows += [("retokenised", s, ("retokenised",)) for s in (0.25, 0.5, 1.0)]
    for fault in ("weights", "prompt"):
        rows += [
            (fault, (s, kind), (fault,))
            for s in ("weak", "middle", "strong")
            for kind in ("bf16", NOISED, "int8", "t06")
        ]
    rows += [(f"{fault}-single", ("middle", "bf16"), (fault,)) for fault in ("weights", "prompt")]
    for fault in ("weights-growing", "weights-behind", "weights-replicas"):
        rows += [(fault, (s, "bf16"), ("weights",)) for s in ("weak", "middle", "strong")]
    rows += [("cache", kind, ("cache",)) for kind in ("cache-sft1", "cache-rl4-quarter", "cache-sft2")]
    rows += [("stale", name, ("cache",)) for name in ("stale-rl4-quarter", "stale-sft2", "stale-sft8")]
    for place in ("rows", "steps"):
        rows += [(f"both-temperature-weights-{place}", "", ("temperature", "weights"))]
        rows += [(f"both-truncated-weights-{place}", "", ("truncated-support", "weights"))]
    return rows


def judge(causes: list[str], expected: tuple[str, ...]) -> bool:
    if len(expected) > 1:
        return set(causes) == set(expected)
    return causes[:1] == list(expected)


def run(bank: Bank, arguments) -> None:
    print(
        f"| fault | strength | right | called instead |\n|---|---|---|---|  part {bank.part}, {arguments.prompts} prompts"
    )
    for fault, strength, expected in plan():
        if arguments.only and not fault.startswith(tuple(arguments.only)):
            continue
        families = {"synthetic", "temperature", "truncated", "placeholder", "observation", "both"}
        family = fault.split("-")[0]
        if arguments.exact and not {fault, family if family in families else fault} & set(arguments.exact):
            continue
        counts: collections.Counter = collections.Counter()
        done = right = 0
        for number in range(arguments.draws):
            seed = zlib.crc32(repr((arguments.seed, number, fault, strength)).encode())
            data = faulty(bank, np.random.default_rng(seed), fault, strength, number, arguments.prompts)
            if data is None:
                break
            causes = [found.cause for found in find_causes(to_sample(data)) if found.cause not in FLOORS]
            done += 1
            if judge(causes, expected):
                right += 1
            else:
                counts[", ".join(causes if len(expected) > 1 else causes[:1]) or "healthy"] += 1
        if done:
            shown = strength if isinstance(strength, (str, int, float)) else ", ".join(strength)
            others = ", ".join(f"{name} {n}" for name, n in counts.most_common(4))
            print(f"| {fault} | {shown} | {right / done:.1%} of {done} | {others} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bank", type=Path)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a draw, of two responses each")
    parser.add_argument("--part", choices=("dev", "held", "all"), default="held")
    parser.add_argument("--only", nargs="*", help="faults whose names start so")
    parser.add_argument("--exact", nargs="*", help="faults of these names")
    parser.add_argument("--fit", action="store_true", help="fit the choice between prompt and weights, and try it")
    parser.add_argument("--refit", action="store_true", help="use coefficients fitted on the development part")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.refit:
        for with_ids, columns in ((True, list(range(len(NAMES)))), (False, WITHOUT_IDS)):
            x, y, names = shapes(Bank(arguments.bank, "dev"), arguments.seed, 10, arguments.prompts)
            beta = coefficients(x[:, columns], y, names)
            COEFFICIENTS[with_ids] = (beta[:-1], float(beta[-1]))
    (fit if arguments.fit else run)(Bank(arguments.bank, arguments.part), arguments)


if __name__ == "__main__":
    main()
