"""What makes one device fast: precision, layout, allocator, compilation, graphs, and the choice among them."""

from kasoku.device.channels_last import ChannelsLast
from kasoku.device.compile import Compile
from kasoku.device.cpu_kernels import CpuKernels
from kasoku.device.cuda_graphs import Graphs
from kasoku.device.half_precision import Autocast, LossScale
from kasoku.device.seeding import Seeded
from kasoku.device.select import Chosen, Device, choose, tune_malloc

__all__ = [
    "Autocast", "ChannelsLast", "Chosen", "Compile", "CpuKernels", "Device", "Graphs", "LossScale", "Seeded",
    "choose", "tune_malloc",
]  # fmt: skip
