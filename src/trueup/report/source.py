"""What a report is about: a run directory, or rollout files; and where the text of its tokens can be found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from trueup.correction import Correction, preset
from trueup.rundir import RunDirectory

_MINI = Path(__file__).parent.parent / "assets" / "mini"


@dataclass
class Source:
    title: str
    files: list[Path]
    """Rollouts, in order."""
    out: Path
    """Where the page goes unless told otherwise."""
    run: Path | None = None
    """The run directory, if it is one."""
    config_text: str = ""
    config: dict = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    correction: Correction | None = None
    tokenizer: Path | None = None
    """A folder with a tokenizer.json."""

    @property
    def engine(self) -> str:
        """As the rollouts name it, e.g. `vllm:int8`; empty where the configuration does not say."""
        sampler = self.config.get("sampler") or {}
        return f"{sampler.get('engine', '')}:{sampler.get('precision', '')}" if sampler else ""

    @property
    def command(self) -> str:
        """What makes these data again."""
        if self.run:
            return f"trueup train {self.run / 'config.yaml'} --out {self.run}-again"
        return "trueup report " + " ".join(map(str, self.files))


def find(path: str | Path | Iterable[str | Path], tokenizer: str | Path | None = None) -> Source:
    """Raises FileNotFoundError or ValueError with what was expected."""
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(item) for item in path]
    if not paths:
        raise ValueError("nothing to report on: give a run directory or rollout parquet files")
    for item in paths:
        if not item.exists():
            raise FileNotFoundError(f"{item} does not exist; give a run directory or rollout parquet files")
    folders = [item for item in paths if item.is_dir()]
    if folders and len(paths) > 1:
        raise ValueError(f"{folders[0]} is a folder; give one run directory, or only parquet files")
    source = _run(folders[0]) if folders else _files(paths)
    if tokenizer is not None:
        if not (Path(tokenizer) / "tokenizer.json").exists():
            raise ValueError(f"{tokenizer} has no tokenizer.json; give a model's or tokenizer's folder")
        source.tokenizer = Path(tokenizer)
    return source


def _files(paths: list[Path]) -> Source:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Source(paths[0].stem + more, paths, paths[0].with_name(paths[0].stem + "-report.html"))


def _run(path: Path) -> Source:
    run = RunDirectory(path)
    config_path = path / "config.yaml"
    if not config_path.exists() and not run.metrics_path.exists():
        raise ValueError(
            f"{path} is no run directory (neither config.yaml nor metrics.jsonl); "
            f"for a folder of rollouts give its files: {path}/*.parquet"
        )
    text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = yaml.safe_load(text) or {}
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} holds no configuration: expected a mapping, got {type(config).__name__}")
    return Source(
        title=path.resolve().name,
        files=sorted((path / "rollouts").glob("*.parquet")),
        out=path / "report.html",
        run=path,
        config_text=text,
        config=config,
        metrics=[row for row in run.metrics() if isinstance(row, dict) and "step" in row],
        correction=preset(config["correction"]) if config.get("correction") else None,
        tokenizer=_tokenizer_of(run, config),
    )


def _tokenizer_of(run: RunDirectory, config: dict) -> Path | None:
    model = str(config.get("model", ""))
    candidates = [*reversed(run.checkpoints()), _MINI if model == "mini" else Path(model)]
    return next((folder for folder in candidates if (folder / "tokenizer.json").exists()), None)
