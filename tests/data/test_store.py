import errno
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.photos import coloured_photos
from helpers.web import made, serving, web
from kasoku.core import InputError
from kasoku.data import Files, GoneError
from kasoku.data.remote import store
from kasoku.data.remote.store import Store, is_remote

SEVERAL = settings(deadline=None, max_examples=40)


@pytest.fixture
def site():
    with serving() as site:
        yield site


@pytest.fixture(scope="module")
def lasting_site():
    with serving() as site:
        yield site


@pytest.fixture(autouse=True)
def _waits_are_short(monkeypatch):
    monkeypatch.setattr(store, "_FIRST_WAIT_S", 0.02)


VISIBLE = ["a.tar", "b/c/empty", "b/two words.tar", "b/ü 100%41.bin"]


def kept(cache):
    """The pieces that are kept: a file for each, the crc32 and the bytes."""
    return list(Path(cache).glob("pieces-*/*/*.piece"))


def kept_bytes(cache):
    return sum(path.stat().st_size - 4 for path in kept(cache))


# The same files, here and far away


@web
def test_far_files_are_listed_and_read_as_local_ones_are(site, tmp_path):
    for path, data in site.files.items():
        (tmp_path / "here" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / path).write_bytes(data)
    here, file, far = (Store(root) for root in (str(tmp_path / "here"), f"file://{tmp_path}/here/", f"{site.root}/"))
    assert (here.local, file.local, far.local) == (True, True, False)
    assert here.list_files() == file.list_files() == far.list_files() == VISIBLE
    for path in VISIBLE:
        data = site.files[path]
        assert here.size(path) == far.size(path) == len(data)
        for start, stop in [(0, None), (0, 10), (7, 7), (100, 900), (990, 10**6), (10**6, 10**6 + 1), (5, None)]:
            assert here.read(path, start, stop) == far.read(path, start, stop) == data[start:stop], (path, start, stop)


@web
@SEVERAL
@given(ranges=st.lists(st.tuples(st.integers(0, 300_100), st.integers(0, 300_100)).map(sorted), max_size=12))
def test_any_ranges_equal_the_original_and_cost_nothing_when_read_again(lasting_site, ranges):
    site, data = lasting_site, lasting_site.files["a.tar"]
    with tempfile.TemporaryDirectory() as cache:
        far = Store(site.root, cache=cache)
        for start, stop in ranges:
            assert far.read("a.tar", start, stop) == data[start:stop]
        sent_bytes = site.sent_bytes
        again = Store(site.root, cache=cache)
        for start, stop in reversed(ranges):
            assert again.read("a.tar", start, stop) == data[start:stop]
        assert site.sent_bytes == sent_bytes
        assert again.read("a.tar") == data


@web
def test_a_second_epoch_reads_nothing_remote(site):
    ranges = [(start, start + 1000) for start in range(0, 300_000, 1000)]
    first = Store(site.root)
    for start, stop in random.Random(0).sample(ranges, len(ranges)):
        first.read("a.tar", start, stop)
    assert len(site.reads) == 300
    assert site.sent_bytes == 300_000
    for far in (first, Store(site.root)):
        assert b"".join(far.read("a.tar", *r) for r in ranges) == far.read("a.tar") == site.files["a.tar"]
    assert len(site.reads) == 300


@web
def test_the_cache_says_which_root_it_is_of(site, tmp_path):
    Store(site.root).read("a.tar", 0, 5)
    (told,) = (tmp_path / "cache" / "kasoku").glob("pieces-*/root.txt")
    assert told.read_text().strip() == site.root


@web
def test_a_large_file_is_asked_for_in_parts(site, monkeypatch):
    monkeypatch.setattr(store, "_REQUEST_BYTES", 100_000)
    assert Store(site.root).read("a.tar", 1) == site.files["a.tar"][1:]
    assert [stop - start for _, start, stop in site.reads] == [100_000, 100_000, 99_999]


