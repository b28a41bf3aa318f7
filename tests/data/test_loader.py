import gc
import io
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kasoku.core import InputError, Job
from kasoku.data import (
    Augment,
    Items,
    Memory,
    digits,
    folder,
    loader,
    normalise,
    order,
    sample,
)
from kasoku.data.augment.basic import stored_side
from kasoku.data.loading import executor

VARIED = Augment(flip="alternating", translate=1, cutout=2)
CROPPED = Augment(flip="random", translate=3, crop="random_resized")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """An image folder: 2 classes of 20 images of several sizes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / name).mkdir()
        for number in range(20):
            size = (16, 16) if number % 2 else (20 + number, 30)
            pixels = np.asarray(Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize(size))
            kind = "jpg" if number % 3 == 0 else "png"  # both decoders
            Image.fromarray(pixels).save(root / name / f"{number}.{kind}")
    return folder(str(root), size=16, validation=0.3, cache=str(tmp_path_factory.mktemp("index")))


def few_digits():
    data = digits()
    train, test = (Memory(s.images_NHWC[:n], s.labels_N[:n]) for s, n in ((data.train, 150), (data.test, 53)))
    return replace(data, train=train, test=test)


@pytest.fixture(params=["memory", "files"])
def made(request, photos):
    """A function that makes the same loader each time: of a split in memory, or of files."""
    data, augment = (few_digits(), VARIED) if request.param == "memory" else (photos, CROPPED)

    def make(split="train", batch=8, **settings):
        return loader(data, split, batch, augment=augment, **settings)

    return make


def copies(batches):
    return [(x.clone(), y.clone()) for x, y in batches]


def equal(a, b):
    return len(a) == len(b) and all(x.equal(u) and y.equal(v) for (x, y), (u, v) in zip(a, b, strict=True))


def test_no_batch_of_bytes_is_kept_while_the_next_is_made(monkeypatch):
    batches, seen = loader(digits(), "train", 8), []

    def run(pipeline, epoch, part_numbers, trace):
        for _ in zip(range(3), part_numbers, strict=False):
            assert all(images() is None for images in seen)
            images_NHWC = torch.zeros((8, 8, 8, 1), dtype=torch.uint8)
            seen.append(weakref.ref(images_NHWC))
            given = [(images_NHWC, torch.zeros(8), torch.arange(8))]
            del images_NHWC
            yield given.pop()

    monkeypatch.setattr(batches.executor, "run", run)
    assert len(list(batches)) == len(seen) == 3


def test_an_epoch_is_its_full_batches_normalised_on_the_device(made):
    batches = made()
    first = copies(batches)
    assert len(first) == len(batches) == batches.images // 8
    x_NCHW, y_N = first[0]
    assert x_NCHW.shape[0] == len(y_N) == 8
    assert x_NCHW.shape[2:] == batches.dataset.image_size
    assert (x_NCHW.dtype, y_N.dtype) == (torch.float32, torch.int64)
    assert x_NCHW.is_contiguous(memory_format=torch.channels_last)


def test_batches_are_the_same_each_time_and_differ_by_epoch_and_seed(made):
    batches = made()
    first, second = copies(batches), copies(batches)
    assert equal(first, copies(made()))
    assert not equal(first, second)
    assert not equal(first, copies(made(seed=1)))


def test_the_training_order_is_the_order_of_seed_and_epoch():
    d = digits()
    batches = loader(d, "train", 100, seed=4)
    batches.seek(2, 0)
    y_N = torch.cat([y for _, y in batches])
    assert y_N.equal(d.train.labels_N[order(1437, 4, 2)][:1400])


def test_test_images_come_in_order_whole_and_never_augmented(made):
    batches = made("test", 7)
    got = copies(batches)
    y_N = torch.cat([y for _, y in got])
    assert y_N.equal(batches.dataset.test.labels_N)
    assert len(got[-1][1]) == len(y_N) % 7
    assert equal(got, copies(batches))


@pytest.mark.parametrize("split", ["train", "test"])
def test_ranks_share_the_batches_of_one_rank(made, split):
    alone = copies(made(split))
    shares = [copies(made(split, comm=SimpleNamespace(rank=rank, size=4))) for rank in range(4)]
    together = [tuple(torch.cat(part) for part in zip(*one, strict=True)) for one in zip(*shares, strict=True)]
    assert equal(together, alone)
    counts = [len(y) for _, y in (share[-1] for share in shares)]
    assert max(counts) - min(counts) <= 1


def test_augmentation_does_not_depend_on_the_size_of_the_batch(made):
    small, large = copies(made(batch=4)), copies(made(batch=12))
    n = len(large) * 12
    assert torch.cat([x for x, _ in small])[:n].equal(torch.cat([x for x, _ in large])[:n])


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_resuming_within_an_epoch_gives_the_same_batches_bit_for_bit(made, stop):
    want = made()
    want = [*copies(want), *copies(want)]
    batches, got = made(), []
    for _ in range(stop):
        x, y = next(iter(batches))
        got.append((x.clone(), y.clone()))
    resumed = made()
    resumed.load_state_dict(batches.state_dict())
    assert resumed.state_dict() == {"epoch": 0, "position": stop, "parts": 1}
    while resumed.epoch < 2:
        got += copies(resumed)
    assert equal(got, want)


def test_position_moves_before_a_batch_is_used_the_epoch_with_the_last(made):
    batches = made()
    seen = [(batches.epoch, batches.position) for _ in batches]
    assert seen == [(0, i) for i in range(1, len(batches))] + [(1, 0)]
    assert (batches.epoch, batches.position) == (1, 0)


def test_a_loop_left_early_goes_on_there(made):
    batches, rest = made(), []
    whole = copies(made())
    for _ in batches:
        break
    rest = copies(batches)
    assert equal(rest, whole[1:])
    assert batches.epoch == 1


def test_dtype_is_that_of_the_batches(made):
    batches = made(dtype=torch.bfloat16)
    assert next(iter(batches))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("split", "batch", "size", "message"),
    [
        ("train", 1438, 1, "batch=1438: at most 1437 images"),
        ("train", 0, 1, "batch=0: at least 1 image"),
        ("test", -1, 1, "batch=-1: at least 1 image"),
        ("train", 100, 3, "batch=100: not a multiple of 3 ranks"),
        ("val", 10, 1, 'split="val": "train" or "test"'),
    ],
)
def test_a_wrong_batch_is_one_clear_line(split, batch, size, message):
    with pytest.raises(InputError, match=message):
        loader(digits(), split, batch, comm=SimpleNamespace(rank=0, size=size))


@pytest.mark.parametrize("state", [{"epoch": 0, "position": 14}, {"epoch": -1, "position": 0}])
def test_a_state_of_another_loader_is_one_clear_line(state):
    with pytest.raises(InputError, match=r"position=.*: this loader has 14 batches an epoch; resume with"):
        loader(digits(), "train", 100).load_state_dict(state)


# ---- files


def decoders():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kasoku-decode")]


def test_threads_end_with_the_epoch_with_a_break_and_with_an_error(photos):
    def fail():
        for _ in loader(photos, "train", 4):
            raise RuntimeError("mine")

    copies(loader(photos, "train", 4))
    assert not decoders()
    for _ in loader(photos, "train", 4):
        assert decoders()
        break
    assert not decoders()
    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert not decoders()


@pytest.mark.smoke
@pytest.mark.process
def test_a_program_that_ends_in_the_middle_of_an_epoch_does_not_hang(photos):
    root = os.path.dirname(os.path.dirname(photos.train.paths[0]))
    code = f"from kasoku.data import folder, loader; b = iter(loader(folder({root!r}, size=16), 'train', 4)); next(b)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
@pytest.mark.parametrize("threads", [0, 1, 7])
def test_batches_do_not_depend_on_the_number_of_threads(photos, threads, cache_bytes):
    runs = []
    for count in (2, threads):
        batches = loader(photos, "train", 8, augment=CROPPED, threads=count, cache_bytes=cache_bytes)
        runs.append([*copies(batches), *copies(batches)])
    assert equal(*runs)


def counted(monkeypatch):
    """The names of the images that are decoded from now on."""
    seen = []
    for what in ("decode", "crop"):
        real = getattr(executor, what)

        def noted(*a, real=real, **named):
            if isinstance(a[0], bytes):
                seen.append(named["name"])
            return real(*a, **named)

        monkeypatch.setattr(executor, what, noted)
    return seen


def test_each_image_of_a_set_that_fits_the_cache_is_decoded_once(photos, monkeypatch):
    decoded = counted(monkeypatch)
    batches = loader(photos, "test", 4)
    first = copies(batches)
    assert equal(first, copies(batches))
    assert sorted(decoded) == sorted(photos.test.name(i) for i in range(len(photos.test)))
    batches = loader(photos, "test", 4, cache_bytes=0)
    copies(batches), copies(batches)
    assert len(decoded) == 3 * len(photos.test)


def test_what_is_kept_depends_on_the_set_not_on_what_was_decoded(photos):
    batches = loader(photos, "train", 4)
    side = stored_side(16)
    for most, keeps in ((batches.images * 4 * side * side, True), (batches.images * 4 * side * side - 1, False)):
        batches.configure(cache_bytes=most)
        assert batches.pipeline.keeps_decoded is keeps
        copies(batches)
        assert batches.pipeline.keeps_decoded is keeps


@pytest.mark.parametrize(("parts", "size"), [(1, 1), (2, 1), (2, 2)])
def test_what_was_decoded_ahead_is_the_next_batch_and_changes_none(photos, monkeypatch, parts, size):
    def made():
        comm = SimpleNamespace(rank=size - 1, size=size)
        return loader(photos, "train", 8, comm=comm, augment=CROPPED, parts=parts)

    plain = copies(made())
    ahead = made()
    ahead.warm()
    ahead.warm()
    decoded = counted(monkeypatch)
    assert ahead.state_dict() == made().state_dict()
    assert equal(copies(ahead), plain)
    assert len(decoded) == len(set(decoded)) == ahead.images // 8 * 8 // size - 8 // size


def test_a_file_of_the_wanted_size_is_used_as_it_is(photos):
    at = next(i for i, path in enumerate(photos.test.paths) if np.array(Image.open(path)).shape == (16, 16, 3))
    (x_NCHW, _) = next(iter(loader(photos, "test", len(photos.test))))
    want = np.array(Image.open(photos.test.paths[at]))
    assert x_NCHW[at].equal(normalise(torch.from_numpy(want)[None], photos.mean, photos.std)[0])


def with_bad(photos, tmp_path, count, split="train", **more):
    """The same set with so many files that are no images; returns it and their places."""
    part = getattr(photos, split)
    paths, places = list(part.paths), [3 * i for i in range(count)]
    for i in places:
        bad = tmp_path / os.path.basename(os.path.dirname(paths[i])) / f"bad{i}.png"
        bad.parent.mkdir(exist_ok=True)
        bad.write_bytes(b"no image")
        paths[i] = str(bad)
    return replace(photos, **{split: replace(part, paths=tuple(paths))}, **more), places


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_a_bad_image_is_replaced_by_the_next_good_one_with_its_label(photos, tmp_path, cache_bytes):
    bad, places = with_bad(photos, tmp_path, 3, max_bad_fraction=0.2)
    paths, labels_N = list(photos.train.paths), photos.train.labels_N.clone()
    for i in places:
        paths[i], labels_N[i] = paths[i + 1], labels_N[i + 1]
    want, got = (
        loader(one, "train", len(paths), cache_bytes=cache_bytes)
        for one in (replace(photos, train=replace(photos.train, paths=tuple(paths), labels_N=labels_N)), bad)
    )
    assert equal([*copies(got), *copies(got)], [*copies(want), *copies(want)])
    assert sorted(got.skipped.reasons) == places
    for i in places:
        assert f"bad{i}.png: cannot be decoded" in got.skipped.summary()


def test_bad_test_images_are_left_out(photos, tmp_path):
    bad, places = with_bad(photos, tmp_path, 2, split="test", max_bad_fraction=0.3)
    got = torch.cat([y for _, y in loader(bad, "test", 4)])
    keep = [i for i in range(len(photos.test)) if i not in places]
    assert got.equal(photos.test.labels_N[keep])


def test_more_bad_images_than_allowed_end_the_epoch_with_their_names(photos, tmp_path):
    one, _ = with_bad(photos, tmp_path, 1)
    copies(loader(one, "train", 4))  # one is always allowed
    two, _ = with_bad(photos, tmp_path, 2)
    with pytest.raises(InputError, match=r"more than 1 of 28 images.*bad0\.png.*bad3\.png.*; mend them, or") as caught:
        copies(loader(two, "train", 4))
    assert "\n" not in str(caught.value)
    assert not decoders()


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


class Own:
    """A data set as users write them."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 24

    def __getitem__(self, index):
        pixels = np.full((20, 24, 3), 10 * index, np.uint8)
        image = {
            "array": pixels,
            "grey": pixels[..., 0],
            "tensor": torch.from_numpy(pixels).permute(2, 0, 1),
            "pillow": Image.fromarray(pixels),
            "bytes": png(pixels),
        }[self.kind]
        return image, index % 3


