"""Store files in a bucket, or wherever else pyarrow.fs reaches, through a network that fails now and then."""

# Why not by obstore, which can abort uploads and write conditionally: it needs boto3 to read the profiles of the AWS
# command line, takes the sending of a part for silence (a slow uplink would never end one), and does not try again when
# an answer breaks off in the middle.

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

from app.storage.local import span

Result = TypeVar("Result")

_RETRY_BUDGET_S = 30.0  # for all tries of one verb, the last of which may begin at its end
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0
_CONNECT_TIMEOUT_S = 3.0
_IDLE_TIMEOUT_S = 10.0  # a request that moves no byte for so long has failed; 30 s more for one half sent
_ATTEMPTS_WITHIN_A_WRITE = 3  # of each part of it, since its chunks come only once
_IN_FLIGHT_BYTES = 64 << 20

_S3_OPTIONS = {"endpoint_override", "region", "scheme", "tls_ca_file_path"}
_WHOLE_ON_CLOSE = {"s3", "gcs", "abfs"}  # where a file is not seen before its stream has been closed

# pyarrow has no types for what a server answers: it is told by the names and codes in the message.
_DENIED = re.compile(
    "ACCESS_DENIED|PERMISSION_DENIED|SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY|UNAUTHENTICATED|status 40[13]"
)
_FINAL = re.compile(f"{_DENIED.pattern}|NO_SUCH_BUCKET|INVALID_|EXPIRED_TOKEN|status 4(?!08|29)")


@dataclass(frozen=True)
class ArrowStore:
    """A store at `s3://bucket/prefix`, `gs://bucket/prefix` or another URI of pyarrow.fs.

    Every request is bounded in time. All verbs but `write` are tried again while that may help, and have the same
    outcome however often they are. In a bucket a file is seen once it is whole, and not at all when `write` has failed;
    on a file system (`file://`) it is not brought to the disk before a verb returns, as LocalStore does.
    """

    uri: str  # options stand in its query, such as `?endpoint_override=http://127.0.0.1:8333`

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        # The URI is shown in messages and written to config.yaml, where a secret must not go.
        if parts.password or (parts.scheme == "s3" and "@" in parts.netloc):
            remedy = "credentials belong in the environment (such as AWS_ACCESS_KEY_ID)"
            raise ValueError(f"{remedy}, not in a storage's URI")
        unknown = dict(parse_qsl(parts.query)).keys() - _S3_OPTIONS
        if parts.scheme == "s3" and unknown:
            known = ", ".join(sorted(_S3_OPTIONS))
            raise ValueError(f"{', '.join(sorted(unknown))}: s3 takes only {known} in its query")

    def list(self, folder: str) -> list[str]:
        def names(files: fs.FileSystem, path: str) -> list[str]:
            try:
                found = files.get_file_info(fs.FileSelector(path, allow_not_found=True))
            except NotADirectoryError:
                return []
            return sorted(each.base_name for each in found)

        return self._retry(folder, names)

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        def content(files: fs.FileSystem, path: str) -> bytes:
            with files.open_input_file(path) as file:
                first, length = span(file.size(), start, num_bytes)
                data = b""
                if length:  # a server may refuse a range that holds no byte
                    data = file.read_at(length, first)
            if len(data) != length:  # the answer broke off, which is no error to pyarrow
                raise OSError(f"{len(data)} bytes came where {length} were to come")
            return data

        return self._retry(name, content)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file as `Store.write` says. What `parts` raises is raised as it is."""
        source_errors: list[BaseException] = []

        def watched() -> Iterator[bytes | memoryview]:
            try:
                yield from parts
            except BaseException as error:
                source_errors.append(error)
                raise

        # Not tried again as a whole: the caller has the chunks, and here they only pass by.
        try:
            files, path = self._connect(name, _ATTEMPTS_WITHIN_A_WRITE)
            _write(files, path, watched())
        except (OSError, pyarrow.ArrowException) as error:
            if error in source_errors:
                raise
            raise self._error(error, name) from None

    def commit(self, name: str, data: bytes, private: bool = False) -> None:
        def replace(files: fs.FileSystem, path: str) -> None:
            if files.type_name in _WHOLE_ON_CLOSE:
                _write(files, path, [data])
                return
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.{socket.gethostname()}-{os.getpid()}"
            _write(files, temporary, [data])
            files.move(temporary, path)

        self._retry(name, replace)

    def delete(self, name: str) -> None:
        def remove(files: fs.FileSystem, path: str) -> None:
            # What is not found has been deleted by an earlier try, or by another process. As on a disk, the folder that
            # it was in stays: pyarrow puts an empty object in its place.
            with contextlib.suppress(FileNotFoundError):
                _delete(files, path)

        self._retry(name, remove)

    def _retry(self, name: str, verb: Callable[[fs.FileSystem, str], Result]) -> Result:
        """Try a verb until it succeeds, cannot succeed any more, or has used up its time."""
        deadline = time.monotonic() + _RETRY_BUDGET_S
        longest_s = _FIRST_DELAY_S
        while True:
            try:
                return verb(*self._connect(name, num_attempts=1))
            except (OSError, pyarrow.ArrowException) as error:
                # Random, because all ranks meet the same trouble at the same time.
                delay_s = random.uniform(longest_s / 2, longest_s)
                if _is_final(error) or time.monotonic() + delay_s > deadline:
                    raise self._error(error, name) from None
            time.sleep(delay_s)
            longest_s = min(2 * longest_s, _LONGEST_DELAY_S)

    def _connect(self, name: str, num_attempts: int) -> tuple[fs.FileSystem, str]:
        files, root = connect(self.uri, num_attempts)
        return files, f"{root}/{name}".rstrip("/")

    def _error(self, error: Exception, name: str) -> OSError:
        """Return an OSError of the right kind, with the server's message and the address of the file."""
        number = getattr(error, "errno", None)
        message = str(error)
        if isinstance(error, FileNotFoundError):
            number = errno.ENOENT
            message = os.strerror(errno.ENOENT)
        elif number is None:
            number = errno.EACCES if _DENIED.search(message) else errno.EIO
        place, _, _ = self.uri.partition("?")
        return OSError(number, message, f"{place.rstrip('/')}/{name}")


