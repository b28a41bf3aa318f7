"""A web server that goes wrong when told to, for the tests of data far away."""

import contextlib
import hashlib
import importlib.util
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

import pytest

WEB = all(importlib.util.find_spec(name) for name in ("fsspec", "aiohttp"))
web = pytest.mark.skipif(not WEB, reason="fsspec or aiohttp is missing: pip install 'kasoku[remote]'")


def made(size, seed=0):
    return random.Random(seed).randbytes(size)


class Site:
    """A web server on 127.0.0.1 that counts what it sends and can be told to go wrong."""

    def __init__(self):
        self.files = {
            "a.tar": made(300_000),
            "b/two words.tar": made(70_000, 1),
            "b/ü 100%41.bin": made(999, 2),
            "b/c/empty": b"",
            ".hidden": b"x",
            "b/.git/config": b"x",
        }
        self.reads = []  # (path, first, last + 1) of each request for bytes
        self.sent_bytes = self.requests = 0
        self.ranges = True
        self.fails = self.cuts = 0  # so many of the next requests for bytes get a 500, or half of their bytes
        self.garbage = set()  # the numbers of requests for bytes that get others of the same length
        self.honest = False  # half of the bytes are said to be all
        self.together = threading.Barrier(1)  # so many requests for bytes are answered at once
        self.status = 0  # all requests get this
        self.stalls, self.released = False, threading.Event()  # requests for bytes get nothing
        self.broken = ""  # this page gets a 500
        self._lock = threading.Lock()

    def answer(self, request, body):
        path = unquote(request.path).strip("/")
        with self._lock:
            self.requests += 1
        folder = not path or any(name.startswith(f"{path}/") for name in self.files)
        if self.status or (folder and path == self.broken != ""):
            self.send(request, self.status or 500, b"sorry", body)
        elif folder:
            page = "".join(f'<a href="{quote(name)}">{name}</a>' for name in self.below(path))
            page += '<a href="../">up</a><a href="?C=N;O=D">sort</a><a href="/">top</a><a href="./">here</a>'
            self.send(request, 200, page.encode(), body, {"Content-Type": "text/html"})
        elif path not in self.files:
            self.send(request, 404, b"not here", body)
        elif body:
            self.give(request, path)
        else:
            self.send(request, 200, self.files[path], False, self.tag(path))

    def below(self, path):
        start = f"{path}/" if path else ""
        rest = [name[len(start) :] for name in self.files if name.startswith(start)]
        return sorted({part if not slash else f"{part}/" for part, slash, _ in (name.partition("/") for name in rest)})

    def tag(self, path):
        return {"ETag": f'"{hashlib.sha256(self.files[path]).hexdigest()[:8]}"'}

    def give(self, request, path):
        data, status = self.files[path], 200
        first, stop = 0, len(data)
        if self.ranges and (asked := request.headers.get("Range")):
            first, last = asked.removeprefix("bytes=").split("-")
            first, stop, status = int(first), min(int(last) + 1, stop), 206
        with self._lock:
            self.reads.append((path, first, stop))
            fails, cuts, garbage = self.fails > 0, self.cuts > 0, len(self.reads) - 1 in self.garbage
            self.fails, self.cuts = self.fails - fails, self.cuts - cuts
        if garbage:
            data = made(len(data), 7)
        self.together.wait(20)
        if self.stalls:
            self.released.wait(60)
            request.close_connection = True
        elif fails:
            self.send(request, 500, b"sorry", True)
        else:
            self.send(request, status, data[first:stop], True, self.tag(path), cut=cuts)

    def send(self, request, status, data, body, headers=None, cut=False):
        request.send_response(status)
        data = data[: len(data) // 2] if cut and self.honest else data
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            data = data[: len(data) // 2] if cut and not self.honest else data
            with self._lock:
                self.sent_bytes += len(data)
            request.wfile.write(data)
        request.close_connection = cut


@contextlib.contextmanager
def serving():
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, timeout, disable_nagle_algorithm = "HTTP/1.1", 60, True

        def do_GET(self):
            site.answer(self, True)

        def do_HEAD(self):
            site.answer(self, False)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    site.root = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.released.set()
        server.shutdown()
        server.server_close()
