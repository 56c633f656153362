"""Reading a configuration: a YAML file plus dotted overrides, with errors that name the nearest valid key."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml
from pydantic import ValidationError

from trueup.config import ConfigError, RunConfig, merge


def load_config(source: str | Path | dict | None = None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """A YAML file (or mapping) plus dotted overrides `key.path=value`. Raises ConfigError with the remedy."""
    given = _read(source)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise ConfigError(f"override {override!r} is not KEY=VALUE, e.g. sampler.precision=int8")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: {text!r} is not a YAML value: {error}") from error
        *sections, key = path.split(".")
        target = given
        for section in sections:
            nested = target.get(section)
            if target is given and section == "correction" and isinstance(nested, str):
                nested = target[section] = {"preset": nested}  # the field changes the named preset
            elif not isinstance(nested, dict):
                nested = target[section] = {}
            target = nested
        target[key] = _number(value)
    try:
        return RunConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def _read(source: str | Path | dict | None) -> dict:
    if source is None:
        return {}
    if isinstance(source, dict):
        return merge({}, source)
    path = Path(source)
    if not path.is_file():
        near = get_close_matches(path.name, [found.name for found in path.parent.glob("*.yaml")], n=1)
        hint = (
            f"; did you mean {path.parent / near[0]}?"
            if near
            else "; give a YAML file such as configs/sums-ppo-int8-tis.yaml"
        )
        raise ConfigError(f"config {str(path)!r} does not exist{hint}")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} is not YAML: {error}") from error
    if given is None:  # an empty file
        return {}
    if not isinstance(given, dict):
        raise ConfigError(
            f"config {str(path)!r} holds {type(given).__name__}; expected keys and values, e.g. `task: sums`"
        )
    return _numbers(given)


def _number(value):
    """YAML 1.1 reads 1e-6 as text; people write it as a number."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value


def _numbers(value):
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return _number(value)


def _explain(problem: dict) -> str:
    """One pydantic error as a sentence with the key, the value and, for an unknown key, the nearest valid one."""
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        section = RunConfig
        for part in problem["loc"][:-1]:
            section = section.model_fields[part].annotation
        known = [field.name for field in fields(section)] if is_dataclass(section) else list(section.model_fields)
        near = get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = (
            f"did you mean {'.'.join([*map(str, problem['loc'][:-1]), near[0]])}?"
            if near
            else f"known: {', '.join(known)}"
        )
        return f"unknown key {path!r}; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if not path:
        return message
    if problem["type"] == "literal_error":
        expected = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = get_close_matches(str(problem["input"]), expected, n=1)
        message = f"expected one of {', '.join(expected)}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}={problem['input']!r}: {message}"
