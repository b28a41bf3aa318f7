"""Where images come from and how they reach the model: sources, augmentation, order, loaders."""

from kasoku.data.augment import Augment, Transform, normalise
from kasoku.data.cifar import cifar10, cifar100
from kasoku.data.decode import decode, read_image
from kasoku.data.folder import find_images, folder, imagenet
from kasoku.data.grow import GrowBatch
from kasoku.data.idx import fashion_mnist, idx, mnist
from kasoku.data.images import FilesLoader
from kasoku.data.loader import Loader, MemoryLoader, loader, sample
from kasoku.data.mix import Mix
from kasoku.data.nvjpeg import Decoding
from kasoku.data.order import draws, order
from kasoku.data.randaugment import RandAugment
from kasoku.data.resolution import LowResolution
from kasoku.data.shards import shards
from kasoku.data.shared import shared
from kasoku.data.shares import Shares, by_speed
from kasoku.data.sources import PUBLISHED, Dataset, Encoded, Facts, Files, GoneError, Items, Memory, Split, digits

__all__ = [
    "PUBLISHED",
    "Augment",
    "Dataset",
    "Decoding",
    "Encoded",
    "Facts",
    "Files",
    "FilesLoader",
    "GoneError",
    "GrowBatch",
    "Items",
    "Loader",
    "LowResolution",
    "Memory",
    "MemoryLoader",
    "Mix",
    "RandAugment",
    "Shares",
    "Split",
    "Transform",
    "by_speed",
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
    "shards",
    "shared",
]
