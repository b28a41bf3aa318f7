"""One rank looks into image folders for all, whatever happens on which of them."""

import os
import queue
import shutil
import threading
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from data.made import fill
from kasoku.core import InputError, Threads
from kasoku.data import folder
from kasoku.data.index import OneScan
from kasoku.ranks import ToldElsewhereError
from kasoku.recipe import load
from kasoku.start import Start
from kasoku.trainer import prepare
from parallel.ranks import on_processes

LIMIT_S = 60


class Wire:
    """What rank 0 broadcasts, to one other rank."""

    size = 2

    def __init__(self, rank, sent):
        self.rank, self._sent = rank, sent

    def broadcast_object(self, thing, *, root=0):
        if self.rank == 0:
            self._sent.put(thing)
            return thing
        return self._sent.get(timeout=LIMIT_S)


@pytest.fixture
def scans():
    sent = queue.SimpleQueue()
    return [OneScan(Wire(rank, sent)) for rank in range(2)]


def failure(scan, make):
    with pytest.raises(InputError) as caught:
        scan.during(make)
    return str(caught.value)


def test_the_second_rank_lists_nothing(tree, scans, listings):
    first = scans[0].during(lambda: folder(str(tree)))
    assert listings.total() == 9
    scans[0].tell()
    scans[1].tell()
    second = scans[1].during(lambda: folder(str(tree)))
    assert listings.total() == 9
    assert (second.train.paths, second.test.paths) == (first.train.paths, first.test.paths)
    assert second.index() == first.index()


def test_who_asks_early_waits_and_who_asks_for_no_folder_does_not(tree, scans):
    assert scans[1].during(lambda: 3) == 3
    found = []
    asking = threading.Thread(target=lambda: found.append(scans[1].during(lambda: folder(str(tree)))), daemon=True)
    asking.start()
    hearing = threading.Thread(target=scans[1].tell, daemon=True)
    hearing.start()
    asking.join(0.2)
    assert not found
    telling = threading.Thread(target=scans[0].tell, daemon=True)
    telling.start()
    asking.join(0.2)
    assert not found
    scans[0].during(lambda: folder(str(tree)))
    for thread in (telling, hearing, asking):
        thread.join(LIMIT_S)
    assert len(found[0].train) == 12


def test_several_folders_go_by_their_roots_and_one_that_rank_0_did_not_want_is_listed_here(tree, scans, listings):
    roots = [str(tree / part) for part in ("train", "val")]
    first = scans[0].during(lambda: [folder(root) for root in roots])
    for scan in scans:
        scan.tell()
    listings.clear()
    second = scans[1].during(lambda: [folder(root) for root in reversed(roots)])
    assert not listings
    assert [d.train.paths for d in reversed(second)] == [d.train.paths for d in first]
    assert len(scans[1].during(lambda: folder(str(tree))).train) == 12


def test_what_fails_on_rank_0_fails_on_all_with_its_line(tree, scans):
    fill(tree / "train" / "void", 0)
    line = failure(scans[0], lambda: folder(str(tree)))
    assert "void: a class folder with no image" in line
    for scan in scans:
        scan.tell()
    assert failure(scans[1], lambda: folder(str(tree))) == line


def test_after_a_failure_of_rank_0_nobody_else_looks(tree, scans, listings):
    def full():
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        scans[0].during(full)
    for scan in scans:
        scan.tell()
    assert failure(scans[1], lambda: folder(str(tree))) == "no space left"
    assert not listings


def test_a_rank_that_fails_alone_hears_rank_0_all_the_same(tree, scans, tmp_path):
    assert "no such folder" in failure(scans[1], lambda: folder(str(tmp_path / "gone")))
    scans[0].during(lambda: folder(str(tree)))
    for scan in scans:
        scan.tell()
    assert len(scans[1].during(lambda: folder(str(tree))).train) == 12


def test_files_that_only_rank_0_has_are_told_at_the_start(tree, scans, monkeypatch, tmp_path):
    copied = shutil.copytree(tree, tmp_path / "copy")
    monkeypatch.setenv("PHOTOS", str(tree))
    scans[0].during(lambda: folder("$PHOTOS"))
    for scan in scans:
        scan.tell()
    monkeypatch.setenv("PHOTOS", str(copied))
    assert all(path.startswith(f"{copied}/") for path in scans[1].during(lambda: folder("$PHOTOS")).train.paths)
    (copied / "val" / "cat" / "1.png").unlink()
    line = failure(scans[1], lambda: folder("$PHOTOS"))
    assert line == f"{copied}/val/cat/1.png: not on this host, though rank 0 has it; give all ranks the same data"


def test_who_waits_is_told_where_the_ranks_cannot_be_connected(tree, scans):
    def broken():
        raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match="connection reset"):
        scans[1].needed(broken)
    with pytest.raises(RuntimeError, match="connection reset"):
        scans[1].during(lambda: folder(str(tree)))


# ---- in a start

RECIPE = """
epochs = 1
batch = 8
model = { use = "kasoku.models.cifarnet", widths = [8, 16] }
data = { use = "kasoku.data.folder", root = "$PHOTOS", size = 16 }
optimizer = { use = "kasoku.optim.sgd", lr = 0.01, momentum = 0.9 }
device = { precision = "fp32", threads = 1 }
"""


@pytest.fixture
def recipe(tmp_path):
    random = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "0" / label).mkdir(parents=True)
        for i in range(20):
            Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / "0" / label / f"{i}.png")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def started(comm, recipe, overlap):
    """A rank's start with a root of its own: how often it listed its folders and its first path, or what was told."""
    home = recipe.parent / str(comm.rank)
    os.environ |= {"PHOTOS": str(home), "XDG_CACHE_HOME": str(recipe.parent / f"cache-{comm.rank}")}
    found, real = Counter(), os.scandir
    os.scandir = lambda path: found.update([str(path).startswith(str(home))]) or real(path)
    try:
        training = prepare(load(recipe), comm, start=Start(overlap=overlap))
    except InputError as error:
        return isinstance(error, ToldElsewhereError), str(error)
    training.job.close()
    return found[True], training.dataset.train.paths[0].removeprefix(str(recipe.parent))


@pytest.mark.parametrize("overlap", [True, False])
def test_of_two_ranks_with_data_of_their_own_one_lists_it(recipe, overlap):
    assert on_processes(2, started, recipe, overlap) == [(3, "/0/a/0.png"), (0, "/1/a/0.png")]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("gone", "line"), [(0, "root=$PHOTOS: no such folder"), (1, "rank 1: root=$PHOTOS: no such")])
def test_a_root_that_one_rank_lacks_is_told_once(recipe, overlap, gone, line):
    shutil.rmtree(recipe.parent / str(gone))
    (told, said), (silent, _) = on_processes(2, started, recipe, overlap)
    assert (told, silent) == (False, True)
    assert said.startswith(line)


def test_ranks_that_take_turns_list_once(recipe, monkeypatch, listings):
    monkeypatch.setenv("PHOTOS", str(recipe.parent / "0"))

    def rank_main(comm):
        training = prepare(load(recipe), comm)
        training.job.close()
        return training.dataset.index()

    one, other = Threads(2).run(rank_main)
    assert one == other
    assert {name: listings[name] for name in ("0", "a", "b")} == {"0": 1, "a": 1, "b": 1}
