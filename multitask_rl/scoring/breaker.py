"""Circuit breaker: a plugin that only fails is not called for a while, which saves its time limit."""

from __future__ import annotations

import time

from multitask_rl.records import Failure, FailureKind

FIRST_REST_S = 5.0
LONGEST_REST_S = 120.0
INFRA_IN_A_ROW = 20


class CircuitBreaker:
    """Opens when a plugin hangs or keeps failing; while it is open, samples fail without a call.

    After the rest one success closes it; a failure opens it again for twice as long.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._infra = 0
        self._rest_s = FIRST_REST_S
        self._open_until = 0.0
        self._kind = FailureKind.infra
        self._reason = ""
        self.opened: list[str] = []
        """Reasons of openings that are not reported yet."""

    @property
    def suspicious(self) -> bool:
        """It opened, and no success has closed it."""
        return self._open_until > 0.0

    def refusal(self) -> Failure | None:
        """Return the failure of every sample now, or None if calls may go out."""
        left = self._open_until - time.monotonic()
        if left <= 0:
            return None
        message = f"not called: {self._reason}; tried again in {left:.0f} s"
        return Failure(kind=self._kind, message=message, source=self._source)

    def success(self) -> None:
        """Note a result that is no ``infra`` failure."""
        self._infra, self._rest_s, self._open_until = 0, FIRST_REST_S, 0.0

    def infra(self, message: str) -> None:
        """Note a final ``infra`` failure."""
        self._infra += 1
        if self._infra >= (1 if self.suspicious else INFRA_IN_A_ROW):
            self.open(FailureKind.infra, f"{self._infra} infrastructure failures in a row ({message})")

    def open(self, kind: FailureKind, reason: str) -> None:
        """Refuse calls for a while."""
        self._kind, self._reason = kind, reason
        self._open_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        self._infra = 0
        self.opened.append(f"{self._source} is given a rest: {reason}")
