"""One of two ranks that do nothing but keep in touch, until one of them is ended or halted from outside.

Run by `tests.chaos.processes`: arguments are the rank, the port where the two meet, the seconds of a collective's timeout, and
"mistake" if the thread that keeps in touch is to die.
"""

import sys
import time
from typing import Any

from consumers import parallel
from consumers.parallel import Command, Team
from echo.errors import EchoError
from tests.parallel.rank_process import be_rank


def main() -> None:
    rank, port, timeout_s, *fault = sys.argv[1:]
    be_rank(rank, port)
    team = Team(precision="float32", timeout_s=float(timeout_s))
    print("together", flush=True)
    if fault == ["mistake"] and team.leads:
        parallel.dist.all_reduce = _mistake
    try:
        if team.leads:
            while True:
                time.sleep(0.05)
                team.check()
        command, _ = team.listen()
        assert command is Command.END
    except EchoError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)


def _mistake(*_: Any, **__: Any) -> None:
    raise TypeError("injected")
