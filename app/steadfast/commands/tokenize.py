"""`tokenize FILE ... --tokenizer NAME --out FILE`: write the tokens of documents into one file."""

import fcntl
import hashlib
import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from steadfast.commands.options import run_on_cluster
from steadfast.errors import DataError, StorageError, UsageError
from steadfast.run.directory import runs_root
from steadfast.storage.local import sync_tree
from steadfast.units import duration, printable, size

_BATCH_CHARACTERS = 2**20  # documents of so many characters are encoded at a time
_PROGRESS_S = 5.0
_NUM_UINT16 = 2**16  # numbers of two bytes
# Names that tokenizers commonly give to the end of a text.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


@dataclass
class _Progress:
    """Progress of the command, which a record beside the output keeps.

    Attributes:
        files: paths and sizes of the inputs, and the options that change the tokens.
        file: number of the input that is read now.
        documents: number of its documents that are written.
        tokens: number of all tokens that are written.
    """

    files: list[Any]
    file: int = 0
    documents: int = 0
    tokens: int = 0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="*.jsonl, *.parquet, or a text that is one document")
    parser.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="a tokenizer.json, its folder, or a name on the hub"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write, which must not exist")
    parser.add_argument("--column", default="text", help="key or column with the text; by default text")
    parser.add_argument(
        "--end-token", metavar="TOKEN", help="token after each document; by default the tokenizer's own"
    )


def run(options: Namespace) -> int:
    """Write the file of tokens, and print the section `data` for the configuration."""
    if options.cluster:
        return run_on_cluster(options)
    if "://" in options.out:
        raise UsageError(f"--out {options.out}: must be a file of this machine; copy it to a bucket afterwards")
    out = runs_root() / options.out
    if out.exists():
        raise UsageError(f"--out {out}: already exists; choose another file, or delete this one to write it anew")
    tokenizer = _open_tokenizer(options.tokenizer)
    end = _end_token(tokenizer, options.end_token)
    # The vocabulary may have gaps, so its size is no bound.
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    dtype = "uint16" if largest < _NUM_UINT16 else "uint32"
    count = _write(options, tokenizer, end, dtype, out)
    section = f"{{kind: tokens, path: {options.out}, dtype: {dtype}, end_token: {end}}}"
    print(
        printable(
            f"{out}: {count:,} tokens. To train on them, with a model.vocab_size of at least {largest + 1}:\n"
            f"  data: {section}"
        )
    )
    return 0


def _open_tokenizer(name: str) -> Any:
    from steadfast.data.extras import import_extra

    tokenizers = import_extra("tokenizers", "huggingface", "--tokenizer")
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    try:
        if path.exists() or path.suffix == ".json":
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        else:
            tokenizer = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the package raises Exception itself
        raise UsageError(f"--tokenizer {name}: cannot be read: {error}") from error
    # A document is written whole, whatever length a model takes.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_token(tokenizer: Any, wanted: str | None) -> int:
    for token in [wanted] if wanted else _END_TOKENS:
        end: int | None = tokenizer.token_to_id(token)
        if end is not None:
            return end
    if wanted:
        raise UsageError(f"--end-token {wanted}: the tokenizer has no such token")
    raise UsageError(f"--end-token is missing: the tokenizer has none of {', '.join(_END_TOKENS)}")


def _write(options: Namespace, tokenizer: Any, end: int, dtype: str, out: Path) -> int:
    """Write all tokens, after an interruption only the rest. Return the number of all tokens."""
    import numpy as np

    try:
        sizes = [os.path.getsize(file) for file in options.files]
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    inputs = [list(each) for each in zip(options.files, sizes, strict=True)]
    partial, record = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    width = np.dtype(dtype).itemsize
    try:
        with partial.open("ab") as file:
            _lock(file, partial)
            progress = _resumed(record, [*inputs, digest, options.column, end], partial, width)
            file.truncate(progress.tokens * width)
            meter = _Meter(sizes)
            while progress.file < len(inputs):
                documents = _documents(options.files[progress.file], options.column)
                for batch, read in _batches(islice(documents, progress.documents, None)):
                    ids = [
                        [*encoding.ids, end]
                        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                    ]
                    file.write(np.concatenate(ids).astype(dtype).tobytes())
                    progress.documents += len(batch)
                    progress.tokens += sum(map(len, ids))
                    if meter.is_due():
                        _record(file, progress, record)
                        meter.tell(progress, read)
                progress.file, progress.documents = progress.file + 1, 0
                _record(file, progress, record)
            if not progress.tokens:
                partial.unlink()
                record.unlink()
                raise DataError(f"{', '.join(options.files)}: there is no text")
            partial.rename(out)
            record.unlink()
            sync_tree(out.parent, deep=False)
    except OSError as error:
        raise StorageError(f"{partial}: {error}; the same command goes on from here") from error
    return progress.tokens


