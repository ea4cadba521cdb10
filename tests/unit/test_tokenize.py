"""`tokenize`: every document once, also after an interruption, and what is refused."""

import hashlib
import json
import os
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from steadfast.cli import main
from steadfast.commands import tokenize

PAGES = [topics[name] for name in sorted(topics)]
END_TEXT = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator(PAGES, trainers.BpeTrainer(vocab_size=400, special_tokens=[END_TEXT], show_progress=False))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("steadfast.commands.tokenize.runs_root", lambda: tmp_path)
    return tmp_path


def write(path: Path, pages: list[str]) -> Path:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps({'text': page})}\n" for page in pages) + "\n")
        case ".parquet":
            parquet.write_table(pa.table({"text": [*pages, None]}), path)
        case _:
            path.write_text("".join(pages))
    return path


def run(*words: Any) -> int:
    return main(0.0, ["tokenize", *map(str, words)])


def expected(tokenizer: Path, documents: list[str]) -> list[int]:
    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(END_TEXT)
    assert end is not None
    found: list[int] = []
    for document in documents:
        found += [*encoder.encode(document, add_special_tokens=False).ids, end]
    return found


def test_all_formats_are_written_in_order(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        write(tmp_path / "a.jsonl", PAGES[:5]),
        write(tmp_path / "b.parquet", PAGES[5:9]),
        write(tmp_path / "c.txt", PAGES[9:10]),
    ]
    assert run(*files, "--tokenizer", tokenizer, "--out", "tokens.bin") == 0
    assert np.fromfile(tmp_path / "tokens.bin", np.uint16).tolist() == expected(tokenizer, PAGES[:10])
    assert "data: {kind: tokens, path: tokens.bin, dtype: uint16, end_token: 0}" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.parquet", "c.txt", "tokens.bin"}
    assert run(tmp_path / "none.txt", "--tokenizer", tokenizer, "--out", "other.bin") == 2
    assert "none.txt cannot be read" in capsys.readouterr().err


def test_an_interrupted_command_goes_on(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / "a.jsonl", PAGES[:20]), write(tmp_path / "b.jsonl", PAGES[20:30])]
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 1)
    monkeypatch.setattr(tokenize, "_PROGRESS_S", -1.0)
    written = tokenize._record
    left = 25

    def interrupted(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        written(*arguments)

    monkeypatch.setattr(tokenize, "_record", interrupted)
    assert run(*files, "--tokenizer", tokenizer, "--out", "tokens.bin") == 3
    assert not (tmp_path / "tokens.bin").exists()
    # A killed command may have written tokens that it has not recorded.
    with (tmp_path / "tokens.bin.partial").open("ab") as file:
        file.write(bytes(99))
    monkeypatch.setattr(tokenize, "_record", written)
    assert run(files[0], "--tokenizer", tokenizer, "--out", "tokens.bin") == 2, "other files"
    assert run(*files, "--tokenizer", tokenizer, "--out", "tokens.bin") == 0
    assert np.fromfile(tmp_path / "tokens.bin", np.uint16).tolist() == expected(tokenizer, PAGES[:30])


def test_tokenize_goes_on_after_a_loss_of_power(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is on the disk is left of the files at any record."""
    words = [write(tmp_path / "a.jsonl", PAGES[:6]), "--tokenizer", tokenizer, "--out", "tokens.bin"]
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 1)
    monkeypatch.setattr(tokenize, "_PROGRESS_S", -1.0)
    on_disk: dict[int, bytes] = {}  # by inode
    states: list[dict[str, bytes]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            on_disk[path.stat().st_ino] = path.read_bytes()
        elif path == tmp_path:
            states.append({each.name: on_disk.get(each.stat().st_ino, b"") for each in path.glob("tokens.bin*")})

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        assert run(*words) == 0
    assert [*states[-1]] == ["tokens.bin"]
    assert len(states) > 6
    for state in states[:-1]:
        (tmp_path / "tokens.bin").unlink(missing_ok=True)
        for name, content in state.items():
            (tmp_path / name).write_bytes(content)
        assert run(*words) == 0
        assert (tmp_path / "tokens.bin").read_bytes() == states[-1]["tokens.bin"]


def test_a_second_command_is_refused_while_the_first_one_writes(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [write(tmp_path / "a.jsonl", PAGES[:3]), "--tokenizer", tokenizer, "--out", "tokens.bin"]
    written = tokenize._record
    codes = []

    def record(*arguments: Any) -> None:
        monkeypatch.setattr(tokenize, "_record", written)
        codes.append(run(*words))
        written(*arguments)

    monkeypatch.setattr(tokenize, "_record", record)
    assert run(*words) == 0
    assert codes == [2]
    assert "another command is writing this file; wait for its end" in capsys.readouterr().err
    assert np.fromfile(tmp_path / "tokens.bin", np.uint16).tolist() == expected(tokenizer, PAGES[:3])


def test_tokens_that_were_deleted_are_written_again(tmp_path: Path, tokenizer: Path) -> None:
    file = write(tmp_path / "a.txt", PAGES[:1])
    found = Tokenizer.from_file(str(tokenizer))
    found.enable_truncation(5)
    found.enable_padding(length=3000)
    found.save(str(tokenizer.with_name("other.json")))
    words = [file, "--tokenizer", tokenizer.with_name("other.json"), "--out", "tokens.bin"]
    digest = hashlib.sha256(Tokenizer.from_file(str(tokenizer)).to_str().encode()).hexdigest()
    inputs = [[str(file), file.stat().st_size], digest, "text", 0]
    (tmp_path / "tokens.bin.partial.json").write_text(json.dumps({"files": inputs, "file": 1, "tokens": 7}))
    assert run(*words) == 0
    # The length that the tokenizer was saved with does not apply either.
    assert np.fromfile(tmp_path / "tokens.bin", np.uint16).tolist() == expected(tokenizer, PAGES[:1])


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    large = Tokenizer(models.WordLevel({"far": 70_000, "?": 0, END_TEXT: 1}, unk_token="?"))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    large.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("far away")
    assert run(tmp_path / "a.txt", "--tokenizer", tmp_path, "--out", "tokens.bin") == 0
    assert np.fromfile(tmp_path / "tokens.bin", np.uint32).tolist() == [70_000, 0, 1]


@pytest.mark.parametrize(
    ("name", "content", "more", "sentence"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text":\n', [], "line 2 of .* is no JSON"),
        ("a.jsonl", b'{"body": "x"}\n', [], "line 1 of .* has no text; name another key by --column"),
        ("a.jsonl", b'{"text": 5}\n', [], "text is a int, not a text"),
        ("a.jsonl", b'{"text": null}\n', [], "there is no text"),
        ("a.parquet", b"PAR1", [], "no whole Parquet file"),
        ("a.txt", b"\xff\xfe\xff", [], "no text in UTF-8"),
        ("a.jsonl", b"\n", [], "there is no text"),
        ("a.txt", b"x", ["--end-token", "<none>"], "the tokenizer has no such token"),
        ("a.txt", b"x", ["--tokenizer", "no.json"], "--tokenizer no.json: cannot be read"),
        ("a.txt", b"x", ["--out", "a.txt"], "already exists"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    more: list[str],
    sentence: str,
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path / name, "--tokenizer", tokenizer, "--out", "tokens.bin", *more) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(sentence, said)
    assert not (tmp_path / "tokens.bin").exists()
    assert (tmp_path / name).read_bytes() == content, "nothing is overwritten"
    if sentence == "there is no text":
        assert not list(tmp_path.glob("tokens.bin*"))
