"""The same problems in every evaluation, found by what they ask; sets that differ are refused with the difference shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trueup.evaluate.records import Evaluation, Item, canonical, canonical_reference

EXAMPLES = 3


class MismatchedSets(ValueError):
    """Evaluations of different problems; the message says which."""


@dataclass
class Matched:
    """Items of every evaluation in one order, that of the first."""

    items: list[list[Item]]
    """One list an evaluation; position i is the same problem in all of them."""
    how: str
    """`content`: question and reference are equal; `contained`: one prompt contains the other's question."""
    duplicates: int
    """Problems beyond the first of each content; they are paired in order of occurrence."""
    left_out: int
    """Problems that not all evaluations have; 0 unless only common ones were asked for."""


def match(evaluations: Sequence[Evaluation], common: bool = False) -> Matched:
    """common: compare the problems that all have instead of refusing. Raises MismatchedSets."""
    for evaluation in evaluations:
        if not evaluation.items:
            raise MismatchedSets(f"{evaluation.name} holds no problems; nothing to compare")
    counts = {evaluation.name: evaluation.samples for evaluation in evaluations}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise MismatchedSets(
            f"answers a problem differ: {listed}; a paired test compares the same number on every side: "
            "evaluate with the same --samples"
        )
    tables = [_numbered(evaluation) for evaluation in evaluations]
    first, how = tables[0], "content"
    for place in range(1, len(tables)):
        if tables[place].keys() != first.keys():
            tables[place], found = _contained(first, tables[place])
            how = "contained" if found else how
    shared = [key for key in first if all(key in table for table in tables)]
    everything = set().union(*tables)
    if len(shared) < len(everything) and not (common and shared):
        raise MismatchedSets(_difference(evaluations, tables, shared))
    return Matched(
        items=[[table[key] for key in shared] for table in tables],
        how=how,
        duplicates=sum(number > 0 for _, number in shared),
        left_out=len(everything) - len(shared),
    )


def _numbered(evaluation: Evaluation) -> dict[tuple[str, int], Item]:
    """(key, how many with this key came before) -> item."""
    seen: Counter[str] = Counter()
    table = {}
    for item in evaluation.items:
        table[item.key, seen[item.key]] = item
        seen[item.key] += 1
    return table


def _contained(first: dict, other: dict) -> tuple[dict, bool]:
    """Harnesses wrap a question differently: an instruction before or after it. Where keys differ, items of equal reference
    are the same if one question contains the other, and each fits no second one. -> `other` under the keys of `first`."""
    free = [key for key in first if key not in other]
    by_reference = defaultdict(list)
    for key in free:
        by_reference[canonical_reference(first[key].reference)].append((key, canonical(first[key].question)))
    fits: dict[tuple[str, int], list] = {}
    for key, item in other.items():
        if key in first:
            continue
        question = canonical(item.question)
        candidates = by_reference[canonical_reference(item.reference)]
        fits[key] = [ours for ours, text in candidates if text and question and (text in question or question in text)]
    claimed = Counter(ours for found in fits.values() for ours in found)
    renamed = {found[0]: other[key] for key, found in fits.items() if len(found) == 1 and claimed[found[0]] == 1}
    taken = {id(item) for item in renamed.values()}
    kept = {key: item for key, item in other.items() if id(item) not in taken}
    return kept | renamed, bool(renamed)


def _difference(evaluations: Sequence[Evaluation], tables: list[dict], shared: list) -> str:
    sizes = ", ".join(f"{evaluation.name} has {len(table)}" for evaluation, table in zip(evaluations, tables))
    lines = [f"not the same problems: {sizes}; {len(shared)} are in all of them"]
    everywhere = set(shared)
    for evaluation, table in zip(evaluations, tables):
        alone = [item for key, item in table.items() if key not in everywhere]
        if alone:
            shown = "; ".join(f"{_short(item.question)} -> {_short(item.reference)}" for item in alone[:EXAMPLES])
            more = f"; and {len(alone) - EXAMPLES} more" if len(alone) > EXAMPLES else ""
            lines.append(f"  not in all, but in {evaluation.name}: {len(alone)} ({shown}{more})")
    others = _other_references(tables, everywhere)
    if others:
        question, ours, theirs = others[0]
        lines.append(
            f"  {len(others)} questions are the same but their references differ: {_short(question)} "
            f"has {_short(ours)} and {_short(theirs)}"
        )
    lines.append(
        "Evaluate all on the same problems (same file, same limit)"
        + (f", or compare the {len(shared)} common ones with --common." if shared else ".")
    )
    return "\n".join(lines)


def _other_references(tables: list[dict], shared: set) -> list[tuple[str, str, str]]:
    asked = {canonical(item.question): item.reference for key, item in tables[0].items() if key not in shared}
    found = []
    for table in tables[1:]:
        for key, item in table.items():
            ours = asked.get(canonical(item.question))
            if (
                key not in shared
                and ours is not None
                and canonical_reference(ours) != canonical_reference(item.reference)
            ):
                found.append((item.question, ours, item.reference))
    return found


def _short(text: str, width: int = 60) -> str:
    text = canonical(text)
    return repr(text if len(text) <= width else text[: width - 3] + "...")
