"""`--gate 'kl<0.01'`: a condition on one statistic, for use in CI."""

from __future__ import annotations

import operator
import re

NAMES = {
    "kl": "kl_k3",
    "kl_k3": "kl_k3",
    "kl_k1": "kl_k1",
    "ess": "ess_token",
    "ess_token": "ess_token",
    "ess_sequence": "ess_sequence",
    "rho": "rho",
    "prob_diff": "prob_diff",
    "prob_diff_max": "prob_diff_max",
    "log_rho": "log_rho_abs",
    "log_rho_max": "log_rho_abs_max",
    "missing": "missing_fraction",
}
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def parse_gate(text: str) -> tuple[str, str, float]:
    match = re.fullmatch(r"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*(\S+)\s*", text)
    if match is None or match[1] not in NAMES:
        raise ValueError(
            f"--gate {text!r} is not NAME<NUMBER or NAME>NUMBER with NAME one of {', '.join(NAMES)}; e.g. --gate 'kl<0.01'"
        )
    try:
        return match[1], match[2], float(match[3])
    except ValueError:
        raise ValueError(f"--gate {text!r}: {match[3]!r} is not a number; e.g. --gate 'kl<0.01'") from None


def failed_gates(gates: list[tuple[str, str, float]], stats: dict) -> list[str]:
    """Reasons, one a gate that fails. A statistic that does not exist (nothing measured) fails."""
    reasons = []
    for name, sign, bound in gates:
        value = stats[NAMES[name]]
        value = value["mean"] if isinstance(value, dict) else value
        if value is None or not COMPARE[sign](value, bound):
            shown = "not measurable" if value is None else f"{value:.4g}"
            reasons.append(f"gate {name}{sign}{bound:g} failed: {name} is {shown}")
    return reasons
