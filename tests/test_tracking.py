"""Trackers: each through its own library, named when it is missing."""

import sys
from types import SimpleNamespace

import pytest

from trueup.config import ConfigError
from trueup.configfile import load_config
from trueup.tracking import open_trackers


def config(*names: str):
    return load_config({"log": {"trackers": list(names)}, "seed": 3})


def test_without_trackers_nothing_is_opened(tmp_path):
    assert open_trackers(config(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_writes_an_event_file_that_reads_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (log,) = open_trackers(config("tensorboard"), tmp_path)
    log(1, {"reward/mean": 0.25, "mismatch/kl_k3": 1e-4})
    log(2, {"reward/mean": 0.5})
    found = EventAccumulator(str(tmp_path / "tensorboard"))  # the writer is still open: a killed run keeps its steps
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, pytest.approx(event.value)) for event in found.Scalars("mismatch/kl_k3")] == [(1, 1e-4)]


def test_wandb_gets_the_run_its_configuration_and_each_step(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(log=lambda *given, **named: calls.append(("log", given, named)))

    def init(**named):
        calls.append(("init", named))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    folder = tmp_path / "first"
    (log,) = open_trackers(config("wandb"), folder)
    log(4, {"reward/mean": 0.5})
    expected = {
        "project": "trueup",
        "name": "first",
        "config": config("wandb").model_dump(mode="json"),
        "dir": str(folder),
    }
    assert calls == [("init", expected), ("log", ({"reward/mean": 0.5},), {"step": 4})]
    assert expected["config"]["seed"] == 3


def test_trackio_gets_the_run_its_configuration_and_each_step(tmp_path, monkeypatch):
    calls = []
    stand_in = SimpleNamespace(
        init=lambda **named: calls.append(("init", named)),
        log=lambda *given, **named: calls.append(("log", given, named)),
    )
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    (log,) = open_trackers(config("trackio"), tmp_path / "first")
    log(4, {"reward/mean": 0.5})
    expected = {"project": "trueup", "name": "first", "config": config("trackio").model_dump(mode="json")}
    assert calls == [("init", expected), ("log", ({"reward/mean": 0.5},), {"step": 4})]


def test_trackers_are_opened_in_the_order_named(tmp_path, monkeypatch):
    seen = []
    for name in ("wandb", "trackio"):
        log = lambda metrics, step, name=name: seen.append(name)  # noqa: E731
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(init=lambda log=log, **_: SimpleNamespace(log=log), log=log)
        )
    for track in open_trackers(config("trackio", "wandb"), tmp_path):
        track(1, {})
    assert seen == ["trackio", "wandb"]


@pytest.mark.parametrize(
    "name, module", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_library_that_is_missing_is_named_with_the_extra(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)  # how Python marks a module that cannot be imported
    expected = (
        rf"log\.trackers names {name}, which is not installed .*: pip install 'trueup\[tracking\]', or {name} alone"
    )
    with pytest.raises(ConfigError, match=expected):
        open_trackers(config(name), tmp_path)