def own(kind):
    return replace(digits(), train=Items(Own(kind)), image_size=(16, 16), mean=(0,) * 3, std=(1,) * 3)


@pytest.mark.parametrize("kind", ["array", "grey", "tensor", "pillow", "bytes"])
def test_a_data_set_of_the_users_own_is_a_split(kind):
    batches = loader(own(kind), "train", 8)
    values = torch.cat([torch.stack([x[:, 0, 0, 0] * 255, y.float()]) for x, y in batches], 1)
    assert values.shape == (2, 24)
    order_N = order(24, 0, 0)
    torch.testing.assert_close(values, torch.stack([10.0 * order_N, (order_N % 3).float()]))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (np.zeros((4, 4, 3)), r"item 0: an array of float64, shape \(4, 4, 3\): the bytes or the path"),
        (np.zeros((4, 4, 5), np.uint8), "item 0: an array of uint8"),
        ("/nowhere/x.png", "item 0: FileNotFoundError"),
        (7, "item 0: a int"),
        (np.zeros((0, 5, 3), np.uint8), "item 0: an array of uint8"),
    ],
)
def test_items_that_are_no_images_are_one_clear_line(item, message):
    with pytest.raises(InputError, match=message):
        Items([(item, 0)]).read(0)


def test_labels_that_are_no_numbers_are_one_clear_line():
    with pytest.raises(InputError, match="labels: class numbers are wanted"):
        Items([(b"", "cat")] * 2)
    with pytest.raises(InputError, match="labels: class numbers are wanted"):
        Items([(b"", 0)] * 2, labels_N=["cat", "dog"])


