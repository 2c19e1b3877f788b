"""SIGTERM and SIGINT: finish the step, save, leave. A process that cannot (its peers are gone) ends by itself.

The same signal may come twice at once: a cluster tells every process, and the launcher passes its own on. So only a
second Ctrl-C, later, means "do not wait".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 20.0  # torchrun follows its SIGTERM with SIGKILL after 30
AGAIN_SECONDS = 1.0  # a SIGINT so long after the first signal is a second wish, not a copy of it


class StopSignal:
    """`received` becomes True at the first signal; the loop asks for it between steps. A second Ctrl-C ends at once."""

    def __init__(self, grace: float = GRACE_SECONDS):
        self.received = False
        self._grace = grace
        self._timer: threading.Timer | None = None
        self._since = 0.0

    def install(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def finished(self) -> None:
        """The run has left the step in which the signal came: no forced end any more, saving may take its time."""
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: object) -> None:
        if self.received:
            if number == signal.SIGINT and time.monotonic() - self._since > AGAIN_SECONDS:
                self._end(number)
            return
        self.received, self._since = True, time.monotonic()
        self._timer = threading.Timer(self._grace, self._end, (number,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, number: int) -> None:
        print(f"signal {number}: the step did not end within {self._grace:.0f} s (are other ranks gone?); leaving without "
              "saving", file=sys.stderr, flush=True)  # fmt: skip
        os._exit(128 + number)
