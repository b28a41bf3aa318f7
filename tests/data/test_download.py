import gzip
import hashlib
import io
import os
import shutil
import sys
import tarfile
import threading
import time
from dataclasses import replace
from functools import wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module

import pytest

from helpers import made
from kasoku import cli
from kasoku.core import InputError
from kasoku.data import cifar10, fashion_mnist, folder
from kasoku.data.datasets import binary
from kasoku.data.datasets import download as module
from kasoku.data.datasets.binary import CIFAR10
from kasoku.data.datasets.download import RELEASES, SUMS, download

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
ARCHIVE, PART = "cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz.part"


class Server(ThreadingHTTPServer):
    """Serves `files` on 127.0.0.1; notes every request as (name, Range or ""), and misbehaves as it is told."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self.server_port}/below"
        self.files, self.requests, self.sent_bytes = {}, [], 0
        self.knows_ranges = self.tells_length = True
        self.drops = []  # after how many bytes each of the next answers breaks off
        self.status = []  # what the next answers are instead of the file
        self.stall_s = 0.0  # how long each answer waits in its middle

    def handle_error(self, *_):
        pass  # a client that hung up is no news


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self):
        server, name = self.server, self.path.removeprefix("/below/")
        wanted = self.headers.get("Range", "")
        server.requests.append((name, wanted))
        if server.status or name not in server.files:
            self.send_error(server.status.pop(0) if server.status else 404)
            return
        body, first = server.files[name], 0
        if wanted and server.knows_ranges:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if first else 200)
        if server.tells_length:
            self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        sent = body[first:][: server.drops.pop(0) if server.drops else None]
        half = len(sent) // 2
        self.wfile.write(sent[:half])
        self.wfile.flush()
        time.sleep(server.stall_s)
        self.wfile.write(sent[half:])
        server.sent_bytes += len(sent)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server at work; no test waits between tries."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "BACKOFF_S", 0.0)
    with Server() as made_server:
        thread = threading.Thread(target=made_server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made_server
        made_server.shutdown()
        thread.join(10)


def publish(server, monkeypatch, name, files):
    """Lets the server have these files and the table know them."""
    server.files.update(files)
    known = {file: (len(body), hashlib.sha256(body).hexdigest()) for file, body in files.items()}
    monkeypatch.setitem(RELEASES, name, replace(RELEASES[name], files=known))


def packed(write):
    """A tar.gz of what `write(tar)` adds, incompressible enough to be sent in parts."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        write(tar)
    return out.getvalue()


def add(tar, name, body=b"x"):
    member = tarfile.TarInfo(name)
    member.size = len(body)
    tar.addfile(member, io.BytesIO(body))


@pytest.fixture
def cifar_body(server, monkeypatch, tmp_path):
    """A small CIFAR-10 in the official layout, published; its archive's bytes."""
    monkeypatch.setattr(binary, "CIFAR10", made.SMALL10)
    made.write_binary(made.SMALL10, tmp_path / "made")
    body = packed(lambda tar: tar.add(tmp_path / "made", CIFAR10.folder))
    publish(server, monkeypatch, "cifar10", {ARCHIVE: body})
    return body


@pytest.fixture
def idx_files(server, monkeypatch, tmp_path):
    """A small Fashion-MNIST in the official layout, published."""
    made.write_idx(tmp_path / "idx", packed=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "idx").iterdir()}
    publish(server, monkeypatch, "fashion-mnist", files)
    return files


def get(server, to, name="cifar10", **options):
    return download(name, str(to), source=server.address, **options)


def all_files(home):
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def refused(server, to, match, name="cifar10"):
    """Checks that the download is refused with one line, and that no file has its final name."""
    with pytest.raises(InputError, match=match) as caught:
        get(server, to, name)
    assert "\n" not in str(caught.value)
    assert not to.is_dir() or [name for name in all_files(to) if not name.endswith(".part")] == []


# ---- what lies there afterwards


def test_cifar10_is_unpacked_and_read_by_kasoku(server, cifar_body, tmp_path):
    to = tmp_path / "data"
    line = get(server, to)
    assert cifar10(str(to)).train.images_NHWC.shape == (100, 32, 32, 3)
    assert cifar10(str(to)).classes == tuple(made.names(made.SMALL10))
    assert os.listdir(to) == [CIFAR10.folder]  # neither the archive nor a temporary folder stays
    assert f"--set data.root={to} or KASOKU_DATA={to}" in line
    assert "data.use=kasoku.data.cifar10" in line
    assert "\n" not in line


