"""The named corrections, each with its source. `docs/corrections.md` has them as a table with when to use which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trueup.correction.spec import Correction, Filter, known_fields, nearest

_OURS: dict[str, Correction] = {
    # Nothing: the mismatch is measured and left alone.
    "none": Correction(level="none"),
    # Vanilla importance sampling, unbounded.
    "is": Correction(level="token", bound="none"),
    # The clip around pi_theta / mu does the correcting; verl's bypass mode with ppo_clip.
    "ppo-is": Correction(level="none", anchor="sampler"),
    # Yao et al. 2025, fengyao.notion.site/off-policy-rl: min(rho, C).
    "tis": Correction(level="token", bound="truncate", high=2.0),
    # Liu, Li et al. 2025, richardli.xyz/rl-collapse: rho where rho <= C, else dropped; one-sided. Here per token.
    "mis": Correction(level="token", bound="mask", high=2.0),
    # Ling team 2025, IcePop: two-sided, alpha = 0.5, beta = 5 (verl's decoupled_token_icepop has the same).
    "icepop": Correction(level="token", bound="mask", low=0.5, high=5.0),
    # Liu, Li et al. 2025, on the product over the response: truncated, and masked (one-sided, as published).
    "sequence-tis": Correction(level="sequence", bound="truncate", high=2.0),
    "sequence-mis": Correction(level="sequence", bound="mask", high=2.0),
    # Length-normalised, two-sided (verl: seq_mean_k1, slime: geometric); wider than theirs, see docs/corrections.md.
    "geometric-mask": Correction(level="geometric", bound="mask", low=0.98, high=1.02),
    # The same as a filter, with TIS on what stays: OpenRLHF's seq-mask-tis, with these bounds.
    "geometric-tis": Correction(filters=(Filter("ratio", "mean", low=0.98, high=1.02),)),
    # A response drops out when its mean k3 exceeds 0.01 nats (verl's threshold); what stays is weighted by TIS.
    "k3-tis": Correction(filters=(Filter("k3", "mean", high=0.01),)),
}


def _steps_away(limit: float) -> tuple[Filter, Filter]:
    """Drops a token where pi has moved from mu by more than `limit` in the direction that its advantage pushes."""
    return (
        Filter("prob_diff", high=limit, advantage="positive"),
        Filter("prob_diff", low=-limit, advantage="negative"),
    )


# In each of these a dropped token has weight 0 and stays in the denominator, as the source has it.
_PUBLISHED: dict[str, Correction] = {
    # Qi et al. 2026, arXiv 2602.04879, DPPO-Binary-TV: rho where |pi - mu| is within 0.15 or the advantage pulls back.
    # 0.15 and the cap of 10000 are those of verl's examples/dppo_trainer/run_qwen3_30b_a3b_megatron.sh (clip_ratio_low,
    # clip_ratio_high, clip_ratio_c with loss_mode=dppo_tv); pair with objective.kind=reinforce.
    "dppo-tv": Correction(high=1e4, filters=_steps_away(0.15), dropped_in_denominator=True),
    # prime-rl, default_loss_fn in src/prime_rl/trainer/rl/loss.py: rho within 0.2 (dppo_mask_low, dppo_mask_high), as
    # above. Its penalty of 1e-3 (log pi_theta - log mu)^2 is no weight and not in here: docs/corrections.md adds it.
    "prime-rl-mask": Correction(bound="none", filters=_steps_away(0.2), dropped_in_denominator=True),
    # DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking: a response of negative advantage is dropped when its
    # mean log(mu / pi) exceeds delta. delta is not published; 0.5 is the example of TRL's off_policy_mask_threshold.
    "deepseek-v3.2": Correction(
        level="none", filters=(Filter("k1", "mean", high=0.5, advantage="negative"),), dropped_in_denominator=True
    ),
}

# TRL 1.16, trl/trainer/grpo_trainer.py, `_generate_and_score_completions`: vllm_importance_sampling_mode, with
# vllm_importance_sampling_clip_max=3.0 and no lower bound, both GRPOConfig's defaults. Masked tokens have weight 0 and
# stay in the denominator. TRL gives a token without a log-prob the ratio 1; it is dropped here.
_TRL: dict[str, Correction] = {
    "trl-token-truncate": Correction("token", "truncate", high=3.0, dropped_in_denominator=True),
    "trl-token-mask": Correction("token", "mask", high=3.0, dropped_in_denominator=True),
    "trl-sequence-truncate": Correction("sequence", "truncate", high=3.0, dropped_in_denominator=True),
    "trl-sequence-mask": Correction("sequence", "mask", high=3.0, dropped_in_denominator=True),
}
_TRL = {"trl-default": _TRL["trl-sequence-mask"]} | _TRL

# verl 0.9, verl/trainer/config/algorithm.py: the class methods of RolloutCorrectionConfig with their default thresholds,
# computed in verl/trainer/ppo/rollout_corr_helper.py. "0.999_1.001" bounds exp(mean k1), which is 1 / G, and "0.5_2.0"
# exp(sum k1); rejected tokens leave the denominator, those that IcePop zeroes stay.
_GEO = Filter("k1", "mean", low=math.log(0.999), high=math.log(1.001))
_K3 = Filter("k3", "mean", high=0.01)
_TOKEN = Correction("token", "truncate", high=2.0)
_SEQUENCE = Correction("sequence", "truncate", high=2.0)
_ONE = Correction("none")
_ICEPOP = Correction("token", "mask", low=0.5, high=5.0, dropped_in_denominator=True)
_BYPASS = Correction("none", anchor="sampler")
_VERL: dict[str, Correction] = {
    "disabled": _ONE,
    "decoupled-token-is": _TOKEN,
    "decoupled-seq-is": _SEQUENCE,
    "decoupled-token-icepop": _ICEPOP,
    "decoupled-seq-is-rs": replace(_SEQUENCE, filters=(Filter("k1", "sum", math.log(0.5), math.log(2.0)),)),
    "decoupled-geo-rs": replace(_ONE, filters=(_GEO,)),
    "decoupled-geo-rs-seq-tis": replace(_SEQUENCE, filters=(_GEO,)),
    "decoupled-geo-rs-token-tis": replace(_TOKEN, filters=(_GEO,)),
    "decoupled-k3-rs": replace(_ONE, filters=(_K3,)),
    "decoupled-k3-rs-seq-tis": replace(_SEQUENCE, filters=(_K3,)),
    "decoupled-k3-rs-token-tis": replace(_TOKEN, filters=(_K3,)),
    "bypass-ppo-clip": _BYPASS,
    "bypass-ppo-clip-geo-rs": replace(_BYPASS, filters=(_GEO,)),
    "bypass-ppo-clip-k3-rs": replace(_BYPASS, filters=(_K3,)),
    # REINFORCE, no clip: pair with objective.kind=reinforce. verl's weight follows pi_theta / mu within the batch, ours
    # is pi_old / mu; the two are equal at a batch's first update.
    "bypass-pg-is": _SEQUENCE,
    "bypass-pg-token-icepop": _ICEPOP,
    "bypass-pg-geo-rs": replace(_ONE, filters=(_GEO,)),
    "bypass-pg-geo-rs-seq-tis": replace(_SEQUENCE, filters=(_GEO,)),
    "bypass-pg-geo-rs-token-tis": replace(_TOKEN, filters=(_GEO,)),
}

PRESETS: dict[str, Correction] = _OURS | _PUBLISHED | _TRL | {f"verl-{name}": item for name, item in _VERL.items()}


def preset(name: str | Mapping | Correction) -> Correction:
    """A preset's name, or a mapping of fields with an optional `preset` to start from -> Correction.

    `preset("tis")`, `preset({"preset": "tis", "high": 5})`, `preset({"level": "none", "filters": [{"criterion": "k3",
    "aggregate": "mean", "high": 0.01}]})`. Raises ValueError naming the nearest valid name.
    """
    if isinstance(name, Correction):
        return name
    if isinstance(name, str):
        if name not in PRESETS:
            raise ValueError(f"unknown correction {name!r}{nearest(name, PRESETS)}; presets: {', '.join(PRESETS)}")
        return PRESETS[name]
    if not isinstance(name, Mapping):
        raise ValueError(f"a correction is a preset's name or a mapping of its fields, not {name!r}")
    given = dict(name)
    base = preset(given.pop("preset")) if "preset" in given else Correction()
    if "filters" in given:
        if not isinstance(given["filters"], (list, tuple)):
            raise ValueError(f"filters={given['filters']!r}: expected a list of mappings, one a filter")
        given["filters"] = tuple(_filter(item) for item in given["filters"])
    return replace(base, **known_fields(given, Correction))


def _filter(given: Mapping | Filter) -> Filter:
    if isinstance(given, Filter):
        return given
    given = dict(given)
    if given.pop("negative_advantage_only", False):  # the older spelling, in run directories that exist
        given["advantage"] = "negative"
    return Filter(**known_fields(given, Filter))
