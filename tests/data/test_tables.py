"""Parquet files, data sets of Hugging Face and tars of the webdataset library are read, trained on and packed."""

import importlib
import io
import itertools
import json
import re
import shutil
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'kasoku[parquet]'")
import pyarrow as pa
import pyarrow.parquet as pq

from helpers.photos import coloured_photos
from helpers.web import serving, web
from kasoku import evaluate
from kasoku.cli import main
from kasoku.core import InputError, Threads
from kasoku.data import GoneError, find_images, folder, hugging_face, loader, parquet, shards
from kasoku.data.datasets import tables
from kasoku.data.datasets.tables import read_photos
from kasoku.data.packs.writer import pack, verify
from kasoku.data.remote import store as store_module
from kasoku.testing import SourceContracts, SourceRow

pytestmark = pytest.mark.extras
NO_DATASETS = pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets: pip install 'kasoku[datasets]'")
NO_WEBDATASET = pytest.mark.skipif(find_spec("webdataset") is None, reason="needs webdataset: pip install webdataset")
NAMES = ("colour0", "colour1", "colour2")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FEATURES = {"image": {"_type": "Image"}, "label": {"names": list(NAMES), "_type": "ClassLabel"}}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """48 JPEG files of three classes, in turns: (bytes, class)."""
    root = coloured_photos(tmp_path_factory.mktemp("made") / "photos", images=16, side=40)
    return [((root / NAMES[i % 3] / f"{i // 3}.jpg").read_bytes(), i % 3) for i in range(48)]


def png(data):
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "PNG")
    return out.getvalue()


def schema(features=FEATURES):
    """As Hugging Face writes it."""
    kinds = {"ClassLabel": pa.int64(), "Image": IMAGE}
    fields = [(name, kinds[feature["_type"]]) for name, feature in features.items()]
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def write(path, samples, *, rows=4, table=None, **settings):
    """A Parquet file of (bytes, label), with row groups of so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if table is None:
        structs = [{"bytes": data, "path": f"{i}.jpg"} for i, (data, _) in enumerate(samples)]
        columns = dict(zip(FEATURES, (structs, [label for _, label in samples]), strict=True))
        table = pa.table(columns, schema=schema())
    pq.write_table(table, path, row_group_size=rows, **settings)
    return path


def group_bytes(*paths):
    """The bytes of the largest row group of Parquet files, or of those in folders."""
    files = [file for path in paths for file in (path.rglob("*.parquet") if path.is_dir() else [path])]
    footers = [pq.read_metadata(file) for file in files]
    return max(footer.row_group(i).total_byte_size for footer in footers for i in range(footer.num_row_groups))


@pytest.fixture
def hub(images, tmp_path):
    """Two files to train on, one for validation, and a test part without labels, as the Hub lays them out."""
    data = tmp_path / "hub" / "data"
    write(data / "train-00000-of-00002.parquet", images[:20])
    write(data / "train-00001-of-00002.parquet", images[20:36])
    write(data / "validation-00000-of-00001.parquet", images[36:])
    write(data / "test-00000-of-00001.parquet", [(images[0][0], -1)])
    return tmp_path / "hub"


def facts(dataset):
    return [[(s.read(i), int(s.labels_N[i])) for i in range(len(s))] for s in (dataset.train, dataset.test)]


def everything(dataset):
    return sorted(itertools.chain(*facts(dataset)))


def recipe(path, text, root):
    path.write_text(f"""
