"""The signatures of `trueup explain`, each against numbers computed by hand or data whose cause is known."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trueup.explain.alignment import shifted
from trueup.explain.responses import Rows, growth
from trueup.explain.sample import Sample, log_odds
from trueup.explain.shape import NAMES as SHAPE_NAMES
from trueup.explain.shape import _across, describe_shape, favoured
from trueup.explain.significance import as_normal
from trueup.explain.verdict import explain

DATA = Path(__file__).parent / "data" / "explain"


def a_sample(mu, pi, lengths, group=None, ids=None, step=None, engine="vllm:bf16", temperature=1.0) -> Sample:
    count = len(lengths)
    rows = lambda value: np.zeros(count) + (value if value is not None else np.arange(count))  # noqa: E731
    return Sample(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        sampler_N=np.asarray(mu, np.float64),
        learner_N=np.asarray(pi, np.float64),
        mask_N=np.ones(len(mu), bool),
        unequal_B=np.zeros(count, bool),
        number_B=np.arange(count),
        columns={
            "step": rows(0 if step is None else step),
            "group": rows(group),
            "temperature": rows(temperature),
            "lag": np.full(count, np.nan),
        },
        ids_N=ids,
        engine=engine,
        seen_rows=count,
    )


def test_the_covariance_of_equal_ids_in_other_prompts_matches_a_loop_over_pairs():
    rng = np.random.default_rng(0)
    values, ids, group = rng.normal(size=60), rng.integers(0, 5, 60), np.repeat(np.arange(6), 10)
    pairs = [(i, j) for i in range(60) for j in range(60)]
    sums, weights = 0.0, 0.0
    for token in range(5):
        found = [values[i] * values[j] for i, j in pairs if ids[i] == ids[j] == token and group[i] != group[j]]
        weight = min(math.sqrt(len(found)), 10)
        sums, weights = sums + weight * np.mean(found), weights + weight
    assert _across(values, ids, group.astype(float)) == pytest.approx(sums / weights)


def test_the_shape_of_a_gap_does_not_depend_on_its_scale():
    rng = np.random.default_rng(1)
    sample = a_sample(np.full(4000, -0.7), np.full(4000, -0.7), np.full(40, 100), np.repeat(np.arange(20), 2))
    sample.ids_N = rng.integers(0, 50, 4000)
    gap, free = rng.normal(size=4000).cumsum() % 3 - 1.5, np.arange(4000)
    one, other = (describe_shape(sample, free, gap * size, size) for size in (0.1, 1.0))
    assert one == pytest.approx(other, abs=1e-9) and len(one) == len(SHAPE_NAMES)


def test_unrelated_series_are_astray_and_a_temperature_is_not():
    rng = np.random.default_rng(2)
    mu, other = (-rng.gamma(0.7, 1.0, 20 * 96) for _ in range(2))
    lengths = np.full(20, 96)
    assert shifted(a_sample(mu, other, lengths)).cause == "retokenised"
    assert shifted(a_sample(mu, mu + rng.normal(0, 0.1, len(mu)) * mu, lengths)) is None
    # Log-odds times three: far from the sampler's value, in the same order.
    odds = 3 * log_odds(mu)
    assert shifted(a_sample(mu, -np.log1p(np.exp(-odds)), lengths)) is None


def rows_with_scales(scales_by_step, rows=16, tokens=60, seed=0) -> Rows:
    rng = np.random.default_rng(seed)
    step = np.repeat(np.arange(len(scales_by_step)), rows)
    gap = rng.normal(size=(len(step), tokens)) * np.asarray(scales_by_step)[step][:, None]
    mu = np.full(gap.size, math.log(0.5))
    sample = a_sample(mu, -np.log1p(np.exp(-gap.ravel())), np.full(len(step), tokens), step=step)
    return Rows(sample, np.arange(gap.size))


def test_a_gap_that_grows_on_and_one_that_stays_level_are_told_apart():
    assert growth(rows_with_scales([0.1] * 8)) is None
    first, ratio, knee = growth(rows_with_scales([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]))
    assert first == 0 and knee is None and ratio == pytest.approx(math.sqrt(0.7 * 0.8 / (0.1 * 0.2)), rel=0.1)
    first, ratio, knee = growth(rows_with_scales([0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]))
    assert knee == 2
    assert growth(rows_with_scales([0.1, 0.3, 0.3, 0.3]))[2] is None  # four steps cannot tell


def test_students_t_is_read_as_a_normal_value_of_the_same_tail():
    # One-sided 0.1% points of t: 4.785 (7), 3.733 (15), 3.385 (30 degrees of freedom); the normal's is 3.090.
    for t, freedom in ((4.785, 7), (3.733, 15), (3.385, 30)):
        assert as_normal(t, freedom) == pytest.approx(3.090, abs=0.02)
        assert as_normal(-t, freedom) == -as_normal(t, freedom)
    assert as_normal(100.0, 0) == 0.0 and as_normal(math.inf, 3) == 0.0


def test_ids_that_gain_in_every_prompt_are_favoured_and_chance_is_not():
    rng = np.random.default_rng(3)
    sample = a_sample(np.full(6400, -0.7), np.full(6400, -0.7), np.full(64, 100), np.repeat(np.arange(32), 2))
    sample.ids_N, free = rng.integers(0, 40, 6400), np.arange(6400)
    noise = rng.normal(size=6400)
    assert abs(favoured(sample, free, noise, 1.0)[1]) < 3.5
    liked = noise + 0.5 * rng.normal(size=40)[sample.ids_N]
    correlation, z = favoured(sample, free, liked, 1.0)
    assert correlation == pytest.approx(0.2, abs=0.08) and z > 5  # 0.25 / 1.25, less what the bound takes
    # The prompt's own liking is not shared with the others.
    own = noise + 0.5 * rng.normal(size=(32, 40))[np.repeat(np.arange(32), 200), sample.ids_N]
    assert favoured(sample, free, own, 1.0)[1] < 3.5


# --- a 0.5B model sampled by vLLM, scored under known faults (bench/explain_bank.py) ---------------------------------


def table_of(name: str) -> pa.Table:
    return pq.read_table(DATA / f"{name}.parquet")


def causes_of(table: pa.Table, path: Path) -> list[dict]:
    pq.write_table(table, path)
    return [cause for cause in explain([str(path)])["causes"] if cause["cause"] not in ("precision", "quantised")]


def learner(table: pa.Table, variants: list[str]) -> pa.Table:
    """The learner's log-probs of row i become those of variants[i]; "" leaves them."""
    columns = {
        name: table[name].to_pylist() for name in {f"learner.{v}" if v else "learner_logprobs" for v in variants}
    }
    rows = [columns[f"learner.{v}" if v else "learner_logprobs"][i] for i, v in enumerate(variants)]
    at = table.column_names.index("learner_logprobs")
    return table.set_column(at, "learner_logprobs", pa.array(rows, pa.list_(pa.float32())))


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize(
    ("variant", "cause"),
    [
        ("other-system", "prompt"),
        ("no-instruction", "prompt"),
        ("sft1", "weights"),
        ("sft4", "weights"),
        ("layers12", "weights"),
    ],
)
def test_another_prompt_and_other_weights_are_told_apart_at_one_step(variant, cause, with_ids, tmp_path):
    table = learner(table_of("variants-bf16"), [variant] * 32)
    found = causes_of(table if with_ids else table.drop_columns(["response_ids"]), tmp_path / "d.parquet")
    assert [f["cause"] for f in found] == [cause]
    # Whatever is less than sure names the runner-up.
    runner_up = {"prompt": "weights would look", "weights": "prompt would look"}[cause]
    assert (found[0]["confidence"] <= 0.9) == (runner_up in found[0]["evidence"])


