"""`trueup explain`: the dump is read as its columns say, causes follow from statistics, a healthy dump raises no alarm."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.cli import main
from trueup.explain.columns import parse_columns
from trueup.explain.dump import expand, read_batches
from trueup.explain.gates import failed_gates, parse_gate
from trueup.explain.sample import Sampler
from trueup.explain.significance import binomial_tail, clustered_z, two_groups
from trueup.explain.statistics import ClusteredMean
from trueup.explain.verdict import explain, scan

DATA = Path(__file__).parent / "data" / "explain"
FLOORS = ("precision", "quantised")


def slice_of(name: str) -> pa.Table:
    return pq.read_table(DATA / f"{name}.parquet")


def with_values(table: pa.Table, name: str, rows: list) -> pa.Table:
    column = pa.array(rows, pa.list_(pa.float32()))
    return table.set_column(table.column_names.index(name), name, column)


def verdict_of(table: pa.Table, path: Path) -> dict:
    pq.write_table(table, path)
    return explain([str(path)])


def named(verdict: dict) -> list[str]:
    return [cause["cause"] for cause in verdict["causes"] if cause["cause"] not in FLOORS]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- causes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ground"), [("healthy-bf16", "precision"), ("healthy-int8", "quantised")])
def test_a_healthy_dump_raises_no_alarm(name, ground):
    verdict = explain([str(DATA / f"{name}.parquet")])
    assert verdict["healthy"] and [cause["cause"] for cause in verdict["causes"]] == [ground]
    assert verdict["causes"][0]["share"] == 1.0


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("temperature-raw-t06", "temperature"),
        ("truncated-support-top-p", "truncated-support"),
        ("cache-stale-prefix", "cache"),
        ("weights-never-delivered", "weights"),
    ],
)
def test_a_fault_of_a_real_engine_is_named(name, cause):
    verdict = explain([str(DATA / f"{name}.parquet")])
    assert not verdict["healthy"] and named(verdict) == [cause]
    assert sum(found["share"] for found in verdict["causes"]) == pytest.approx(1, abs=1e-3)
    assert any(found["cause"] in FLOORS for found in verdict["causes"])


def test_several_engines_in_one_dump_are_no_replicas_with_other_weights(tmp_path):
    bf16, int8 = slice_of("healthy-bf16"), slice_of("healthy-int8")
    both = pa.concat_tables([bf16, int8.select(bf16.column_names).cast(bf16.schema)])
    verdict = verdict_of(both, tmp_path / "both.parquet")
    assert verdict["healthy"] and named(verdict) == []
    where = {cause["cause"]: cause["where"] for cause in verdict["causes"]}
    assert where["precision"].startswith("vllm:bf16: ") and where["quantised"].startswith("vllm:int8: ")
    assert sum(cause["share"] for cause in verdict["causes"]) == pytest.approx(1, abs=1e-3)
    rows = {cause["cause"]: cause["rows"] for cause in verdict["causes"]}
    assert rows["quantised"] == list(range(len(bf16), len(both)))


def test_a_fault_of_one_engine_is_named_beside_a_healthy_one(tmp_path):
    bf16, int8 = slice_of("healthy-bf16"), slice_of("healthy-int8")
    shifted = with_values(int8, "sampler_logprobs", [row[1:] + row[:1] for row in int8["sampler_logprobs"].to_pylist()])
    both = pa.concat_tables([bf16, shifted.select(bf16.column_names).cast(bf16.schema)])
    verdict = verdict_of(both, tmp_path / "both.parquet")
    assert named(verdict)[0] == "misaligned" and verdict["causes"][0]["where"].startswith("vllm:int8: ")


def test_a_copy_is_said_to_be_one(tmp_path):
    table = slice_of("healthy-bf16")
    copied = with_values(table, "learner_logprobs", table["sampler_logprobs"].to_pylist())
    (cause,) = verdict_of(copied, tmp_path / "copied.parquet")["causes"]
    assert cause["cause"] == "precision" and "nothing was recomputed" in cause["evidence"]


def test_a_shift_in_some_rows_names_exactly_these_rows(tmp_path):
    table = slice_of("healthy-bf16")
    rows = table["sampler_logprobs"].to_pylist()
    for row in (3, 10, 21):
        rows[row] = rows[row][1:] + rows[row][:1]
    verdict = verdict_of(with_values(table, "sampler_logprobs", rows), tmp_path / "d.parquet")
    assert named(verdict) == ["misaligned"] and verdict["causes"][0]["rows"] == [3, 10, 21]


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, -9999.0])
def test_a_constant_at_the_last_token_is_a_placeholder(value, tmp_path):
    table = slice_of("healthy-bf16")
    rows = [row[:-1] + [value] for row in table["sampler_logprobs"].to_pylist()]
    verdict = verdict_of(with_values(table, "sampler_logprobs", rows), tmp_path / "d.parquet")
    assert named(verdict) == ["placeholder"]
    found = next(cause for cause in verdict["causes"] if cause["cause"] == "placeholder")
    assert "last token" in found["evidence"]


def test_missing_log_probs_are_counted_and_their_rows_named(tmp_path):
    table = slice_of("healthy-bf16")
    rows = table["sampler_logprobs"].to_pylist()
    rows[5][7] = None
    rows[9] = rows[9][:-2]
    verdict = verdict_of(with_values(table, "sampler_logprobs", rows), tmp_path / "d.parquet")
    found = next(cause for cause in verdict["causes"] if cause["cause"] == "missing")
    assert found["rows"] == [5, 9] and verdict["stats"]["rows_with_unequal_lengths"] == 1


def test_tool_output_in_the_loss_is_an_observation_and_masked_out_it_is_nothing(tmp_path):
    table, rng = slice_of("healthy-bf16"), np.random.default_rng(0)
    columns = {name: table[name].to_pylist() for name in ("response_ids", "sampler_logprobs", "learner_logprobs")}
    mask = []
    for i in range(table.num_rows):
        spoken = {"response_ids": [1] * 12, "sampler_logprobs": [0.0] * 12}
        spoken["learner_logprobs"] = (-rng.gamma(1.5, 3, 12)).tolist()
        for name, values in spoken.items():
            columns[name][i][40:40] = values
        mask.append([not 40 <= t < 52 for t in range(len(columns["response_ids"][i]))])
    table = pa.table({**columns, "engine": table["engine"]})
    assert named(verdict_of(table, tmp_path / "in.parquet")) == ["observation"]
    masked = table.append_column("loss_mask", pa.array(mask))
    assert verdict_of(masked, tmp_path / "out.parquet")["healthy"]


def test_two_faults_are_both_named(tmp_path):
    table = slice_of("truncated-support-top-p")
    rows = [row[:-1] + [1.0] for row in table["sampler_logprobs"].to_pylist()]
    verdict = verdict_of(with_values(table, "sampler_logprobs", rows), tmp_path / "d.parquet")
    assert sorted(named(verdict)) == ["placeholder", "truncated-support"]


@settings(max_examples=8, deadline=None)
@given(
    st.randoms(use_true_random=False), st.sampled_from(["healthy-int8", "cache-stale-prefix", "temperature-raw-t06"])
)
def test_the_order_of_rows_does_not_change_the_verdict(tmp_path_factory, random, name):
    table = slice_of(name)
    order = list(range(table.num_rows))
    random.shuffle(order)
    folder = tmp_path_factory.mktemp("order")
    before, after = verdict_of(table, folder / "a.parquet"), verdict_of(table.take(order), folder / "b.parquet")
    assert named(before) == named(after)
    for one, other in zip(before["causes"], after["causes"]):
        assert one["share"] == pytest.approx(other["share"], abs=1e-3)
        assert sorted(order[row] for row in other["rows"]) == one["rows"]


def test_what_a_bounded_sample_keeps_does_not_depend_on_order(tmp_path):
    table = slice_of("healthy-bf16")
    kept = []
    for order in (np.arange(32), np.arange(32)[::-1]):
        path = tmp_path / "d.parquet"
        pq.write_table(pa.concat_tables([table] * 4).take(np.concatenate([order + 32 * k for k in range(4)])), path)
        sampler = Sampler(bound=9000)
        for batch in read_batches([path], {}):
            sampler.add(batch)
        kept.append(np.sort(sampler.sample().sampler_N))
    assert len(kept[0]) <= 9000 and np.array_equal(*kept)


# --- numbers --------------------------------------------------------------------------------------------------------


def test_statistics_match_a_hand_computed_dump(tmp_path):
    half = math.log(0.5)
    rows = [
        {"response_ids": [1, 2], "sampler_logprobs": [half, half], "learner_logprobs": [half, 2 * half], "step": 0},
        {"response_ids": [3], "sampler_logprobs": [2 * half], "learner_logprobs": [half], "step": 1},
    ]
    stats = explain([write_jsonl(tmp_path / "d.jsonl", rows)])["stats"]
    # rho = 1, 1/2, 2; log rho = 0, -ln 2, ln 2.
    assert stats["rho"]["mean"] == pytest.approx(3.5 / 3, rel=1e-6)
    assert stats["kl_k1"]["mean"] == pytest.approx(0, abs=1e-6)
    assert stats["kl_k3"]["mean"] == pytest.approx(0.5 / 3, rel=1e-5)
    assert stats["ess_token"] == pytest.approx(3.5**2 / (3 * 5.25), rel=1e-6)
    assert stats["ess_sequence"] == pytest.approx(2.5**2 / (2 * 4.25), rel=1e-6)
    # Residuals by response: (1.5 - 2R, 2 - R) = (-5/6, 5/6); variance 2/1 * 2 * (5/6)^2 / 9.
    assert stats["rho"]["high"] - stats["rho"]["mean"] == pytest.approx(1.96 * math.sqrt(4 * 25 / 36 / 9), rel=1e-5)
    assert [(entry["step"], entry["tokens"]) for entry in stats["by_step"]] == [(0, 2), (1, 1)]
    assert [(entry["from"], entry["tokens"]) for entry in stats["by_position"]] == [(0, 2), (1, 1)]


def test_streamed_intervals_equal_those_of_all_responses_at_once():
    rng = np.random.default_rng(0)
    n, s = rng.integers(1, 9, 50).astype(float), rng.normal(size=50)
    streamed = ClusteredMean(1, 1)
    for part in (slice(0, 13), slice(13, 50)):
        streamed.add(np.zeros(len(n[part]), int), n[part], [s[part]])
    mean, error = streamed.mean(0)
    assert mean / error == pytest.approx(clustered_z(s, n), rel=1e-9)


def test_two_groups_tells_a_mixture_from_one_normal_sample():
    rng = np.random.default_rng(1)
    one = rng.normal(size=40)
    assert two_groups(one)[0] > 0.01
    p, upper, distance = two_groups(np.concatenate([one, rng.normal(8, 1, 20)]))
    assert p < 0.005 and upper.sum() == 20 and distance == pytest.approx(8, abs=0.6)


def test_the_binomial_bound_is_above_the_exact_tail():
    exact = sum(math.comb(20, k) * 0.1**k * 0.9 ** (20 - k) for k in range(6, 21))
    assert exact <= binomial_tail(6, 20, 0.1) < 20 * exact
    assert binomial_tail(1, 20, 0.1) == 1


# --- formats --------------------------------------------------------------------------------------------------------


def test_padded_arrays_of_another_framework_are_cut_to_the_response(tmp_path):
    row = {"responses": [5, 6, 0], "response_mask": [1, 1, 0]}
    row |= {"rollout_log_probs": [-0.5, -0.7, 0.0], "old_log_probs": [-0.5, -0.6, 0.0]}
    path = write_jsonl(tmp_path / "verl.jsonl", [row, row])
    for columns in (None, "verl"):
        statistics, sampler = scan([path], columns)
        assert statistics.tokens == 4 and statistics.missing == 0
    assert sampler.sample().sampler_N == pytest.approx([-0.5, -0.7] * 2)


def test_whole_sequences_lose_their_prompt_and_ids_before_the_response_are_cut(tmp_path):
    prime = {"token_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, True], "step": 3}
    prime |= {"inference_logprobs": [0, 0, -1, -2], "trainer_logprobs": [0, -3, -1, -2]}
    slime = {"tokens": [1, 2, 3, 4], "response_length": 2, "loss_mask": [1, 1]}
    slime |= {"rollout_log_probs": [-1, -2], "log_probs": [-1, -2]}
    for name, row in (("prime", prime), ("slime", slime)):
        batch = next(read_batches([Path(write_jsonl(tmp_path / f"{name}.jsonl", [row]))], {}))
        assert batch.lengths.tolist() == [2] and batch.ids_N.tolist() == [3, 4] and batch.mask_N.all()
        assert batch.sampler_N.tolist() == [-1, -2]


def test_columns_are_renamed_as_told(tmp_path):
    rows = [{"a": [-1.0, -2.0], "b": [-1.0, None]}] * 2
    statistics, _ = scan([write_jsonl(tmp_path / "d.jsonl", rows)], "sampler_logprobs=a,learner_logprobs=b")
    assert (statistics.rows, statistics.tokens, statistics.missing) == (2, 2, 2)


def test_files_folders_and_globs_are_found(tmp_path):
    for name in ("step-1.parquet", "step-2.parquet"):
        pq.write_table(slice_of("healthy-bf16"), tmp_path / name)
    assert len(expand([str(tmp_path)])) == len(expand([str(tmp_path / "step-*.parquet")])) == 2
    assert explain([str(tmp_path)])["stats"]["rows"] == 64


# --- what is refused ------------------------------------------------------------------------------------------------


def test_unreadable_and_foreign_files_say_what_is_wrong(tmp_path):
    empty, broken, foreign = tmp_path / "empty.parquet", tmp_path / "broken.parquet", tmp_path / "foreign.parquet"
    empty.write_bytes(b"")
    broken.write_bytes((DATA / "healthy-bf16.parquet").read_bytes()[:20_000])
    pq.write_table(pa.table({"text": ["a"]}), foreign)
    newer = tmp_path / "newer.parquet"
    pq.write_table(slice_of("healthy-bf16").replace_schema_metadata({"trueup.schema": "2"}), newer)
    norows = tmp_path / "norows.parquet"
    pq.write_table(slice_of("healthy-bf16").slice(0, 0), norows)
    unscored = tmp_path / "unscored.parquet"
    pq.write_table(slice_of("healthy-bf16").drop_columns(["learner_logprobs"]), unscored)
    text = tmp_path / "text.jsonl"
    text.write_text("hello\n")
    for path, message in (
        (empty, "not a readable parquet file"),
        (broken, "not a readable parquet file"),
        (foreign, "has no column sampler_logprobs; it has text"),
        (newer, "trueup.schema=2"),
        (norows, "holds no rows"),
        (unscored, "no column learner_logprobs.*score the responses"),
        (text, "line 1: not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            explain([str(path)])
    with pytest.raises(FileNotFoundError, match="no file matches"):
        explain([str(tmp_path / "absent-*.parquet")])


def test_wrong_options_say_what_is_expected():
    for columns, message in (
        ("nosuch", "formats: trl, verl"),
        ("logps=a", "does not read"),
        ("step=", "names no column"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_columns(columns)
    for gate in ("kl", "speed<1", "kl<small"):
        with pytest.raises(ValueError, match="--gate"):
            parse_gate(gate)


def test_a_gate_on_a_statistic_that_does_not_exist_fails():
    assert failed_gates([parse_gate("kl<1")], {"kl_k3": {"mean": None}}) == ["gate kl<1 failed: kl is not measurable"]


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_one_json_object_and_a_failed_gate_exits_1(capsys):
    dump = str(DATA / "healthy-int8.parquet")
    assert main(["explain", dump, "--json", "--gate", "kl<0.1", "--gate", "ess>0.5"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["schema"] == 1 and verdict["healthy"] is True
    keys = {"cause", "confidence", "share", "rows", "where", "evidence", "remedy"}
    assert all(set(cause) == keys for cause in verdict["causes"])
    assert main(["explain", dump, "--json", "--gate", "kl<0.0001"]) == 1
    assert "gate kl<0.0001 failed: kl is 0.00" in capsys.readouterr().err


def test_the_command_prints_the_verdict_and_bad_input_exits_2(capsys, tmp_path):
    assert main(["explain", str(DATA / "cache-stale-prefix.parquet")]) == 0
    printed = capsys.readouterr().out
    assert "not healthy: cache" in printed and "E[rho]" in printed
    assert main(["explain", str(tmp_path / "absent.parquet")]) == 2
    assert "no file matches" in capsys.readouterr().err
