"""Random kills on a small real run, and then every id compared.

    python -m tests.chaos --kills 50 --seed 1 --json out.json

On Apache Kafka where a home is there (KAFKA_HOME or ../shared/kafka; its single node is among the victims), else on Tansu.
Prints and writes {"kills": ..., "lost": ..., "trained_twice": ..., "hung": ...}; exit status 0 only where the last three are 0
and nothing else is wrong.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer


def main(
    kills: Annotated[int, typer.Option(min=1, help="How many processes are killed.")] = 50,
    seed: Annotated[int, typer.Option(help="Draws victims and moments.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="A new folder for the run's logs and data; default: a temporary one.")
    ] = None,
) -> None:
    """Kill processes of a run at random moments, and count what was lost, trained twice, or hung."""
    from tests.chaos.audit import audit
    from tests.chaos.storm import storm
    from tests.chaos.swarm import ChaosError, HungError, Swarm, choose_broker, open_broker

    def say(text: str) -> None:
        typer.echo(text, err=True)

    result: dict[str, Any] = {"kills": kills, "lost": None, "trained_twice": None, "hung": 0}
    well = False
    plan = choose_broker()
    say(plan.describe())
    with tempfile.TemporaryDirectory(prefix="echo-chaos-") as temporary:
        folder = keep or Path(temporary)
        with open_broker(plan, folder) as broker, Swarm(folder / "run", broker) as swarm:
            try:
                killed = storm(swarm, kills=kills, seed=seed)
            except ChaosError as error:
                say(str(error))
                result["hung"] = int(isinstance(error, HungError))
            else:
                verdict = audit(swarm)
                say(f"killed: {killed}; {verdict.acknowledged} records acknowledged, {verdict.steps} steps; {verdict.counts}")
                for line in verdict.wrong:
                    say(f"wrong: {line}")
                result |= {"lost": verdict.lost, "trained_twice": verdict.trained_twice}
                well = not (verdict.lost or verdict.trained_twice or verdict.wrong)
    text = json.dumps(result)
    typer.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    typer.run(main)