def test_fashion_mnist_stays_packed_and_is_read_by_root_and_by_kasoku_data(server, idx_files, tmp_path, monkeypatch):
    to = tmp_path / "data"
    get(server, to, "fashion-mnist")
    assert all_files(to) == sorted(f"fashion_mnist/{name}" for name in idx_files)
    monkeypatch.setenv("KASOKU_DATA", str(to))
    for dataset in (fashion_mnist(str(to)), fashion_mnist()):
        assert (len(dataset.train), len(dataset.test)) == (30, 10)


def test_mnist_and_fashion_mnist_of_the_same_file_names_share_a_folder(server, idx_files, tmp_path, monkeypatch):
    get(server, tmp_path / "data", "fashion-mnist")
    publish(server, monkeypatch, "mnist", {name: gzip.compress(body) for name, body in idx_files.items()})
    get(server, tmp_path / "data", "mnist")
    assert all_files(tmp_path / "data") == sorted(
        f"{set_}/{n}" for set_ in ("fashion_mnist", "mnist") for n in idx_files
    )


def test_imagenette_is_a_folder_that_kasoku_reads_and_the_line_names_it(server, tmp_path, monkeypatch):
    def photos(tar):
        for part in ("train", "val"):
            for number in range(4):
                add(tar, f"imagenette2-320/{part}/n{number % 2}/{number}.JPEG", bytes([number]))

    publish(server, monkeypatch, "imagenette", {"imagenette2-320.tgz": packed(photos)})
    line = get(server, tmp_path / "my data", "imagenette")
    assert f"data.use=kasoku.data.folder and --set 'data.root={tmp_path}/my data/imagenette2-320'" in line
    assert "KASOKU_DATA" not in line
    photos_read = folder(str(tmp_path / "my data" / "imagenette2-320"))
    assert (photos_read.classes, len(photos_read.train)) == (("n0", "n1"), 4)


# ---- nothing twice


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_a_second_call_downloads_nothing_and_says_so(server, cifar_body, idx_files, tmp_path, name):
    assert "downloaded to" in get(server, tmp_path / "data", name)
    before, asked = all_files(tmp_path / "data"), len(server.requests)
    assert "nothing to download" in get(server, tmp_path / "data", name)
    assert (all_files(tmp_path / "data"), len(server.requests)) == (before, asked)


def test_only_the_file_that_is_missing_or_wrong_is_downloaded(server, idx_files, tmp_path):
    get(server, tmp_path / "data", "fashion-mnist")
    place = tmp_path / "data" / "fashion_mnist"
    (place / LABELS).unlink()
    (place / IMAGES).write_bytes(idx_files[IMAGES][:-1] + b"?")  # the right length
    server.requests.clear()
    get(server, tmp_path / "data", "fashion-mnist")
    assert sorted(name for name, _ in server.requests) == [IMAGES, LABELS]
    assert {path.name: path.read_bytes() for path in place.iterdir()} == idx_files


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"?" + b"x" * 20)])
def test_a_damaged_unpacked_file_is_mended_and_the_users_own_files_stay(server, cifar_body, tmp_path, damage):
    get(server, tmp_path / "data")
    home = tmp_path / "data" / CIFAR10.folder
    whole = (home / "data_batch_2.bin").read_bytes()
    damage(home / "data_batch_2.bin")
    (home / "notes.txt").write_text("mine")
    assert "downloaded to" in get(server, tmp_path / "data")
    assert (home / "data_batch_2.bin").read_bytes() == whole
    assert (home / "notes.txt").read_text() == "mine"
    assert "nothing to download" in get(server, tmp_path / "data")


def test_an_archive_that_lies_there_already_is_used_and_stays(server, cifar_body, tmp_path):
    (tmp_path / ARCHIVE).write_bytes(cifar_body)
    assert "nothing to download" in get(server, tmp_path)
    assert server.requests == []
    assert (tmp_path / ARCHIVE).read_bytes() == cifar_body
    assert len(cifar10(str(tmp_path)).train) == 100