@web
def test_a_server_that_knows_no_ranges_gives_the_file_once(site):
    site.ranges = False
    far = Store(site.root)
    assert far.read("a.tar", 500, 600) == site.files["a.tar"][500:600]
    assert far.read("a.tar", 299_000) == site.files["a.tar"][299_000:]
    assert far.read("a.tar") == site.files["a.tar"]
    assert len(site.reads) == 1


@web
def test_eight_threads_at_once_read_what_is_there(site, tmp_path):
    data, draw = site.files["a.tar"], random.Random(3)
    starts = [draw.randrange(0, 299_000) for _ in range(60)] * 4
    draw.shuffle(starts)
    stores = [Store(site.root, cache=str(tmp_path)) for _ in range(2)]  # as two ranks of one machine
    with ThreadPoolExecutor(8) as pool:
        jobs = [(start, pool.submit(stores[n % 2].read, "a.tar", start, start + 700)) for n, start in enumerate(starts)]
        assert all(job.result(60) == data[start : start + 700] for start, job in jobs)
    reads = len(site.reads)
    third = Store(site.root, cache=str(tmp_path))
    assert all(third.read("a.tar", start, start + 700) == data[start : start + 700] for start in starts)
    assert len(site.reads) == reads


@web
def test_what_eight_threads_read_at_once_is_kept_once(site, tmp_path):
    far, data = Store(site.root, cache=str(tmp_path)), site.files["a.tar"]
    far.size("a.tar")
    site.together = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(far.read, "a.tar", 100, 90_100) for _ in range(8)]
        assert all(job.result(60) == data[100:90_100] for job in jobs)
    assert len(site.reads) == 8
    assert kept_bytes(tmp_path) == 90_000
    (used,) = tmp_path.glob("pieces-*/used")
    assert used.stat().st_size == 22  # blocks of 4 KiB


# What is kept


@web
def test_the_cache_stays_within_its_bytes_and_reading_goes_on(site, tmp_path, capsys):
    limit, data = 50 * 4096, site.files["a.tar"]
    for epoch in range(3):
        far = Store(site.root, cache=str(tmp_path), cache_bytes=limit)
        for start in range(0, 300_000, 6000):
            assert far.read("a.tar", start, start + 6000) == data[start : start + 6000]
        assert 0.6 * limit < kept_bytes(tmp_path) <= limit, epoch
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("kasoku: ")
        assert f"takes no more (cache_bytes={limit} are used)" in lines[0]


@web
def test_no_cache_bytes_keep_nothing_and_say_nothing(site, tmp_path, capsys):
    far = Store(site.root, cache=str(tmp_path / "none"), cache_bytes=0)
    assert far.read("a.tar", 0, 9) == far.read("a.tar", 0, 9) == site.files["a.tar"][:9]
    assert len(site.reads) == 2
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().err == ""


@web
def test_a_full_disk_stops_keeping_not_reading(site, tmp_path, monkeypatch, capsys):
    far, data = Store(site.root, cache=str(tmp_path)), site.files["a.tar"]
    far.read("a.tar", 0, 5000)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for start in (5000, 10_000, 15_000):
        assert far.read("a.tar", start, start + 5000) == data[start : start + 5000]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "No space left" in lines[0]
    assert kept_bytes(tmp_path) == 5000
    assert not list(tmp_path.rglob("*.tmp"))
    reads = len(site.reads)
    assert far.read("a.tar", 0, 5000) == data[:5000]  # what was kept before still serves
    assert len(site.reads) == reads


