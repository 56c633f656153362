"""Reading a study: a base run, arms, seeds, and what is compared. Everything is checked before the first run starts."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from trueup.config import ConfigError, RunConfig, Section
from trueup.configfile import load_config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]*")
SAME = ("model", "task", "steps", "log.eval_every", "log.eval_problems", "log.eval_by")
"""What every arm must share, or its curve answers another question."""


class Evaluate(Section):
    every: int = Field(5, ge=1)
    """Steps between evaluations: the points of the learning curve."""
    problems: int = Field(512, ge=1)
    """Held-out problems, the same for every arm and seed; 512 put the standard error at 2 points or less."""


class Against(Section):
    metric: str = "mismatch/prob_diff_mean"
    """Horizontal axis: this metric, mean over the steps of a run."""
    by: str = "correction"
    """The grid's axis whose values become the lines."""


class StudyFile(Section):
    """What a study's YAML may hold."""

    title: str = ""
    """Headline of the page; default: the file's name."""
    question: str = ""
    """What the study asks, in a sentence or two, for the top of the page."""
    notes: str = ""
    """How the shared settings were chosen, and what a reader must know to judge the result."""
    base: str | dict[str, Any] = Field(default_factory=dict)
    """A run's YAML, relative to the study's own folder, or its keys and values right here."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted overrides for every arm."""
    arms: dict[str, dict[str, Any] | list[str] | None] = Field(default_factory=dict)
    """Name -> dotted overrides, as a mapping or as a list of KEY=VALUE."""
    grid: dict[str, list[Any] | dict[str, Any]] = Field(default_factory=dict)
    """Key -> its values, or label -> value; every combination is an arm. An axis whose name is no configuration key holds
    label -> overrides."""
    seeds: int | list[int] = 3
    """A count (seeds 0, 1, ...) or the seeds themselves."""
    cores: int | None = Field(None, ge=1)
    """CPU cores to use side by side; default: all that this process may use. `--cores` wins."""
    threads: int = Field(1, ge=1)
    """Cores of one run. 1 suits small models: two threads that wait for each other are slower than one."""
    evaluate: Evaluate = Evaluate()
    compare: str | list[tuple[str, str]] | None = None
    """One arm against which all others are held, or pairs [A, B], read as A minus B. Default: the first arm."""
    against: Against | None = None
    """Also draw final accuracy and the area under the curve against a measured metric."""


@dataclass(frozen=True)
class Arm:
    name: str
    overrides: tuple[str, ...]
    """Of this arm alone, on top of the base and `set`."""
    labels: dict[str, str]
    """Grid axis -> label of this arm's value; empty for a named arm."""
    config: RunConfig
    """Resolved, with the study's first seed."""

    def at(self, seed: int) -> RunConfig:
        return self.config.model_copy(update={"seed": seed})


@dataclass(frozen=True)
class Study:
    name: str
    path: Path
    file: StudyFile
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    pairs: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        return self.file.title or self.name

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


def load_study(path: str | Path) -> Study:
    """A study's YAML with every arm resolved. Raises ConfigError naming the key or arm, and the remedy."""
    path = Path(path)
    file = _file(path)
    seeds = tuple(range(file.seeds)) if isinstance(file.seeds, int) else tuple(file.seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{path}: seeds={file.seeds!r}; give a count of 1 or more, or a list without repetitions")
    base = file.base
    if isinstance(base, str):
        base = path.parent / base
    common = [*_overrides(file.set, f"{path}: set"), *_evaluation(file)]
    arms = []
    for name, overrides, labels in _named(file, path):
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: arm {name!r} becomes a folder: begin with a letter or digit and use letters, digits and . _ = + @ -"
            )
        if any(arm.name == name for arm in arms):
            raise ConfigError(f"{path}: two arms are called {name!r}; rename one, or label the grid's values")
        if any(override.partition("=")[0] == "seed" for override in (*common, *overrides)):
            raise ConfigError(f"{path}: arm {name}: seed is the study's to set; list it in `seeds`")
        try:
            config = load_config(base, [*common, *overrides, f"seed={seeds[0]}"])
        except ConfigError as error:
            raise ConfigError(f"{path}: arm {name}: {error}") from None
        arms.append(Arm(name, tuple(overrides), labels, config))
    if not arms:
        raise ConfigError(f"{path}: no arms; give `arms:` (name -> overrides) or `grid:` (key -> values)")
    _check(arms, path)
    study = Study(path.stem, path, file, tuple(arms), seeds, _pairs(file, [arm.name for arm in arms], path))
    if file.against and not all(file.against.by in arm.labels for arm in arms):
        raise ConfigError(f"{path}: against.by={file.against.by!r} is not an axis of the grid: {', '.join(file.grid)}")
    return study


