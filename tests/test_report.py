"""The report: its numbers are those of `measure`, model text stays text, and a real browser shows it."""

import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from chromium import BINARY, Chromium
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from trueup.explain.finding import CAUSES
from trueup.explain.ladder import split_gap
from trueup.explain.live import Measured, measured_json, write_measured
from trueup.explain.text import tokens_in
from trueup.explain.verdict import explain
from trueup.mismatch import measure
from trueup.report import Finding, Gathered, Verdict, verdict, write_report
from trueup.report.causes import said, with_causes
from trueup.report.histogram import Histogram
from trueup.report.scale import Scale, spanning
from trueup.report.tokentext import visible
from trueup.report.verdict import verdict_of_steps
from trueup.rollouts import Rollouts, offsets_of

HOSTILE = [
    "<script>window.harmed=1</script>",
    "</td></table>",
    '" onmouseover="window.harmed=1',
    "</i><img src=x onerror=window.harmed=1>",
    "<style>*{display:none}</style>",
    "<!--",
    "&lt;b&gt;",
    "\u202eabc",
    "'",
    "\n",
    "\x00",
    "plain",
]


def dump(responses=40, noise=0.02, seed=0, engine="vllm:bf16", **columns) -> Rollouts:
    """Responses of 1 to 60 tokens, each drawn by the sampler from two; the learner's logit differs by noise. Both are
    distributions, so E[rho] is 1."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, responses)
    logit = random.logistic(size=lengths.sum()) * 3
    side = np.where(random.random(len(logit)) < 1 / (1 + np.exp(-logit)), 1, -1)
    sampler = -np.log1p(np.exp(-side * logit))
    learner = -np.log1p(np.exp(-side * (logit + random.normal(0, noise, len(logit)))))
    offsets = offsets_of(torch.from_numpy(lengths)).tolist()
    ids = random.integers(0, len(HOSTILE), len(sampler)).tolist()
    rows = [ids[start:end] for start, end in zip(offsets, offsets[1:])]
    prompts = [[1, 2, index % len(HOSTILE)] for index in range(responses)]
    return Rollouts.from_lists(
        prompts,
        rows,
        torch.from_numpy(sampler).float(),
        **{"learner_logprobs": torch.from_numpy(learner).float(), "engine": engine, "learner_version": 0, **columns},
    )


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose every token is markup."""
    folder.mkdir(parents=True)
    Tokenizer(models.WordLevel({text: index for index, text in enumerate(HOSTILE)}, "plain")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def write_run(path: Path, steps: int = 12) -> Path:
    write_tokenizer(path / "checkpoints" / "step-000010")
    config = {
        "model": "mini",
        "steps": steps,
        "correction": {"preset": "icepop"},
        "note": "</pre><script>harm</script>",
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            rollouts = dump(seed=step, step=step, engine="vllm:int8")
            rollouts.to_parquet(path / "rollouts" / f"step-{step:06d}.parquet")
            stats = measure(rollouts.sampler_logprobs, rollouts.learner_logprobs, rollouts.offsets, rollouts.loss_mask)
            row = {
                "step": step,
                "reward/mean": step / 20,
                "response/length_mean": 30.0,
                "policy/entropy": None,
                **stats,
            }
            row |= {"correction/truncated_fraction": 0.0, "correction/masked_fraction": 0.01}
            row |= {"eval/accuracy": step / 15} if step % 5 == 0 else {}
            file.write(json.dumps(row) + "\n")
        file.write('{"step": 13, "rew')  # a kill
    return path


class Page(HTMLParser):
    """Elements and text as a parser finds them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def numbers(self) -> dict[str, float]:
        return {a["data-name"]: float(a["value"]) for tag, a in self.tags if tag == "data"}


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


# --- numbers ----------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1000),
    responses=st.integers(1, 30),
    noise=st.sampled_from([0.0, 1e-4, 0.1, 3.0]),
    missing=st.sampled_from([0.0, 0.2, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_numbers_are_those_of_measure_however_the_rows_are_batched(seed, responses, noise, missing):
    rollouts = dump(responses, noise, seed)
    random = torch.Generator().manual_seed(seed)
    rollouts.sampler_logprobs[torch.rand(rollouts.tokens, generator=random) < missing] = math.nan
    rollouts.loss_mask[torch.rand(rollouts.tokens, generator=random) < 0.2] = False
    gathered = Gathered()
    middle = responses // 2
    gathered.add(rollouts.rows(range(middle)))
    gathered.add(rollouts.rows(range(middle, responses)))
    stats = gathered.stats()
    expected = measure(rollouts.sampler_logprobs, rollouts.learner_logprobs, rollouts.offsets, rollouts.loss_mask)
    assert stats["mismatch/tokens"] == expected["mismatch/tokens"]
    for name, value in stats.items():
        assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


def test_the_page_holds_these_numbers(tmp_path):
    rollouts = dump()
    rollouts.to_parquet(tmp_path / "dump.parquet")
    page = write_report(tmp_path / "dump.parquet")
    assert page == tmp_path / "dump-report.html"
    numbers = read(page).numbers()
    expected = measure(rollouts.sampler_logprobs, rollouts.learner_logprobs, rollouts.offsets, rollouts.loss_mask)
    assert len(numbers) == 14
    for name, value in numbers.items():
        assert value == pytest.approx(expected[name], rel=1e-9), name


def test_several_files_are_one_report(tmp_path):
    files = []
    for seed in range(3):
        files.append(tmp_path / f"{seed}.parquet")
        dump(seed=seed, step=seed).to_parquet(files[-1])
    page = read(write_report(files, tmp_path / "deep" / "all.html"))
    assert page.numbers()["mismatch/tokens"] == Rollouts.from_parquet(files).tokens
    assert "120 responses" in page.text and "KL by step" in page.text


def test_histogram_keeps_every_value_while_it_widens():
    histogram = Histogram()
    for values in ([0.0, 1e-5, -1e-5], [0.5, -0.25], [1e6, -7.0, -0.0]):
        histogram.add(np.array(values))
    assert histogram.total == 8
    edges, counts, below, above = histogram.within(1.0, 50)
    assert (counts.sum(), below, above) == (6, 1, 1)
    assert counts[np.searchsorted(edges, 0.5, "right") - 1] == 1
    assert np.allclose(edges, -edges[::-1])


@given(st.lists(st.floats(-1e9, 1e9), max_size=5), st.sampled_from(["linear", "log"]))
def test_ticks_lie_on_the_axis(values, kind):
    scale = spanning(values, kind)
    for value, _ in scale.ticks():
        assert scale.low - 1e-6 * abs(scale.low) <= value <= scale.high + 1e-6 * abs(scale.high)
    assert Scale(0, 1).ticks()[0] == (0, "0")


# --- verdict ----------------------------------------------------------------------------------------------------------


def judge(rollouts: Rollouts):
    gathered = Gathered()
    gathered.add(rollouts)
    return verdict(gathered)


def test_no_alarm_over_healthy_dumps():
    verdicts = [judge(dump(200, 0.02, seed)) for seed in range(200)]
    assert all(item.healthy for item in verdicts)
    # The 95% interval leaves out 1 in about one of twenty: said, but no alarm.
    assert sum(finding.level == "look" for item in verdicts for finding in item.findings) < 25


def test_a_ratio_that_is_not_1_is_a_fault():
    rollouts = dump(200)
    rollouts.learner_logprobs -= 0.01
    found = judge(rollouts)
    assert not found.healthy and "E[rho]" in found.headline


def test_size_is_judged_by_the_engine():
    noisy = dict(responses=300, noise=0.35)  # KL 0.005
    assert judge(dump(engine="vllm:int8", **noisy)).healthy
    assert judge(dump(engine="vllm:bf16", **noisy)).healthy is False
    assert judge(dump(engine="", **noisy)).healthy


def test_missing_invented_and_stale_tokens_are_named():
    rollouts = dump(200)
    rollouts.sampler_logprobs[:100] = math.nan
    rollouts.sampler_logprobs[100:110] = 1.0
    rollouts.sampler_version[:] = 3
    levels = {finding.what: finding.level for finding in judge(rollouts).findings}
    assert levels["missing log-probs"] == levels["invented log-probs"] == "fault"
    assert levels["staleness"] == "look"


@pytest.mark.parametrize("outside, level", [(0, "ok"), (60, "ok"), (100, "look"), (600, "fault")])
def test_steps_are_judged_without_rollouts(outside, level):
    healthy = {"kl_k3": 1e-4, "ess_token": 1.0, "ess_sequence": 0.9, "rho_mean_low": 0.99, "rho_mean_high": 1.01}
    rows = [{f"mismatch/{name}": value for name, value in healthy.items()} for _ in range(1000)]
    for row in rows[:outside]:
        row["mismatch/rho_mean_high"] = 0.995
    found = verdict_of_steps(rows, "vllm:bf16")
    assert found.findings[0].level == level and found.healthy == (level != "fault")


def test_a_healthy_dump_is_said_to_be_healthy_and_why(tmp_path):
    dump(200).to_parquet(tmp_path / "dump.parquet")
    page = read(write_report(tmp_path / "dump.parquet"))
    assert "Healthy: nothing but ordinary rounding and kernels." in page.text
    assert "Fresh noise at every token" in page.text and "100% of the gap" in page.text


def test_causes_are_named_with_share_evidence_and_remedy(tmp_path):
    rollouts = dump(200)
    odds = rollouts.learner_logprobs.double()
    odds = odds - torch.log(-torch.expm1(odds))
    rollouts.learner_logprobs = -torch.log1p(torch.exp(-odds / 0.6)).float()  # the same two tokens at temperature 0.6
    rollouts.to_parquet(tmp_path / "dump.parquet")
    found = explain([str(tmp_path / "dump.parquet")])["causes"]
    assert found[0]["cause"] == "temperature"
    page = read(write_report(tmp_path / "dump.parquet"))
    assert "Not healthy: the two sides took different temperatures." in page.text
    for words in (f"{found[0]['share']:.0%} of the gap", found[0]["evidence"], found[0]["remedy"], "ordinary rounding"):
        assert words.lower() in page.text.lower(), words


def test_the_page_is_written_when_causes_cannot_be_told(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyError("no such <column>")

    monkeypatch.setattr("trueup.report.causes.explain", fail)
    dump(200).to_parquet(tmp_path / "dump.parquet")
    page = read(write_report(tmp_path / "dump.parquet"))
    assert "could not be told: 'no such <column>'" in page.text
    assert "Causes could not be told." in page.text and page.numbers()["mismatch/tokens"] > 0


@pytest.mark.parametrize(
    "causes, kl, healthy, words",
    [
        (["quantised"], 0.001, True, "Healthy: nothing but ordinary quantisation."),
        (["quantised"], 0.9, False, "No known fault was found, but KL(mu, pi) is beyond the usual."),
        (["precision", "missing", "cache"], 0.001, False, "Not healthy: some log-probs are missing; some prompts"),
    ],
)
def test_sizes_and_causes_make_one_headline(causes, kl, healthy, words):
    level = "fault" if kl > 0.1 else "ok"
    sizes = Verdict(level == "ok", "", [Finding(level, "KL(mu, pi)", "")])
    found = {"healthy": len(causes) == 1, "causes": [{"cause": cause} for cause in causes]}
    merged = with_causes(sizes, found)
    assert merged.healthy is healthy and merged.headline.startswith(words)
    assert [cause["cause"] for cause in merged.causes][-1] == causes[0]  # the floor comes last


# --- what is given ----------------------------------------------------------------------------------------------------


def test_a_run_directory(tmp_path):
    page_path = write_report(write_run(tmp_path / "run"))
    assert page_path == tmp_path / "run" / "report.html"
    page = read(page_path)
    for words in ("Healthy", "held-out accuracy", "dropped below 0.5", "dropped above 5", "trueup train", "12 steps"):
        assert words in page.text, words
    assert page.text.count("training step") >= 5
    assert "</pre><script>harm</script>" in page.text


def test_an_empty_run_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("model: mini\n")
    page = read(write_report(tmp_path))
    assert "No verdict" in page.text and "No step has been finished yet" in page.text


def test_a_run_without_rollouts_still_has_its_curves(tmp_path):
    shutil.rmtree(write_run(tmp_path / "run") / "rollouts")
    page = read(write_report(tmp_path / "run"))
    assert "Healthy" in page.text and "median over the steps" in page.text
    assert "no rollouts have been written" in page.text and "Effective sample size" in page.text


def test_a_dump_without_learner_logprobs_says_how_to_get_them(tmp_path):
    dump(learner_logprobs=None).to_parquet(tmp_path / "dump.parquet")
    with pytest.raises(ValueError, match="no column learner_logprobs.*Score the same tokens"):
        write_report(tmp_path / "dump.parquet")
    assert not list(tmp_path.glob("*.html*"))


def test_responses_that_were_not_scored_are_left_out_and_counted(tmp_path):
    dump(learner_logprobs=None, seed=1).to_parquet(tmp_path / "a.parquet")
    dump().to_parquet(tmp_path / "b.parquet")
    page = read(write_report([tmp_path / "a.parquet", tmp_path / "b.parquet"]))
    assert "40 responses have no learner log-probs" in page.text


@pytest.mark.parametrize(
    "given, words",
    [
        ("absent", "does not exist"),
        ("folder", "no run directory"),
        ("text.parquet", "not a parquet file"),
        ([], "nothing to report on"),
    ],
)
def test_bad_input_is_named(tmp_path, given, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        write_report(tmp_path / given if given else given)


@pytest.mark.parametrize("responses", [1, 2])
def test_a_dump_of_one_or_two_tokens(tmp_path, responses):
    rollouts = Rollouts.from_lists([[1]] * responses, [[2]] * responses, [[-0.5]] * responses, learner_logprobs=-0.5)
    rollouts.to_parquet(tmp_path / "dump.parquet")
    assert read(write_report(tmp_path / "dump.parquet")).numbers()["mismatch/tokens"] == responses


def test_an_identical_response_is_shown_once(tmp_path):
    rollouts = Rollouts.from_lists(
        [[1]] * 7, [[2, 3]] * 7, [[-0.5, -3.0]] * 7, learner_logprobs=[[-0.5, -1.0 - row / 100] for row in range(7)]
    )
    rollouts.to_parquet(tmp_path / "dump.parquet")
    page = read(write_report(tmp_path / "dump.parquet"))
    assert sum(a.get("class") == "response" for _, a in page.tags) == 1 and "7 times" in page.text


def test_a_long_response_is_cut_around_its_worst_token(tmp_path):
    length, at = 20_000, 12_345
    learner = torch.full((length,), -0.5)
    learner[at] = -4.0
    rollouts = Rollouts.from_lists([[1] * 5000], [[2] * length], torch.full((length,), -0.5), learner_logprobs=learner)
    rollouts.to_parquet(tmp_path / "dump.parquet")
    page = write_report(tmp_path / "dump.parquet")
    assert page.stat().st_size < 200_000
    assert any(a.get("data-n", "").startswith(f"{at + 1}|2|-4|-0.5|-3.5") for _, a in read(page).tags)
    assert "tokens before]" in page.read_text() and "tokens after]" in page.read_text()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_of_other_frameworks_are_read_as_explain_reads_them(tmp_path, kind):
    rollouts = dump()
    rows = [
        {"ids": rollouts.response(row).tolist(), "mu": mu.tolist(), "pi": pi.tolist()}
        for row, (mu, pi) in enumerate(
            zip(*(v.split(rollouts.lengths.tolist()) for v in (rollouts.sampler_logprobs, rollouts.learner_logprobs)))
        )
    ]
    path = tmp_path / f"theirs.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    columns = "response_ids=ids,sampler_logprobs=mu,learner_logprobs=pi"
    seen = []
    page = read(write_report(tmp_path, columns=columns, progress=seen.append))
    expected = measure(rollouts.sampler_logprobs, rollouts.learner_logprobs, rollouts.offsets, rollouts.loss_mask)
    for name, value in page.numbers().items():
        assert value == pytest.approx(expected[name], rel=1e-5), name
    assert "The worst responses" in page.text and "Prompt" not in page.text
    assert sum(seen) == 2 * rollouts.tokens  # once for the page, once for the causes
    bare = read(write_report(tmp_path, columns=columns.partition(",")[2]))  # without ids
    assert bare.numbers() == page.numbers() and "[?]" in bare.text and "[?]" not in page.text
    with pytest.raises(ValueError, match="has no column sampler_logprobs"):
        write_report(tmp_path / f"theirs.{kind}")


def test_a_response_alone_in_its_bin_is_hollow_and_no_line_leads_to_it(tmp_path):
    lengths = [2, 50, 50, 50]
    rollouts = Rollouts.from_lists(
        [[1]] * 4, [[2] * n for n in lengths], [[-0.5] * n for n in lengths], learner_logprobs=-0.4
    )
    rollouts.to_parquet(tmp_path / "dump.parquet")
    text = write_report(tmp_path / "dump.parquet").read_text()
    chart = text[text.index("<h3>Gap by response length") :].partition("</svg>")[0]
    assert chart.count("hollow") == 1 and re.search(r'class="line s0" d="M[^L"]*"', chart)


def test_log_probs_of_another_length_are_missing_ones_and_no_crash(tmp_path):
    table = dump(200)
    table.to_parquet(tmp_path / "whole.parquet")
    rows = pq.read_table(tmp_path / "whole.parquet")
    short = [values[:-1] if row == 3 else values for row, values in enumerate(rows["sampler_logprobs"].to_pylist())]
    rows = rows.set_column(
        rows.column_names.index("sampler_logprobs"), "sampler_logprobs", pa.array(short, pa.list_(pa.float32()))
    )
    pq.write_table(rows, tmp_path / "dump.parquet")
    page = read(write_report(tmp_path / "dump.parquet"))
    assert "some log-probs are missing" in page.text and "200 responses" in page.text


def test_a_read_only_folder_sends_the_page_to_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "here").mkdir()
    dump().to_parquet(tmp_path / "locked" / "dump.parquet")
    monkeypatch.chdir(tmp_path / "here")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and allowed(path, mode))
    told = []
    page = write_report(tmp_path / "locked" / "dump.parquet", say=told.append)
    assert page == tmp_path / "here" / "dump-report.html" and page.exists()
    assert len(told) == 1 and "locked is read-only" in told[0] and "current directory" in told[0]


def test_the_page_does_not_grow_with_the_dump(tmp_path):
    sizes = []
    for responses in (300, 6000):
        dump(responses).to_parquet(tmp_path / "dump.parquet")
        assert tokens_in([str(tmp_path / "dump.parquet")]) == dump(responses).tokens
        sizes.append(write_report(tmp_path / "dump.parquet").stat().st_size)
    assert sizes[1] < 1.3 * sizes[0] < 300_000


# --- the ladder -------------------------------------------------------------------------------------------------------


def measured(spec: str, seed: int) -> Measured:
    """A ladder of random rungs; the engine's tokens carry markup."""
    rollouts = dump(seed=seed, engine=spec)
    random = torch.Generator().manual_seed(seed)
    rungs = {"bf16": rollouts.learner_logprobs}
    for rung in ["fp32", *(["simulated"] if spec.endswith("int8") else []), "prefill"]:
        rungs[rung] = list(rungs.values())[-1] + 0.01 * torch.randn(rollouts.tokens, generator=random)
    rungs["decode"] = rollouts.sampler_logprobs
    twice = [rungs["prefill"] + 0.01, rungs["prefill"]] if spec.endswith("int8") else None
    differs_N = torch.arange(rollouts.tokens) % 50 == 0
    return Measured(spec, split_gap(spec, rollouts, rungs, rungs["prefill"], differs_N, twice), rollouts)


class HostileTokenizer:
    def decode(self, ids) -> str:
        return "".join(HOSTILE[token] for token in ids)


def write_ladders(path: Path, specs=("vllm:int8", "vllm:bf16")) -> list[Measured]:
    found = [measured(spec, seed) for seed, spec in enumerate(specs)]
    write_measured(measured_json("models/<x>", "sums", found, HostileTokenizer()), found, path)
    return found


def test_a_measured_ladder_is_drawn_with_its_parts_its_nulls_and_its_tokens(tmp_path):
    found = write_ladders(tmp_path / "measured.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "measured-vllm-bf16.parquet",
        "measured-vllm-int8.parquet",
        "measured.json",
    ]
    page = read(write_report(tmp_path / "measured.json"))
    for one in found:
        assert f"{one.spec} against the bf16 learner" in page.text and f"The gap: {one.spec}" in page.text
        for step in one.ladder.steps:
            assert f"{step.share:.1%}" in page.text and f"{step.share_low:.1%} to {step.share_high:.1%}" in page.text
    int8, _, bf16 = page.text.partition("vllm:bf16 against")
    assert "null of kernels" in int8 and "null of kernels" not in bf16
    assert "Growth with position" in page.text and "models/<x> on sums" in page.text
    assert "rate another token highest at 2.0%" in page.text


def test_a_ladder_is_found_beside_its_rollouts_and_in_a_run(tmp_path):
    write_ladders(tmp_path / "one.parquet", ["vllm:int8"])
    assert {file.name for file in tmp_path.iterdir()} == {"one.parquet", "one.json"}
    assert "Where it comes from" in read(write_report(tmp_path / "one.parquet")).text
    run = write_run(tmp_path / "run")
    assert "Where it comes from" not in read(write_report(run)).text
    write_ladders(run, ["vllm:int8"])
    assert (run / "measure.json").exists()
    text = read(write_report(run)).text
    assert "Where it comes from" in text and "12 steps" in text and "6,144 responses" not in text


def test_a_ladder_without_its_rollouts_is_still_shown(tmp_path):
    write_ladders(tmp_path / "one.json", ["vllm:int8"])
    (tmp_path / "one.parquet").unlink()
    text = read(write_report(tmp_path / "one.json")).text
    assert "No verdict on health" in text and "Parts of the gap" in text


def test_a_ladder_of_another_release_is_refused_by_name(tmp_path):
    write_ladders(tmp_path / "one.json", ["vllm:int8"])
    text = (tmp_path / "one.json").read_text().replace('"schema": 1', '"schema": 9', 1)
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(ValueError, match="schema 9; this trueup reads 1"):
        write_report(tmp_path / "one.json")


def test_every_cause_has_words():
    assert all(said(cause) != cause for cause in CAUSES)


# --- text -------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=30))
def test_any_text_shows_as_itself(text):
    shown = visible(text)
    page = Page(f"<p title='{shown}'>{shown}</p>")
    assert [tag for tag, _ in page.tags] == ["p"]
    restored = re.sub(r"\\u\{([0-9a-f]+)\}", lambda match: chr(int(match[1], 16)), page.text)
    restored = restored.replace("\u21b5\n", "\n").replace("\u21e5\t", "\t")
    if "\\" not in text and "\u21b5" not in text and "\u21e5" not in text:
        assert restored == text
    shown.encode()  # no lone surrogate may reach the file


def test_markup_in_tokens_makes_no_elements(tmp_path):
    plain = tmp_path / "plain.html"
    dump(noise=0.5).to_parquet(tmp_path / "dump.parquet")
    write_report(tmp_path / "dump.parquet", plain)
    hostile = write_report(tmp_path / "dump.parquet", tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    tags = [[tag for tag, _ in read(path).tags if tag != "p"] for path in (plain, hostile)]
    assert tags[0] == tags[1]
    assert not any(name.startswith("on") for _, attributes in read(hostile).tags for name in attributes)
    assert "</td></table>" in read(hostile).text


def test_the_page_refers_to_nothing_outside(tmp_path):
    text = write_report(write_run(tmp_path / "run")).read_text()
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", text.replace("src=x onerror", ""))


# --- the browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if BINARY is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    return write_report(write_run(tmp_path_factory.mktemp("report") / "run"))


@pytest.fixture(scope="module")
def ladder_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    write_ladders(folder / "measured.json")
    return write_report(folder / "measured.json", tokenizer=write_tokenizer(folder / "tokenizer"))


@pytest.fixture(scope="module")
def faulty_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    rollouts = dump(200, engine="vllm:int8")
    rollouts.sampler_logprobs[::40] = 1.0
    rollouts.sampler_logprobs[1::40] = math.nan
    rollouts.loss_mask[2::40] = False
    rollouts.to_parquet(folder / "faulty.parquet")
    return write_report(folder / "faulty.parquet", tokenizer=write_tokenizer(folder / "tokenizer"))


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "ladder", "faulty"])
def test_it_fits_the_window_in_both_themes(browser, request, name, width, scheme):
    """Screenshots go to build/screenshots (or TRUEUP_ARTEFACTS), to be looked at."""
    folder = Path(os.environ.get("TRUEUP_ARTEFACTS", Path(__file__).parent.parent / "build" / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    page = request.getfixturevalue(f"{name}_page")
    browser.open(page, width, scheme)
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert browser.screenshot(folder / f"{name}-{width}-{scheme}.png").stat().st_size > 20_000


@pytest.mark.parametrize("name", ["run", "ladder", "faulty"])
def test_the_browser_has_nothing_to_mend(browser, request, name):
    """Wrong nesting makes a browser move or close elements: its tree would not be what the file says."""
    page = request.getfixturevalue(f"{name}_page")
    browser.open(page)
    tree = browser.evaluate("[...document.querySelectorAll('*')].map(e => e.localName)")
    added = browser.evaluate("document.querySelectorAll('path.guide').length")
    written = [tag for tag, _ in read(page).tags]
    assert sorted(tree) == sorted(written + ["path"] * added)
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    unnamed = (
        "[...document.querySelectorAll('svg:not([aria-hidden])')].filter(e => !e.getAttribute('aria-label')).length"
    )
    assert browser.evaluate(unnamed) == 0
    levels = browser.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(e => +e.localName[1])")
    assert levels[0] == 1 and all(after - before <= 1 for before, after in zip(levels, levels[1:]))


def test_every_chart_has_its_numbers_in_a_table(browser, run_page):
    browser.open(run_page)
    charts = browser.evaluate(
        "[...document.querySelectorAll('svg.plot[data-x]')].map(plot => [plot.dataset.x.split(' ').length, "
        "plot.parentNode.querySelectorAll('tbody tr').length])"
    )
    assert len(charts) > 10 and all(reached == rows for reached, rows in charts)
    figure = "document.querySelector('figure')"
    assert not browser.evaluate(f"{figure}.querySelector('tbody').checkVisibility({{contentVisibilityAuto: true}})")
    browser.evaluate(f"{figure}.querySelector('summary').focus()")
    browser.evaluate(f"{figure}.querySelector('summary').click()")
    assert browser.evaluate(f"[...{figure}.querySelectorAll('tbody tr')].at(-1).innerText").split() == ["12", "0.6"]


def test_markup_shows_as_text_in_the_browser(browser, run_page):
    browser.open(run_page)
    assert browser.evaluate("window.harmed") is None
    assert browser.evaluate("document.querySelectorAll('script').length") == 1
    assert browser.evaluate("document.querySelectorAll('img, iframe, object, body style').length") == 0
    assert "<script>window.harmed=1</script>" in browser.evaluate("document.body.textContent")


def test_numbers_appear_under_the_pointer_and_by_keyboard(browser, run_page):
    browser.open(run_page)
    where = "document.querySelector('.tokens.body')"
    browser.evaluate(f"{where}.scrollIntoView()")
    x, y = browser.evaluate(
        f"(r => [r.left + r.width / 2, r.top + r.height / 2])({where}.querySelector('i').getClientRects()[0])"
    )
    browser.move(x, y)
    tip = "document.getElementById('tip')"
    assert re.search(r"position \d+\nlog pi -.*log mu -.*\nlog rho ", browser.evaluate(f"{tip}.textContent"))
    browser.move(1, 1)
    browser.key("Tab")
    browser.evaluate(f"{where}.focus()")
    browser.key("End")
    last = browser.evaluate(f"[...{where}.querySelectorAll('i[data-n]')].at(-1).dataset.n.split('|')[0]")
    assert f"position {last}\n" in browser.evaluate(f"{tip}.textContent")
    browser.key("ArrowLeft")
    assert f"position {int(last) - 1}\n" in browser.evaluate(f"{tip}.textContent")
    browser.key("Escape")
    assert browser.evaluate(f"{tip}.hidden")
    browser.evaluate("document.querySelector('svg.plot').focus()")
    browser.key("ArrowRight")
    assert "mean reward" in browser.evaluate(f"{tip}.textContent")


def test_the_button_changes_the_theme(browser, run_page):
    browser.open(run_page, scheme="light")
    seen = []
    for _ in range(3):
        browser.evaluate("document.getElementById('theme').click()")
        seen.append(
            browser.evaluate("[document.getElementById('theme').textContent, document.documentElement.dataset.theme]")
        )
    assert seen == [["Theme: light", "light"], ["Theme: dark", "dark"], ["Theme: auto", None]]


def test_it_prints_dark_on_white(browser, run_page):
    browser.open(run_page, scheme="dark", media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.getElementById('theme')).display") == "none"