@web
def test_a_cache_that_cannot_be_written_is_one_warning(site, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    far = Store(site.root, cache=str(tmp_path / "file" / "below"))
    assert far.read("a.tar", 3, 9) == far.read("a.tar", 3, 9) == site.files["a.tar"][3:9]
    assert len(capsys.readouterr().err.splitlines()) == 1


@web
def test_a_damaged_byte_is_read_anew_and_mended(site, tmp_path):
    data = site.files["a.tar"]
    Store(site.root, cache=str(tmp_path)).read("a.tar", 1000, 3000)
    (piece,) = kept(tmp_path)
    with piece.open("r+b") as file:
        file.seek(504)
        file.write(bytes([data[1500] ^ 1]))
    for reads in (2, 2):
        assert Store(site.root, cache=str(tmp_path)).read("a.tar", 1000, 3000) == data[1000:3000]
        assert len(site.reads) == reads


@web
def test_a_lost_piece_costs_a_read(site, tmp_path):
    far = Store(site.root, cache=str(tmp_path))
    far.read("a.tar", 0, 100)
    kept(tmp_path)[0].unlink()
    for _ in range(2):
        assert Store(site.root, cache=str(tmp_path)).read("a.tar", 0, 100) == site.files["a.tar"][:100]
    assert len(site.reads) == 2


@web
@SEVERAL
@given(damage=st.binary(max_size=200) | st.integers(0, 5004))
def test_a_piece_of_any_bytes_never_raises_and_never_gives_wrong_data(lasting_site, damage):
    site, data = lasting_site, lasting_site.files["a.tar"]
    with tempfile.TemporaryDirectory() as cache:
        Store(site.root, cache=cache).read("a.tar", 0, 5000)
        (piece,) = kept(cache)
        piece.write_bytes(piece.read_bytes()[:damage] if isinstance(damage, int) else damage)
        again = Store(site.root, cache=cache)
        assert again.read("a.tar", 100, 4000) == data[100:4000]
        assert again.read("a.tar") == data
        assert Store(site.root, cache=cache).read("a.tar") == data


@web
def test_a_changed_remote_file_is_not_mixed_with_what_was_kept(site, tmp_path):
    Store(site.root, cache=str(tmp_path)).read("a.tar", 0, 9000)
    site.files["a.tar"] = made(300_000, 7)  # as long as before
    changed = Store(site.root, cache=str(tmp_path))
    assert changed.read("a.tar", 4000, 12_000) == site.files["a.tar"][4000:12_000]
    assert len(site.reads) == 2


# A source that fails


@web
def test_a_read_that_fails_twice_works(site):
    site.fails = 2
    assert Store(site.root).read("a.tar", 5, 50) == site.files["a.tar"][5:50]
    assert len(site.reads) == 3


@web
@pytest.mark.parametrize("honest", [True, False])
def test_half_an_answer_is_no_answer(site, honest):
    site.cuts, site.honest = 2, honest
    assert Store(site.root).read("a.tar", 90, 5000) == site.files["a.tar"][90:5000]
    assert len(site.reads) == 3


@web
def test_bytes_that_are_not_intact_are_fetched_again_and_never_kept(site, tmp_path):
    part = site.files["a.tar"][100:5000]
    far = Store(site.root, cache=str(tmp_path / "cache"))
    site.garbage = {0, 1}
    assert far.read("a.tar", 100, 5000, lambda data: data == part) == part
    assert len(site.reads) == 3
    again = Store(site.root, cache=str(tmp_path / "cache"))
    assert again.read("a.tar", 100, 5000, lambda data: data == part) == part
    assert len(site.reads) == 3
    site.garbage = set(range(3, 99))
    wrong = far.read("a.tar", 6000, 7000, lambda data: data == site.files["a.tar"][6000:7000])
    assert (len(wrong), len(site.reads)) == (1000, 3 + store.TRIES)  # and the caller, who has a checksum, refuses them
    site.garbage = set()
    assert Store(site.root, cache=str(tmp_path / "cache")).read("a.tar", 6000, 7000) == site.files["a.tar"][6000:7000]


@web
def test_what_was_kept_and_is_not_intact_is_fetched_again(site, tmp_path):
    site.garbage = {0}
    far = Store(site.root, cache=str(tmp_path / "cache"))
    assert far.read("a.tar", 0, 300_000) != site.files["a.tar"]  # kept, as nobody could tell
    for cached in (far, Store(site.root, cache=str(tmp_path / "cache"))):
        assert cached.read("a.tar", 0, 300_000, lambda data: data == site.files["a.tar"]) == site.files["a.tar"]


@web
@pytest.mark.parametrize(("start", "stop"), [(0, 300_000), (1000, 5000), (250_000, 270_000)])
def test_bad_bytes_in_the_cache_are_replaced_in_its_files(site, tmp_path, start, stop):
    site.garbage, wanted = {0}, site.files["a.tar"]
    far = Store(site.root, cache=str(tmp_path))
    assert far.read("a.tar") != wanted  # kept: no caller could tell
    assert far.read("a.tar", start, stop, lambda data: data == wanted[start:stop]) == wanted[start:stop]
    assert len(site.reads) == 2
    for cached in (far, Store(site.root, cache=str(tmp_path))):
        assert cached.read("a.tar", start, stop) == wanted[start:stop]
    assert len(site.reads) == 2
    assert far.read("a.tar", 0, None, lambda data: data == wanted) == wanted


@web
def test_a_proxy_that_answers_wrongly_for_a_while_is_waited_for(site, monkeypatch):
    waits = []
    monkeypatch.setattr(store, "_FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(time, "sleep", waits.append)
    site.garbage, wanted = {0, 1, 2}, site.files["a.tar"]
    assert Store(site.root, cache_bytes=0).read("a.tar", 0, None, lambda data: data == wanted) == wanted
    site.garbage = set(range(99))
    assert Store(site.root, cache_bytes=0).read("a.tar", 0, None, lambda data: data == wanted) != wanted
    assert waits == [0.5, 1, 2] * 2


@pytest.fixture
def silent(site, monkeypatch):
    """A store whose source stays silent from now on, with two seconds of patience."""
    monkeypatch.setattr(store, "_PATIENCE_S", 2.0)
    far = Store(site.root)
    far.size("a.tar")
    site.stalls = True
    return far


@pytest.mark.timing
@web
def test_patience_with_a_source_is_not_paid_by_each_thread(silent):
    start = time.monotonic()

    def read(after_s):
        time.sleep(after_s)
        with pytest.raises(GoneError):
            silent.read("a.tar", 0, 10)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, (0.0, 1.5)))
    assert time.monotonic() - start < 3.4


