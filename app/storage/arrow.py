"""Files in a bucket, or wherever else pyarrow.fs reaches, through a network that fails now and then."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow
from pyarrow import fs

Result = TypeVar("Result")

_PATIENCE_S = 30.0  # for all tries of one verb, the last of which may begin at its end
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 5.0
_CONNECT_S, _SILENCE_S = 3.0, 10.0  # a request that moves no byte for so long has failed; 30 s more for one half sent
_ATTEMPTS_WITHIN_A_WRITE = 3  # of each part of it, since its chunks come only once
_IN_FLIGHT_BYTES = 64 << 20

_OPTIONS = {"endpoint_override", "region", "scheme", "tls_ca_file_path"}  # of s3
_WHOLE_ON_CLOSE = {"s3", "gcs", "abfs"}
_DENIED = re.compile(
    "ACCESS_DENIED|PERMISSION_DENIED|SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY|UNAUTHENTICATED|status 40[13]"
)
_FINAL = re.compile(f"{_DENIED.pattern}|NO_SUCH_BUCKET|INVALID_|EXPIRED_TOKEN|status 4(?!08|29)")


@dataclass(frozen=True)
class ArrowStore:
    """`s3://bucket/prefix`, `gs://bucket/prefix` or another URI of pyarrow.fs. Options stand in its query, such as
    `?endpoint_override=http://127.0.0.1:8333`; credentials do not, since it is shown: they come from the environment.

    Every request is bounded in time. All verbs but `write` are tried again while that may help, and have the same
    outcome however often they are. In a bucket a file is seen once it is whole, and not at all when `write` has failed;
    on a file system (`file://`) it is not brought to the disk before a verb returns, as LocalStore does.

    pyarrow puts an empty object in the place of the folder that something is deleted from. As on a disk, the folder is
    there until it is deleted itself.
    """

    uri: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        if parts.password or (parts.scheme == "s3" and "@" in parts.netloc):
            raise ValueError(
                "credentials belong in the environment (such as AWS_ACCESS_KEY_ID), not in a storage's URI"
            )
        unknown = dict(parse_qsl(parts.query)).keys() - _OPTIONS if parts.scheme == "s3" else ()
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: s3 takes only {', '.join(sorted(_OPTIONS))} in its query")

    def list(self, folder: str) -> list[str]:
        def names(files: fs.FileSystem, path: str) -> list[str]:
            try:
                found = files.get_file_info(fs.FileSelector(path, allow_not_found=True))
            except NotADirectoryError:
                return []
            return sorted(each.base_name for each in found)

        return self._try(folder, names)

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        def content(files: fs.FileSystem, path: str) -> bytes:
            with files.open_input_file(path) as file:
                first = max(0, start + file.size()) if start < 0 else start
                rest = max(0, file.size() - first)
                length = rest if num_bytes is None else min(rest, num_bytes)
                data: bytes = file.read_at(length, first) if length else b""
            if len(data) != length:
                raise OSError(f"{len(data)} bytes came where {length} were to come")
            return data

        return self._try(name, content)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Not tried again as a whole: its caller has the chunks, and this has only seen them pass by. What `parts`
        raises is raised as it is."""
        raised: list[BaseException] = []

        def passed_on() -> Iterator[bytes | memoryview]:
            try:
                yield from parts
            except BaseException as error:
                raised.append(error)
                raise

        try:
            files, path = self._reach(name, _ATTEMPTS_WITHIN_A_WRITE)
            _write(files, path, passed_on())
        except (OSError, pyarrow.ArrowException) as error:
            if error in raised:
                raise
            raise self._error(error, name) from None

    def commit(self, name: str, data: bytes) -> None:
        def replace(files: fs.FileSystem, path: str) -> None:
            if files.type_name in _WHOLE_ON_CLOSE:
                return _write(files, path, [data])
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.{socket.gethostname()}-{os.getpid()}"
            _write(files, temporary, [data])
            files.move(temporary, path)

        self._try(name, replace)

    def delete(self, name: str) -> None:
        def remove(files: fs.FileSystem, path: str) -> None:
            kind = files.get_file_info(path).type
            try:
                if kind == fs.FileType.File:
                    files.delete_file(path)
                elif kind == fs.FileType.Directory:
                    below = files.get_file_info(fs.FileSelector(path, recursive=True))
                    folders = [each.path for each in below if each.type == fs.FileType.Directory]
                    for folder in sorted(folders, reverse=True):  # or SeaweedFS keeps a folder that had folders in it
                        files.delete_dir(folder)
                    files.delete_dir(path)
            except FileNotFoundError:  # an earlier try has done it, or another process
                pass

        self._try(name, remove)

    def _try(self, name: str, verb: Callable[[fs.FileSystem, str], Result]) -> Result:
        """Until it succeeds, or is not going to. Waits a random part of a growing time between tries, because all ranks
        meet the same trouble at the same time."""
        deadline, longest_s = time.monotonic() + _PATIENCE_S, _FIRST_DELAY_S
        while True:
            try:
                return verb(*self._reach(name, attempts=1))
            except (OSError, pyarrow.ArrowException) as error:
                delay_s = random.uniform(longest_s / 2, longest_s)
                if _is_final(error) or time.monotonic() + delay_s > deadline:
                    raise self._error(error, name) from None
            time.sleep(delay_s)
            longest_s = min(2 * longest_s, _LONGEST_DELAY_S)

    def _reach(self, name: str, attempts: int) -> tuple[fs.FileSystem, str]:
        files, root = connect(self.uri, attempts)
        return files, f"{root}/{name}".rstrip("/")

    def _error(self, error: Exception, name: str) -> OSError:
        """With the server's message, and with the address but for its query."""
        number, message = getattr(error, "errno", None), str(error)
        if isinstance(error, FileNotFoundError):
            number, message = errno.ENOENT, os.strerror(errno.ENOENT)
        elif number is None:
            number = errno.EACCES if _DENIED.search(message) else errno.EIO
        return OSError(number, message, f"{self.uri.partition('?')[0].rstrip('/')}/{name}")


