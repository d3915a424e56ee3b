"""`model.path`: a folder or a hub id, and what both commands say where it is neither.

Refuses to load anything.
"""

import os
from pathlib import Path

from echo.errors import ConfigError

_TEXT_CHARS = 500


def names_folder(path: str) -> bool:
    """Whether it can only be a folder: a hub id has at most one slash, between two names."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def check_model_path(path: str) -> None:
    """Call before transformers is asked, which would look for a missing folder on the hub. Raises ConfigError."""
    if names_folder(path) and not os.path.isdir(path):
        raise ConfigError(f"model.path: {Path(path).expanduser().absolute()} is no folder")


def unloadable(path: str, what: str, error: Exception) -> str:
    """Why a model, or a part of it, can't be had, in one line. what: the problem where it was found."""
    # Some list every architecture that there is.
    text = " ".join(str(error).split())[:_TEXT_CHARS]
    # transformers raises OSError where it finds no files, others where it can't use what it found.
    if isinstance(error, OSError) and not os.path.isdir(path):
        return f"model.path: no folder {path} beside the run file or here, and the hub did not give it: {text}"
    return f"model.path: {path} {what}: {text}"
