"""Stacks are taken of a process in which other threads run, come and go."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A thread of Python, and two of a library's, which attach when they call back and are gone right after.
BUSY = """
import ctypes, threading, time
from steadfast.world.stacks import stacks

def some(n):
    yield from range(n)

def deep(n):
    return n and sum(some(5)) + deep(n - 1)

pthread = ctypes.CDLL(None)
callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: deep(3) and None)

def python():
    while True:
        deep(30)

def library():
    thread = ctypes.c_ulong()
    while True:
        pthread.pthread_create(ctypes.byref(thread), None, callback, None)
        pthread.pthread_join(thread, None)

for run in (python, library, library):
    threading.Thread(target=run, daemon=True).start()
until = time.monotonic() + 4
while time.monotonic() < until:
    stacks(0)
print("lived", stacks(0).count("most recent call first"))
"""


@pytest.mark.timeout(60)
def test_a_process_survives_it() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 3
