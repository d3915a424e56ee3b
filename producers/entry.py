"""The installed command `echo-produce`: catches a stop first, and only then imports what takes time.

`python -m producers.cli` does the same.
"""

from echo.stopping import catch_early


def produce() -> None:
    catch_early()
    from producers.cli import main

    main()