def test_waiting_for_input_is_noted_in_the_jobs_trace(photos):
    model = torch.nn.Linear(1, 1)
    batches = loader(photos, "train", 4)
    job = Job(model, lambda m: torch.optim.SGD(m.parameters(), 0.1), loader=batches)
    copies(job.loader)
    spans = [span for span in job.trace.spans if span.kind == "input"]
    assert len(spans) == len(batches)


def test_memory_does_not_grow_over_epochs(photos):
    batches = loader(photos, "train", 4, cache_bytes=0)
    copies(batches)
    tracemalloc.start()
    try:
        for _ in range(2):
            copies(batches)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            copies(batches)
        assert tracemalloc.get_traced_memory()[0] < before + 50_000
    finally:
        tracemalloc.stop()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc/self/statm: resident memory is not told")
def test_resident_memory_grows_by_less_than_half_a_batch_an_epoch(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(70):
            pixels_HWC = rng.integers(0, 256, (5, 5, 3), np.uint8)
            Image.fromarray(pixels_HWC).resize((280, 260)).save(tmp_path / name / f"{number}.jpg")
    data = folder(str(tmp_path), size=256)
    batches = loader(data, "train", 60, cache_bytes=0, augment=CROPPED)
    batch_bytes = 60 * 256 * 256 * 3  # as they are decoded; normalised they are four times as many

    def least():
        """Of four epochs: what malloc keeps for the next batches comes and goes."""
        found = []
        for _ in range(4):
            assert sum(len(y_N) for _, y_N in batches) == 120
            gc.collect()
            found.append(resident_bytes())
        return min(found)

    before, *_, after = (least() for _ in range(6))
    assert after < before + 20 * batch_bytes / 2


def test_sample_is_deterministic_and_not_augmented(photos):
    d = digits()
    assert sample(d, 50).equal(normalise(d.train.images_NHWC[:50], d.mean, d.std))
    assert len(sample(d, 10_000)) == 1437
    assert sample(photos, 6).equal(sample(photos, 6))
    assert sample(photos, 6).shape == (6, 3, 16, 16)


def test_a_grey_sample_has_the_channel_of_its_data_set():
    grey = replace(own("array"), channels=1, mean=(0.5,), std=(0.5,))
    assert sample(grey, 6).shape == (6, 1, 16, 16)


# ---- parts, filling up, surveys, sharing


def test_parts_of_a_batch_are_the_shares_of_as_many_ranks(made):
    """Part i of 2 on rank r of 2 is the share of rank 2r + i of 4."""
    halves = [made(batch=8, parts=2, comm=SimpleNamespace(rank=r, size=2)) for r in range(2)]
    quarters = [list(made(batch=8, comm=SimpleNamespace(rank=r, size=4))) for r in range(4)]
    for r, half in enumerate(halves):
        assert len(half) == 2 * len(quarters[0])
        for number, (x, y) in enumerate(half):
            x_4, y_4 = quarters[2 * r + number % 2][number // 2]
            assert torch.equal(x, x_4)
            assert torch.equal(y, y_4)


def test_parts_are_resumed_in_the_middle_of_a_batch(made):
    whole, part = made(parts=4), made(parts=4)
    batches = [x for _ in range(2) for x, _ in whole]
    head = iter(part)
    for _ in range(3):
        next(head)
    again = made(parts=4)
    again.load_state_dict(part.state_dict())
    rest = [x for _ in range(2) for x, _ in again]
    assert all(torch.equal(a, b) for a, b in zip(batches[3:], rest, strict=True))


def test_a_batch_that_does_not_divide_into_parts_is_refused(made):
    batches = made(batch=8, parts=3)
    with pytest.raises(InputError, match="batch=8: not a multiple of 1 ranks x 3 parts"):
        next(iter(batches))


def test_an_epoch_filled_up_shows_every_image_and_the_first_ones_again():
    data = digits()
    assert len(loader(data, "train", 400, seed=3)) == 3
    batches = loader(data, "train", 400, seed=3, fill=True)
    assert len(batches) == 4
    labels = torch.cat([y for _, y in batches])
    wanted = data.train.labels_N[order(1437, 3, 0)]
    assert torch.equal(labels, torch.cat([wanted, wanted[: 1600 - 1437]]))


def test_a_survey_shows_each_image_once_and_moves_nothing(made):
    batches = made(batch=8, parts=2)
    next(iter(batches))
    state = batches.state_dict()
    seen = list(batches.survey(10))
    assert [len(y) for _, y in seen] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in seen]), sample_of(batches, 10))
    assert batches.state_dict() == state
    assert sum(len(y) for _, y in batches.survey()) == batches.images


def sample_of(batches, n):
    plain = loader(batches.dataset, "train", 1, shuffled=False)
    return torch.cat([x for _, (x, _) in zip(range(n), plain, strict=False)])


def test_a_rank_that_is_dealt_no_share_gets_no_batch(made):
    batches = made(batch=8)
    with batches.deal_from(lambda: None):
        assert list(batches) == []
