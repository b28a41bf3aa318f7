"""Where images come from and how they reach the model: sources, augmentation, order, loaders."""

from kasoku.data.augment import Augment, Transform, normalise
from kasoku.data.cifar import cifar10, cifar100
from kasoku.data.decode import decode, read_image
from kasoku.data.folder import find_images, folder, imagenet
from kasoku.data.grow import GrowBatch
from kasoku.data.idx import fashion_mnist, idx, mnist
from kasoku.data.loader import FilesLoader, Loader, MemoryLoader, loader, sample
from kasoku.data.order import draws, order
from kasoku.data.resolution import LowResolution
from kasoku.data.shared import shared
from kasoku.data.sources import PUBLISHED, Dataset, Facts, Files, Memory, Split, digits

__all__ = [
    "PUBLISHED",
    "Augment",
    "Dataset",
    "Facts",
    "Files",
    "FilesLoader",
    "GrowBatch",
    "Loader",
    "LowResolution",
    "Memory",
    "MemoryLoader",
    "Split",
    "Transform",
    "cifar10",
    "cifar100",
    "decode",
    "digits",
    "draws",
    "fashion_mnist",
    "find_images",
    "folder",
    "idx",
    "imagenet",
    "loader",
    "mnist",
    "normalise",
    "order",
    "read_image",
    "sample",
    "shared",
]