@pytest.mark.timing
@web
def test_a_source_that_stays_silent_is_told_in_time(silent):
    start = time.monotonic()
    with pytest.raises(GoneError, match=r"http://127.*/a\.tar: no answer for 2 s \(TimeoutError"):
        silent.read("a.tar", 0, 10)
    assert 1.9 < time.monotonic() - start < 5


@web
def test_a_request_that_hangs_is_made_again(site, monkeypatch):
    monkeypatch.setattr(store, "_REQUEST_S", 1.0)
    site.stalls, far = True, Store(site.root)
    threading.Timer(0.5, lambda: setattr(site, "stalls", False)).start()
    assert far.read("a.tar", 0, 10) == site.files["a.tar"][:10]
    assert len(site.reads) == 2


@pytest.mark.smoke
@pytest.mark.process
@web
def test_a_process_with_a_hanging_read_can_exit(site):
    site.stalls = True
    code = (
        "import sys; from kasoku.data.remote import store; from kasoku.core import InputError\n"
        "store._PATIENCE_S = 1.5\n"
        "try: store.Store(sys.argv[1]).read('a.tar', 0, 9)\n"
        "except InputError as error: print(error)\n"
        "import time; from fsspec.implementations.memory import MemoryFileSystem\n"
        "MemoryFileSystem.info = lambda *_: time.sleep(600)\n"
        "try: store.Store('memory://x').size('a')\n"
        "except InputError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, site.root], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [line.partition(" s (")[0] for line in ran.stdout.splitlines()] == [
        f"{site.root}/a.tar: no answer for 1.5",
        "memory://x/a: no answer for 1.5",
    ]
    assert ran.stderr == ""


@web
def test_a_server_that_is_down_is_not_taken_for_a_missing_file(site, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_S", 0.5)
    site.status, far = 500, Store(site.root)
    for ask in (far.list_files, lambda: far.size("a.tar"), lambda: far.read("a.tar")):
        with pytest.raises(GoneError, match=r"no answer for 0\.5 s"):
            ask()
    gone = Store("http://127.0.0.1:9")  # nobody listens
    for ask in (gone.list_files, lambda: gone.read("a.tar")):
        with pytest.raises(GoneError, match=r"http://127\.0\.0\.1:9/.*no answer for 0\.5 s"):
            ask()


@web
def test_what_is_not_there_is_told_at_once(site):
    far = Store(site.root)
    with pytest.raises(InputError, match=r"b/none\.tar: no such file") as told:
        far.read("b/none.tar")
    assert not isinstance(told.value, GoneError)
    with pytest.raises(InputError, match="none/: no such file or folder"):
        Store(f"{site.root}/none").list_files()
    far.size("a.tar")
    del site.files["a.tar"]
    with pytest.raises(InputError, match=r"a\.tar: no such file"):
        far.read("a.tar")
    assert site.requests < 12


@web
def test_refused_access_is_told_at_once(site):
    far = Store(site.root)
    far.size("a.tar")
    site.status = 403
    with pytest.raises(GoneError, match=r"a\.tar: access refused \(.*403"):
        far.read("a.tar", 0, 5)


@web
def test_a_folder_that_cannot_be_listed_is_not_left_out(site, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_S", 0.3)
    site.broken = "b/c"
    with pytest.raises(GoneError, match="b/c: no answer"):
        Store(site.root).list_files()


# Other sources, other mistakes


def memory(monkeypatch, files):
    spec = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is missing")
    monkeypatch.setattr(spec.MemoryFileSystem, "store", {})
    system = spec.MemoryFileSystem()
    for path, data in files.items():
        system.pipe_file(f"/set/{path}", data)
    return spec.MemoryFileSystem


def test_a_source_without_coroutines_serves_as_well(monkeypatch):
    kind = memory(monkeypatch, {"a/1.bin": made(5000), "a/.no": b"", "2.bin": b"xyz"})
    far = Store("memory://set")
    assert far.list_files() == ["2.bin", "a/1.bin"]
    assert far.read("a/1.bin", 10, 4000) == made(5000)[10:4000]
    assert far.read("a/1.bin", 4000) == made(5000)[4000:]
    monkeypatch.setattr(kind, "cat_file", lambda *_, **__: pytest.fail("read again"))
    for each in (far, Store("memory://set")):
        assert each.read("a/1.bin", 10, 200) == made(5000)[10:200]
        assert each.read("a/1.bin", 10) == made(5000)[10:]


def test_a_source_without_coroutines_that_hangs_is_told_in_time(monkeypatch):
    kind, released = memory(monkeypatch, {"1.bin": b"xyz"}), threading.Event()
    monkeypatch.setattr(store, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(kind, "cat_file", lambda *_, **__: released.wait(30))
    start = time.monotonic()
    with pytest.raises(GoneError, match=r"memory://set/1\.bin: no answer for 1 s"):
        Store("memory://set").read("1.bin")
    assert time.monotonic() - start < 4
    released.set()


def test_a_missing_package_is_told_with_its_line(monkeypatch):
    if importlib.util.find_spec("fsspec") is not None:
        registry = importlib.import_module("fsspec.registry")
        monkeypatch.setattr(registry, "_registry", {})
        monkeypatch.setattr(registry, "registry", {})
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(InputError, match=r"s3://bucket/x: .*s3fs.*; run: pip install 'kasoku\[s3\]'"):
            Store("s3://bucket/x")
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"s3://bucket/x: .*; run: pip install 'kasoku\[remote\]'"):
        Store("s3://bucket/x")


def test_without_aiohttp_the_web_needs_a_line(monkeypatch):
    registry = pytest.importorskip("fsspec.registry", reason="fsspec is missing")
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(registry, "registry", {})
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(InputError, match=r"root=http://h/x: .*aiohttp.*; run: pip install 'kasoku\[remote\]'"):
        Store("http://h/x")


def test_a_root_that_is_none_is_one_clear_line(tmp_path):
    for root in ("", str(tmp_path / "gone"), f"file://{tmp_path}/gone"):
        with pytest.raises(InputError, match=r"root=.*: no such folder; give a folder, or an address such as s3://"):
            Store(root)
    with pytest.raises(InputError, match=r"root=nonsense://x: .*; (check the address|run: pip install)"):
        Store("nonsense://x")
    with pytest.raises(InputError, match="cache_bytes=-1: 0 bytes or more"):
        Store(str(tmp_path), cache_bytes=-1)
    assert [is_remote(root) for root in ("s3://b", "http://h/x", "file:///x", "/x", "x")] == [True] * 2 + [False] * 3


def test_a_password_in_the_address_is_not_shown():
    pytest.importorskip("fsspec", reason="fsspec is missing")
    with pytest.raises(InputError, match="root=nonsense://host/x: ") as told:
        Store("nonsense://me:secret@host/x")
    assert "secret" not in str(told.value)


def test_local_files_stay_open_up_to_a_bound_and_missing_ones_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_OPEN", 3)
    for name in "abcdef":
        (tmp_path / name).write_text(name * 9)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    here = Store(str(tmp_path))
    for name in "abcdefabcdef":
        assert here.read(name, 2, 5) == name.encode() * 3
    if before:
        assert len(os.listdir("/proc/self/fd")) == before + 3
    here.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
    for ask in (here.read, here.size):
        with pytest.raises(InputError, match=r"/none: cannot be read \(No such file or directory\)"):
            ask("none")


def test_a_disk_that_fails_for_a_while_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("abc")
    here, real, errors = Store(str(tmp_path)), os.pread, [errno.ESTALE, errno.EIO]

    def pread(*given):
        if errors:
            raise OSError(errors[0], "Stale file handle")
        return real(*given)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(time, "sleep", lambda _: errors.pop(0))
    assert here.read("a", 1, 3) == b"bc"
    errors.append(errno.EIO)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(store, "_PATIENCE_S", 0.1)
    for split_read in (lambda: here.read("a"), lambda: Files((str(tmp_path / "a"),), torch.zeros(1)).read(0)):
        with pytest.raises(GoneError, match=r"/a: no answer for 0\.1 s \(Stale file handle\)"):
            split_read()


def test_nothing_is_kept_of_local_files(tmp_path):
    (tmp_path / "a").write_text("abc")
    assert Store(str(tmp_path), cache=str(tmp_path / "cache")).read("a") == b"abc"
    assert not (tmp_path / "cache").exists()


def test_relative_files_stay_those_of_the_folder_that_was_current(tmp_path, monkeypatch):
    coloured_photos(tmp_path / "photos", classes=1, images=1)
    monkeypatch.chdir(tmp_path)
    relative = "photos/colour0/0.jpg"
    files = Files((relative, str(tmp_path / relative)), torch.zeros(2))
    monkeypatch.chdir("/")
    wanted = (tmp_path / relative).read_bytes()
    assert [files.read(i) for i in range(2)] == [wanted] * 2


@pytest.mark.parametrize("root", ["reference::file:///x.json", "zip://a.zip::http://127.0.0.1:9/b", "reference://x"])
def test_an_address_in_an_address_is_refused(root):
    with pytest.raises(InputError, match="an address in an address can run code; give a plain one"):
        Store(root)
