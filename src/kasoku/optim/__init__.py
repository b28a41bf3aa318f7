"""Optimizers (sgd, adamw, lars, muon), learning-rate schedules, clipping, a weight average, the loss."""

from kasoku.optim.averaging import EMA
from kasoku.optim.clip import Clip
from kasoku.optim.fused import adamw, sgd
from kasoku.optim.lars.lars import LARS, Trust, lars
from kasoku.optim.loss import cross_entropy
from kasoku.optim.lr_schedule import Rate
from kasoku.optim.muon import Muon, SGDSettings, muon

__all__ = [
    "EMA", "LARS", "Clip", "Muon", "Rate", "SGDSettings", "Trust", "adamw", "cross_entropy", "lars", "muon", "sgd",
]  # fmt: skip
