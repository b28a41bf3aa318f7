"""Images that cannot be decoded: which, and why."""

from __future__ import annotations

import threading

from kasoku.core.errors import InputError

_WHY = 1000  # reasons in a checkpoint


class Skipped:
    """Images that cannot be decoded: left out, counted, named; too many of them end the training.

    On several ranks each counts what it met itself, so the limit is each rank's own; a checkpoint holds what all met.

    Attributes:
        reasons: index of an image -> why, also of the earlier parts of a resumed training: what is named at the end.
        met: those met in this part, which count; the others are tried again, as they may have been mended.
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
                    f"{self.fraction:g}): {_told([self.reasons[i] for i in sorted(self.met)])}; mend them, or go on "
                    "without more of them: data.max_bad_fraction=0.1"
                )

    def told(self) -> str:
        """The first of them, in a line."""
        return _told([reason for _, reason in sorted(self.reasons.items())])

    def state_dict(self) -> dict[int, str]:
        """Which images, and of the first thousand why."""
        return {index: why if i < _WHY else "" for i, (index, why) in enumerate(sorted(self.reasons.items()))}

    def load_state_dict(self, state: dict[int, str]) -> None:
        """Names these too."""
        self.reasons.update(state)


def _told(reasons: list[str]) -> str:
    return "; ".join([*reasons[:10], *(["..."] if len(reasons) > 10 else [])])
