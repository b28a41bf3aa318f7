"""Simulation of training steps on clusters: their time and cost before anything is rented."""

from kasoku.simulate.cluster import Cluster, load
from kasoku.simulate.compute_model import ModelCosts, model_costs, profiled
from kasoku.simulate.step import Sharing, SimulatedStep, Simulator, timeline

__all__ = [
    "Cluster", "ModelCosts", "Sharing", "SimulatedStep", "Simulator", "load", "model_costs", "profiled", "timeline",
]  # fmt: skip
