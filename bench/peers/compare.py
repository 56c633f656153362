"""Runs TRL's and verl's own code and trueup on the same log-probs and compares weights, masks, loss and gradient.

    PYTHONPATH=src bench/peers/.venv/bin/python bench/peers/compare.py [--seeds N]

Prints a Markdown table, then the known differences, each shown. Exits 1 when a difference exceeds 1e-5.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version

import known
import peer_trl
import peer_verl
from batches import CASES, B, Batch, Result, batch, ours

from trueup.correction import PRESETS

TOLERANCE = 1e-5
TRL_MODES = {f"trl-{mode.replace('_', '-')}": mode for mode in
             ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")}  # fmt: skip


class Row:
    """Largest differences of one preset to one peer, over all batches. Loss and gradient relative to 1 or their size."""

    def __init__(self, name: str, peer: str):
        self.name, self.peer = name, peer
        self.weight = self.loss = self.gradient = 0.0
        self.masks = self.tokens = self.dropped = self.batches = self.without = 0

    def add(self, given: Batch, mine: Result, theirs: Result) -> None:
        scale = theirs.weights.abs().clamp(min=1)
        self.weight = max(self.weight, float(((mine.weights - theirs.weights).abs() / scale)[given.mask].max()))
        self.masks += int(((mine.weights > 0) != (theirs.weights > 0))[given.mask].sum())
        self.tokens += int(given.mask.sum())
        self.dropped += int((theirs.weights == 0)[given.mask].sum())
        self.batches += 1
        for aggregation, loss in theirs.losses.items():
            if math.isnan(loss) and math.isnan(mine.losses[aggregation]):
                self.without += 1  # every response rejected: see the known differences
                continue
            apart = abs(mine.losses[aggregation] - loss) / max(1, abs(loss))
            self.loss = max(self.loss, math.inf if math.isnan(apart) else apart)
            gradient = theirs.gradients[aggregation]
            apart = (mine.gradients[aggregation] - gradient).abs() / gradient.abs().clamp(min=1)
            self.gradient = max(self.gradient, float(apart[given.mask].max()))

    @property
    def agrees(self) -> bool:
        return self.masks == 0 and max(self.weight, self.loss, self.gradient) <= TOLERANCE

    def __str__(self) -> str:
        cells = [
            f"`{self.name}`",
            self.peer,
            self.batches,
            self.tokens,
            f"{self.dropped / self.tokens:.1%}",
            self.without,
        ]
        cells += [f"{self.weight:.1e}", self.masks, f"{self.loss:.1e}", f"{self.gradient:.1e}"]
        return "| " + " | ".join(map(str, cells)) + " |"


def rows(seeds: int, trl: peer_trl.Peer) -> list[Row]:
    found = []
    given = [batch(case, seed) for case in CASES for seed in range(seeds)]
    for name, mode in {"trl-default": trl.default[1], **TRL_MODES}.items():
        row = Row(name, f"`{mode}`" + (" (TRL's default)" if name == "trl-default" else ""))
        for one in given:
            theirs = trl.corrected(one, mode)
            row.add(one, ours(name, replace(one, advantages=trl.advantages)), theirs)
        found.append(row)
    row = Row("deepseek-v3.2", "TRL `off_policy_mask_threshold=0.5`")
    for one in given:
        one = one.at_first_update()
        theirs = trl.corrected(one, None, 0.5)
        row.add(one, ours(row.name, replace(one, advantages=trl.advantages)), theirs)
    found.append(row)
    for name, config in peer_verl.presets().items():
        reinforce = config.bypass_mode and config.loss_type == "reinforce"
        row = Row(name, "verl " + ("bypass loss, " + config.loss_type if config.bypass_mode else "vanilla loss"))
        for one in given:
            one = one.at_first_update() if config.bypass_mode else one
            mine = ours(name, one, "reinforce" if reinforce else "ppo", None if reinforce else 3.0)
            row.add(one, mine, peer_verl.corrected(config, one))
        found.append(row)
    for name, limit, cap in (("dppo-tv", 0.15, 1e4), ("prime-rl-mask", 0.2, 1e30)):
        row = Row(name, f"verl `dppo_tv`, {limit}, cap {cap:g}")
        for one in given:
            one = one.at_first_update()
            row.add(one, ours(name, one, "reinforce"), peer_verl.dppo(limit, cap, one))
        found.append(row)
    return found


def control(seeds: int, trl: peer_trl.Peer) -> Row:
    """A pair that does not belong together, capped at 2 and at 3: what cannot disagree compares nothing."""
    row = Row("tis", "`token_truncate` (control, must differ)")
    for one in (batch("broken", seed) for seed in range(seeds)):
        theirs = trl.corrected(one, "token_truncate")
        row.add(one, ours("tis", replace(one, advantages=trl.advantages)), theirs)
    return row


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=25, help="batches of each of the four kinds")
    seeds = parser.parse_args().seeds
    trl = peer_trl.Peer(B)
    missing = {f"verl-{name[5:]}" for name in peer_verl.presets()} ^ {name for name in PRESETS if name[:5] == "verl-"}
    print(f"TRL {version('trl')}, verl {version('verl')}; {seeds} batches each of {', '.join(CASES)}\n")
    print(f"TRL's defaults (correction, mode, clip_max, clip_min): {trl.default}")
    print(f"presets in one of verl and trueup only: {sorted(missing) or 'none'}\n")
    print("| preset | peer's code | batches | tokens | dropped | losses of nothing | weight | mask | loss | gradient |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    found = rows(seeds, trl)
    for row in found:
        print(row, flush=True)
    wrong = control(seeds, trl)
    print(wrong)
    print("\nKnown differences:\n")
    for line in known.differences(trl):
        print(f"- {line}")
    bad = [row.name for row in found if not row.agrees]
    print(f"\n{len(found) - len(bad)} of {len(found)} rows agree to {TOLERANCE:g}" + (f"; not: {bad}" if bad else ""))
    return 1 if bad or missing or wrong.agrees else 0


if __name__ == "__main__":
    sys.exit(main())
