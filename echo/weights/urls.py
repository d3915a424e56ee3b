"""Where a weight server keeps things, and what a bearer token may look like: shared by server, client and announcer.

Refuses to open a connection. URLs that carry credentials, queries or fragments are refused, without being repeated.
"""

import re
from urllib.parse import urlsplit

from pydantic import SecretStr

from echo.errors import ConfigError, ManifestError

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"
VERSION_MAX = 2**63 - 1
# Sent with every chunk request: the version that is being pulled, so that the store keeps it until the pull is over.
READING_HEADER = "Echo-Reading"
READING_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63}/[0-9]{1,19})?$"
# The environment variable that hands the token to a process; never an argument, which `ps` would show.
TOKEN_VARIABLE = "ECHO_WEIGHTS_TOKEN"


def is_run_id(text: str) -> bool:
    """Also what keeps a run id from being a path."""
    return re.fullmatch(RUN_ID_PATTERN[1:-1], text) is not None


def manifest_url(base: str, run_id: str, version: int) -> str:
    """`base` is scheme://host[:port][/prefix], as in `weights.url` of the run file."""
    return f"{base.rstrip('/')}/v1/runs/{run_id}/manifests/{version}"


def latest_url(base: str, run_id: str) -> str:
    return f"{base.rstrip('/')}/v1/runs/{run_id}/latest"


def peers_url(base: str, run_id: str, version: int) -> str:
    """Where the origin tells who holds what, and is told."""
    return f"{base.rstrip('/')}/v1/runs/{run_id}/peers/{version}"


def chunk_url(base: str, digest: str) -> str:
    return f"{base.rstrip('/')}/v1/chunks/{digest}"


def base_of(url: str, run_id: str, version: int) -> str:
    """The server behind a manifest URL. Raises ManifestError where the URL is not of this run and version."""
    check_url(url)
    base = url.removesuffix(manifest_url("", run_id, version))
    if base == url:
        raise ManifestError(f"{url}: not the manifest URL of version {version} of run {run_id!r}")
    return base


def check_url(url: str) -> None:
    """Raises ManifestError unless `url` is plain http(s)://host[:port]/path."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ManifestError(f"not a URL: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ManifestError(f"a URL of host {parts.hostname!r} carries credentials: pass a token instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ManifestError(f"{url!r}: not a plain http:// or https:// URL of a weight server")
    if not url.isascii() or any(letter <= " " or letter == "\x7f" for letter in url):
        raise ManifestError(f"{url!r}: a URL is printable ASCII; percent-encode the rest")


def check_token(token: SecretStr | None) -> SecretStr | None:
    """Raises ConfigError, without the token, where it can't travel in an Authorization header."""
    if token is not None and re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", token.get_secret_value()) is None:
        raise ConfigError("weights.token: a bearer token is made of letters, digits and -._~+/ (and '=' at its end)")
    return token
