import io
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kasoku.core import InputError, Job
from kasoku.data import Augment, Decoding, folder, loader
from kasoku.data.augment.basic import box_draws, random_box
from kasoku.data.decode import native, nvjpeg
from kasoku.data.decode.decode import crop
from kasoku.data.loading import executor

pytestmark = pytest.mark.skipif(not native.LIBRARY, reason="kasoku's piece of C was not built here")
CPU = torch.device("cpu")
SIZE = (48, 40)
TOGETHER = 16  # images that a thread takes at a time


def by_pillow(files):
    """What nvJPEG does, done by Pillow."""
    found = []
    for file in files:
        try:
            pixels_HWC = np.asarray(Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB"))
        except OSError as error:
            raise RuntimeError(str(error)) from error
        found.append(torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1).contiguous())
    return found


@pytest.fixture(params=["torchvision", "Pillow"])
def in_its_place(request, monkeypatch):
    """The CPU stands for the GPU: through torchvision, where that is installed, and through Pillow."""
    if request.param == "torchvision":
        try:
            nvjpeg.decoding(CPU)
        except InputError as error:
            pytest.skip(str(error))
    else:
        monkeypatch.setattr(nvjpeg, "decoding", lambda device: by_pillow)


def boxes_of(count, scale_min=0.08):
    return [lambda w, h, u=u: random_box(w, h, u, scale_min) for u in box_draws(0, 0, torch.arange(count)).tolist()]


