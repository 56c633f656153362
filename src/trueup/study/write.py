"""The files of a study: study.json, README.md, index.html; each under a temporary name first."""

from __future__ import annotations

import json
from pathlib import Path

from trueup.rundir import write_text
from trueup.study.markdown import markdown
from trueup.study.page import page
from trueup.study.results import finite


def write_results(results: dict, out: Path) -> dict:
    """Write what `gather` found; returns it with the folder's path."""
    results = finite(results)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "study.json", json.dumps(results, indent=1) + "\n")
    write_text(out / "README.md", markdown(results))
    write_text(out / "index.html", page(results))
    return results | {"out": str(out)}
