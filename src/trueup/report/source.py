"""What a report is about: a run directory, rollout files, or what `trueup measure` wrote; and where the text of its tokens
can be found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from trueup.correction import Correction, preset
from trueup.explain.dump import expand
from trueup.rundir import RunDirectory

_MINI = Path(__file__).parent.parent / "assets" / "mini"
_MEASURED_SCHEMA = 1
_EXPECTED = "a run directory, rollout files (.parquet, .jsonl), folders or globs of them, or the JSON of trueup measure"


@dataclass
class Source:
    title: str
    parts: list[tuple[str, list[Path]]]
    """Rollouts, in order, that are judged together: all of a run or dump, or those of each measured sampler by name."""
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
    measured: dict = field(default_factory=dict)
    """What `trueup measure --out` wrote: its ladders are under `samplers`."""
    command: str = ""
    """What makes these data, or this page, again."""

    @property
    def files(self) -> list[Path]:
        return [file for _, files in self.parts for file in files]

    @property
    def engine(self) -> str:
        """As the rollouts name it, e.g. `vllm:int8`; empty where the configuration does not say."""
        sampler = self.config.get("sampler") or {}
        return f"{sampler.get('engine', '')}:{sampler.get('precision', '')}" if sampler else ""


def find(path: str | Path | Iterable[str | Path], tokenizer: str | Path | None = None) -> Source:
    """Raises FileNotFoundError or ValueError with what was expected."""
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(item) for item in path]
    if not paths:
        raise ValueError(f"nothing to report on: give {_EXPECTED}")
    runs = [item for item in paths if item.is_dir() and _is_run(item)]
    if runs and len(paths) > 1:
        raise ValueError(f"{runs[0]} is a run directory; give it alone, or only rollout files")
    if runs:
        source = _run(runs[0])
    elif len(paths) == 1 and paths[0].suffix == ".json" and paths[0].exists() and (found := _measured(paths[0])):
        source = _of_measured(paths[0], found)
    else:
        source = _dump(paths)
    if tokenizer is not None:
        if not (Path(tokenizer) / "tokenizer.json").exists():
            raise ValueError(f"{tokenizer} has no tokenizer.json; give a model's or tokenizer's folder")
        source.tokenizer = Path(tokenizer)
    return source


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").exists() or (path / "metrics.jsonl").exists()


def _dump(paths: list[Path]) -> Source:
    try:
        files = expand([str(item) for item in paths])
    except FileNotFoundError:
        absent = next(item for item in paths if not item.exists())
        raise FileNotFoundError(f"{absent} does not exist; give {_EXPECTED}") from None
    except ValueError as error:
        raise ValueError(f"{error}; it is no run directory (no config.yaml, no metrics.jsonl) either") from None
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    first = files[0] if len(paths) > 1 or not paths[0].is_dir() else paths[0]
    source = Source(
        title=first.stem + more,
        parts=[("", files)],
        out=first.with_name(first.stem + "-report.html"),
        command="trueup report " + " ".join(map(str, paths)),
    )
    beside = files[0].with_suffix(".json")
    if len(files) == 1 and beside.exists() and beside != files[0] and (found := _measured(beside)):
        source.measured, source.tokenizer = found, _tokenizer(found.get("model"))
    return source


def _of_measured(path: Path, found: dict) -> Source:
    """The page of `trueup measure --out`; dumps that are not beside it any more are left out."""
    dumps = [(ladder["spec"], path.with_name(str(ladder.get("dump")))) for ladder in found["samplers"]]
    parts = [(spec, [dump]) for spec, dump in dumps if dump.is_file()]
    specs = " ".join(f"--sampler {ladder['spec']}" for ladder in found["samplers"])
    return Source(
        title=path.stem,
        parts=parts,
        out=path.with_name(path.stem + "-report.html"),
        measured=found,
        tokenizer=_tokenizer(found.get("model")),
        command=f"trueup measure {found.get('model')} {specs} --task {found.get('task')} --out {path}",
    )


def _measured(path: Path) -> dict:
    """The ladders in a JSON file; empty where it is something else. Raises ValueError for a schema of another release."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    if not isinstance(found, dict) or not isinstance(found.get("samplers"), list):
        return {}
    if found.get("schema") != _MEASURED_SCHEMA:
        raise ValueError(
            f"{path} has schema {found.get('schema')!r}; this trueup reads {_MEASURED_SCHEMA}: measure again, or "
            "install the release that wrote it"
        )
    return found


def _run(path: Path) -> Source:
    run = RunDirectory(path)
    config_path = path / "config.yaml"
    text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = yaml.safe_load(text) or {}
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} holds no configuration: expected a mapping, got {type(config).__name__}")
    files = sorted((path / "rollouts").glob("*.parquet"))
    measured_path = path / "measure.json"
    return Source(
        title=path.resolve().name,
        parts=[("", files)],
        out=path / "report.html",
        run=path,
        config_text=text,
        config=config,
        metrics=[row for row in run.metrics() if isinstance(row, dict) and "step" in row],
        correction=preset(config["correction"]) if config.get("correction") else None,
        tokenizer=_tokenizer_of(run, config),
        measured=_measured(measured_path) if measured_path.exists() else {},
        command=f"trueup train {path / 'config.yaml'} --out {path}-again",
    )


def _tokenizer_of(run: RunDirectory, config: dict) -> Path | None:
    found = next((item for item in reversed(run.checkpoints()) if (item / "tokenizer.json").exists()), None)
    return found or _tokenizer(config.get("model"))


def _tokenizer(model: object) -> Path | None:
    if not isinstance(model, str) or not model:
        return None
    folder = _MINI if model == "mini" else Path(model).expanduser()
    return folder if (folder / "tokenizer.json").exists() else None


def writable(path: Path) -> Path:
    """Where the page can go: there, or under the same name in the current directory when the folder is read-only."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    return path if os.access(folder, os.W_OK) else Path.cwd() / path.name
