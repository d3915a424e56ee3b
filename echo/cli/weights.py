"""echo-weights: serve a store of policies, look into it, check it, tidy it, and pull from a server.

    echo-weights serve run.yaml
    echo-weights ls weights/
    echo-weights pull http://127.0.0.1:9103 --run my-run --out policy.safetensors

STORE is a run file or the folder itself. Refuses to serve beyond loopback without a token. The token comes from the
environment variable ECHO_WEIGHTS_TOKEN or the run file, never from an argument, which everybody on the host could read.
"""

import sys

from echo.stopping import catch_early

if __name__ == "__main__" and sys.argv[1:2] == ["serve"]:
    # What is imported below takes a good part of a second. The other commands are ended by the first signal.
    catch_early()

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from echo.cli import base
from echo.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from pydantic import SecretStr

    from echo.config import RunConfig
    from echo.weights.client import Latest, WeightClient
    from echo.weights.manifest import HostTensor
    from echo.weights.store import WeightStore

app = typer.Typer(
    help="Policies as content-addressed chunks: serve, list, verify, collect, pull.",
    add_completion=False,
)

Store = Annotated[Path, typer.Argument(metavar="STORE", help="A run file, or the store's folder.")]
Run = Annotated[str | None, typer.Option("--run", help="Only this run; a run file names its own.")]

# What `ls` shows of each run, where nobody asks for all.
_LISTED = 10


@app.command()
def serve(
    store: Store,
    host: Annotated[str | None, typer.Option(help="Default: the run file's weights.host, else 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 takes a free one. Default: weights.port, else 9103.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate. Default: weights.tls_cert.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key. Default: weights.tls_key.")] = None,
    max_egress: Annotated[
        float | None, typer.Option(min=0, help="Chunk bytes per second at most. Default: weights.max_egress_bytes_per_s.")
    ] = None,
    accel_redirect: Annotated[
        str | None, typer.Option(help="Internal nginx location over the store's chunks. Default: weights.accel_redirect.")
    ] = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True, help="Where to write the port, when listening.")] = None,
) -> None:
    """Serve the store over HTTP until SIGTERM or Ctrl-C; a second one stops at once."""
    from echo.process import StopSignal, configure_logging, end_with_asking_parent

    end_with_asking_parent()
    configure_logging()

    import structlog
    from prometheus_client import CollectorRegistry

    from echo.addresses import is_loopback
    from echo.config import WeightsConfig
    from echo.http_server import Tls, raise_descriptor_limit
    from echo.metrics import WeightsMetrics
    from echo.weights.server import WeightServer, create_app
    from echo.weights.urls import TOKEN_VARIABLE

    # A server may be there before the first version.
    run, opened = _open(store, must_exist=False)
    config = run.weights if run is not None else WeightsConfig()
    host = host if host is not None else config.host
    port = port if port is not None else config.port
    token = _token(run)
    if token is None and not is_loopback(host):
        raise ConfigError(f"serving on {host!r} without a token: set weights.token or {TOKEN_VARIABLE}, or use 127.0.0.1")
    tls_cert, tls_key = tls_cert or config.tls_cert, tls_key or config.tls_key
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("weights.tls_cert and weights.tls_key go together")
    app = create_app(
        opened,
        token=token,
        metrics=WeightsMetrics(CollectorRegistry()),
        max_egress_bytes_per_s=max_egress or config.max_egress_bytes_per_s,
        accel_redirect=accel_redirect or config.accel_redirect,
    )
    stop = StopSignal().install()
    # This process does nothing else: pullers shall have what the system allows.
    raise_descriptor_limit()
    tls = Tls(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    server = WeightServer(app, host=host, port=port, tls=tls)
    stop.on_stop(server.request_stop)
    log = structlog.get_logger("weights.server")
    log.info("serving weights", url=server.url, store=str(opened.root), token="required" if token is not None else "none")
    if ready_fd is not None:
        os.write(ready_fd, f"{server.port}\n".encode())
        os.close(ready_fd)
    server.start()
    server.join()
    server.check()
    log.info("stopped")


@app.command("ls")
def list_versions(
    store: Store,
    run: Run = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Every version, not the newest {_LISTED} of each run. So is --json.")
    ] = False,
    as_json: base.Json = False,
) -> None:
    """List the published versions: of each run the newest ten."""
    from echo.weights import manifest as manifests

    _, opened = _open(store)
    rows, older = [], 0
    for run_id in _runs(opened, store, run):
        versions = opened.versions(run_id)
        shown = versions if everything or as_json else versions[-_LISTED:]
        older += len(versions) - len(shown)
        for version in shown:
            raw, digest = opened.read_manifest(run_id, version)
            found = manifests.decode(raw, where=str(opened.manifest_path(run_id, version)), run_id=run_id)
            rows.append((found, digest, opened.is_being_read(run_id, version)))
    stored = opened.stored_bytes()
    if as_json:
        listed = [
            {
                "run": found.run_id,
                "version": found.version,
                "step": found.step,
                "created": found.created,
                "tensors": len(found.tensors),
                "bytes": found.nbytes,
                "digest": digest,
                "being_read": being_read,
            }
            for found, digest, being_read in rows
        ]
        typer.echo(json.dumps({"store": str(opened.root), "stored_bytes": stored, "versions": listed}))
        return

    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(caption=f"{opened.root}: {decimal(stored)} on disk, shared between versions", caption_justify="left")
    for title in ("run", "version", "step", "created (UTC)", "tensors", "size", "manifest", "read now"):
        table.add_column(title, justify="right" if title in ("version", "step", "tensors", "size") else "left")
    for found, digest, being_read in rows:
        table.add_row(
            found.run_id,
            str(found.version),
            str(found.step),
            f"{datetime.fromtimestamp(found.created, UTC):%m-%d %H:%M:%S}",
            str(len(found.tensors)),
            decimal(found.nbytes),
            digest[:8],
            "yes" if being_read else "",
        )
    Console().print(table)
    if older:
        typer.echo(f"{older} older version{'s' if older > 1 else ''} more: --all lists them")


