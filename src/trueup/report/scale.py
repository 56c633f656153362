"""Axes: where a value lies between the ends of an axis, and which ticks to draw."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Scale:
    """`at` maps [low, high] to [0, 1]."""

    low: float
    high: float
    kind: str = "linear"
    """`linear`, `log` or `logit`."""
    percent: bool = False

    def at(self, value: float) -> float:
        low, high = self._warp(self.low), self._warp(self.high)
        return min(1.0, max(0.0, (self._warp(value) - low) / (high - low)))

    def _warp(self, value: float) -> float:
        if self.kind == "log":
            return math.log(max(value, 1e-300))
        if self.kind == "logit":
            value = min(max(value, 1e-12), 1 - 1e-12)
            return math.log(value / (1 - value))
        return value

    def ticks(self) -> list[tuple[float, str]]:
        values = {"linear": self._linear, "log": self._log, "logit": self._logit}[self.kind]()
        return [(value, f"{100 * value:.6g}%" if self.percent else tick(value)) for value in values]

    def _linear(self) -> list[float]:
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = next((unit * factor for factor in (1, 2, 2.5, 5) if unit * factor >= rough), unit * 10)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * count for count in range(first, last + 1)]

    def _log(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        every = max(1, -(-(last - first + 1) // 5))
        values = [10.0**power for power in range(first, last + 1, every)]
        if len(values) >= 3:
            return values
        finer = [m * 10.0**power for power in range(first - 1, last + 1) for m in (1, 2, 5)]
        finer = [value for value in finer if self.low * 0.999 <= value <= self.high * 1.001]
        return finer if len(finer) >= 3 else self._linear()

    def _logit(self) -> list[float]:
        marks = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
        return [value for value in marks if self.low <= value <= self.high]


def spanning(values: list[float], kind: str = "linear", include: float | None = None, percent: bool = False) -> Scale:
    """A scale that holds all finite values with a little air."""
    values = [value for value in values if value is not None and math.isfinite(value)]
    values = [value for value in values if value > 0] if kind == "log" else values
    values += [] if include is None else [include]
    if not values:
        return Scale(0.1, 1.0, kind, percent) if kind == "log" else Scale(0.0, 1.0, kind, percent)
    low, high = min(values), max(values)
    if kind == "log":
        return Scale(low / 1.3, high * 1.3, kind, percent)
    air = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low if low == 0 else low - air, high + air, kind, percent)


def tick(value: float) -> str:
    """Short: ticks of one axis are round numbers."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.6g}"


def number(value: float | None) -> str:
    """Three or four digits, for text."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
