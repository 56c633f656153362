"""The run directory: what a run leaves behind, written so that a kill at any moment loses at most the running step."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trueup.config import RunConfig
from trueup.configfile import load_config
from trueup.rollouts import Rollouts


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used as asked; the message says what to do."""


class RunDirectory:
    """`config.yaml`, `metrics.jsonl`, `rollouts/`, `checkpoints/`. One process at a time: a lock says who."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self._lock = None

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """A folder for a new run, locked; `start` makes it one. Raises RunDirectoryError if it holds one already."""
        run = cls(path)
        if any((run.path / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
            raise RunDirectoryError(
                f"{run.path} already holds a run; continue it with --resume, or choose another folder with --out"
            )
        run._acquire()
        return run

    def start(self, config: RunConfig) -> None:
        """Write the configuration: from here on the folder holds a run that can be resumed."""
        write_text(self.path / "config.yaml", config.to_yaml())

    @classmethod
    def reopen(cls, path: str | Path) -> tuple[RunDirectory, RunConfig]:
        """A run to be continued, and its configuration."""
        run = cls(path)
        if not (run.path / "config.yaml").exists():
            raise RunDirectoryError(
                f"{run.path} holds no run to resume (no config.yaml); leave --resume out to start one"
            )
        config = load_config(run.path / "config.yaml")
        run._acquire()
        return run, config

    def _acquire(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 - held as long as the run
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunDirectoryError(
                f"{self.path} is in use by another process; wait for it, or choose another folder with --out"
            ) from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # --- metrics and rollouts -------------------------------------------------------------------------------------

    def append_metrics(self, metrics: dict) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        with open(self.metrics_path, "a") as file:
            file.write(json.dumps(finite) + "\n")

    def metrics(self) -> list[dict]:
        """All steps so far; a line that a kill left half-written is passed over."""
        if not self.metrics_path.exists():
            return []
        rows = []
        for line in self.metrics_path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def rewind(self, step: int) -> None:
        """Forget metrics and rollouts of steps after `step`: they will be made again."""
        if self.metrics_path.exists():  # a run killed while it starts must leave nothing that looks like a run
            kept = [json.dumps(row) for row in self.metrics() if row["step"] <= step]
            write_text(self.metrics_path, "".join(line + "\n" for line in kept))
        for file in (self.path / "rollouts").glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def write_rollouts(self, step: int, rollouts: Rollouts) -> None:
        rollouts.to_parquet(self.path / "rollouts" / f"step-{step:06d}.parquet")

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, model, tokenizer, tensors: dict[str, Tensor], state: dict, keep: int) -> Path:
        """HF layout that transformers and vLLM load as it is. Optimizer state goes to `trainer/` inside: vLLM would take
        any further safetensors file beside the model's for weights."""
        final = self.checkpoints_path / f"step-{step:06d}"
        temporary = self.checkpoints_path / f".step-{step:06d}.tmp"
        for leftover in self.checkpoints_path.glob(".step-*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            trainer = temporary / "trainer"
            trainer.mkdir()
            save_file({name: value.contiguous() for name, value in tensors.items()}, trainer / "state.safetensors")
            (trainer / "state.json").write_text(json.dumps(state, indent=1))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk should not stay fuller
            if "os error 28" in str(error):  # safetensors' own word for it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary)) from error
            raise
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)
        return final

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.checkpoints_path.glob("step-*"))

    def load_checkpoint(self) -> tuple[Path, dict[str, Tensor], dict] | None:
        """The newest checkpoint's folder, tensors and state; None if there is none yet."""
        found = self.checkpoints()
        if not found:
            return None
        folder = found[-1]
        trainer = folder / "trainer"
        return folder, load_file(trainer / "state.safetensors"), json.loads((trainer / "state.json").read_text())


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
