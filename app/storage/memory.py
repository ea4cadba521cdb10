"""Files in memory: the twin for tests, which remembers what was asked of it."""

from __future__ import annotations

from collections.abc import Iterable


class MemoryStore:
    """
    files: contents by name. operations: (verb, name) of every call, oldest first.
    """

    uri = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.operations: list[tuple[str, str]] = []

    def list(self, folder: str) -> list[str]:
        self.operations.append(("list", folder))
        below = f"{folder}/" if folder else ""
        names = (name.removeprefix(below) for name in self.files if name.startswith(below))
        return sorted({name.partition("/")[0] for name in names})

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        self.operations.append(("read", name))
        if name not in self.files:
            raise FileNotFoundError(name)
        data = self.files[name]
        first = max(0, start + len(data)) if start < 0 else start
        return data[first : None if num_bytes is None else first + num_bytes]

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self.operations.append(("write", name))
        self.files[name] = b"".join(parts)

    def commit(self, name: str, data: bytes) -> None:
        self.operations.append(("commit", name))
        self.files[name] = data

    def delete(self, name: str) -> None:
        self.operations.append(("delete", name))
        for each in [each for each in self.files if each == name or each.startswith(f"{name}/")]:
            del self.files[each]
