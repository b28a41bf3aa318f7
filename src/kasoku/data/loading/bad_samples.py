"""Images that cannot be decoded: which, and why."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kasoku.core.errors import InputError

_REASONS = 1000  # reasons in a checkpoint


class Skipped:
    """Images that cannot be decoded: left out, counted, named; too many of them end the training.

    On several ranks each counts what it met itself, so the limit is each rank's own; a checkpoint holds what all met.

    Attributes:
        reasons: index of an image -> why, also of the earlier parts of a resumed training; named at the end.
        met: those met in this part, which count; earlier ones are tried again, as they may have been mended.
    """

    def __init__(self, images: int, max_bad_fraction: float) -> None:
        self.images, self.fraction = images, max_bad_fraction
        self.reasons: dict[int, str] = {}
        self.met: set[int] = set()
        self._lock = threading.Lock()

    def add(self, index: int, reason: str) -> None:
        """Notes an image. Raises InputError with the list where there are too many."""
        with self._lock:
            self.reasons[index] = reason
            self.met.add(index)
            most = max(1, int(self.fraction * self.images))
            if len(self.met) > most:
                raise InputError(
                    f"more than {most} of {self.images:,} images cannot be decoded (max_bad_fraction="
                    f"{self.fraction:g}): {self.summary(self.met)}; mend them, or go on "
                    "without more of them: data.max_bad_fraction=0.1"
                )

    def copy(self) -> Skipped:
        """The same images, noted apart from here on."""
        twin = Skipped(self.images, self.fraction)
        twin.reasons, twin.met = dict(self.reasons), set(self.met)
        return twin

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """What is noted in the body is forgotten after it."""
        reasons, met = dict(self.reasons), set(self.met)
        try:
            yield
        finally:
            self.reasons, self.met = reasons, met

    def summary(self, images: Collection[int] | None = None) -> str:
        """The reasons of the first ten of them, in a line; all that are noted by default."""
        shown = sorted(self.reasons if images is None else images)
        return "; ".join([*(self.reasons[i] for i in shown[:10]), *(["..."] if len(shown) > 10 else [])])

    def state_dict(self) -> dict[int, str]:
        """Which images, and of the first thousand why."""
        return {index: reason if i < _REASONS else "" for i, (index, reason) in enumerate(sorted(self.reasons.items()))}

    def load_state_dict(self, state: dict[int, str]) -> None:
        self.reasons.update(state)
