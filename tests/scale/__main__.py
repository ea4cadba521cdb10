"""Print what events cost a coordinator of `n` workers, one JSON object a line."""

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.scale.crowd import SWITCH, Crowd
from tests.scale.micro import MICRO


async def play(folder: Path, n: int, names: list[str]) -> None:
    async with Crowd.formed(folder, n) as crowd:
        for name in names:
            figures = await (crowd.lose(SWITCH) if name == "switch" else getattr(crowd, name)())
            print(json.dumps({"n": n, "event": name, **asdict(figures)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument("--n", type=int, default=1000, help="number of workers")
    parser.add_argument("--events", default="lose,grow,drain,restart,switch", help="events, or `micro`")
    arguments = parser.parse_args()
    if arguments.events == "micro":
        for name, seconds in MICRO.items():
            print(json.dumps({"n": arguments.n, "function": name, "cpu_s": round(seconds(arguments.n), 4)}), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), arguments.n, arguments.events.split(",")))


if __name__ == "__main__":
    main()
