"""The installed command `echo-train`: catches a stop first, and only then imports what takes time.

`python -m consumers.cli` does the same.
"""

from echo.stopping import catch_early


def train() -> None:
    catch_early()
    from consumers.cli import main

    main()
