"""How weights move: rules (sgd, adamw, muon), the rate's course, clipping, averages, the loss."""

from kasoku.optim.adamw import adamw
from kasoku.optim.average import EMA, Lookahead
from kasoku.optim.clip import Clip
from kasoku.optim.loss import cross_entropy
from kasoku.optim.muon import Muon, Rest, muon
from kasoku.optim.rate import Rate
from kasoku.optim.sgd import sgd

__all__ = ["EMA", "Clip", "Lookahead", "Muon", "Rate", "Rest", "adamw", "cross_entropy", "muon", "sgd"]
