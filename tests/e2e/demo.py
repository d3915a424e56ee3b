"""Running `echo-demo` as a person would, for the tests: a process of its own, and what it leaves behind."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from echo import journal

SECONDS = 180
"""The demo's promise for two cores. Other processes may share them, so a test waits longer before it gives up."""
PATIENCE_S = 3 * SECONDS


class Demo:
    """A running `echo-demo`."""

    def __init__(self, out: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.out = out
        self.log_path = out.parent / f"{out.name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "echo.cli.demo", "--out", str(out), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KAFKA_HOME": "", **(env or {})},
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def steps(self) -> list[dict[str, Any]]:
        """The journal's lines of optimiser steps so far."""
        path = self.out / "checkpoints" / journal.FILE_NAME
        return [line for line in journal.read(path) if "batch" in line] if path.exists() else []

    def until_step(self, step: int) -> None:
        """Wait until the trainer has done so many steps."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.steps()) < step:
            assert self.process.poll() is None, f"the demo ended early:\n{self.log}"
            assert time.monotonic() < deadline, f"the demo did not reach step {step}:\n{self.log}"
            time.sleep(0.05)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return found

    def metrics_urls(self) -> list[str]:
        """Where its processes said that they serve metrics."""
        urls = []
        for path in sorted((self.out / "logs").glob("*.log")):
            urls += re.findall(r"metrics are served.*?(http://[0-9.:]+/metrics)", path.read_text())
        server = re.search(r"^  port: (\d+)$", (self.out / "run.yaml").read_text(), re.MULTILINE)
        return [*urls, *([f"http://127.0.0.1:{server[1]}/metrics"] if server else [])]

    def exposition(self) -> str:
        """All that its processes expose right now."""
        return "\n".join(httpx.get(url, timeout=5.0).text for url in self.metrics_urls())

    def processes(self) -> list[str]:
        """Command lines of living processes that belong to it, itself excluded."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(self.out) in command and state != "Z":
                found.append(command)
        return found


def check_summary(summary: dict[str, Any], *, learned: bool = True) -> None:
    """What every demo must show. learned: also that the reward has climbed, for which a short run has no time."""
    s = summary
    assert set(s) == {
        "reward_first",
        "reward_last",
        "steps",
        "trajectories_produced",
        "trained",
        "dropped",
        "dead_lettered",
        "pending",
        "staleness_max",
        "staleness_bound",
        "policy_versions",
        "pulls",
        "seconds",
    }
    if learned:
        assert s["reward_last"] >= 0.8, s
        assert s["reward_last"] >= s["reward_first"] + 0.4, s
    total = s["trained"] + sum(s["dropped"].values()) + s["dead_lettered"] + s["pending"]
    assert s["trajectories_produced"] == total, s
    assert s["staleness_max"] <= s["staleness_bound"], s
    assert s["policy_versions"] == s["steps"] + 1, s
    assert s["pulls"] > s["steps"] / 4, s
    assert s["dead_lettered"] == 0, s