def _file(path: Path) -> StudyFile:
    if not path.is_file():
        near = get_close_matches(path.name, [found.name for found in path.parent.glob("*.yaml")], n=1)
        hint = (
            f"did you mean {path.parent / near[0]}?" if near else "give a YAML file such as configs/studies/quick.yaml"
        )
        raise ConfigError(f"study {str(path)!r} does not exist; {hint}")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"study {str(path)!r} is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"study {str(path)!r} holds {type(given).__name__}; expected keys such as base, grid and seeds"
        )
    try:
        return StudyFile.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(problem)}" for problem in error.errors())) from None


def _explain(problem: dict) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = list(StudyFile.model_fields)
        near = get_close_matches(str(problem["loc"][-1]), known, n=1)
        return f"unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
    return f"{key}={problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"


def _evaluation(file: StudyFile) -> list[str]:
    return [
        f"log.eval_every={file.evaluate.every}",
        f"log.eval_problems={file.evaluate.problems}",
        "log.eval_by=learner",  # the learner's own weights, never what an 8-bit sampler makes of them
    ]


def _named(file: StudyFile, path: Path):
    """(name, overrides, labels) of every arm: the grid's combinations, then the arms given by name."""
    axes = [_axis(key, values, path) for key, values in file.grid.items()]
    for chosen in itertools.product(*axes) if axes else ():
        labels = {key: label for key, (label, _) in zip(file.grid, chosen)}
        yield "-".join(labels.values()), [text for _, overrides in chosen for text in overrides], labels
    for name, given in file.arms.items():
        yield str(name), _overrides(given or {}, f"{path}: arm {name}"), {}


def _axis(key: str, values: list | dict, path: Path) -> list[tuple[str, list[str]]]:
    """One axis of the grid as (label, overrides)."""
    if not values:
        raise ConfigError(f"{path}: grid.{key} has no values")
    is_key = key.partition(".")[0] in RunConfig.model_fields
    if isinstance(values, dict):
        if is_key:
            return [(str(label), _overrides({key: value}, f"{path}: grid.{key}")) for label, value in values.items()]
        return [(str(label), _overrides(value, f"{path}: grid.{key}.{label}")) for label, value in values.items()]
    if not is_key:
        raise ConfigError(
            f"{path}: grid.{key} is no configuration key; with a name of your own, give label -> overrides, e.g. "
            f"{key}: {{small: {{batch.prompts: 32}}}}"
        )
    return [(_label(key, value, path), _overrides({key: value}, f"{path}: grid.{key}")) for value in values]


def _label(key: str, value: Any, path: Path) -> str:
    if isinstance(value, (dict, list)):
        raise ConfigError(f"{path}: grid.{key}: {value!r} needs a name: write label -> value instead of a list")
    number = not isinstance(value, str) or re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?", value)
    text = _text(value)
    return re.sub(r"[^A-Za-z0-9._=+@-]", "-", f"{key.rpartition('.')[2]}={text}" if number else text)


def _overrides(given: Any, where: str, prefix: str = "") -> list[str]:
    """Nested or dotted keys, or a list of KEY=VALUE -> `key.path=value`, the form that `trueup train` takes."""
    if isinstance(given, list):
        if bad := [item for item in given if not isinstance(item, str) or "=" not in item]:
            raise ConfigError(f"{where}: {bad[0]!r} is not KEY=VALUE, e.g. sampler.precision=int8")
        return given
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: expected overrides such as {{correction: tis}}, got {given!r}")
    made = []
    for key, value in given.items():
        # A correction is replaced as a whole: fields of another preset must not shine through.
        if isinstance(value, dict) and f"{prefix}{key}" != "correction":
            made += _overrides(value, where, f"{prefix}{key}.")
        else:
            made.append(f"{prefix}{key}={_text(value)}")
    return made


def _text(value: Any) -> str:
    if isinstance(value, str) and yaml.safe_load(value or "''") == value:
        return value
    return json.dumps(value)


def _check(arms: list[Arm], path: Path) -> None:
    first = arms[0]
    for arm in arms[1:]:
        for key in SAME:
            if (a := _value(first.config, key)) != (b := _value(arm.config, key)):
                raise ConfigError(
                    f"{path}: {key} is {a!r} in arm {first.name} and {b!r} in arm {arm.name}; curves of a study are compared "
                    "step by step on one held-out set from one checkpoint: set it once, in `base` or `set`"
                )
        if twin := next((other.name for other in arms if other is not arm and other.config == arm.config), None):
            raise ConfigError(f"{path}: arms {twin} and {arm.name} are the same run; leave one out")


def _value(config: RunConfig, key: str):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _pairs(file: StudyFile, names: list[str], path: Path) -> tuple[tuple[str, str], ...]:
    compare = names[0] if file.compare is None else file.compare
    given = [compare] if isinstance(compare, str) else [name for pair in compare for name in pair]
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"arms: {', '.join(names)}"
            raise ConfigError(f"{path}: compare names {name!r}, which is no arm; {hint}")
    if isinstance(compare, str):
        return tuple((name, compare) for name in names if name != compare)
    for a, b in compare:
        if a == b:
            raise ConfigError(f"{path}: compare holds {a!r} against itself")
    return tuple(dict.fromkeys(tuple(pair) for pair in compare))
