"""Random kills and other faults on a small real run, and then every id compared.

    python -m tests.chaos --kills 200 --seed 7 --json out.json

On Apache Kafka if a home is there (KAFKA_HOME or ../shared/kafka; its single node is among the victims), else on Tansu.
Prints and writes {"kills": ..., "faults": {...}, "lost": ..., "trained_twice": ..., "hung": ..., "peak_mib": {...}}; status 0
only if nothing was lost, trained twice or hung, memory stayed within its bound, and nothing else is wrong.
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
    faults: Annotated[bool, typer.Option(help="Other faults between the kills.")] = True,
) -> None:
    """Kill processes of a run at random moments, with other faults between, and count what was lost, trained twice, or hung."""
    from tests.chaos.audit import audit
    from tests.chaos.small_disk import mounted
    from tests.chaos.storm import storm
    from tests.chaos.swarm import ChaosError, HungError, Swarm, choose_broker, open_broker

    def say(text: str) -> None:
        typer.echo(text, err=True)

    result: dict[str, Any] = {"kills": kills, "faults": {}, "lost": None, "trained_twice": None, "hung": 0, "peak_mib": {}}
    well = False
    plan = choose_broker()
    say(plan.describe())
    with tempfile.TemporaryDirectory(prefix="echo-chaos-") as temporary:
        folder = keep or Path(temporary)
        with (
            open_broker(plan, folder) as broker,
            mounted(folder / "disk", say) as disk,
            Swarm(folder / "run", broker, small_disk=disk) as swarm,
        ):
            try:
                told = storm(swarm, kills=kills, seed=seed, faults=faults)
            except ChaosError as error:
                say(str(error))
                result["hung"] = int(isinstance(error, HungError))
            else:
                verdict = audit(swarm)
                say(f"killed: {told.killed}; {verdict.acknowledged} acknowledged, {verdict.steps} steps; {verdict.counts}")
                for line in verdict.wrong:
                    say(f"wrong: {line}")
                result |= {"faults": dict(told.faults), "lost": verdict.lost, "trained_twice": verdict.trained_twice}
                well = not (verdict.lost or verdict.trained_twice or verdict.wrong or swarm.grown())
            result["peak_mib"] = {role: round(peak) for role, peak in swarm.peak_mib.items()}
            for line in swarm.grown():
                say(f"wrong: {line}")
    text = json.dumps(result)
    typer.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    typer.run(main)
