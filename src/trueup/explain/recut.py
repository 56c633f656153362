"""One response: which other tokens of the same text explain the learner's log-probs?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

PARTED = 1.0
"""Nats between the two log-probs of one token at which they no longer belong together: int8 reaches .9 in a thousand."""
BACK = 8
"""Tokens before the first parted one in which the text may have been cut: sure tokens agree by chance for a while."""
AHEAD = 48
"""Tokens over which a cut must pay."""
GAIN = 4.0
"""Nats of disagreement that a cut must take away there."""
CUTS = 16
TOKENS_TRIED = 1024


@dataclass
class Recut:
    """What is known of one response after trying."""

    changed: bool
    """Decoded and encoded again as a whole, the ids differ."""
    substituted: tuple[int, int]
    """First and last + 1 of the tokens that the whole round trip replaces, in the sampler's positions; 0, 0 where none."""
    cuts: int = 0
    tried: float = 0.0
    """Log of the number of ways in which the cuts were chosen."""
    first: int = -1
    """The first position that holds another token under the best cuts."""
    wins: int = 0
    losses: int = 0
    """Positions that tell: the learner's value fits the re-cut token fourfold better than its own, or worse."""


def recut(ids: list[int], mu_T: np.ndarray, pi_T: np.ndarray, encoder) -> Recut:
    """`mu_T`, `pi_T`: the two log-probs of the tokens `ids`, NaN where unknown.

    The learner is supposed to have scored tokens h of the same text, position by position. Where h is in step again with the
    sampled tokens, k positions later, its value of position t + k belongs to the sampler's of t. The whole text encoded
    again is tried first; then, wherever the values part, every cut of the text nearby, its second part encoded for
    itself, as it is when messages, lines or chunks are encoded one by one.
    """
    ids = _head(ids, encoder)
    count = len(ids)
    again = _encode(encoder, _decode(encoder, ids))
    front, back = _common(ids, again)
    found = Recut(again != ids, (front, max(front, count - back)) if again != ids else (0, 0))
    paired = np.full(count, -1)  # where the learner's value of each sampled token stands, -1 where it scored none such
    paired[:front] = np.arange(front)
    paired[count - back :] = np.arange(count - back, count) + len(again) - count
    if again != ids and _gain(mu_T, pi_T, paired, front, count) < 0:
        paired = np.arange(count)  # it did not score the round trip of the whole
    start = 0  # of the piece that is cut next
    while found.cuts < CUTS:
        parted = np.flatnonzero(_distance(mu_T, pi_T, paired)[start:] > PARTED)
        if len(parted) == 0:
            break
        best = _best_cut(ids, mu_T, pi_T, paired, start, start + int(parted[0]), encoder)
        if best is None:
            start += int(parted[0]) + 1
            continue
        paired, start, ways = best
        found.cuts += 1
        found.tried += math.log(ways)
    moved_T = (paired >= 0) & (paired != np.arange(count))
    here_T, there_T = np.abs(pi_T[:count] - mu_T[:count]), _distance(mu_T, pi_T, paired)
    tell_T = moved_T & (np.maximum(here_T, there_T) > 0.1)
    found.wins = int((tell_T & (there_T * 4 < here_T)).sum())
    found.losses = int((tell_T & (here_T * 4 < there_T)).sum())
    other = np.flatnonzero(paired != np.arange(count))
    found.first = int(other[0]) if len(other) else -1
    return found


def _best_cut(ids, mu_T, pi_T, paired, start: int, at: int, encoder) -> tuple[np.ndarray, int, int] | None:
    """The cut near token `at` that pays most -> new pairs, where the next piece starts, ways tried."""
    count = len(ids)
    first = max(start, at - BACK)
    text = _decode(encoder, ids[start:])
    low, high = len(_decode(encoder, ids[start:first])), len(_decode(encoder, ids[start : at + 2]))
    offset = _offset(paired, start)  # of the piece's first token in the learner's positions
    best, most, ways = None, GAIN, 0
    seen = set()
    for cut in range(max(1, low), min(high, len(text) - 1) + 1):
        head, tail = _encode(encoder, text[:cut]), _encode(encoder, text[cut:])
        pieces = head + tail
        front, back = _common(ids[start:], pieces)
        back = min(back, len(tail))
        lag = offset + len(pieces) - (count - start)
        key = (front, back, lag)
        if back == 0 or key in seen or (lag == 0 and front + back >= count - start):
            continue
        seen.add(key)
        ways += 1
        moved = paired.copy()
        moved[start + front : count - back] = -1
        moved[count - back :] = np.arange(count - back, count) + lag
        moved[moved >= len(pi_T)] = -1
        distance_T = _distance(mu_T, pi_T, moved)
        parted = np.flatnonzero(distance_T[at + 1 : at + AHEAD] > PARTED)
        # To the next parted token only: the text may have been cut again before it.
        run = at + 1 + int(parted[0]) if len(parted) else at + AHEAD
        gain = _gain(mu_T, pi_T, moved, start + front, run)
        if gain > most:
            best, most = (moved, count - back), gain
    return None if best is None else (*best, max(ways, 1))


def _offset(paired: np.ndarray, start: int) -> int:
    return int(paired[start]) - start if start < len(paired) and paired[start] >= 0 else 0


def _gain(mu_T, pi_T, paired, low: int, high: int) -> float:
    """Nats of disagreement, each token's bounded by 4, that these pairs take away between two positions."""
    here_T, there_T = np.abs(pi_T[: len(paired)] - mu_T[: len(paired)]), _distance(mu_T, pi_T, paired)
    known_T = (paired >= 0) & np.isfinite(here_T) & np.isfinite(there_T)
    part = slice(low, high)
    return float((np.minimum(here_T, 4.0) - np.minimum(there_T, 4.0))[part][known_T[part]].sum())


def _distance(mu_T: np.ndarray, pi_T: np.ndarray, paired: np.ndarray) -> np.ndarray:
    """|log pi - log mu| of each sampled token at its pair; NaN without one."""
    at = np.clip(paired, 0, len(pi_T) - 1)
    return np.where((paired >= 0) & (paired < len(pi_T)), np.abs(pi_T[at] - mu_T[: len(paired)]), np.nan)


def _common(one: list[int], other: list[int]) -> tuple[int, int]:
    """Lengths of the common beginning and, of what is left, of the common end."""
    most = min(len(one), len(other))
    front = next((i for i in range(most) if one[i] != other[i]), most)
    back = next((i for i in range(most - front) if one[-1 - i] != other[-1 - i]), most - front)
    return front, back


def _head(ids: list[int], encoder) -> list[int]:
    """At most TOKENS_TRIED of them, ending where a word ends, so that the rest of the text does not change their cut."""
    if len(ids) <= TOKENS_TRIED:
        return ids
    for end in range(TOKENS_TRIED, TOKENS_TRIED // 2, -1):
        if _decode(encoder, ids[end : end + 1])[:1].isspace():
            return ids[:end]
    return ids[:TOKENS_TRIED]


def _decode(encoder, ids: list[int]) -> str:
    return encoder.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _encode(encoder, text: str) -> list[int]:
    return encoder.encode(text, add_special_tokens=False)