@pytest.mark.parametrize("by_prompt", [True, False])
def test_responses_that_were_cut_anew_are_named_also_in_a_quarter_of_the_rows(by_prompt, tmp_path):
    rows = set(range(8, 16) if by_prompt else range(0, 32, 4))
    table = learner(table_of("variants-bf16"), ["retok-24" if i in rows else "" for i in range(32)])
    (found,) = causes_of(table, tmp_path / "d.parquet")
    assert found["cause"] == "retokenised" and set(found["rows"]) <= rows and len(found["rows"]) >= 7


def in_steps(table: pa.Table, variants: list[str]) -> pa.Table:
    """The sixteen prompts spread over len(variants) steps, each scored by its step's variant."""
    step = np.repeat(np.arange(16) % len(variants), 2)
    return learner(table, [variants[s] for s in step]).append_column("step", pa.array(step, pa.int32()))


def test_weights_that_fall_further_behind_are_never_delivered(tmp_path):
    table = in_steps(table_of("variants-bf16"), ["", "sft1", "sft2", "sft4"])
    (found,) = causes_of(table, tmp_path / "d.parquet")
    assert found["cause"] == "weights" and "never delivered" in found["evidence"]
    assert "steps 1, 2, 3" in found["where"]


def test_weights_that_stay_two_versions_behind_are_said_to_be_so(tmp_path):
    table = in_steps(table_of("variants-bf16"), ["", "sft1"] + ["sft2"] * 6)
    (found,) = causes_of(table, tmp_path / "d.parquet")
    assert found["cause"] == "weights" and "about 2 versions behind" in found["evidence"]


