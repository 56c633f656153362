"""Running what is missing: one `trueup train` process a run, side by side under a budget of cores."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from trueup.config import ConfigError
from trueup.rundir import write_text
from trueup.study.progress import StudyProgress
from trueup.study.runs import Run

_POLL = 0.2  # seconds between looks at the children


class Child:
    """One run in progress."""

    def __init__(self, run: Run, cores: list[int], lock: int):
        self.run, self.cores, self.begin = run, cores, time.monotonic()
        self._told = False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads until the end may fill up
        if (
            not run.started
        ):  # killed while it started: no configuration, so nothing to resume, but enough to be in the way
            shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--resume"] if run.started else [str(config_file(run)), f"seed={run.seed}"]
        command = [sys.executable, "-m", "trueup.cli", "train", *arguments, "--out", str(run.folder), "--json"]
        threads = str(len(cores))
        with open(run.log, "a") as log:
            log.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {' '.join(command[1:])}\n")
            log.flush()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                start_new_session=True,  # Ctrl-C reaches the study alone, which then stops its runs in order
                pass_fds=[lock],  # an orphaned run keeps the study's folder locked
            )
        if hasattr(os, "sched_setaffinity"):  # Linux; its threads, still to come, inherit it
            os.sched_setaffinity(self.process.pid, cores)

    def stop(self, kill: bool = False) -> None:
        self._told = True
        self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def ended(self) -> dict | None:
        """None while it runs; then what is to be noted about it."""
        if (code := self.process.poll()) is None:
            return None
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")
        self._printed.close()
        record = {"seconds": round(time.monotonic() - self.begin, 1), "cores": self.cores, "exit": code}
        if self.run.done():
            return {"state": "done", "accuracy_before": _summary(printed).get("accuracy_before")} | record
        if code == 0 or self._told:
            return {"state": "stopped"} | record
        killed = (
            f"ended by {signal.Signals(-code).name}; SIGKILL is often the kernel, out of memory\n" if code < 0 else ""
        )
        return {"state": "failed", "says": killed + _last_words(self.run.log)} | record


def config_file(run: Run) -> Path:
    """The arm's resolved configuration, which anybody can rerun with another seed."""
    path = run.out / "arms" / f"{run.arm.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = run.arm.config.to_yaml()
    if not path.exists() or path.read_text() != text:
        write_text(path, text)
    return path


def run_all(
    runs: list[Run],
    cores: list[int],
    threads: int,
    progress: StudyProgress,
    after: Callable[[], None] = lambda: None,
) -> str | None:
    """Run what is not done, `len(cores) // threads` at a time; `after` is called when a run ends. A run that fails is noted
    and the others go on. SIGINT and SIGTERM stop the runs after their step, saved; a second one kills them. Returns the
    signal's name if one came."""
    waiting = [run for run in runs if not run.done()]
    free = [cores[at : at + threads] for at in range(0, len(cores) - threads + 1, threads)]
    running: list[Child] = []
    with _Lock(runs[0].out) as lock, _Signals() as signals, progress:
        told = 0
        try:
            while running or (waiting and not signals.name):
                while waiting and free and not signals.name:
                    running.append(Child(waiting.pop(0), free.pop(0), lock))
                    progress.begin(running[-1].run)
                time.sleep(_POLL)
                if signals.count > told:
                    told = signals.count
                    _stop(running, signals.name, progress, kill=told > 1)
                for child in list(running):
                    progress.advance(child.run)
                    if (record := child.ended()) is None:
                        continue
                    running.remove(child)
                    free.append(child.cores)
                    child.run.note(**record)
                    progress.end(child.run, record)
                    _attempt(after, progress)
        finally:  # none is left where the study itself breaks
            for child in running:
                child.stop()
    return signals.name


def _stop(running: list[Child], name: str, progress: StudyProgress, kill: bool) -> None:
    for child in running:
        child.stop(kill)
    progress.say(
        "killing the runs; their last checkpoints stay"
        if kill
        else f"{name}: runs in progress ({len(running)}) stop after their step and save; again to kill them"
    )


def _attempt(after: Callable[[], None], progress: StudyProgress) -> None:
    """Hours of runs must not end by a page that cannot be written; the last call, after them, may fail aloud."""
    try:
        after()
    except Exception as error:  # noqa: BLE001
        progress.say(f"results could not be written now: {error}")


def available_cores(asked: int | None, threads: int) -> list[int]:
    """Cores this process may use, at most `asked`. Raises ConfigError if one run has too few."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = mine[: asked or len(mine)]
    if len(cores) < threads:
        raise ConfigError(
            f"threads={threads} a run but {len(cores)} cores to use ({len(mine)} available): lower threads, or raise cores"
        )
    return cores


class _Lock:
    """One study a folder at a time. The descriptor is handed to the runs, so that it holds as long as any of them."""

    def __init__(self, out: Path):
        self.path = out / "lock"

    def __enter__(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+")  # noqa: SIM115 - held as long as the study
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            raise ConfigError(
                f"{self.path.parent} is in use by another study, begun by process {self._file.read().strip() or '?'}, or by "
                "a run that it left behind; wait for it, or choose another folder with --out"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return self._file.fileno()

    def __exit__(self, *error) -> None:
        self._file.close()


class _Signals:
    """Counts SIGINT and SIGTERM instead of dying of them."""

    def __enter__(self):
        self.count, self.name = 0, None
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame) -> None:
        self.count += 1
        self.name = signal.Signals(number).name

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _summary(printed: str) -> dict:
    try:
        return json.loads(printed)
    except json.JSONDecodeError:
        return {}


def _last_words(log: Path, lines: int = 3) -> str:
    """The end of what the run said, which is where an error says what it is."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        said = file.read().decode(errors="replace").splitlines()
    return "\n".join([line for line in said if line.strip()][-lines:])
