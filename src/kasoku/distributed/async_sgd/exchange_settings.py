"""The settings of an exchange, with their defaults resolved."""

from __future__ import annotations

from dataclasses import dataclass

from kasoku.distributed.async_sgd.quantization import Codec
from kasoku.distributed.ddp.bucket_plan import Policy


@dataclass(frozen=True)
class ExchangeSettings:
    """The engine's settings: those of Asynchronous, with codec, prediction and momentum as values.

    Args:
        code: the codec of updates and replies.
        ahead: the prediction, in multiples of the other ranks' last movement; 0: none.
        momentum: of the optimizers between sync points; None: unchanged.
        max_staleness, buckets, servers, every, hidden, stream, warmup, finish: as in Asynchronous.
    """

    code: Codec
    ahead: float
    momentum: float | None
    max_staleness: int | None
    buckets: Policy
    servers: int
    every: int
    hidden: bool
    stream: bool
    warmup: float
    finish: float

    @property
    def predicts(self) -> bool:
        return self.ahead > 0

    @property
    def blocking(self) -> bool:
        """Whether the parameters do not change during an exchange, and equal the weights read after it."""
        return not self.hidden and not self.predicts