epochs = 2.0
batch = 8
model = {{ use = "kasoku.models.cnn4" }}
optimizer = {{ use = "kasoku.optim.sgd", lr = 0.02 }}
device = {{ threads = 1, precision = "fp32" }}
save = {{ every_steps = 1, keep = 99 }}
data = {{ use = "kasoku.data.{text}", root = "{root}", size = 32 }}
techniques = [{{ use = "kasoku.data.Augment", flip = "random", crop = "random_resized" }}]
""")
    return str(path)


# ---- Parquet


def test_parquet_files_of_the_hub_are_images_with_labels_and_class_names(hub, images):
    d = parquet(str(hub), 32)
    assert (d.name, d.classes, d.image_size, d.channels) == ("hub", NAMES, (32, 32), 3)
    assert facts(d) == [images[:36], images[36:]]
    assert d.train.labels_N.dtype == torch.int64
    assert d.train.name(22) == "data/train-00001-of-00002.parquet group 0 row 2"
    assert d.index() == parquet(f"file://{hub}").index()


def test_a_file_and_a_pattern_are_read_as_a_folder_is(hub, images, monkeypatch):
    d = parquet(f"{hub}/data/train-*.parquet", validation=0.25)
    assert sorted(len(s) for s in (d.train, d.test)) == [9, 27]
    assert Counter(d.test.labels_N.tolist()) == {0: 3, 1: 3, 2: 3}
    assert everything(d) == sorted(images[:36])
    one = parquet(str(hub / "data" / "train-00001-of-00002.parquet"))
    assert len(one.train) + len(one.test) == 16
    monkeypatch.chdir(hub / "data")
    assert facts(parquet("train-00001-of-00002.parquet")) == facts(one)
    Path("train-00001-of-00002.parquet").rename("photos[1].parquet")
    assert everything(parquet("photos[1].parquet")) == everything(one)


def test_labels_may_be_texts_or_plain_numbers_and_images_plain_bytes(images, tmp_path):
    data, labels = zip(*images, strict=True)
    for number, kind in enumerate((pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.int32())):
        values = list(labels) if kind == pa.int32() else [NAMES[label] for label in labels]
        table = pa.table({"image": pa.array(data, pa.large_binary()), "label": pa.array(values).cast(kind)})
        d = parquet(str(write(tmp_path / f"{number}.parquet", (), table=table)))
        assert d.classes == (("0", "1", "2") if kind == pa.int32() else NAMES)
        assert everything(d) == sorted(images)


def test_columns_of_other_names_are_found_by_their_types_or_named(images, tmp_path):
    features = {"img": {"_type": "Image"}, "fine": FEATURES["label"]}
    structs = [{"bytes": data, "path": None} for data, _ in images]
    table = pa.table({"img": structs, "fine": [label for _, label in images]}, schema=schema(features))
    root = str(write(tmp_path / "x.parquet", (), table=table))
    assert parquet(root).classes == NAMES
    assert facts(parquet(root)) == facts(parquet(root, image="img", label="fine"))
    plain = str(write(tmp_path / "plain.parquet", (), table=table.replace_schema_metadata()))
    with pytest.raises(InputError, match=r"plain\.parquet: no column image, but img, fine: set data\.image$"):
        parquet(plain)
    with pytest.raises(InputError, match=r"no column label, but img, fine: set data\.label$"):
        parquet(plain, image="img")
    with pytest.raises(InputError, match=r'x\.parquet: data\.image = "imk": no such column; the file has img, fine$'):
        parquet(root, image="imk")
    assert everything(parquet(plain, image="img", label="fine")) == everything(parquet(root))


@pytest.mark.parametrize(
    "features",
    [
        7,
        [FEATURES],
        {"image": [FEATURES["image"]], "label": [FEATURES["label"]]},
        {"label": {"names": 3}},
        {"label": None},
    ],
)
def test_metadata_of_another_form_is_left_out(images, tmp_path, features):
    structs = [{"bytes": data, "path": None} for data, _ in images]
    table = pa.table({"image": structs, "label": [label for _, label in images]})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    d = parquet(str(write(tmp_path / "x.parquet", (), table=table.replace_schema_metadata(metadata))))
    assert d.classes == ("0", "1", "2")
    assert everything(d) == sorted(images)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": ["a.jpg"], "label": [0]}, r"x\.parquet: column image is string; bytes of image files are wanted"),
        ({"image": [[b"x"]], "label": [0]}, r"column image is list<.*; bytes of image files"),
        ({"image": [{"path": "a.jpg"}], "label": [0]}, r"column image is struct<path: string>; bytes"),
        ({"image": [b"x"], "label": [1.5]}, r"float labels: a whole number or text"),
        ({"image": [b"x", b"y"], "label": [1, None]}, r"NoneType, int labels: "),
        ({"image": [b"x"], "label": [[1]]}, r"list labels: "),
        ({"image": [b"x", b"y"], "label": [1, -1]}, r"image 1 has label -1, allowed are 0 to 1"),
        (
            {"image": [b"x", b"y"], "label": [0, 10**6]},
            r"label 1000000 of 2 images is no class number; set data\.label$",
        ),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, r"no labels: a whole number"),
        ({"image": [b"x", b"y"], "label": [0, 1]}, r"no class has two images"),
    ],
)
def test_what_a_table_lacks_is_one_line(tmp_path, columns, message):
    write(tmp_path / "x.parquet", (), table=pa.table(columns))
    with pytest.raises(InputError, match=message) as caught:
        parquet(str(tmp_path / "x.parquet"))
    assert "\n" not in str(caught.value)


def test_files_that_are_not_parquet_are_one_line(hub, images, tmp_path):
    whole = (hub / "data" / "train-00000-of-00002.parquet").read_bytes()
    for number, data in enumerate((b"", b"not this", whole[:-20], whole[:4] + bytes(len(whole) - 8) + whole[-4:])):
        bad = tmp_path / f"{number}.parquet"
        bad.write_bytes(data)
        with pytest.raises(InputError, match=rf"{number}\.parquet: no Parquet file \(") as caught:
            parquet(str(bad))
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"no \.parquet file there"):
        parquet(str(tmp_path / "hub" / "data" / "*.txt"))
    nearest = r'^data\.root = ".*/4\.parquet": no such file: did you mean [0-3]\.parquet\?$'
    with pytest.raises(InputError, match=nearest):
        parquet(str(tmp_path / "4.parquet"))
    with pytest.raises(InputError, match=r'^data\.root = ".*/hub/none\.parquet": no such file$'):
        parquet(str(hub / "none.parquet"))
    with pytest.raises(InputError, match=r"window_bytes=0: at least \d+ for such row groups"):
        parquet(str(hub), window_bytes=0)
    other = schema(FEATURES | {"label": {"names": ["x", "y", "z"], "_type": "ClassLabel"}})
    table = pq.read_table(hub / "data" / "train-00001-of-00002.parquet").cast(other)
    write(hub / "data" / "train-00001-of-00002.parquet", (), table=table)
    with pytest.raises(InputError, match=r"class names of its files differ"):
        parquet(str(hub))


def test_a_row_without_an_image_is_skipped_and_named_and_two_are_too_many(hub, images, tmp_path):
    first = hub / "data" / "train-00000-of-00002.parquet"
    samples = list(images[:20])
    samples[5] = (None, samples[5][1])
    write(first, samples)
    d = parquet(str(hub), 32)
    batches = loader(d, "train", 6)
    assert sum(len(y_N) for _, y_N in batches) == 36
    (reason,) = batches.skipped.reasons.values()
    assert reason.startswith("data/train-00000-of-00002.parquet group 1 row 1: a NoneType: ")
    line = pack(str(hub), str(tmp_path / "packed"), side=32)
    assert "; 1 left out: data/train-00000-of-00002.parquet group 1 row 1: a NoneType" in line
    samples[6] = (b"\xff\xd8\xff nothing", samples[6][1])
    write(first, samples)
    with pytest.raises(InputError, match=r"more than 1 of 36 images cannot be decoded"):
        list(loader(parquet(str(hub), 32), "train", 6))


def test_a_damaged_row_group_is_bad_images_of_one_line(hub, images):
    path = hub / "data" / "train-00000-of-00002.parquet"
    write(path, images[:20], compression="none", write_page_checksum=True)
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    data[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    d = parquet(str(hub), 32)
    with pytest.raises(InputError, match=r"of-00002\.parquet: group 2 cannot be read \(.*(CRC|checksum)"):
        d.train.read(9)
    assert d.train.read(7) == images[7][0]
    assert sum(len(y_N) for _, y_N in loader(parquet(str(hub), 32, max_bad_fraction=0.2), "train", 6)) == 36


# ---- the window


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_mixes_row_groups_and_reads_each_once_an_epoch(images, tmp_path, monkeypatch, window):
    path = write(tmp_path / "train.parquet", images * 4, rows=6)
    group = group_bytes(path)
    d = parquet(str(path), 32, validation=0.01, window_bytes=(window + 4) * group + group // 2)
    real, read = pq.ParquetFile.read_row_group, Counter()

    def counting(self, number, **settings):
        read[number] += 1
        return real(self, number, **settings)

    def at_once(target, args, daemon):  # one thread reads, so that nothing depends on which of them is late
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(tables, "threading", SimpleNamespace(Thread=at_once))
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
    assert d.train.window == window
    orders = [d.train.epoch_order(0, epoch) for epoch in (0, 1)]
    assert not orders[0].equal(orders[1])
    assert orders[0].equal(d.train.epoch_order(0, 0))
    for order_N in orders:
        assert order_N.sort().values.equal(torch.arange(len(d.train)))
        rows = np.array(d.train.row_N)[order_N.numpy()] // 6
        seen = [np.flatnonzero(rows == g) for g in range(32)]
        begun = sorted(int(places[0]) for places in seen)
        assert all(np.sum((np.array(begun) > places[0]) & (np.array(begun) < places[-1])) <= window for places in seen)
        assert (window == 1) or any(len(set(rows[at : at + 6])) > 2 for at in range(0, 180, 6))
    assert sum(len(y_N) for _, y_N in loader(d, "train", 6, threads=1, cache_bytes=0)) == len(d.train) // 6 * 6
    assert set(read) == set(range(32))
    assert max(read.values()) == 1


def test_a_rank_keeps_no_more_bytes_than_its_window(images, tmp_path):
    path = write(tmp_path / "train.parquet", images * 4, rows=6)
    window_bytes = 7 * group_bytes(path)
    d = parquet(str(path), 32, window_bytes=window_bytes)
    before = pa.total_allocated_bytes()
    for i in range(len(d.train)):
        d.train.read(i)
    assert window_bytes // 2 < pa.total_allocated_bytes() - before <= window_bytes


@pytest.mark.parametrize("rows", [4, 16, 48])
def test_row_groups_that_are_too_large_for_the_window_are_refused(images, tmp_path, rows):
    path = write(tmp_path / "train.parquet", images, rows=rows)
    footer = pq.read_metadata(path)
    whole = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    least = min(5 * group_bytes(path), whole)
    assert (least < whole) == (rows == 4)
    assert everything(parquet(str(path), window_bytes=least)) == sorted(images)
    with pytest.raises(
        InputError, match=rf"window_bytes={least - 1}: at least {least} for such row groups; or write sm"
    ):
        parquet(str(path), window_bytes=least - 1)


def test_reads_of_the_test_part_leave_what_the_training_reads_ahead(images, tmp_path):
    path = write(tmp_path / "train.parquet", images * 4, rows=6)
    d = parquet(str(path), 32, validation=0.25, window_bytes=5 * group_bytes(path))
    order_N = d.train.epoch_order(0, 0)
    assert len(d.train.next_group) == 31
    for i in range(len(d.test)):
        d.test.read(i)
    assert (len(d.train.next_group), d.test.next_group) == (31, {})
    d.train.read(int(order_N[0]))
    assert len(d.train.next_group) == 30


def test_a_set_that_fits_the_window_is_shuffled_globally(hub):
    from kasoku.data import order

    d = parquet(str(hub), 32)
    assert d.train.epoch_order(3, 5).equal(order(36, 3, 5))


@pytest.mark.parametrize("groups", [5, 1000])
def test_two_ranks_take_the_batches_of_one(hub, groups):
    window_bytes = groups * group_bytes(hub)
    assert parquet(str(hub), window_bytes=window_bytes).train.window == (1 if groups == 5 else 12)

    def batches(comm):
        d = parquet(str(hub), 32, window_bytes=window_bytes)
        return [(x_NCHW, y_N) for x_NCHW, y_N in loader(d, "train", 6, comm=comm, seed=1)]

    (alone,), ranks = Threads(1).run(batches), Threads(2).run(batches)
    assert len(alone) == 6
    for (x_NCHW, y_N), *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(x_NCHW, torch.cat([x for x, _ in parts]))
        assert torch.equal(y_N, torch.cat([y for _, y in parts]))


@pytest.mark.parametrize("groups", [5, 1000])
def test_training_from_parquet_resumes_to_the_same_bits(hub, tmp_path, groups):
    file, whole, run = recipe(tmp_path / "r.toml", "parquet", hub), tmp_path / "whole", tmp_path / "run"
    settings = ["--set", f"data.window_bytes={groups * group_bytes(hub)}", "--quiet"]
    assert main(["train", file, *settings, "--out", str(whole)]) == 0
    shutil.copytree(whole, run)
    for checkpoint in run.glob("checkpoints/step-*"):
        if int(checkpoint.name[5:]) not in (2, 3):
            shutil.rmtree(checkpoint)
    for name in ("result.json", "manifest.json", "best.safetensors", "model.safetensors"):
        (run / name).unlink(missing_ok=True)
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    weights, again = (load_file(folder / "model.safetensors") for folder in (whole, run))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert json.loads((run / "data.json").read_text())["classes"] == list(NAMES)


def test_a_parquet_file_without_a_recipe_is_trained_on(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "photos.parquet", images)
    settings = ["--set", "epochs=1", "--set", "data.size=32", "--set", "device.threads=1", "--quiet"]
    assert main(["train", "--data", "photos.parquet", *settings, "--out", "run"]) == 0
    assert 'use = "kasoku.data.parquet"' in Path("run/recipe.toml").read_text()
    assert main(["init", "photos.parquet"]) == 0
    assert "kasoku.data.parquet" in Path("photos.parquet.toml").read_text()
    assert main(["eval", "run"]) == 0


def test_a_run_is_evaluated_on_a_folder_and_on_files_of_tables(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    backwards = {"image": FEATURES["image"], "label": {"names": list(NAMES[::-1]), "_type": "ClassLabel"}}
    for part, samples in (("train", images[:36]), ("test", images[36:])):
        structs = [{"bytes": data, "path": None} for data, _ in samples]
        table = pa.table({"image": structs, "label": [2 - label for _, label in samples]}, schema=schema(backwards))
        write(tmp_path / f"photos-{part}.parquet", (), table=table)
    for number, (data, label) in enumerate(images[36:]):
        file = tmp_path / "photos" / NAMES[label] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    settings = ["--set", "epochs=3", "--set", "data.size=32", "--set", "device.threads=1", "--quiet"]
    assert main(["train", "--data", "photos-*.parquet", *settings, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"images +│ 36 to train, 12 to test +│", told)  # no share was held out
    assert told.index("weight decay") < told.index("time")
    assert main(["train", "--data", "photos-*.parquet", *settings, "--out", "run"]) == 0
    assert main(["export", "run", "--format", "hub"]) == 0
    assert "cifar_resnet18 on photos\n" in Path("run/hub/README.md").read_text()
    assert json.loads(Path("run/data.json").read_text())["classes"] == list(NAMES[::-1])
    own = evaluate("run")
    assert own.images == 12
    assert own.top1 > 1 / 3  # a wrong order of the classes would change it
    for data in ("photos-test.parquet", "photos-*.parquet", "photos"):
        scores = evaluate("run", data)
        assert (scores.images, scores.top1) == (12, own.top1)
        assert scores.loss == pytest.approx(own.loss, rel=1e-4)
    assert evaluate("run", "photos-train.parquet").images == 36  # no test part: all of them
    (tmp_path / "photos" / NAMES[0]).rename(tmp_path / "photos" / "other")
    assert main(["eval", "run", "--data", "photos"]) == 2
    assert "other classes than run was trained on (colour0, other): the same class names" in capsys.readouterr().err


def test_predict_says_that_tables_are_no_images(tmp_path):
    with pytest.raises(InputError, match=r"photos\.parquet: no image; give image files, or folders of them"):
        find_images(tmp_path / "photos.parquet")


def test_a_folder_of_photos_beside_tables_names_the_tables(images, tmp_path):
    write(tmp_path / "photos.parquet", images)
    for name in ("a", "log"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(images[0][0])
    instead = rf"log: a class folder with no image .*or did you mean {tmp_path}/\*\.parquet\?"
    with pytest.raises(InputError, match=instead):
        read_photos(str(tmp_path))
    (tmp_path / "a" / "0.jpg").unlink()
    assert read_photos(str(tmp_path))[0] is parquet


# ---- far away


@pytest.fixture
def far(hub):
    memory = pytest.importorskip("fsspec", reason="fsspec is not installed: no data far away").filesystem("memory")
    for file in hub.rglob("*.parquet"):
        memory.pipe(f"/far/{file.relative_to(hub)}", file.read_bytes())
    yield "memory://far"
    memory.rm("/far", recursive=True)


def test_parquet_far_away_is_read_as_here(hub, far, tmp_path):
    here, there = parquet(str(hub)), parquet(far, cache=str(tmp_path / "cache"))
    assert there.index() == here.index()
    assert facts(there) == facts(here)
    assert facts(parquet(f"{far}/data/train-*.parquet")) == facts(parquet(f"{hub}/data/train-*.parquet"))
    assert main(["train", recipe(tmp_path / "r.toml", "parquet", far), "--quiet", "--out", str(tmp_path / "run")]) == 0
    line = pack(far, str(tmp_path / "packed"), side=0)
    assert line.startswith(f"{tmp_path}/packed: 48 images of 3 classes")


@web
def test_a_second_epoch_from_a_server_reads_its_cache(hub, tmp_path, images):
    with serving() as site:
        site.files = {"train.parquet": (hub / "data" / "train-00000-of-00002.parquet").read_bytes()}
        for _ in range(2):
            d = parquet(f"{site.root}/train.parquet", 32, cache=str(tmp_path / "cache"))
            assert everything(d) == sorted(images[:20])
            sent_bytes, site.sent_bytes = site.sent_bytes, 0
        assert sent_bytes == 0


@web
def test_a_server_that_goes_away_ends_the_training_and_skips_no_image(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(store_module, "_FIRST_WAIT_S", 0.02)
    with serving() as site:
        site.files = {"train.parquet": (hub / "data" / "train-00000-of-00002.parquet").read_bytes()}
        d = parquet(f"{site.root}/train.parquet", 32, cache=str(tmp_path / "cache"), cache_bytes=0)
        site.status = 503
        with pytest.raises(GoneError, match=r"train\.parquet: no answer for 0\.2 s"):
            list(loader(d, "train", 6))


# ---- data sets of Hugging Face


@pytest.fixture
def loaded(images):
    """A DatasetDict with images as bytes."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})

    def part(samples):
        rows = {"image": [{"bytes": data, "path": None} for data, _ in samples], "label": [k for _, k in samples]}
        return datasets.Dataset.from_dict(rows, features=features)

    return datasets.DatasetDict({"train": part(images[:36]), "validation": part(images[36:])})


