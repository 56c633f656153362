"""What `trueup explain` reads: dumps as each framework's own code writes them, statistics that no batch boundary changes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.explain import tables
from trueup.explain.columns import PRESETS, detect, parse_columns
from trueup.explain.dump import Batch, read_batches
from trueup.explain.recut import recut
from trueup.explain.statistics import POSITION_EDGES, PROBABILITY_EDGES, STEPS_KEPT, Statistics
from trueup.explain.verdict import explain, scan

DATA = Path(__file__).parent / "data" / "explain"


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only_batch(path: Path, columns: str | None = None) -> Batch:
    (batch,) = read_batches([path], *parse_columns(columns))
    return batch


def response(batch: Batch, row: int) -> dict:
    part = slice(batch.offsets[row], batch.offsets[row + 1])
    return {
        "ids": batch.ids_N[part].tolist(),
        "mu": batch.sampler_N[part].tolist(),
        "pi": batch.learner_N[part].tolist(),
        "mask": batch.mask_N[part].tolist(),
    }


# Two responses of one prompt [1, 2]: [5, 6, 7], a tool's word 8, [9]; and [5, 9].
FIRST = {"ids": [5, 6, 7, 8, 9], "mu": [-1, -2, -3, 0, -4], "pi": [-1.5, -2, -3, -9, -4], "mask": [1, 1, 1, 0, 1]}
SECOND = {"ids": [5, 9], "mu": [-0.5, -0.25], "pi": [-0.5, -0.75], "mask": [1, 1]}


def read_as_written(batch: Batch) -> None:
    assert batch.lengths.tolist() == [5, 2] and not batch.unequal_B.any()
    assert response(batch, 0) == FIRST and response(batch, 1) == SECOND
    assert batch.columns["group"][0] == batch.columns["group"][1] >= 0


# --- formats --------------------------------------------------------------------------------------------------------


def test_trl_batches_are_padded_left_and_right(tmp_path):
    row = {"prompt_ids": [0, 1, 2], "completion_mask": [1, 1, 1, 1, 1], "tool_mask": [1, 1, 1, 0, 1]}
    row |= {"completion_ids": FIRST["ids"], "sampling_per_token_logps": FIRST["mu"], "old_per_token_logps": FIRST["pi"]}
    other = {"prompt_ids": [0, 1, 2], "completion_mask": [1, 1, 0, 0, 0], "tool_mask": [1, 1, 1, 1, 1]}
    other |= {"completion_ids": [5, 9, 0, 0, 0], "sampling_per_token_logps": [*SECOND["mu"], 0, 0, 0]}
    other |= {"old_per_token_logps": [*SECOND["pi"], -7, -7, -7]}
    pq.write_table(pa.Table.from_pylist([row, other]), tmp_path / "b.parquet")
    read_as_written(only_batch(tmp_path / "b.parquet"))


def test_verl_batches_mask_tools_and_padding_alike(tmp_path):
    row = {"prompts": [0, 1, 2], "responses": FIRST["ids"], "response_mask": FIRST["mask"], "uid": "6f1e"}
    row |= {"rollout_log_probs": FIRST["mu"], "old_log_probs": FIRST["pi"]}
    other = {"prompts": [0, 1, 2], "responses": [5, 9, 0, 0, 0], "response_mask": [1, 1, 0, 0, 0], "uid": "6f1e"}
    other |= {"rollout_log_probs": [*SECOND["mu"], -1, -1, -1], "old_log_probs": [*SECOND["pi"], -7, -7, -7]}
    for path in (tmp_path / "b.parquet", tmp_path / "b.jsonl"):
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([row, other]), path)
        else:
            write_jsonl(path, [row, other])
        read_as_written(only_batch(path))


def test_prime_rl_exports_are_whole_sequences(tmp_path):
    rows = [
        {
            "schema_version": 1,
            "step": 9,
            "export_step": 7,
            "run_id": None,
            "env_name": "math",
            "token_ids": [1, 2, *own["ids"]],
            "position_ids": list(range(2 + len(own["ids"]))),
            "loss_mask": [False, False, *map(bool, own["mask"])],
            "inference_logprobs": [0.0, 0.0, *own["mu"]],
            "trainer_logprobs": [-11.9, -3.0, *own["pi"]],
            "losses": [{}, {}, *[{"rl": {"advantage": 1.0, "mask": True}} for _ in own["ids"]]],
            "entropy": [None] * (2 + len(own["ids"])),
        }
        for own in (FIRST, SECOND)
    ]
    batch = only_batch(write_jsonl(tmp_path / "token_exports" / "step_7" / "rank_0.jsonl", rows))
    read_as_written(batch)
    assert batch.columns["step"].tolist() == [7, 7]


def test_nemo_rl_logs_every_value_as_a_list_of_one(tmp_path):
    def row(own, idx, kept):
        pad = [0] * (5 - len(own["ids"]))
        return {
            "content": [["text"]],
            "rewards": [1.0],
            "input_lengths": [2 + len(own["ids"])],
            "token_ids": [[1, 2, *own["ids"], *pad]],
            "token_loss_mask": [[0, 0, *own["mask"], *pad]],
            "sample_loss_mask": [kept],
            "generation_logprobs": [[0.0, 0.0, *own["mu"], *pad]],
            "prev_logprobs": [[0.0, -3.0, *own["pi"], *pad]],
            "idx": idx,
        }

    path = write_jsonl(tmp_path / "train_data_step12.jsonl", [row(FIRST, 0, 1.0), row(SECOND, 1, 1.0)])
    batch = only_batch(path)
    read_as_written(batch)
    assert batch.columns["step"].tolist() == [12, 12]  # NeMo-RL says it in the file's name only
    dropped = only_batch(write_jsonl(tmp_path / "train_data_step13.jsonl", [row(FIRST, 0, 1.0), row(SECOND, 1, 0.0)]))
    assert dropped.mask_N.tolist() == [True, True, True, False, True, False, False]


def slime_samples(plural: bool, as_tensor: bool) -> list[dict]:
    value = (lambda items, kind: torch.tensor(items, dtype=kind)) if as_tensor else (lambda items, kind: items)
    ending = "s" if plural else ""
    return [
        {
            "tokens": value([1, 2, *own["ids"]], torch.long),
            f"response_length{ending}": len(own["ids"]),
            f"loss_mask{ending}": value(own["mask"], torch.int),
            "rollout_log_probs": value([float(x) for x in own["mu"]], torch.float32),
            "log_probs": value([float(x) for x in own["pi"]], torch.float32),
            "status": "completed",
        }
        for own in (FIRST, SECOND)
    ]


@pytest.mark.parametrize("layout", ["samples", "rollout_data"])
def test_slime_train_dumps_are_read_from_their_torch_files(tmp_path, layout):
    rows = slime_samples(plural=True, as_tensor=True)
    if layout == "samples":
        held = {
            "format_version": 2,
            "rollout_id": 4,
            "rank": 0,
            "samples": rows,
            "dp_shards": [{}],
            "raw_reward": [1, 0],
        }
    else:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        held = {
            "rollout_id": 4,
            "rank": 0,
            "rollout_data": columns | {"num_microbatches": [1], "total_lengths": [7, 4]},
        }
    torch.save(held, tmp_path / "4_0.pt")
    batch = only_batch(tmp_path / "4_0.pt")
    read_as_written(batch)
    assert batch.columns["step"].tolist() == [4, 4]
    assert only_batch(tmp_path / "4_0.pt", "slime").lengths.tolist() == [5, 2]


def test_slime_samples_converted_to_jsonl_are_read(tmp_path):
    read_as_written(only_batch(write_jsonl(tmp_path / "s.jsonl", slime_samples(plural=False, as_tensor=False))))


def test_every_preset_is_found_by_its_columns_and_our_own_names_come_first():
    for name, mapping in PRESETS.items():
        assert detect([theirs[0] for theirs in mapping.values()]) == (mapping, name)
    ours = ["sampler_logprobs", "learner_logprobs", "rollout_log_probs", "old_log_probs"]
    assert detect(ours) == ({}, None)


# --- what is refused ------------------------------------------------------------------------------------------------


class Opaque:
    """Something only a full unpickling could bring back."""


def test_a_torch_file_that_needs_code_is_refused_with_the_remedy(tmp_path):
    torch.save({"samples": [{"tokens": Opaque()}]}, tmp_path / "code.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 not an archive")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    for name, says in (
        ("code.pt", "runs no code from a dump"),
        ("broken.pt", "cannot be loaded"),
        ("other.pt", "holds a dict with weights; expected slime's"),
    ):
        with pytest.raises(ValueError, match=says):
            scan([str(tmp_path / name)])


@pytest.mark.parametrize(
    "row, says",
    [
        ({"step": 1, "prompt": "a", "completion": "b", "advantage": 0.5}, "TRL.*sampling_per_token_logps"),
        ({"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 3}, "verl.*calculate_log_probs=True"),
        ({"responses": [1], "rollout_log_probs": [-1.0]}, "bypass_mode=False"),
        ({"completion_ids": [1], "sampling_per_token_logps": [-1.0]}, "vllm_importance_sampling_correction"),
        ({"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1.0]}, "slime.*--save-debug-train-data"),
        ({"content": [["a"]], "input_lengths": [3], "idx": 0}, "NeMo-RL.*generation_logprobs"),
        ({"text": "a"}, "has no column sampler_logprobs; it has text.*--columns sampler_logprobs=THEIR_NAME"),
    ],
)
def test_a_dump_without_both_log_probs_says_what_its_writer_has_to_add(tmp_path, row, says):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
    for path in (write_jsonl(tmp_path / "d.jsonl", [row]), tmp_path / "d.parquet"):
        with pytest.raises(ValueError, match=says):
            scan([str(path)])


def test_a_name_that_the_file_lacks_is_an_error_also_where_it_has_our_own(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"sampler_logprobs": [-1.0], "learner_logprobs": [-1.0]}])
    with pytest.raises(ValueError, match="has no column 'old' for learner_logprobs; it has"):
        scan([str(path)], "learner_logprobs=old")


def test_a_column_that_is_no_list_is_named(tmp_path):
    rows = [{"sampler_logprobs": -1.0, "learner_logprobs": [-1.0]}]
    with pytest.raises(ValueError, match="sampler_logprobs is double, expected a list"):
        scan([str(write_jsonl(tmp_path / "d.jsonl", rows))])


def test_explaining_parquet_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from trueup.explain.verdict import explain; explain([sys.argv[1]]); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    dump = str(DATA / "healthy-bf16.parquet")
    assert subprocess.run([sys.executable, "-c", code, dump]).returncode == 0


# --- statistics -----------------------------------------------------------------------------------------------------


def reference(rows: list[dict]) -> dict:
    """The same numbers, plainly: one token after the other, in float64."""
    n, s = np.zeros(len(rows)), {name: np.zeros(len(rows)) for name in ("kl_k3", "kl_k1", "rho", "prob_diff")}
    place, likely, steps, squares = {}, {}, {}, 0.0
    for b, row in enumerate(rows):
        for t, (mu, pi, kept) in enumerate(zip(row["sampler_logprobs"], row["learner_logprobs"], row["loss_mask"])):
            if not kept or mu is None or pi is None:
                continue
            mu, pi = float(np.float32(mu)), float(np.float32(pi))
            x = pi - mu
            k3, rho = np.exp(x) - 1 - x, np.exp(x)
            n[b] += 1
            squares += rho**2
            for name, value in (("kl_k3", k3), ("kl_k1", -x), ("rho", rho)):
                s[name][b] += value
            s["prob_diff"][b] += abs(np.exp(pi) - np.exp(mu))
            for into, key in (
                (place, max(e for e in POSITION_EDGES if e <= t)),
                (likely, max(e for e in PROBABILITY_EDGES[:-1] if e <= np.exp(mu))),
                (steps, row["step"]),
            ):
                into.setdefault(key, []).append(k3)
    filled = n > 0
    found = {"tokens": int(n.sum()), "ess_token": s["rho"].sum() ** 2 / (n.sum() * squares)}
    for name, sums in s.items():
        mean, b = sums.sum() / n.sum(), filled.sum()
        error = np.sqrt((((sums - mean * n)[filled]) ** 2).sum() * b / (b - 1)) / n.sum()
        found[name] = (mean, mean - 1.96 * error, mean + 1.96 * error)
    w = np.exp(-s["kl_k1"][filled])
    found["ess_sequence"] = w.sum() ** 2 / (len(w) * (w**2).sum())
    for name, cells in (("by_position", place), ("by_probability", likely), ("by_step", steps)):
        found[name] = [(key, len(cells[key]), float(np.mean(cells[key]))) for key in sorted(cells)]
    return found


@st.composite
def dumps(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw(st.integers(2, 12))):
        length = int(rng.integers(0, 70))
        mu = -(rng.exponential(1.0, length) ** 2)
        # Away from the edges of the bins by probability, which are found in float32.
        mu = np.where(np.min(np.abs(np.exp(mu)[:, None] - np.array(PROBABILITY_EDGES)), 1, initial=1) < 1e-4, -0.33, mu)
        pi = np.minimum(mu + rng.normal(0, 0.2, length), 0)
        missing = rng.random(length) < draw(st.sampled_from([0.0, 0.1]))
        rows.append(
            {
                "sampler_logprobs": [None if gone else float(x) for x, gone in zip(mu, missing)],
                "learner_logprobs": pi.tolist(),
                "loss_mask": (rng.random(length) < 0.9).tolist(),
                "step": int(rng.integers(0, 4)),
            }
        )
    rows.append({"sampler_logprobs": [-1.0], "learner_logprobs": [-1.5], "loss_mask": [True], "step": 1})
    return [*rows, rows[-1] | {"learner_logprobs": [-0.75]}]


@settings(max_examples=25, deadline=None)
@given(dumps(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_statistics_equal_a_plain_reference_in_any_batches_and_order(tmp_path_factory, rows, at_once, random):
    folder, expected = tmp_path_factory.mktemp("stats"), reference(rows)
    random.shuffle(rows)
    schema = pa.schema(
        [
            ("sampler_logprobs", pa.list_(pa.float32())),
            ("learner_logprobs", pa.list_(pa.float32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("step", pa.int32()),
        ]
    )
    half = len(rows) // 2
    for name, part in (("b", rows[:half]), ("a", rows[half:])):
        pq.write_table(pa.Table.from_pylist(part, schema), folder / f"{name}.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ROWS_AT_ONCE", at_once)
        statistics, _ = scan([str(folder)])
    found = statistics.as_dict()
    assert found["tokens"] == expected["tokens"]
    for name in ("kl_k3", "kl_k1", "rho", "prob_diff"):
        got = tuple(found[name][end] for end in ("mean", "low", "high"))
        assert got == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
    for name in ("ess_token", "ess_sequence"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    for name, key in (("by_position", "from"), ("by_probability", "from"), ("by_step", "step")):
        got = [(cell[key], cell["tokens"], cell["kl_k3"]["mean"]) for cell in found[name]]
        assert [cell[:2] for cell in got] == [cell[:2] for cell in expected[name]]
        assert [cell[2] for cell in got] == pytest.approx([cell[2] for cell in expected[name]], rel=1e-5, abs=1e-7)


def test_a_long_run_is_reported_in_pairs_of_steps():
    statistics, count = Statistics(), STEPS_KEPT + 10
    mu = np.full(count, -1.0, np.float32)
    columns = {"step": np.arange(count, dtype=float)}
    batch = Batch(
        np.arange(count + 1), mu, mu - 0.5, np.ones(count, bool), np.zeros(count, bool), np.arange(count), columns
    )
    statistics.add(batch, np.ones(count, bool), batch.sampler_N, batch.learner_N, np.arange(count))
    by_step = statistics.as_dict()["by_step"]
    assert [entry["step"] for entry in by_step] == list(range(0, count, 2))
    assert {entry["tokens"] for entry in by_step} == {2}


def test_tiny_gaps_keep_their_digits():
    """k3 of a gap of 2e-4 is 2e-8: in float32, rho - 1 - log rho would be off by half of it."""
    mu = np.array([-1.0, -2.0], np.float32)
    pi = mu + np.float32(2e-4)
    batch = Batch(np.array([0, 1, 2]), mu, pi, np.ones(2, bool), np.zeros(2, bool), np.arange(2), {"step": np.zeros(2)})
    statistics = Statistics()
    statistics.add(batch, np.ones(2, bool), mu, pi, np.arange(2))
    gap = (pi.astype(float) - mu.astype(float)).mean()
    assert statistics.as_dict()["kl_k3"]["mean"] == pytest.approx(gap**2 / 2, rel=1e-3)


# --- --tokenizer ----------------------------------------------------------------------------------------------------


def test_responses_of_a_real_model_that_were_scored_in_other_tokens_are_proven():
    """16 responses of a 0.5B model, scored in the pieces of their text; its tokenizer, cut down to what they hold."""
    verdict = explain([str(DATA / "retokenised.parquet")], tokenizer=str(DATA / "tokenizer"))
    finding = verdict["causes"][0]
    assert finding["cause"] == "retokenised" and finding["confidence"] == 0.999
    assert "Proven with" in finding["evidence"] and "(9 of them in pieces)" in finding["evidence"]


class Words:
    """A tokenizer of letters and of the words that it knows; longest first, as pieces of text allow."""

    WORDS = ("the cat ", "the ", "cat ", "sat ", "on ", "mat ", "dog ", "ran ", *"thecasonmdgr ")

    def decode(self, ids, **options) -> str:
        return "".join(self.WORDS[i] for i in ids)

    def encode(self, text: str, **options) -> list[int]:
        ids = []
        while text:
            ids.append(next(i for i, word in enumerate(self.WORDS) if text.startswith(word)))
            text = text[len(self.WORDS[ids[-1]]) :]
        return ids


def scored(ids: list[int], words: Words, noise: np.ndarray) -> np.ndarray:
    """Log-probs that depend, as a language model's do, on the text before and the token, not on how it was cut."""
    before = [words.decode(ids[:i]) for i in range(len(ids))]
    values = [
        np.random.default_rng([len(text), i, sum(map(ord, text))]).exponential(1.0) for text, i in zip(before, ids)
    ]
    return -np.array(values) + noise[: len(ids)]