@cache
def connect(uri: str, attempts: int = 1) -> tuple[fs.FileSystem, str]:
    """A file system and a path in it. Once in each process: connections and credentials are kept with it.

    attempts: of each request, within the library.
    """
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        if "region" not in options:  # whoever else may know it is asked, which takes seconds where nobody answers
            own = "endpoint_override" in options
            options["region"] = os.environ.get("AWS_REGION", "us-east-1") if own else fs.resolve_s3_region(parts.netloc)
        files = fs.S3FileSystem(
            **options,
            connect_timeout=_CONNECT_S,
            request_timeout=_SILENCE_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
            allow_delayed_open=True,  # so that what fits in one part takes one request
        )
        return files, f"{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
        uri += f"{'&' if parts.query else '?'}retry_limit_seconds={_PATIENCE_S:g}"  # 15 minutes otherwise
    files, path = fs.FileSystem.from_uri(uri)
    return files, path.rstrip("/")


def _write(files: fs.FileSystem, path: str, parts: Iterable[bytes | memoryview]) -> None:
    if files.type_name == "local":  # a bucket needs no folders, and pyarrow would put objects in their places
        files.create_dir(path.rpartition("/")[0], recursive=True)
    stream = files.open_output_stream(path)
    try:
        in_flight = 0
        for part in parts:
            stream.write(part)
            in_flight += len(part)
            if in_flight >= _IN_FLIGHT_BYTES:
                stream.flush()  # waits for the parts on their way, of which pyarrow would keep any number in memory
                in_flight = 0
        stream.close()
    except BaseException:
        if files.type_name in _WHOLE_ON_CLOSE:
            _abandon(stream)
        else:
            with contextlib.suppress(OSError):
                stream.close()
                files.delete_file(path)
        raise


def _abandon(stream: pyarrow.NativeFile) -> None:
    """A stream that is closed, or whose last reference goes, completes its upload, and there is no other way to end it
    (apache/arrow#40502). So one that has failed is referred to for good, at the price of a part's memory. The bucket
    keeps its parts unseen, as those of a process that was killed, until its rule for incomplete uploads deletes them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


def _is_final(error: Exception) -> bool:
    """Whether to try again is of no use: what this machine says has a number, what a server says a name in capitals."""
    return (
        getattr(error, "errno", None) is not None or not isinstance(error, OSError) or bool(_FINAL.search(str(error)))
    )
