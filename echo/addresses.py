"""Hosts and ports: how they stand in a URL, and which hosts others can reach.

Never opens a connection or asks a name server.
"""

import ipaddress


def authority(host: str, port: int | str) -> str:
    """`host:port` as it stands in a URL: the address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int, *, is_tls: bool = False) -> str:
    """http(s)://host:port, without a path."""
    return f"{'https' if is_tls else 'http'}://{authority(host, port)}"


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of this machine: something to listen on, and nothing that others can reach."""
    address = _address(host)
    return host == "" or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. A name is taken for another machine's, but for `localhost`."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def local_host(host: str) -> str:
    """Where this machine reaches a server that listens on `host`."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def check_host(host: str) -> str:
    """A host of the run file, brackets of IPv6 taken off. Raises ValueError where it is no host, or has a port."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if any(letter.isspace() for letter in bare) or "/" in bare or (":" in bare and _address(bare) is None):
        raise ValueError(f"{host!r} is no host: give a name or an address alone, the port has a key of its own")
    return bare


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
