"""The coordinator with hundreds or thousands of simulated workers, and what one event costs it.

The real coordinator runs in a process of its own (`server`). The workers are simulated in another process (`crowd`):
they speak the real protocol of heartbeats over sockets and train nothing. `micro` times pure functions.
`python -m tests.scale --n 1000` prints the figures of larger worlds.
"""