def _lock(file: BinaryIO, partial: Path) -> None:
    """Raise UsageError if another command writes the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other command may just have given the file its final name.
        free = partial.exists()
    except OSError as error:
        free = not isinstance(error, BlockingIOError)  # some file systems have no locks
    if not free:
        raise UsageError(f"{partial}: another command is writing this file; wait for its end")


def _resumed(record: Path, files: list[Any], partial: Path, width: int) -> _Progress:
    """Return what an interrupted command has written.

    Raises UsageError if that command had other files or options.
    """
    if not record.exists():
        return _Progress(files)
    progress = _Progress(**json.loads(record.read_text()))
    if partial.stat().st_size < progress.tokens * width:
        record.unlink()  # its tokens have been deleted
        return _Progress(files)
    if progress.files != files:
        raise UsageError(f"{record} is of a command with other files or options; delete it to begin anew")
    return progress


def _record(file: BinaryIO, progress: _Progress, record: Path) -> None:
    # The tokens are on the disk before the record counts them.
    file.flush()
    os.fsync(file.fileno())
    new = record.with_suffix(".new")
    new.write_text(json.dumps(asdict(progress)))
    sync_tree(new)
    new.replace(record)
    sync_tree(record.parent, deep=False)


def _documents(path: str, column: str) -> Iterator[tuple[str, int]]:
    """Yield the documents of a file, each with the number of bytes that were read so far."""
    suffix = Path(path).suffix
    if suffix in (".jsonl", ".ndjson"):
        read = 0
        with open(path, "rb") as lines:
            for place, line in enumerate(lines):
                read += len(line)
                text = _text(path, place, column, line) if line.strip() else None
                if text is not None:
                    yield text, read
    elif suffix == ".parquet":
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(path)
        except Exception as error:
            raise DataError(f"{path} is no whole Parquet file: {error}") from error
        columns = {field.name: str(field.type) for field in file.schema_arrow}
        if not columns.get(column, "").endswith("string"):
            texts = [name for name, kind in columns.items() if kind.endswith("string")]
            raise DataError(f"{path} has no column {column} of text; there are: {', '.join(texts) or 'none'}")
        done = 0
        for batch in file.iter_batches(columns=[column]):
            for text in batch.column(0).to_pylist():
                done += 1
                if text is not None:
                    yield text, os.path.getsize(path) * done // file.metadata.num_rows
    else:
        try:
            yield Path(path).read_text("utf-8"), os.path.getsize(path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no text in UTF-8: {error}") from error


def _text(path: str, place: int, column: str, line: bytes) -> str | None:
    try:
        text = json.loads(line)[column]
    except ValueError as error:
        raise DataError(f"line {place + 1} of {path} is no JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"line {place + 1} of {path} has no {column}; name another key by --column") from error
    if not isinstance(text, str | None):
        raise DataError(f"line {place + 1} of {path}: {column} is a {type(text).__name__}, not a text")
    return text


def _batches(documents: Iterator[tuple[str, int]]) -> Iterator[tuple[Sequence[str], int]]:
    batch: list[str] = []
    characters = read = 0
    for text, read in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch, read
            batch, characters = [], 0
    if batch:
        yield batch, read


class _Meter:
    """Prints a line of progress every few seconds."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._told_s = self._began_s = time.monotonic()
        self._at_start: int | None = None

    def is_due(self) -> bool:
        return time.monotonic() - self._told_s > _PROGRESS_S

    def tell(self, progress: _Progress, read: int) -> None:
        """Print what is done; `read` is the number of bytes of the present file."""
        self._told_s = time.monotonic()
        done, total = sum(self._sizes[: progress.file]) + read, sum(self._sizes)
        if self._at_start is None:
            self._at_start, self._began_s = done, self._told_s
        rate = (done - self._at_start) / max(self._told_s - self._began_s, 1e-9)
        left = f", {duration((total - done) / rate)} left" if rate else ""
        print(f"{size(done)} of {size(total)}: {progress.tokens:,} tokens{left}", flush=True)
