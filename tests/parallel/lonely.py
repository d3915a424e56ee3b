"""One of two ranks that do nothing but keep in touch, until one of them is ended or halted from outside.

Run by `tests.chaos.processes`: arguments are the rank, the port where the two meet, and the seconds of a collective's timeout.
"""

import sys
import time

from consumers.parallel import Command, Team
from echo.errors import RankError
from tests.parallel.rank_process import be_rank


def main() -> None:
    rank, port, timeout_s = sys.argv[1:]
    be_rank(rank, port)
    team = Team(precision="float32", timeout_s=float(timeout_s))
    print("together", flush=True)
    try:
        if team.leads:
            while True:
                time.sleep(0.05)
                team.check()
        command, _ = team.listen()
        assert command is Command.END
    except RankError as error:
        print(f"RankError: {error}", flush=True)
        sys.exit(3)