def test_a_folder_that_somebody_else_put_there_is_left_alone(server, cifar_body, tmp_path):
    (tmp_path / CIFAR10.folder).mkdir()
    with pytest.raises(InputError, match=f"cifar-10-batches-bin: is there, but not from here .*{SUMS}.*move it away"):
        get(server, tmp_path)
    assert server.requests == []


# ---- resume, and servers that do not know how


def test_what_broke_off_goes_on_and_only_the_missing_bytes_are_sent(server, cifar_body, tmp_path):
    server.drops = [1000, 2000]
    get(server, tmp_path / "data")
    assert server.requests == [(ARCHIVE, ""), (ARCHIVE, "bytes=1000-"), (ARCHIVE, "bytes=3000-")]
    assert server.sent_bytes == len(cifar_body)
    assert len(cifar10(str(tmp_path / "data")).train) == 100


def test_a_later_call_goes_on_with_the_part_of_an_earlier_one(server, cifar_body, tmp_path):
    to, server.drops = tmp_path / "data", [1000, 500, 0]
    refused(server, to, r"ended at 1,500 of [\d,]+ bytes \(3 tries\); run this again to go on, or give --source")
    assert (to / PART).read_bytes() == cifar_body[:1500]
    server.requests.clear()
    get(server, to)
    assert server.requests == [(ARCHIVE, "bytes=1500-")]
    assert not (to / PART).exists()


def test_a_part_that_is_whole_is_checked_and_not_asked_for(server, cifar_body, tmp_path):
    (tmp_path / PART).write_bytes(cifar_body)
    get(server, tmp_path)
    assert server.requests == []
    assert len(cifar10(str(tmp_path)).train) == 100


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_server_that_ignores_ranges_starts_anew(server, cifar_body, tmp_path, tells_length):
    server.knows_ranges, server.tells_length, server.drops = False, tells_length, [1000]
    get(server, tmp_path / "data")
    assert server.requests == [(ARCHIVE, ""), (ARCHIVE, "bytes=1000-")]
    assert server.sent_bytes == 1000 + len(cifar_body)
    assert len(cifar10(str(tmp_path / "data")).train) == 100


def test_a_part_longer_than_the_file_is_thrown_away(server, cifar_body, tmp_path):
    (tmp_path / PART).write_bytes(cifar_body + b"more")
    get(server, tmp_path)
    assert server.requests == [(ARCHIVE, "")]


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_a_server_in_trouble_is_asked_again(server, cifar_body, tmp_path, code):
    server.status = [code, code]
    get(server, tmp_path / "data")
    assert len(server.requests) == 3


