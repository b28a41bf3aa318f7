"""S3 and WebHDFS on 127.0.0.1, as far as their clients in fsspec use them; they go wrong when told to, as `Site`."""

import contextlib
import json
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from helpers.web import Site, serving

WRITTEN = "2026-01-01T00:00:00.000Z"  # what both say of every file


def words(request):
    """The path of a request, and its parameters."""
    where = urlsplit(request.path)
    return unquote(where.path), {key: values[0] for key, values in parse_qs(where.query).items()}


class S3(Site):
    """One bucket, called `bucket` and addressed by path: GET, HEAD, PUT, ListObjectsV2."""

    def start(self, port):
        self.root, self.endpoint = "s3://bucket", f"http://127.0.0.1:{port}"

    def answer(self, request, body):
        path, said = words(request)
        bucket, _, key = path.strip("/").partition("/")
        with self._lock:
            self.requests += 1
        if self.status:
            code = {403: "AccessDenied"}.get(self.status, "InternalError")
            self.fail(request, self.status, code, body)
        elif bucket != "bucket":
            self.fail(request, 404, "NoSuchBucket", body)
        elif request.command == "PUT":
            self.take(request, key)
        elif "list-type" in said:
            self.send(request, 200, self.listed(said).encode(), True, {"Content-Type": "application/xml"})
        elif key not in self.files:
            self.fail(request, 404, "NoSuchKey", body)
        elif body:
            self.give(request, key, self.asked(request))
        else:
            self.send(request, 200, b"", False, self.tag(key) | {"Content-Length": str(self.size(key))})

    def tag(self, path):
        return super().tag(path) | {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}

    def fail(self, request, status, code, body):
        text = f"<Error><Code>{code}</Code><Message>sorry</Message></Error>".encode()
        self.send(request, status, text if body else b"", body, {"Content-Type": "application/xml"})

    def listed(self, said):
        prefix, most = said.get("prefix", ""), int(said.get("max-keys", 1000))
        names = sorted(name for name in self.files if name.startswith(prefix))
        folders = set()
        if "delimiter" in said:
            folders = {name[: name.index("/", len(prefix)) + 1] for name in names if "/" in name[len(prefix) :]}
        rows = [
            f"<Contents><Key>{escape(name)}</Key><LastModified>{WRITTEN}</LastModified>"
            f"<ETag>{escape(self.tag(name)['ETag'])}</ETag><Size>{self.size(name)}</Size></Contents>"
            for name in names
            if not any(name.startswith(folder) for folder in folders)
        ][:most]
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        head = f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{head}<KeyCount>{len(rows)}</KeyCount>{''.join(rows)}</ListBucketResult>"


class WebHdfs(Site):
    """A name node, which redirects, and its data node: OPEN, LISTSTATUS, GETFILESTATUS, MKDIRS, CREATE, APPEND."""

    def start(self, port):
        self.root, self.here = f"webhdfs://127.0.0.1:{port}", f"http://127.0.0.1:{port}"

    def answer(self, request, body):
        path, said = words(request)
        operation, node, path = said["op"], *path.removeprefix("/").partition("/")[::2]
        path = path.removeprefix("v1/").strip("/")
        with self._lock:
            self.requests += 1
        if self.status:
            self.fail(request, self.status, {403: "AccessControlException"}.get(self.status, "IOException"))
        elif node == "webhdfs" and operation in ("OPEN", "CREATE", "APPEND"):
            if operation == "OPEN" and path not in self.files:
                self.fail(request, 404, "FileNotFoundException")
            else:
                query = request.path.partition("?")[2]
                self.send(request, 307, b"", True, {"Location": f"{self.here}/data/{quote(path)}?{query}"})
        elif operation == "OPEN":
            first = int(said.get("offset", 0))
            self.give(request, path, (first, first + int(said["length"])))
        elif operation in ("CREATE", "APPEND"):
            created = operation == "CREATE"
            self.take(request, path, 201 if created else 200, after=b"" if created else self.files[path])
        elif operation == "MKDIRS":
            self.reply(request, {"boolean": True})
        elif operation == "LISTSTATUS" and self.below(path):
            found = [self.state(f"{path}/{name}".strip("/"), name) for name in self.below(path)]
            self.reply(request, {"FileStatuses": {"FileStatus": found}})
        elif operation == "GETFILESTATUS" and (path in self.files or self.below(path)):
            self.reply(request, {"FileStatus": self.state(path, "")})
        else:
            self.fail(request, 404, "FileNotFoundException")

    def state(self, path, name):
        if path not in self.files:
            return {"pathSuffix": name.rstrip("/"), "type": "DIRECTORY", "length": 0, "modificationTime": 1}
        version = int(self.tag(path)["ETag"].strip('"'), 16)
        return {"pathSuffix": name, "type": "FILE", "length": self.size(path), "modificationTime": version}

    def reply(self, request, document):
        self.send(request, 200, json.dumps(document).encode(), True, {"Content-Type": "application/json"})

    def fail(self, request, status, kind):
        text = json.dumps({"RemoteException": {"exception": kind, "message": "sorry"}}).encode()
        self.send(request, status, text, True, {"Content-Type": "application/json"})


KINDS = {"s3": S3, "webhdfs": WebHdfs}


@contextlib.contextmanager
def object_store(protocol, monkeypatch):
    """A server of this protocol, which fsspec then finds; the test is skipped without its client."""
    pytest.importorskip("fsspec")
    client = pytest.importorskip({"s3": "s3fs", "webhdfs": "fsspec.implementations.webhdfs"}[protocol])
    with serving(KINDS[protocol]) as site:
        if protocol == "s3":
            settings = {"ENDPOINT_URL": site.endpoint, "ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "secret"}
            for name, value in {**settings, "DEFAULT_REGION": "here-1", "MAX_ATTEMPTS": "1"}.items():
                monkeypatch.setenv(f"AWS_{name}", value)
            client.S3FileSystem.clear_instance_cache()
        yield site