@app.command()
def verify(store: Store, as_json: base.Json = False) -> int:
    """Read and check every manifest and chunk. Exit status 0: all well, 2: something is damaged, 1: could not look."""
    _, opened = _open(store)
    problems = opened.verify()
    if as_json:
        listed = [{"path": str(problem.path), "text": problem.text} for problem in problems]
        typer.echo(json.dumps({"store": str(opened.root), "problems": listed}))
    elif problems:
        from rich.console import Console
        from rich.table import Table

        table = Table("file", "problem", title=str(opened.root), title_justify="left")
        for problem in problems:
            table.add_row(str(problem.path.relative_to(opened.root)), problem.text)
        Console().print(table)
        typer.echo(
            "A chunk is mended when the same content is published again; remove the manifests of versions that can't be."
        )
    else:
        typer.echo(f"{opened.root}: all well")
    return 2 if problems else 0


@app.command()
def gc(
    store: Store,
    run: Run = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="First retire all but this many newest versions, except those being read.")
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Wait so many seconds for publishers to finish.")] = 60.0,
) -> int:
    """Remove chunks that no version names, and what crashed publishers left."""
    _, opened = _open(store)
    if keep is not None:
        for run_id in _runs(opened, store, run):
            for version in opened.retire(run_id, keep):
                typer.echo(f"retired version {version} of run {run_id}")
    collected = opened.gc(wait_s=wait_s)
    if collected.postponed:
        typer.echo(f"{opened.root}: a publisher is at work, nothing collected; try again", err=True)
        return 1
    typer.echo(f"{opened.root}: {collected.chunks} chunks, {collected.nbytes:,} bytes removed")
    return 0