def file(image, kind="JPEG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def photo(width=120, height=90, mode="RGB", seed=0):
    """Smooth, as photos are."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def made(sources, boxes, size=SIZE):
    """(crops_NHWC, which of them were decoded in a batch, what is wrong with which row), as the loader makes them."""
    out_NHWC, bad, taken = torch.zeros((len(sources), *size, 3), dtype=torch.uint8), {}, []
    for first in range(0, len(sources), TOGETHER):
        rows = range(first, min(first + TOGETHER, len(sources)))
        read = nvjpeg.reader(sources.__getitem__, rows, CPU)
        taken += [isinstance(read(row), np.ndarray) and isinstance(sources[row], bytes) for row in rows]
        part = out_NHWC[first : first + TOGETHER].numpy()
        split = SimpleNamespace(name=lambda row: f"file {row}")
        pipeline = SimpleNamespace(decoder="cpu")  # `read` has them decoded
        iteration = SimpleNamespace(pipeline=pipeline, split=split, vary=None, _source=read)
        refused = executor._Iteration._make(iteration, part, [*rows], boxes[first : first + TOGETHER])
        bad |= {first + row: reason for row, reason in refused.items()}
    return out_NHWC, taken, bad


def by_cpu(sources, boxes, size=SIZE):
    out_NHWC = np.zeros((len(sources), *size, 3), np.uint8)
    for row, (source, box) in enumerate(zip(sources, boxes, strict=True)):
        crop(source, box, out_NHWC[row])
    return torch.from_numpy(out_NHWC)


def far(got, want):
    """(mean, share within 8 levels) of the differences."""
    away = (got.int() - want.int()).abs().float()
    return float(away.mean()), float((away <= 8).float().mean())


# ---- pixels


@pytest.mark.data
def test_crops_of_real_photos_are_the_cpus(real_data, in_its_place):
    photos = [path.read_bytes() for path in sorted((real_data / "imagenet_fullsize").rglob("*.JPEG"))[::3]]
    got, taken, bad = made(photos, boxes_of(len(photos)), (224, 224))
    mean, within = far(got, by_cpu(photos, boxes_of(len(photos)), (224, 224)))
    assert sum(taken) > 0.9 * len(photos)
    assert not bad
    assert mean <= 1
    assert within >= 0.999


@pytest.mark.parametrize("most", [1, 3, 64])
def test_how_many_are_decoded_together_changes_no_bit(monkeypatch, most):
    monkeypatch.setattr(nvjpeg, "decoding", lambda device: by_pillow)
    photos = [file(photo(seed=seed)) for seed in range(7)]
    want, _, _ = made(photos, boxes_of(7))
    monkeypatch.setitem(globals(), "TOGETHER", most)
    got, taken, _ = made(photos, boxes_of(7))
    assert all(taken)
    assert got.equal(want)


# ---- what is not the GPU's


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return file(photo(), exif=exif)


OTHERS = {
    "progressive": file(photo(), progressive=True),
    "CMYK": file(photo(mode="CMYK")),
    "RGB": file(photo(), keep_rgb=True),
    "turned": turned(),
    "PNG": file(photo(), "PNG"),
    "pixels": np.asarray(photo()),
    "something behind it": file(photo()) + b"\0",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_nvjpeg_does_not_take_has_the_cpus_pixels(monkeypatch, kind):
    def never(device):
        raise AssertionError("nothing is decoded by it")

    monkeypatch.setattr(nvjpeg, "decoding", never)
    got, taken, bad = made([OTHERS[kind]], boxes_of(1))
    assert (taken, bad) == ([False], {})
    assert got.equal(by_cpu([OTHERS[kind]], boxes_of(1)))


def test_a_large_image_is_the_cpus(monkeypatch):
    monkeypatch.setattr(nvjpeg, "_LARGEST", 120 * 90 - 1)
    monkeypatch.setattr(nvjpeg, "decoding", lambda device: by_pillow)
    assert made([file(photo()), file(photo(119))], boxes_of(2))[1] == [False, True]


def test_grey_and_every_subsampling_are_decoded_in_the_batch(in_its_place):
    files = [file(photo(mode="L")), *(file(photo(), subsampling=s, quality=95) for s in range(3))]
    got, taken, _ = made(files, boxes_of(4, 0.8))
    assert all(taken)
    mean, within = far(got, by_cpu(files, boxes_of(4, 0.8)))
    assert mean <= 1
    assert within >= 0.999


def test_what_is_decoded_with_a_file_that_nvjpeg_fails_on_is_the_cpus(monkeypatch):
    files = [file(photo(seed=seed)) for seed in range(9)]
    calls = []

    def fails_on_one(tensors):
        calls.append(len(tensors))
        if any(tensor.numpy().tobytes() == files[4] for tensor in tensors):
            raise RuntimeError("nvjpeg error 3")
        return by_pillow(tensors)

    monkeypatch.setattr(nvjpeg, "decoding", lambda device: by_pillow)
    want, _, _ = made(files, boxes_of(9))
    want[3:6] = by_cpu(files[3:6], boxes_of(9)[3:6])
    monkeypatch.setitem(globals(), "TOGETHER", 3)
    monkeypatch.setattr(nvjpeg, "decoding", lambda device: fails_on_one)
    got, taken, bad = made(files, boxes_of(9))
    assert taken == [row not in (3, 4, 5) for row in range(9)]
    assert not bad
    assert got.equal(want)
    assert calls == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")
@pytest.mark.data
def test_every_odd_file_has_the_cpus_pixels_or_its_refusal(real_data, in_its_place):
    files = [path for path in sorted((real_data / "odd").glob("*/*")) if path.is_file()]
    sources = [path.read_bytes() for path in files]
    boxes = [lambda w, h: (0.1 * w, 0.2 * h, 0.9 * w, 0.95 * h)] * len(files)
    got, taken, bad = made(sources, boxes)
    assert any(taken)
    refused = {}
    for row, (path, source) in enumerate(zip(files, sources, strict=True)):
        want = np.zeros((*SIZE, 3), np.uint8)
        try:
            crop(source, boxes[row], want, name=f"file {row}")
        except InputError as error:
            refused[row] = str(error)
            continue
        mean, within = far(got[row], torch.from_numpy(want))
        assert mean <= 1, path
        assert within >= 0.999, path
    assert bad == refused


# ---- the loader


@pytest.fixture
def photos(tmp_path):
    """An image folder of two classes, of JPEGs and a few PNGs."""
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(14):
            kind = "png" if number % 5 == 0 else "jpg"
            photo(90 + number, 80, seed=number).save(tmp_path / "photos" / name / f"{number}.{kind}", quality=95)
    return folder(str(tmp_path / "photos"), size=32, validation=0.3)


def epochs(dataset, split="train", batch=4, count=2, position=0, **settings):
    augment = Augment(flip="random", translate=2, crop="random_resized") if split == "train" else Augment()
    batches = loader(dataset, split, batch, **{"seed": 3, "augment": augment, "cache_bytes": 0, **settings})
    batches.seek(0, position)
    return [(x.clone(), y.clone()) for _ in range(count) for x, y in batches], batches


@pytest.fixture
def stand_in(in_its_place, monkeypatch):
    """A loader on the CPU may have its images decoded as on a GPU."""
    monkeypatch.setattr(nvjpeg, "check", lambda decoder, device: None)


def test_a_loader_gives_the_images_of_one_on_the_cpu_in_its_order(photos, stand_in):
    want, _ = epochs(photos)
    got, batches = epochs(photos, decoder="nvjpeg", cache_bytes=2**30)
    assert [y.tolist() for _, y in got] == [y.tolist() for _, y in want]
    assert not batches.pipeline.keeps_decoded
    levels = torch.cat([(x - z).abs().flatten() for (x, _), (z, _) in zip(got, want, strict=True)]) * 255 * 0.225
    assert levels.mean() <= 1
    assert levels.max() <= 8


def test_batches_depend_on_neither_threads_nor_where_it_resumes(photos, stand_in):
    want, _ = epochs(photos, decoder="nvjpeg", threads=1)
    got, _ = epochs(photos, decoder="nvjpeg", threads=5)
    later, _ = epochs(photos, decoder="nvjpeg", threads=2, count=1, position=2)
    assert all(x.equal(z) for (x, _), (z, _) in zip(got, want, strict=True))
    assert all(x.equal(z) for (x, _), (z, _) in zip(later, want[2 : 2 + len(later)], strict=True))


def bad_ones(dataset, tmp_path, split):
    """One of these rows is no image, one is cut off."""
    part = getattr(dataset, split)
    paths = list(part.paths)
    jpegs = [i for i, path in enumerate(paths) if path.endswith("jpg")]
    places = [jpegs[0], jpegs[-1]]
    for i in places:
        bad = tmp_path / os.path.basename(os.path.dirname(paths[i])) / f"bad{i}.jpg"
        bad.parent.mkdir(exist_ok=True)
        bad.write_bytes(b"no image" if i == places[0] else file(photo())[:-40])
        paths[i] = str(bad)
    return replace(dataset, **{split: replace(part, paths=tuple(paths))}, max_bad_fraction=0.5), places


@pytest.mark.parametrize("split", ["train", "test"])
def test_bad_images_are_skipped_counted_and_named_as_on_the_cpu(photos, tmp_path, stand_in, split):
    bad, places = bad_ones(photos, tmp_path, split)
    want, cpu = epochs(bad, split)
    got, batches = epochs(bad, split, decoder="nvjpeg")
    assert [y.tolist() for _, y in got] == [y.tolist() for _, y in want]
    assert batches.skipped.reasons == cpu.skipped.reasons
    assert sorted(batches.skipped.reasons) == places


def test_an_image_that_only_decoding_shows_to_be_bad_is_skipped_too(photos, monkeypatch):
    bad = next(i for i, path in enumerate(photos.test.paths) if path.endswith("jpg"))
    data = photos.test.read(bad)

    def fails_on_one(tensors):
        if any(tensor.numpy().tobytes() == data for tensor in tensors):
            raise RuntimeError("nvjpeg error 3")
        return by_pillow(tensors)

    def refused(source, box, out_HWC, *, name):
        if isinstance(source, bytes) and source == data:
            raise InputError(f"{name}: cannot be decoded")
        crop(source, box, out_HWC, name=name)

    monkeypatch.setattr(nvjpeg, "check", lambda decoder, device: None)
    monkeypatch.setattr(nvjpeg, "decoding", lambda device: fails_on_one)
    monkeypatch.setattr(executor, "crop", refused)
    got, batches = epochs(photos, "test", decoder="nvjpeg", count=1)
    assert batches.skipped.reasons == {bad: f"{photos.test.name(bad)}: cannot be decoded"}
    assert torch.cat([y for _, y in got]).equal(photos.test.labels_N[torch.arange(len(photos.test)) != bad])


# ---- what cannot be


def one_line(error):
    assert "\n" not in str(error.value)


def test_a_loader_on_the_cpu_refuses_nvjpeg_in_one_line(photos):
    with pytest.raises(InputError, match=r"decoder=nvjpeg: only for a loader on a CUDA device, not on cpu") as e:
        epochs(photos, decoder="nvjpeg")
    one_line(e)


def test_another_decoder_is_refused_in_one_line(photos):
    with pytest.raises(InputError, match=r'decoder="gpu": "cpu" or "nvjpeg"') as e:
        epochs(photos, decoder="gpu")
    one_line(e)


def test_a_missing_torchvision_is_one_line_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    nvjpeg.decoding.cache_clear()
    with pytest.raises(InputError, match=r'torchvision cannot decode on cuda.*pip install "torchvision>=0\.26"') as e:
        nvjpeg.check("nvjpeg", torch.device("cuda"))
    one_line(e)


def test_a_torchvision_without_nvjpeg_is_refused_in_one_line(monkeypatch):
    class Without:
        class ImageReadMode:
            RGB = 3

        encode_jpeg = staticmethod(torch.flatten)

        @staticmethod
        def decode_jpeg(files, mode, device):
            raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nException raised from")

    monkeypatch.setitem(sys.modules, "torchvision", Without)
    monkeypatch.setitem(sys.modules, "torchvision.io", Without)
    nvjpeg.decoding.cache_clear()
    with pytest.raises(InputError, match=r"torchvision cannot decode on cuda \(.*not compiled.*\); pip install") as e:
        nvjpeg.check("nvjpeg", torch.device("cuda"))
    one_line(e)


def test_without_the_piece_of_c_nvjpeg_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    with pytest.raises(InputError, match="install with a C compiler") as e:
        nvjpeg.check("nvjpeg", torch.device("cuda"))
    one_line(e)


# ---- on a GPU


@pytest.mark.data
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_decodes_real_photos_to_nearly_the_cpus_pixels(real_data):
    try:
        nvjpeg.check("nvjpeg", torch.device("cuda"))
    except InputError as error:
        pytest.skip(str(error))
    data = folder(str(real_data / "imagenet_fullsize"), size=224, validation=0.3)
    sides = []
    for device, decoder in (("cpu", "cpu"), ("cuda", "nvjpeg")):
        batches = loader(data, "test", 16, device=device, decoder=decoder, cache_bytes=0)
        sides.append([(x.cpu(), y.cpu()) for x, y in batches])
    assert [y.tolist() for _, y in sides[0]] == [y.tolist() for _, y in sides[1]]
    levels = torch.cat([(x - z).abs().flatten() for (x, _), (z, _) in zip(*sides, strict=True)]) * 255 * 0.225
    assert levels.mean() <= 2  # it repeats chroma where libjpeg interpolates
    assert (levels <= 16).float().mean() >= 0.99


def test_as_a_technique_it_sets_the_loader_until_the_job_is_closed(photos, monkeypatch):
    monkeypatch.setattr(nvjpeg, "check", lambda decoder, device: None)
    batches = loader(photos, "train", 4)
    job = Job(torch.nn.Flatten(), torch.optim.SGD([torch.zeros(1)], 0.1), loader=batches)
    job.apply(Decoding("nvjpeg"))
    assert batches.pipeline.decoder == "nvjpeg"
    job.close()
    assert batches.pipeline.decoder == "cpu"


def test_as_a_technique_it_is_refused_in_one_line(photos):
    for batches, by, said in (
        ([], "nvjpeg", "Decoding: list decodes no files"),
        (loader(photos, "train", 4), "nvjpeg", "only for a loader on a CUDA device"),
        (loader(photos, "train", 4), "gpu", 'by="gpu": "cpu" or "nvjpeg"'),
    ):
        with pytest.raises(InputError, match=said):
            Job(torch.nn.Flatten(), torch.optim.SGD([torch.zeros(1)], 0.1), loader=batches).apply(Decoding(by))
