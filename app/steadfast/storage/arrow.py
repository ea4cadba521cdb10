"""Store files in a bucket or another file system of pyarrow.fs.

Requests are bounded in time, and repeated after errors of the network.
"""

# obstore could abort uploads and write conditionally, but it needs boto3 to read profiles of the AWS command line,
# treats the upload of a part as silence, so that a slow uplink would never finish a part, and does not repeat a request
# whose answer breaks off.

import contextlib
import ctypes
import errno
import os
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

from steadfast.backoff import delays
from steadfast.storage.local import span

Result = TypeVar("Result")

_RETRY_BUDGET_S = 30.0  # for all tries of a verb; the last try may begin at the end of this time
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0
_CONNECT_TIMEOUT_S = 3.0
_IDLE_TIMEOUT_S = 10.0  # a request that moves no byte for this time has failed; a half-sent request gets 30 s more
_ATTEMPTS_WITHIN_A_WRITE = 3  # for each part of a write, because the caller's parts can be read only once
_IN_FLIGHT_BYTES = 64 << 20

_S3_OPTIONS = {"endpoint_override", "region", "scheme", "tls_ca_file_path"}
_WHOLE_ON_CLOSE = {"s3", "gcs", "abfs"}  # file systems in which a file is visible only after its stream is closed

# pyarrow has no types for errors of a server, so the names and codes in the messages identify the errors.
_DENIED = re.compile(
    "ACCESS_DENIED|PERMISSION_DENIED|SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY|UNAUTHENTICATED|status 40[13]"
)
_FINAL = re.compile(f"{_DENIED.pattern}|NO_SUCH_BUCKET|INVALID_|EXPIRED_TOKEN|status 4(?!08|29)")


@dataclass(frozen=True)
class ArrowStore:
    """Store at `s3://bucket/prefix`, `gs://bucket/prefix` or another URI of pyarrow.fs.

    Every request is bounded in time. All verbs except `write` are repeated while a repetition may help, and repetitions
    do not change the outcome. In a bucket a file is visible when it is whole, and not visible after a failed `write`.
    On a file system (`file://`) a verb may return before the data is on the disk, unlike a verb of LocalStore.
    """

    uri: str  # options are in the query, such as `?endpoint_override=http://127.0.0.1:8333`

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        # Messages and config.yaml show the URI, so the URI must not contain a secret.
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
                if length:  # a server may refuse a range without bytes
                    data = file.read_at(length, first)
            if len(data) != length:  # a broken answer is no error to pyarrow
                raise OSError(f"{len(data)} bytes arrived instead of {length}")
            return data

        return self._retry(name, content)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file as described by `Store.write`.

        Exceptions of `parts` are raised unchanged.
        """
        source_errors: list[BaseException] = []

        def watched() -> Iterator[bytes | memoryview]:
            try:
                yield from parts
            except BaseException as error:
                source_errors.append(error)
                raise

        # The whole write is not repeated, because the parts can be read only once.
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
            # A missing file was deleted by an earlier try or by another process. As on a disk, the file's folder stays:
            # pyarrow creates an empty object for it.
            with contextlib.suppress(FileNotFoundError):
                _delete(files, path)

        self._retry(name, remove)

    def num_bytes(self, folder: str) -> int:
        def total(files: fs.FileSystem, path: str) -> int:
            found = files.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
            return sum(each.size for each in found if each.type == fs.FileType.File)

        return self._retry(folder, total)

    def _retry(self, name: str, verb: Callable[[fs.FileSystem, str], Result]) -> Result:
        """Repeat a verb until it succeeds, fails for good, or runs out of time."""
        deadline = time.monotonic() + _RETRY_BUDGET_S
        # All ranks meet the same error at the same time, hence the jitter.
        pauses = delays(_FIRST_DELAY_S, _LONGEST_DELAY_S, jitter=0.5)
        while True:
            try:
                return verb(*self._connect(name, num_attempts=1))
            except (OSError, pyarrow.ArrowException) as error:
                delay_s = next(pauses)
                if _is_final(error) or time.monotonic() + delay_s > deadline:
                    raise self._error(error, name) from None
            time.sleep(delay_s)

    def _connect(self, name: str, num_attempts: int) -> tuple[fs.FileSystem, str]:
        files, root = connect(self.uri, num_attempts)
        return files, f"{root}/{name}".rstrip("/")

    def _error(self, error: Exception, name: str) -> OSError:
        """Return an OSError with the right errno, the server's message and the file's address."""
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
    """Return the file system and the path of a URI.

    The library of the file system makes up to `num_attempts` of each request.
    """
    # The cache keeps a file system's connections, and credentials that took a request to get.
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        # pyarrow would look up the region at every possible place, which takes seconds if no server answers.
        if "region" not in options and "endpoint_override" in options:
            options["region"] = os.environ.get("AWS_REGION", "us-east-1")
        elif "region" not in options:
            options["region"] = fs.resolve_s3_region(parts.netloc)
        files = fs.S3FileSystem(
            **options,
            connect_timeout=_CONNECT_TIMEOUT_S,
            request_timeout=_IDLE_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=num_attempts),
            allow_delayed_open=True,  # so that a file that fits in one part takes one request
        )
        return files, f"{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
        mark = "&" if parts.query else "?"
        uri += f"{mark}retry_limit_seconds={_RETRY_BUDGET_S:g}"  # the default is 15 minutes
    files, path = fs.FileSystem.from_uri(uri)
    return files, path.rstrip("/")


def _write(files: fs.FileSystem, path: str, parts: Iterable[bytes | memoryview]) -> None:
    if files.type_name == "local":  # a bucket needs no folders, and pyarrow would create objects for them
        files.create_dir(path.rpartition("/")[0], recursive=True)
    stream = files.open_output_stream(path)
    try:
        in_flight_bytes = 0
        for part in parts:
            stream.write(part)
            in_flight_bytes += len(part)
            if in_flight_bytes >= _IN_FLIGHT_BYTES:
                stream.flush()  # waits for parts on their way, of which pyarrow would keep any number in memory
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
    """Keep a stream open for ever, so that its upload is never completed.

    The stream keeps the memory of one part.
    """
    # pyarrow cannot abort an upload (apache/arrow#40502): closing a stream, or dropping its last reference, completes
    # the upload. The bucket keeps the parts invisible, like those of a killed process, until its rule for incomplete
    # uploads deletes the parts. A list of streams in this module would not suffice: at its end the interpreter clears
    # modules after pyarrow has shut S3 down, and then waits for ever for the upload to complete.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


def _delete(files: fs.FileSystem, path: str) -> None:
    kind = files.get_file_info(path).type
    if kind == fs.FileType.File:
        files.delete_file(path)
    elif kind == fs.FileType.Directory:
        # Folders are deleted first, the deepest one first, because SeaweedFS keeps a folder that had folders in it.
        found = files.get_file_info(fs.FileSelector(path, recursive=True))
        for each in sorted(found, key=lambda each: each.path, reverse=True):
            if each.type == fs.FileType.Directory:
                files.delete_dir(each.path)
        files.delete_dir(path)


def _is_final(error: Exception) -> bool:
    """Return whether repeating a request is useless."""
    if not isinstance(error, OSError):
        return True
    # An error of this machine has a number. An error of a server has none, but a name in capitals or a status.
    return error.errno is not None or bool(_FINAL.search(str(error)))