@cache
def connect(uri: str, num_attempts: int = 1) -> tuple[fs.FileSystem, str]:
    """Return the file system of a URI, whose library makes up to `num_attempts` of each request, and the path in it."""
    # Cached, because a file system keeps its connections, and credentials that took a request to get.
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        # pyarrow itself would ask whoever may know of a region, which takes seconds where nobody answers.
        if "region" not in options and "endpoint_override" in options:
            options["region"] = os.environ.get("AWS_REGION", "us-east-1")
        elif "region" not in options:
            options["region"] = fs.resolve_s3_region(parts.netloc)
        files = fs.S3FileSystem(
            **options,
            connect_timeout=_CONNECT_TIMEOUT_S,
            request_timeout=_IDLE_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=num_attempts),
            allow_delayed_open=True,  # so that what fits in one part takes one request
        )
        return files, f"{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
        mark = "&" if parts.query else "?"
        uri += f"{mark}retry_limit_seconds={_RETRY_BUDGET_S:g}"  # 15 minutes otherwise
    files, path = fs.FileSystem.from_uri(uri)
    return files, path.rstrip("/")


def _write(files: fs.FileSystem, path: str, parts: Iterable[bytes | memoryview]) -> None:
    if files.type_name == "local":  # a bucket needs no folders, and pyarrow would put objects in their places
        files.create_dir(path.rpartition("/")[0], recursive=True)
    stream = files.open_output_stream(path)
    try:
        in_flight_bytes = 0
        for part in parts:
            stream.write(part)
            in_flight_bytes += len(part)
            if in_flight_bytes >= _IN_FLIGHT_BYTES:
                stream.flush()  # waits for the parts on their way, of which pyarrow would keep any number in memory
                in_flight_bytes = 0
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
    """Keep a stream open for good, at the price of the memory of a part, so that its upload is never completed."""
    # pyarrow cannot abort an upload (apache/arrow#40502): a stream that is closed, or whose last reference goes,
    # completes it. The bucket keeps the parts unseen, like those of a process that was killed, until its rule for
    # incomplete uploads deletes them. A list of such streams in this module is not enough: the interpreter clears
    # modules when it ends, after pyarrow has shut S3 down, and then waits for ever for the upload to be completed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


def _delete(files: fs.FileSystem, path: str) -> None:
    kind = files.get_file_info(path).type
    if kind == fs.FileType.File:
        files.delete_file(path)
    elif kind == fs.FileType.Directory:
        # Folders first, the deepest one first: SeaweedFS keeps a folder that had folders in it.
        found = files.get_file_info(fs.FileSelector(path, recursive=True))
        for each in sorted(found, key=lambda each: each.path, reverse=True):
            if each.type == fs.FileType.Directory:
                files.delete_dir(each.path)
        files.delete_dir(path)


def _is_final(error: Exception) -> bool:
    """Return whether trying again is of no use."""
    if not isinstance(error, OSError):
        return True
    # An error of this machine has a number. One of a server has none, and a name in capitals or a status instead.
    return error.errno is not None or bool(_FINAL.search(str(error)))
