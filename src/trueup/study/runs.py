"""One run of a study: an arm with a seed, where it lies, and how far it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet

from trueup.config import ConfigError, RunConfig
from trueup.configfile import load_config
from trueup.rundir import RunDirectory, write_text
from trueup.study.design import Arm, Study


@dataclass(frozen=True, eq=False)
class Run:
    arm: Arm
    seed: int
    out: Path
    """The study's folder."""

    @property
    def name(self) -> str:
        return f"{self.arm.name} seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.arm.name / f"seed-{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def _record(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def config(self) -> RunConfig:
        return self.arm.at(self.seed)

    @property
    def started(self) -> bool:
        return (self.folder / "config.yaml").exists()

    def rows(self) -> list[dict]:
        return RunDirectory(self.folder).metrics()

    def steps(self) -> int:
        """Steps whose metrics are written: a cheap count of lines, good enough to show progress."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def done(self) -> bool:
        """All steps are there, and the last one's checkpoint was written after them."""
        rows = self.rows()
        if not rows or rows[-1]["step"] < self.config.steps:
            return False
        return self.record().get("state") == "done" or self._last_checkpoint() == self.config.steps

    def _last_checkpoint(self) -> int | None:
        found = RunDirectory(self.folder).checkpoints()
        return int(found[-1].name.removeprefix("step-")) if found else None

    def record(self) -> dict:
        """What the runner noted when the run last ended: state (done, stopped, failed), seconds, and for a failure why."""
        try:
            return json.loads(self._record.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def note(self, **record) -> None:
        write_text(self._record, json.dumps(record, indent=1) + "\n")

    def accuracy_before(self) -> float | None:
        """Held-out accuracy of the shared initial weights, which a run keeps in its checkpoints, not in its metrics."""
        if (known := self.record().get("accuracy_before")) is not None:
            return known
        found = RunDirectory(self.folder).checkpoints()
        if not found:
            return None
        return json.loads((found[-1] / "trainer" / "state.json").read_text()).get("accuracy_before")

    def prompts_hash(self) -> str | None:
        """Digest of the first written step's prompts, in the order they were asked; None where no rollouts were written."""
        files = sorted((self.folder / "rollouts").glob("step-*.parquet"))
        if not files:
            return None
        table = parquet.read_table(files[0], columns=["prompt_ids", "group"]).to_pydict()
        prompts = dict(zip(table["group"], table["prompt_ids"]))
        asked = json.dumps([files[0].stem, [prompts[group] for group in sorted(prompts)]])
        return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()

    def difference(self) -> list[str]:
        """Keys whose value in the folder is not the study's, as `key: in the folder -> in the study`."""
        if not self.started:
            return []
        there, here = (_flat(config.model_dump(mode="json")) for config in (self._there(), self.config))
        return [
            f"{key}: {there.get(key)!r} -> {here.get(key)!r}"
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key)
        ]

    def _there(self) -> RunConfig:
        try:
            return load_config(self.folder / "config.yaml")
        except ConfigError as error:
            raise ConfigError(f"{self.folder / 'config.yaml'}: {error}") from None


def all_runs(study: Study, out: str | Path, only: str | None = None) -> list[Run]:
    """Seed by seed, so that an unfinished study has all arms of its first seeds rather than all seeds of its first arms."""
    arms = [study.arm(only)] if only else study.arms
    return [Run(arm, seed, Path(out)) for seed in study.seeds for arm in arms]


def refuse_changes(runs: list[Run]) -> None:
    """Raises ConfigError if a folder holds a run of other settings than the study now asks for."""
    for run in runs:
        if changed := run.difference():
            listed = "\n  ".join(changed)
            raise ConfigError(
                f"{run.folder} was begun with other settings (there -> in the study now):\n  {listed}\n"
                "put the study back as it was, choose another folder with --out, or delete that run"
            )


def _flat(values: dict, prefix: str = "") -> dict:
    return dict(_items(values, prefix))


def _items(values: dict, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