@NO_DATASETS
def test_a_dataset_object_is_read_by_our_decoder(loaded, images, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded by Pillow"))
    d = hugging_face(loaded, 32)
    assert (d.classes, d.train.name(3)) == (NAMES, "root row 3")
    assert facts(d) == [images[:36], images[36:]]
    assert sum(len(y_N) for _, y_N in loader(d, "train", 6)) == 36
    turned = hugging_face(loaded["train"].select(range(35, -1, -1)).with_format("torch"))
    assert len(turned.train) + len(turned.test) == 36
    assert everything(turned) == sorted(images[:36])


@NO_DATASETS
def test_a_saved_dataset_is_trained_on_by_a_recipe_and_packed(loaded, images, tmp_path):
    loaded.save_to_disk(tmp_path / "saved")
    d = hugging_face(str(tmp_path / "saved"))
    assert (d.name, d.classes) == ("saved", NAMES)
    assert facts(d) == [images[:36], images[36:]]
    file = recipe(tmp_path / "r.toml", "hugging_face", tmp_path / "saved")
    assert main(["train", file, "--quiet", "--out", str(tmp_path / "run")]) == 0
    line = pack(str(tmp_path / "saved"), str(tmp_path / "packed"), side=0)
    assert line.startswith(f"{tmp_path}/packed: 48 images of 3 classes")
    assert sorted(facts(shards(str(tmp_path / "packed")))[0]) == sorted(images[:36])


@NO_DATASETS
def test_files_that_load_dataset_finds_are_read_where_they_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    photos = coloured_photos(tmp_path / "photos", images=4, side=24)
    found = datasets.load_dataset("imagefolder", data_dir=str(photos), cache_dir=str(tmp_path / "cache"))
    d = hugging_face(found)
    assert d.classes == NAMES
    assert everything(d) == everything(folder(str(photos)))


@NO_DATASETS
def test_what_is_no_dataset_is_one_line(loaded, tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"image": ["a", "b"] * 9, "label": [0, 1] * 9})
    cases = [
        ("", r"data\.root is not given"),
        (str(tmp_path / "none"), r"none: cannot be loaded \("),
        (loaded["train"].to_iterable_dataset(), r"root: cannot be loaded \(.*\); streamed data sets are not read$"),
        (7, r"root: cannot be loaded \("),
        (loaded.remove_columns("label"), r"root: no column label, but image: set data\.label"),
    ]
    for root, message in cases:
        with pytest.raises(InputError, match=message) as caught:
            hugging_face(root)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"root row \d+: a str: the bytes of an image file are wanted"):
        hugging_face(texts).train.read(0)


