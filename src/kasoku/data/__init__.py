"""Where images come from and how they reach the model: sources, augmentation, order, loaders."""

from kasoku.data.augment.basic import Augment, Transform, normalise
from kasoku.data.augment.growth import GrowBatch, LowResolution
from kasoku.data.augment.mixup import Mix
from kasoku.data.augment.skip_easy import SkipEasy
from kasoku.data.augment.transforms import Transforms
from kasoku.data.datasets.base import PUBLISHED, Dataset, Encoded, Facts, Files, Items, Memory, Split, digits
from kasoku.data.datasets.binary import cifar10, cifar100, fashion_mnist, idx, mnist
from kasoku.data.datasets.folder import find_images, folder, imagenet
from kasoku.data.datasets.tables import hugging_face, parquet
from kasoku.data.decode.decode import decode, read_image
from kasoku.data.decode.nvjpeg import Decoding
from kasoku.data.loading.loader import Loader, loader, sample
from kasoku.data.loading.pipeline import Pipeline
from kasoku.data.loading.shuffle import draws, order
from kasoku.data.loading.uneven_shares import Shares, by_speed
from kasoku.data.packs.reader import shards
from kasoku.data.remote.store import GoneError

__all__ = [
    "PUBLISHED", "Augment", "Dataset", "Decoding", "Encoded", "Facts", "Files", "GoneError", "GrowBatch", "Items",
    "Loader", "LowResolution", "Memory", "Mix", "Pipeline", "Shares", "SkipEasy", "Split", "Transform", "Transforms",
    "by_speed", "cifar10", "cifar100", "decode", "digits", "draws", "fashion_mnist", "find_images", "folder",
    "hugging_face", "idx", "imagenet", "loader", "mnist", "normalise", "order", "parquet", "read_image", "sample",
    "shards",
]  # fmt: skip
