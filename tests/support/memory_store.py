"""Store in memory: a twin of the stores on disks and in buckets, without their waits."""

from collections.abc import Iterable

from steadfast.storage.local import span


class MemoryStore:
    """Store in memory that records the calls of its verbs."""

    uri = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # contents by name
        self.operations: list[tuple[str, str]] = []  # (verb, name) of every call, oldest first

    def list(self, folder: str) -> list[str]:
        self.operations.append(("list", folder))
        prefix = f"{folder}/" if folder else ""
        found = set()
        for name in self.files:
            if name.startswith(prefix):
                found.add(name.removeprefix(prefix).partition("/")[0])
        return sorted(found)

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        self.operations.append(("read", name))
        if name not in self.files:
            raise FileNotFoundError(name)
        data = self.files[name]
        first, length = span(len(data), start, num_bytes)
        return data[first : first + length]

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self.operations.append(("write", name))
        self.files[name] = b"".join(parts)

    def commit(self, name: str, data: bytes, private: bool = False) -> None:
        self.operations.append(("commit", name))
        self.files[name] = data

    def delete(self, name: str) -> None:
        self.operations.append(("delete", name))
        for each in list(self.files):
            if each == name or each.startswith(f"{name}/"):
                del self.files[each]

    def num_bytes(self, folder: str) -> int:
        self.operations.append(("num_bytes", folder))
        prefix = f"{folder}/" if folder else ""
        return sum(len(data) for name, data in self.files.items() if name.startswith(prefix))
