"""Tasks by name: `load_task("gsm8k:data/gsm8k")`. Each kind of task is one file; see docs/tasks.md for the specs."""

from __future__ import annotations

from difflib import get_close_matches

from trueup.tasks.base import Problem, Task

__all__ = ["Problem", "Task", "load_task"]

EXAMPLES = {
    "sums": "sums:addends=4,digits=2",
    "gsm8k": "gsm8k:path/to/folder",
    "reasoning_gym": "reasoning_gym:countdown",
    "jsonl": "jsonl:train.jsonl,heldout=test.jsonl",
    "choice": "choice:path/to/rows.jsonl",
}


def load_task(spec: str, seed: int = 0, heldout: int | None = None) -> Task:
    """The task that `spec` names: `sums`, `gsm8k`, `gsm8k:PATH`, `reasoning_gym:DATASET`, `jsonl:PATH`, or for
    evaluation alone `choice:PATH`.

    seed: which problems a generated task draws. Stored data does not depend on it: ordering rows is the reader's part.
    heldout: at most this many held-out rows, the first ones. None: all there are; generated tasks have a default.
    """
    if heldout is not None and heldout < 1:
        raise ValueError(f"heldout={heldout} leaves nothing to evaluate; give 1 or more rows, or leave it out")
    name, _, rest = spec.partition(":")
    # Imported where it is used, so that `import trueup.tasks` asks for no library that the chosen task does not need.
    if name == "sums":
        from trueup.tasks import sums

        return sums.from_spec(spec, seed=seed, heldout=512 if heldout is None else heldout)
    if name == "gsm8k":
        from trueup.tasks.gsm8k import Gsm8k

        return Gsm8k(rest or None, heldout=heldout)
    if name == "reasoning_gym":
        from trueup.tasks.reasoning_gym import from_spec

        return from_spec(spec, seed=seed, heldout=256 if heldout is None else heldout)
    if name == "jsonl":
        from trueup.tasks.jsonl import from_spec

        return from_spec(spec, heldout=heldout)
    if name == "choice":
        from trueup.tasks.choice import from_spec

        return from_spec(spec, heldout=heldout)
    near = get_close_matches(name, EXAMPLES, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}, as in {EXAMPLES[near[0]]!r}?" if near else ""
    raise ValueError(f"unknown task {name!r} in {spec!r}; known: {', '.join(EXAMPLES)}.{hint}")
