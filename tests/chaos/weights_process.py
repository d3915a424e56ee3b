"""`echo-weights serve` that may kill itself in mid-pull.

python -m tests.chaos.weights_process [--die-at 5] run.yaml

`--die-at N`: dies when the N-th chunk is asked for, so the puller has some of its version's chunks and not all.
"""

import sys

import echo.cli.weights
from echo.weights.store import WeightStore
from tests.chaos.dying import die_around

_DIE_AT = "--die-at"


def main() -> None:
    if _DIE_AT in sys.argv:
        place = sys.argv.index(_DIE_AT)
        passing = int(sys.argv[place + 1])
        del sys.argv[place : place + 2]
        die_around(WeightStore, "chunk_path", f"in mid-pull, at chunk {passing}", before=True, passing=passing)
    sys.argv.insert(1, "serve")
    echo.cli.weights.main()


if __name__ == "__main__":
    main()
