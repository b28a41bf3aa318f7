"""What makes one device fast: precision, layout, allocator, compilation, graphs, and the choice among them."""

from kasoku.device.autocast import Autocast
from kasoku.device.choose import Chosen, Device, choose
from kasoku.device.compile import Compile
from kasoku.device.graphs import Graphs
from kasoku.device.layout import ChannelsLast
from kasoku.device.malloc import tune_malloc
from kasoku.device.scaling import LossScale
from kasoku.device.seed import Seeded

__all__ = [
    "Autocast",
    "ChannelsLast",
    "Chosen",
    "Compile",
    "Device",
    "Graphs",
    "LossScale",
    "Seeded",
    "choose",
    "tune_malloc",
]