def test_a_cut_of_the_text_is_found_by_the_values_of_the_learner():
    words, rng = Words(), np.random.default_rng(0)
    text = "".join(rng.choice(["the cat ", "sat ", "on ", "mat ", "dog ", "ran "], 40))
    ids = words.encode(text)
    cut = len(words.decode(ids[:12])) + 1  # inside the thirteenth token
    other = (words.encode(text[:cut]) + words.encode(text[cut:]))[: len(ids)]
    noise = rng.normal(0, 0.02, len(ids))
    mu = scored(ids, words, noise)
    found = recut(ids, mu, scored(other, words, -noise), words)
    assert not found.changed and found.cuts == 1 and 12 <= found.first <= 13
    assert found.wins > 15 and found.losses <= 1
    same = recut(ids, mu, scored(ids, words, -noise), words)
    assert (same.cuts, same.wins, same.losses, same.first) == (0, 0, 0, -1)


def test_a_shift_of_another_dump_is_refuted_as_a_round_trip(tmp_path):
    """With a tokenizer of single characters nothing can be cut otherwise: drift has another reason."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(24):
        ids = rng.integers(17, 27, 96).tolist()
        mu = -rng.exponential(1.5, 96)
        pi = mu + rng.normal(0, 0.01, 96)
        pi[40:] = np.roll(pi[40:], 1)
        pi[70:] = np.roll(pi[70:], 1)
        rows.append({"response_ids": ids, "sampler_logprobs": mu.tolist(), "learner_logprobs": pi.tolist()})
    path = str(write_jsonl(tmp_path / "d.jsonl", rows))
    finding = explain([path], tokenizer="mini")["causes"][0]
    assert finding["cause"] == "retokenised" and finding["confidence"] == 0.5
    assert "Refuted with mini: encoded again as a whole, 0 of" in finding["evidence"]
    assert "Refuted" not in explain([path])["causes"][0]["evidence"]


def test_a_tokenizer_that_cannot_be_the_dumps_own_is_refused(tmp_path):
    dump = str(DATA / "healthy-bf16.parquet")
    with pytest.raises(ValueError, match="has 98 tokens, but the dump's response_ids reach"):
        explain([dump], tokenizer="mini")
    with pytest.raises(ValueError, match="no tokenizer can be loaded from there"):
        explain([dump], tokenizer=str(tmp_path / "nowhere"))
    rows = [{"sampler_logprobs": [-1.0], "learner_logprobs": [-1.0]}] * 2
    with pytest.raises(ValueError, match="--tokenizer needs response_ids"):
        explain([str(write_jsonl(tmp_path / "d.jsonl", rows))], tokenizer="mini")
