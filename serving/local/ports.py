"""TCP ports: whether one is free, who holds it, and which one to take instead."""

import errno
import ipaddress
import socket

import psutil


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on a port now.

    Raises:
        ValueError: The host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run that linger in TIME_WAIT are
        # no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise ValueError(f"cannot listen on {host}: {error.strerror}") from error
    return True


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_free(host: str, wanted: int, taken: frozenset[int] = frozenset()) -> int:
    """Return `wanted`, or the next free port above it that is not in `taken`.

    Raises:
        ValueError: None of the hundred ports above is free.
    """
    last = min(wanted + 100, 65535)
    for port in range(wanted, last + 1):
        if port not in taken and is_free(host, port):
            return port
    raise ValueError(f"no free port from {wanted} to {last}")


def owner_of(port: int) -> str | None:
    """Name the process that listens on a port, e.g. `python (pid 4711)`.

    Returns:
        None if there is none, or if it belongs to someone else and we may not know.
    """
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid:
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.Error:
                return None
            return f"{name} (pid {connection.pid})"
    return None