@pytest.mark.parametrize(("module", "source"), [("pyarrow.parquet", parquet), ("datasets", hugging_face)])
def test_a_missing_library_is_named_with_its_line(hub, monkeypatch, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    extra = module.rpartition(".")[2]
    with pytest.raises(InputError, match=rf"pip install 'kasoku\[{extra}\]'$") as caught:
        source(str(hub))
    assert module in str(caught.value)


@pytest.mark.parametrize(
    ("name", "least", "source"),
    [("pyarrow", 17, parquet), pytest.param("datasets", 4, hugging_face, marks=NO_DATASETS)],
)
def test_a_library_that_is_too_old_is_named_with_its_line(hub, monkeypatch, name, least, source):
    monkeypatch.setattr(importlib.import_module(name), "__version__", f"{least - 1}.9.1")
    message = rf"\({name} {least - 1}\.9\.1, needed is {least} or newer\): pip install 'kasoku\["
    with pytest.raises(InputError, match=message):
        source(str(hub))


# ---- the contracts of sources


class TestSources(SourceContracts):
    rows = (
        SourceRow("parquet", partial(parquet, "hub", 16)),
        SourceRow("window", lambda: parquet("hub", 16, window_bytes=5 * group_bytes(Path("hub")))),
    )

    @pytest.fixture(autouse=True)
    def _beside_the_files(self, hub, monkeypatch):
        monkeypatch.chdir(hub.parent)


# ---- packs and others' tars


def test_a_pack_of_parquet_has_its_images_labels_and_names(hub, images, tmp_path):
    assert main(["pack", str(hub), str(tmp_path / "packed"), "--side", "0", "--quiet"]) == 0
    assert verify(str(tmp_path / "packed")).startswith("48 images")
    d = shards(str(tmp_path / "packed"))
    assert d.classes == NAMES
    train, test = facts(d)
    assert (sorted(train), sorted(test)) == (sorted(images[:36]), sorted(images[36:]))
    assert "data/train-00000-of-00002.parquet group 0 row 0" in d.train.names
    one = hub / "data" / "train-00000-of-00002.parquet"
    assert pack(str(one), str(tmp_path / "one"), side=0).startswith(f"{tmp_path}/one: 20 images")


@NO_WEBDATASET
@pytest.mark.parametrize("label", ["cls", "json"])
@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "png"])
def test_tars_of_the_webdataset_library_are_read_trained_on_and_packed(images, tmp_path, label, suffix):
    from webdataset import TarWriter

    if suffix == "png":
        images = [(png(data), kind) for data, kind in images]
    (tmp_path / "tars").mkdir()
    for part, first, stop in (("train-000000", 0, 20), ("train-000001", 20, 36), ("val-000000", 36, 48)):
        with TarWriter(str(tmp_path / "tars" / f"{part}.tar")) as out:
            for i in range(first, stop):
                data, kind = images[i]
                text = kind if label == "cls" else {"label": kind, "caption": "a, b"}
                out.write({"__key__": f"shots/{i:05d}", suffix: data, label: text, "txt": "seen"})
    d = shards(str(tmp_path / "tars"), 32)
    assert facts(d) == [images[:36], images[36:]]
    assert d.train.name(0) == f"train-000000.tar/shots/00000.{suffix}"
    file = recipe(tmp_path / "r.toml", "shards", tmp_path / "tars")
    assert main(["train", file, "--set", "epochs=1", "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert pack(str(tmp_path / "tars"), str(tmp_path / "packed"), side=0).startswith(f"{tmp_path}/packed: 48 images")