@pytest.mark.parametrize("seed", range(6))
def test_few_prompts_a_step_raise_no_alarm(seed, tmp_path):
    # With two prompts a step an error of two clusters is no error: z of a step alone must not count.
    for name in ("healthy-bf16", "variants-t06"):
        table = table_of(name)
        groups, at = np.unique(table["group"].to_numpy(), return_inverse=True)
        step = np.random.default_rng(seed).permutation(len(groups))[at] % 8
        table = table.drop_columns([c for c in ("step",) if c in table.column_names])
        assert causes_of(table.append_column("step", pa.array(step, pa.int32())), tmp_path / "d.parquet") == []


def test_a_temperature_in_some_rows_does_not_hide_other_weights_in_the_rest(tmp_path):
    first, second = table_of("variants-t06"), learner(table_of("variants-bf16"), ["sft4"] * 32)
    first = first.set_column(
        first.column_names.index("sampler_logprobs"), "sampler_logprobs", first["learner.raw-sampler"]
    )
    names = ["response_ids", "sampler_logprobs", "learner_logprobs", "engine"]
    table = pa.concat_tables([first.select(names), second.select(names)])
    group = np.concatenate([first["group"].to_numpy(), 100 + second["group"].to_numpy()])
    found = causes_of(table.append_column("group", pa.array(group, pa.int32())), tmp_path / "d.parquet")
    assert {f["cause"] for f in found} == {"temperature", "weights"}
    rows = {f["cause"]: set(f["rows"]) for f in found}
    # A very short response has no slope of its own.
    assert len(rows["weights"] & set(range(24, 56))) >= 29 and len(rows["weights"] & set(range(24))) <= 2
    assert len(rows["temperature"] & set(range(24))) >= 18 and not rows["temperature"] & set(range(24, 56))


def test_one_placeholder_in_a_hundred_is_seen_among_certain_tokens(tmp_path):
    # At temperature 0.6 most log-probs are exactly 0 on both sides.
    table, rng = table_of("variants-t06"), np.random.default_rng(4)
    assert causes_of(table, tmp_path / "d.parquet") == []
    rows = [[0.0 if rng.random() < 0.01 else v for v in row] for row in table["sampler_logprobs"].to_pylist()]
    at = table.column_names.index("sampler_logprobs")
    table = table.set_column(at, "sampler_logprobs", pa.array(rows, pa.list_(pa.float32())))
    assert [f["cause"] for f in causes_of(table, tmp_path / "d.parquet")] == ["placeholder"]


@pytest.mark.parametrize("memory, expected", [(0.0, []), (0.9, ["cache"])])
def test_two_kinds_of_prompts_that_differ_in_noise_alone_are_no_stale_cache(tmp_path, memory, expected):
    """Every other prompt has a gap four times as large: fresh at every token, or leaning one way over stretches."""
    rng, rows, length = np.random.default_rng(0), 64, 80
    odds = rng.normal(0.5, 1.5, (rows, length))
    noise = rng.standard_normal((rows, length))
    for t in range(1, length):
        noise[:, t] = memory * noise[:, t - 1] + math.sqrt(1 - memory**2) * noise[:, t]
    upper = (np.arange(rows) // 2 % 2 == 1)[:, None]
    gap = np.where(upper, 0.12 * noise, 0.03 * rng.standard_normal((rows, length)))
    logp = lambda x: -np.log1p(np.exp(-x))  # noqa: E731
    path = tmp_path / "dump.parquet"
    table = {
        "sampler_logprobs": pa.array(logp(odds - gap / 2).tolist(), pa.list_(pa.float32())),
        "learner_logprobs": pa.array(logp(odds + gap / 2).tolist(), pa.list_(pa.float32())),
        "group": pa.array(np.arange(rows) // 2, pa.int32()),
        "engine": pa.array(["vllm:bf16"] * rows),
    }
    pq.write_table(pa.table(table), path)
    causes = [cause["cause"] for cause in explain([str(path)])["causes"]]
    assert [cause for cause in causes if cause != "precision"] == expected
