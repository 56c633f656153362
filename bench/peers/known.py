"""Where a peer does something else than the preset of its name, each shown by running both."""

from __future__ import annotations

import math
from dataclasses import replace

import peer_verl
import torch
from batches import Batch, batch, ours


def differences(trl) -> list[str]:
    return [_missing_trl(trl), _missing_verl(), _beyond_20(), _all_rejected(trl), _later_updates(), _bound(trl)]


def _lacking(given: Batch) -> Batch:
    """The same, without the sampler's log-prob of the second token of the first response."""
    mu = given.mu.clone()
    mu[0, 1] = math.nan
    mask = given.mask.clone()
    mask[0, 1] = True
    return replace(given, mu=mu, mask=mask)


def _missing_trl(trl) -> str:
    given = _lacking(batch("int8", 0))
    theirs = trl.corrected(given, "token_truncate")
    mine = ours("trl-token-truncate", replace(given, advantages=trl.advantages))
    return (
        f"missing log-prob: TRL weighs the token {float(theirs.weights[0, 1]):g} and keeps it, trueup {float(mine.weights[0, 1]):g} "
        f"and drops it from the denominator (loss {theirs.losses['token-mean']:.6f} and {mine.losses['token-mean']:.6f})"
    )


def _missing_verl() -> str:
    given = _lacking(batch("int8", 0))
    theirs = peer_verl.corrected(peer_verl.presets()["verl-decoupled-token-is"], given)
    mine = ours("verl-decoupled-token-is", given, dual_clip=3.0)
    return (
        f"missing log-prob: verl's loss is {theirs.losses['token-mean']}, trueup's {mine.losses['token-mean']:.6f}: "
        "verl has no handling, the token is dropped here"
    )


def _beyond_20() -> str:
    """log rho = 50, -25, -25: the product is 1."""
    given = batch("bf16", 0)
    mu, pi, mask = given.mu.clone(), given.pi.clone(), given.mask.clone()
    mu[0, :3], pi[0, :3] = torch.tensor([-51.0, -1, -1]), torch.tensor([-1.0, -26, -26])
    mask[0] = torch.arange(mask.shape[1]) < 3
    given = replace(given, mu=mu, pi=pi, mask=mask)
    theirs = peer_verl.corrected(peer_verl.presets()["verl-decoupled-seq-is-rs"], given)
    mine = ours("verl-decoupled-seq-is-rs", given)
    return (
        "log rho beyond 20 nats: verl bounds each token's before it sums for rejection. Of log rho = 50, -25, -25 (product 1) "
        f"verl's weights are {theirs.weights[0, :3].tolist()}, trueup's {mine.weights[0, :3].tolist()}"
    )


def _all_rejected(trl) -> str:
    given = batch("broken", 0)
    given = replace(given, pi=torch.full_like(given.pi, -1.0), mu=torch.full_like(given.mu, -4.0))
    trl_loss = trl.corrected(given, "sequence_mask").losses["token-mean"]
    verl_loss = peer_verl.corrected(peer_verl.presets()["verl-decoupled-geo-rs"], given).losses["token-mean"]
    return f"every response rejected: TRL's loss is {trl_loss:g}, verl's {verl_loss}; trueup skips the update and counts it"


def _later_updates() -> str:
    given = batch("int8", 0)
    theirs = peer_verl.corrected(peer_verl.presets()["verl-bypass-pg-is"], given).losses["token-mean"]
    mine = ours("verl-bypass-pg-is", given, "reinforce").losses["token-mean"]
    return (
        "bypass modes, DPPO and TRL's off-policy mask look at pi_theta / mu, trueup at pi_old / mu: the same at a batch's first "
        f"update (the rows above), not at later ones (bypass_pg_is after a step of 0.15 nats: {theirs:.4f} and {mine:.4f})"
    )


def _bound(trl) -> str:
    given = batch("bf16", 0)
    pi, mu, mask = given.pi.clone(), given.mu.clone(), given.mask.clone()
    mask[0] = torch.arange(mask.shape[1]) < 1
    mu[0, 0] = -math.log(3.0) - 1
    pi[0, 0] = -1.0
    given = replace(given, mu=mu, pi=pi, mask=mask)
    theirs = trl.corrected(given, "token_mask").weights[0, 0]
    mine = ours("trl-token-mask", replace(given, advantages=trl.advantages)).weights[0, 0]
    return (
        f"exactly at a bound the last bit decides: of float32 log-probs log(3) apart TRL (float32) makes {float(theirs):.7f}, trueup "
        f"(float64, compared in log space) {float(mine):.7f}"
    )
