"""Faults planted in real training runs on a real engine: `trueup explain` names each from the run's own rollouts."""

import subprocess
import sys
from pathlib import Path

import pytest

from trueup.explain.verdict import explain

pytestmark = pytest.mark.engine
FLOORS = ("precision", "quantised")
HEALTHY = ("healthy", "healthy-t06", "healthy-repeated")
FAULTY = ("weights", "truncated-support", "temperature", "cache")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, one after the other in one process: the engine starts once."""
    folder = tmp_path_factory.mktemp("faults")
    script = str(Path(__file__).parent / "faulty.py")
    done = subprocess.run([sys.executable, script, str(folder), *HEALTHY, *FAULTY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_without_fault_is_healthy(runs, name):
    verdict = explain([str(runs / name / "rollouts")])
    assert verdict["healthy"] and [cause["cause"] for cause in verdict["causes"]] == ["precision"]


@pytest.mark.parametrize("cause", FAULTY)
def test_the_fault_of_a_run_is_named(runs, cause):
    verdict = explain([str(runs / cause / "rollouts")])
    assert [found["cause"] for found in verdict["causes"] if found["cause"] not in FLOORS] == [cause]
