"""The image's entry: puts the weight server's token, a mounted secret, into the run file, then becomes the command.

    entrypoint.py echo-train /etc/echo/run.yaml

Refuses to hand the token on in arguments or the environment, where every `ps` and `docker inspect` shows it: the command
gets a copy of the run file that its user alone can read, in place of the argument that names the run file. A command
that names no run file, or a container without the secret, is started as it is.
"""

import json
import os
import sys
from pathlib import Path

from echo.errors import ConfigError
from echo.run_file import load, save

RUN_FILE = os.environ.get("ECHO_RUN_FILE", "/etc/echo/run.yaml")
TOKEN_FILE = Path(os.environ.get("ECHO_WEIGHTS_TOKEN_FILE", "/run/secrets/weights_token"))


def with_token(run_file: Path, token: str) -> Path:
    """A private copy of the run file that has the token. Raises ConfigError."""
    run = load(run_file, [f"weights.token={json.dumps(token)}"])
    folder = Path.home() / ".echo"
    folder.mkdir(mode=0o700, exist_ok=True)
    private = folder / run_file.name
    save(run, private)
    return private


def main() -> None:
    command = sys.argv[1:]
    if RUN_FILE in command and TOKEN_FILE.exists():
        token = TOKEN_FILE.read_text().strip()
        if not token:
            sys.exit(f"{TOKEN_FILE}: the weight server's token is empty; make one with `openssl rand -hex 32`")
        try:
            private = with_token(Path(RUN_FILE), token)
        except ConfigError as error:
            sys.exit(str(error))
        command = [str(private) if argument == RUN_FILE else argument for argument in command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
