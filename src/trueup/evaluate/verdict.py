"""A pair's numbers in plain words."""

from __future__ import annotations


def pair_verdict(pair: dict, count: int, family: int = 1) -> str:
    """pair: a row of `compare`; count: problems; family: pairs that p was corrected for."""
    if pair["null"]:
        return _null(pair, count)
    if pair["resolved"]:
        return _resolved(pair, family)
    return _unresolved(pair, count, family)


def points(value: float, sign: bool = False) -> str:
    """A share as percentage points: 0.0312 -> 3.1."""
    text = f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return "0.0" if text in ("-0.0", "+0.0") else text


def p_text(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}" if p < 0.0995 else f"p = {p:.2f}"


def _resolved(pair: dict, family: int) -> str:
    side = "above" if pair["difference"] > 0 else "below"
    return (
        f"{pair['b']} is {points(abs(pair['difference']))} points {side} {pair['a']} "
        f"(95% interval {points(pair['low'], True)} to {points(pair['high'], True)}), "
        f"{p_text(pair['p_holm'])}{_corrected(family)}"
    )


def _unresolved(pair: dict, count: int, family: int) -> str:
    names = f"{pair['a']} and {pair['b']}"
    if pair["discordance"] == 0:
        words = f"no difference between {names}: they score the same on all {count:,} problems"
    else:
        words = (
            f"no difference resolved between {names}: {points(pair['difference'], True)} points seen "
            f"({points(pair['low'], True)} to {points(pair['high'], True)}), {p_text(pair['p_holm'])}{_corrected(family)}"
        )
    # Where nothing differs, the distance below says all; what a test could have called would only confuse.
    if pair["minimum_detectable"] is None:
        words += f"; {count} problems are too few to see any difference"
    elif pair["discordance"]:
        words += f"; at this size anything under {points(pair['minimum_detectable'])} points would stay unseen"
    words += f"; the two are within {points(pair['equivalent_within'])} points of each other (95% confidence)"
    if pair["more_items"]:
        words += f". A true difference of the size seen would need {pair['items_needed']:,} problems, {pair['more_items']:,} more"
    return words


def _null(pair: dict, count: int) -> str:
    flips = pair["only_a"] + pair["only_b"] if "only_a" in pair else pair["better_a"] + pair["better_b"]
    words = (
        f"the null, {pair['a']} run again in other batches: {flips} of {count:,} problems score differently, "
        f"{points(pair['difference'], True)} points ({points(pair['low'], True)} to {points(pair['high'], True)})"
    )
    if pair["resolved"]:
        words += f", {p_text(pair['p'])}: more than chance; this engine does not repeat itself, or its runs differ in a setting"
    return words


def _corrected(family: int) -> str:
    return f" corrected for {family} pairs" if family > 1 else ""
