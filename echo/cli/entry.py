"""The installed commands that run until they are stopped: each catches a stop first, and only then imports what takes time.

`python -m echo.cli.broker` and the like do the same.
"""

import sys

from echo.stopping import catch_early


def broker() -> None:
    catch_early()
    from echo.cli.broker import main

    main()


def demo() -> None:
    catch_early()
    from echo.cli.demo import main

    main()


def weights() -> None:
    if sys.argv[1:2] == ["serve"]:
        catch_early()
    from echo.cli.weights import main

    main()