@app.command()
def pull(
    source: Annotated[str, typer.Argument(metavar="URL|RUN_FILE", help="The server, like http://127.0.0.1:9103.")],
    out: Annotated[Path, typer.Option("--out", help="Where the policy goes, as a .safetensors file.")],
    run: Annotated[str | None, typer.Option("--run", help="The run; needed with a URL.")] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Seconds. Default: weights.pull_deadline_s, else 600.")
    ] = None,
) -> None:
    """Pull the newest version from a server and write it as safetensors."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from echo.config import WeightsConfig
    from echo.run_file import load
    from echo.weights.client import WeightClient

    config = None if "://" in source else load(Path(source))
    weights = config.weights if config is not None else WeightsConfig()
    base_url = config.weights_url if config is not None else source
    run_id = run or (config.run_id if config is not None else None)
    if run_id is None:
        raise ConfigError("a URL does not name the run: add --run RUN_ID")
    client = WeightClient(
        token=_token(config),
        tls_ca=weights.tls_ca,
        connect_timeout_s=weights.connect_timeout_s,
        read_timeout_s=weights.read_timeout_s,
    )
    _check_writable(out)
    latest = newest(client, base_url, run_id)
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(f"{run_id} version {latest.version}", total=None)
        pulled = client.pull(
            [latest.url],
            run_id=run_id,
            version=latest.version,
            manifest_digest=latest.digest,
            deadline_s=deadline_s if deadline_s is not None else weights.pull_deadline_s,
            progress=lambda present, total: bar.update(task, completed=present, total=total),
        )
    notes = {"format": "pt", "echo_run": run_id, "echo_version": str(latest.version), "echo_manifest": latest.digest}
    _write_safetensors(out, pulled.tensors, notes)
    typer.echo(
        f"{out}: version {latest.version} of run {run_id}, {pulled.received_bytes:,} bytes in {pulled.seconds:.1f} s"
        f" ({pulled.retries} retries)"
    )


def newest(client: "WeightClient", base_url: str, run_id: str) -> "Latest":
    """The newest version that the server has. Raises WeightsError, which also asks whether there is a server."""
    try:
        return client.latest(base_url, run_id)
    except WeightsError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConnectionRefusedError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise WeightsError(f"{error}: is echo-train, or `echo-weights serve`, running?", retriable=True) from None


def _check_writable(path: Path) -> None:
    """Before a pull that may take an hour. Raises WeightsError."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise WeightsError(f"--out {path}: {error.strerror}: name a file in a folder that can be written") from None


def _write_safetensors(path: Path, tensors: "Mapping[str, HostTensor]", notes: Mapping[str, str]) -> None:
    """Straight from the pulled memory: the library's writers want torch or numpy tensors, and numpy has no bfloat16."""
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    # Of this process: two pulls to one file must not write into each other's.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for tensor in tensors.values():
                file.write(tensor.data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WeightsError(f"{path}: {error.strerror}: the pulled policy is not written") from None


def _open(path: Path, *, must_exist: bool = True) -> "tuple[RunConfig | None, WeightStore]":
    from echo.run_file import load
    from echo.weights.store import WeightStore

    # Nobody calls a folder so: the run file is missing.
    run = load(path) if path.is_file() or path.suffix in (".yaml", ".yml") else None
    folder = run.weights.dir if run is not None else path
    if must_exist and not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; echo-train makes the store when it publishes its first version")
    if must_exist and not (folder / "runs").is_dir():
        raise WeightsError(f"{folder}: no store of weights, it has no folder runs: name the run file, or its weights.dir")
    return run, WeightStore(folder)


def _runs(store: "WeightStore", path: Path, run: str | None) -> list[str]:
    from echo.run_file import load

    if run is None and path.is_file():
        run = load(path).run_id
    return store.runs() if run is None else [run]


def _token(run: "RunConfig | None") -> "SecretStr | None":
    from pydantic import SecretStr

    from echo.weights.urls import TOKEN_VARIABLE, check_token

    given = os.environ.get(TOKEN_VARIABLE)
    return check_token(SecretStr(given) if given else run.weights.token if run is not None else None)


def main() -> NoReturn:
    base.finish(app)


if __name__ == "__main__":
    main()
