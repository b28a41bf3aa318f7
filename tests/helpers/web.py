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
        self.off_bytes = 0  # what is said of a file's size is wrong by so many
        self.written = []  # paths, in the order in which they came
        self.loses = 0  # so many of the next writes are confirmed, and half of their bytes are kept
        self._lock = threading.Lock()

    def start(self, port):
        self.root = f"http://127.0.0.1:{port}"

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
            self.give(request, path, self.asked(request))
        else:
            self.send(request, 200, self.files[path], False, self.tag(path))

    def below(self, path):
        start = f"{path}/" if path else ""
        rest = [name[len(start) :] for name in self.files if name.startswith(start)]
        return sorted({part if not slash else f"{part}/" for part, slash, _ in (name.partition("/") for name in rest)})

    def tag(self, path):
        return {"ETag": f'"{hashlib.sha256(self.files[path]).hexdigest()[:8]}"'}

    def size(self, path):
        """What is said of it."""
        return len(self.files[path]) + self.off_bytes

    def asked(self, request):
        """The first byte that a request wants, and the one after the last; None for all of them."""
        if not self.ranges or not (text := request.headers.get("Range")):
            return None
        first, last = text.removeprefix("bytes=").split("-")
        return int(first), int(last) + 1

    def give(self, request, path, asked):
        data = self.files[path]
        status, first, stop = (206, asked[0], min(asked[1], len(data))) if asked else (200, 0, len(data))
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

    def take(self, request, path, status=200, *, after=b""):
        """Keeps the bytes that a request brings, `after` others."""
        data = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if self.stalls:
            self.released.wait(60)
            request.close_connection = True
            return
        with self._lock:
            loses, self.loses = self.loses > 0, max(0, self.loses - 1)
            self.written.append(path)
            self.files[path] = after + (data[: len(data) // 2] if loses else data)
        self.send(request, status, b"", True, self.tag(path))

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
def serving(kind=Site):
    site = kind()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, timeout, disable_nagle_algorithm = "HTTP/1.1", 60, True

        def do_GET(self):
            site.answer(self, True)

        def do_HEAD(self):
            site.answer(self, False)

        def do_PUT(self):
            site.answer(self, True)

        def do_POST(self):
            site.answer(self, True)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    site.start(server.server_port)
    try:
        yield site
    finally:
        site.released.set()
        server.shutdown()
        server.server_close()
