"""Metrics to TensorBoard, Weights & Biases or trackio, each through its own library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from trueup.config import ConfigError, RunConfig


def _tensorboard(config: RunConfig, folder: Path) -> Callable[[int, dict], None]:
    writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(step: int, metrics: dict) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb(config: RunConfig, folder: Path) -> Callable[[int, dict], None]:
    run = _need("wandb", "wandb").init(
        project="trueup", name=folder.name, config=config.model_dump(mode="json"), dir=str(folder)
    )
    return lambda step, metrics: run.log(metrics, step=step)


def _trackio(config: RunConfig, folder: Path) -> Callable[[int, dict], None]:
    trackio = _need("trackio", "trackio")
    trackio.init(project="trueup", name=folder.name, config=config.model_dump(mode="json"))
    return lambda step, metrics: trackio.log(metrics, step=step)


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def open_trackers(config: RunConfig, folder: Path) -> list[Callable[[int, dict], None]]:
    """One function (step, metrics) for each tracker that the configuration names. Raises ConfigError by library."""
    return [_TRACKERS[name](config, folder) for name in config.log.trackers]


def _need(module: str, package: str):
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"log.trackers names {package}, which is not installed ({error}): pip install 'trueup[tracking]', or {package} alone"
        ) from error
