"""Ending a run between steps."""

from __future__ import annotations

import signal


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a note to stop after the step; the second SIGINT stops at once."""

    def __enter__(self):
        self.signal: str | None = None
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        self.signal = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)
