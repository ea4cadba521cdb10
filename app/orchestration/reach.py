"""Check whether a cluster answers, without Ray."""

import socket

_CONNECT_S = 1.0


def answers(address: str) -> bool:
    """Return whether a server listens at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True