def test_between_tries_it_waits_longer_each_time(server, cifar_body, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(module, "BACKOFF_S", 1.0)
    monkeypatch.setattr(module.time, "sleep", waited.append)
    server.status = [503] * 3
    refused(server, tmp_path / "data", "HTTP 503 .*3 tries")
    assert [wait for wait in waited if wait] == [1.0, 2.0]


def test_a_server_that_falls_silent_is_given_up(server, cifar_body, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.1)
    server.stall_s = 0.5
    began = time.monotonic()
    refused(server, tmp_path / "data", r"timed out \(3 tries\)")
    assert time.monotonic() - began < 5
    assert len(server.requests) == 3


# ---- what is refused


def test_an_unknown_name_names_the_nearest_or_lists_all(tmp_path):
    with pytest.raises(InputError, match=r"data set 'cifar-10': did you mean cifar10\?$"):
        download("cifar-10", str(tmp_path))
    with pytest.raises(InputError, match="did you mean fashion-mnist"):
        download("fashion_mnist", str(tmp_path))
    with pytest.raises(InputError, match=r"'svhn': one of cifar10, cifar100, mnist, fashion-mnist, imagenette$"):
        download("svhn", str(tmp_path))


def test_no_folder_is_one_clear_line():
    with pytest.raises(InputError, match="--to is not given"):
        download("mnist", "")


@pytest.mark.parametrize("source", ["ftp://host/data", "file:///data", "data", "http://", "http:///data", "http://a b"])
def test_a_source_that_is_no_http_address_is_refused(tmp_path, source):
    with pytest.raises(InputError, match="an http:// or https:// address"):
        download("mnist", str(tmp_path), source=source)


@pytest.mark.parametrize("source", ["http://127.0.0.1:port", "http://[half", "http://a..b"])
def test_an_address_that_cannot_be_parsed_is_one_clear_line(server, tmp_path, source):
    with pytest.raises(InputError, match=r"3 tries"):
        download("mnist", str(tmp_path), source=source)


def test_a_damaged_byte_shows_both_checksums_and_the_part_is_removed(server, cifar_body, tmp_path):
    wrong = bytearray(cifar_body)
    wrong[500] ^= 1
    server.files[ARCHIVE] = bytes(wrong)
    got, expected = hashlib.sha256(wrong).hexdigest(), hashlib.sha256(cifar_body).hexdigest()
    refused(server, tmp_path / "data", f"SHA-256 {got}, expected {expected}; try again, or give --source")
    assert all_files(tmp_path / "data") == []
    server.files[ARCHIVE] = cifar_body
    get(server, tmp_path / "data")
    assert len(cifar10(str(tmp_path / "data")).train) == 100


def test_a_wrong_file_does_not_replace_a_file_that_is_there(server, idx_files, tmp_path):
    place = tmp_path / "fashion_mnist"
    place.mkdir()
    (place / IMAGES).write_bytes(b"mine")
    server.files[IMAGES] = b"?" * len(idx_files[IMAGES])
    with pytest.raises(InputError, match=f"{IMAGES}: SHA-256"):
        get(server, tmp_path, "fashion-mnist")
    assert (place / IMAGES).read_bytes() == b"mine"


def test_a_page_in_place_of_the_file_is_refused_before_it_is_written(server, cifar_body, tmp_path):
    server.files[ARCHIVE] = b"<html>log in first</html>"
    refused(server, tmp_path / "data", rf"{ARCHIVE}: 25 bytes, expected {len(cifar_body):,}; give --source")
    assert all_files(tmp_path / "data") == []


def test_an_answer_without_a_length_is_not_read_beyond_the_file(server, cifar_body, tmp_path):
    server.tells_length = False
    server.files[ARCHIVE] = cifar_body + b"?" * 1000
    get(server, tmp_path / "data")
    assert len(cifar10(str(tmp_path / "data")).train) == 100


def test_not_found_is_told_at_once_and_leaves_nothing(server, cifar_body, tmp_path):
    server.files.clear()
    refused(server, tmp_path / "data", rf"{ARCHIVE}: HTTP 404 .*give --source")
    assert len(server.requests) == 1
    assert all_files(tmp_path / "data") == []


def test_no_server_is_told_after_three_tries(server, cifar_body, tmp_path):
    server.address = "http://127.0.0.1:9"  # discard: nothing listens
    refused(server, tmp_path / "data", r"(refused|timed out|reset).*\(3 tries\)")


# ---- archives


def leads_out(tar):
    add(tar, "cifar-10-batches-bin/data_batch_1.bin")
    add(tar, "../../escaped.bin")


def links_out(tar):
    link = tarfile.TarInfo("cifar-10-batches-bin/link")
    link.type, link.linkname = tarfile.SYMTYPE, "../../.."
    tar.addfile(link)


def is_a_device(tar):
    device = tarfile.TarInfo("cifar-10-batches-bin/device")
    device.type = tarfile.CHRTYPE
    tar.addfile(device)


@pytest.mark.parametrize("member", [leads_out, links_out, is_a_device])
def test_an_archive_that_leads_out_of_its_folder_is_refused(server, monkeypatch, tmp_path, member):
    publish(server, monkeypatch, "cifar10", {ARCHIVE: packed(member)})
    with pytest.raises(InputError, match=f"{ARCHIVE}: damaged or not the official one .*remove it") as caught:
        get(server, tmp_path / "a" / "data")
    assert "\n" not in str(caught.value)
    assert all_files(tmp_path / "a") == [f"data/{ARCHIVE}"]  # whole, with the checksum of the table


def cut_short(body):
    return body[: len(body) // 2]


def no_archive(body):
    return b"?" * len(body)


def damaged_within(body):
    return body[:2000] + b"\xff" * 70_000 + body[72_000:]


@pytest.mark.parametrize("damage", [cut_short, no_archive, damaged_within])
def test_a_damaged_archive_is_told_and_leaves_no_folder(server, cifar_body, monkeypatch, tmp_path, damage):
    publish(server, monkeypatch, "cifar10", {ARCHIVE: damage(cifar_body)})
    with pytest.raises(InputError, match=f"{ARCHIVE}: damaged or not the official one") as caught:
        get(server, tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert all_files(tmp_path / "data") == [ARCHIVE]


def test_an_archive_of_something_else_is_told(server, monkeypatch, tmp_path):
    publish(server, monkeypatch, "cifar10", {ARCHIVE: packed(lambda tar: add(tar, "other/file"))})
    with pytest.raises(InputError, match="has no folder cifar-10-batches-bin: not the official archive"):
        get(server, tmp_path / "data")
    assert all_files(tmp_path / "data") == [ARCHIVE]


# ---- the disk


def test_too_little_room_is_told_before_anything_is_asked_for(server, cifar_body, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=184_000_000)  # less than what the archive unpacks to
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(server, tmp_path / "data", r"data: 184\.0 MB free, 184\.\d MB needed; free some, or give another --to")
    assert server.requests == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_told_and_not_tried_again(server, cifar_body, tmp_path):
    (tmp_path / PART).symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left on device; mend that or free some space, or give another --to"):
        get(server, tmp_path)
    assert len(server.requests) == 1
    assert not (tmp_path / ARCHIVE).exists()


def test_a_folder_that_cannot_be_made_is_told(server, cifar_body, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for to in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(InputError, match=r"file\S*: (File exists|Not a directory); mend that"):
            get(server, to)
    assert server.requests == []


def test_a_second_download_of_the_same_file_is_refused_while_one_runs(server, cifar_body, tmp_path):
    server.stall_s = 1.0
    lines = []
    first = threading.Thread(target=lambda: lines.append(get(server, tmp_path / "data")), daemon=True)
    first.start()
    while not server.requests:
        time.sleep(0.01)
    refused(server, tmp_path / "data", f"{PART}: another download writes it; wait for that")
    first.join(10)
    assert "downloaded to" in lines[0]
    assert len(server.requests) == 1


# ---- what is shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only_and_not_when_quiet(server, cifar_body, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    get(server, tmp_path / "no_terminal")
    assert capsys.readouterr() == ("", "")
    for quiet in (True, False):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        get(server, tmp_path / f"quiet_{quiet}", quiet=quiet)
        assert (ARCHIVE in terminal.getvalue()) is not quiet
    assert "/s" in terminal.getvalue()
    assert capsys.readouterr().out == ""


# ---- the table


@pytest.mark.parametrize(
    ("command", "stays"),
    [
        (["data", "mnist", "--to", "x"], "what was downloaded so far stays, and the same command goes on there"),
        (["pack", "a", "b"], "the shards that are whole stay, and the same command goes on there"),
        (["train", "a.toml"], "a checkpoint written before stands"),
    ],
)
def test_an_interruption_says_what_stays(monkeypatch, capsys, command, stays):
    verb = import_module(f"kasoku.commands.{command[0]}")

    @wraps(verb.run)  # whose annotation says which options there are
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "run", interrupted)
    assert cli.main(command) == 130
    assert capsys.readouterr().err == f"kasoku: interrupted at once; {stays}\n"


def test_the_table_names_what_the_readers_look_for():
    assert RELEASES["cifar10"].folder == binary.CIFAR10.folder
    assert RELEASES["cifar100"].folder == binary.CIFAR100.folder
    for name, release in RELEASES.items():
        assert release.address.startswith("http"), name
        assert release.address.endswith("/"), name
        assert all(len(sha256) == 64 and size_bytes > 0 for size_bytes, sha256 in release.files.values()), name
    unpacked_bytes = CIFAR10.train_images * 6 * (3072 + CIFAR10.label_bytes)
    assert RELEASES["cifar10"].unpacked_bytes == pytest.approx(unpacked_bytes, rel=0.01)


@pytest.mark.data
def test_the_table_knows_the_real_fashion_mnist(real_data):
    for name, (size_bytes, sha256) in RELEASES["fashion-mnist"].files.items():
        body = (real_data / "fashion_mnist" / name).read_bytes()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (size_bytes, sha256)
