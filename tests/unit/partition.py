"""`unshare --map-root-user --net python -m tests.unit.partition`: a network that ends, in a namespace of its own.

Prints what the server of heartbeats knows of a stopped worker, and then of one that no packet reaches any more.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys

from steadfast.orchestration.heartbeat import Access, HeartbeatClient, HeartbeatServer, Silence
from steadfast.world.timeouts import Timeouts

TIMEOUTS = Timeouts(silence_s=1.5)


def work(port: int, name: str, secret: str) -> None:
    """Send heartbeats for ever."""
    HeartbeatClient(Access(("127.0.0.1", port), name, secret), TIMEOUTS, dict, lambda _: None)
    signal.pause()


async def watch() -> None:
    loop = asyncio.get_running_loop()
    known: list[Silence] = []
    lost = loop.create_future()

    def patience(_: str, silence: Silence) -> float:
        known.append(silence)
        return TIMEOUTS.silence_s if not silence.answers else 60.0

    server = HeartbeatServer(TIMEOUTS, lambda *_: None, lambda _, cause: lost.set_result(cause), patience)
    port = await server.listen("127.0.0.1")
    command = [sys.executable, "-m", "tests.unit.partition", str(port), "a", server.admit("a")]
    worker = await asyncio.create_subprocess_exec(*command)
    try:
        while "a" not in server._peers:
            await asyncio.sleep(0.05)
        server.expect(["a"])
        worker.send_signal(signal.SIGSTOP)
        while not known:
            await asyncio.sleep(0.05)
        stopped = known[-1].answers
        worker.send_signal(signal.SIGCONT)
        await asyncio.sleep(2 * TIMEOUTS.silence_s)
        assert not lost.done()
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        cause = await asyncio.wait_for(lost, 20 * TIMEOUTS.silence_s)
        print(json.dumps({"stopped": stopped, "cut off": known[-1].answers, "cause": cause}))
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        await worker.wait()


if __name__ == "__main__":
    if sys.argv[1:]:
        work(int(sys.argv[1]), *sys.argv[2:])
    else:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        asyncio.run(watch())
