"""The ladder: steps add up to the gap, and name what was done."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trueup.explain.ladder import by_position, climb, context, growth, split_gap, text_around
from trueup.explain.live import Measured, measured_json, write_measured
from trueup.learner.model import MINI
from trueup.rollouts import Rollouts
from trueup.samplers import Sampling


def hand_made():
    """Two responses of two and one token; the steps are precision +.1 0 0, quantisation .2 .2 -.4, kernels 0 .1 0."""
    rollouts = Rollouts.from_lists([[5], [6]], [[7, 8], [9]])
    learner = torch.tensor([-1.0, -2.0, -0.5])
    rungs = {"bf16": learner}
    rungs["fp32"] = rungs["bf16"] + torch.tensor([0.1, 0.0, 0.0])
    rungs["simulated"] = rungs["fp32"] + torch.tensor([0.2, 0.2, -0.4])
    rungs["prefill"] = rungs["simulated"] + torch.tensor([0.0, 0.1, 0.0])
    rungs["decode"] = rungs["prefill"].clone()
    return rollouts, rungs


def test_shares_are_those_of_the_squared_gap_and_add_up_to_one():
    rollouts, rungs = hand_made()
    ladder = split_gap("vllm:int8", rollouts, rungs, rungs["prefill"] + 0.01, torch.tensor([True, False, False]))
    # D = .3 .3 -.4, D^2 sums to .34; precision .1 x .3; quantisation .2 x .3 + .2 x .3 + .4 x .4; kernels .1 x .3
    assert [step.cause for step in ladder.steps] == ["learner precision", "quantisation", "kernels", "decode and cache"]
    assert [step.share for step in ladder.steps] == pytest.approx([0.03 / 0.34, 0.28 / 0.34, 0.03 / 0.34, 0], abs=1e-6)
    assert sum(step.share for step in ladder.steps) == pytest.approx(1)
    assert [step.k1 for step in ladder.steps] == pytest.approx([0.1 / 3, 0, 0.1 / 3, 0], abs=1e-6)
    assert sum(step.k1 for step in ladder.steps) == pytest.approx(ladder.stats["mismatch/kl_k1"], abs=1e-6)
    assert ladder.steps[1].rms == pytest.approx((0.24 / 3) ** 0.5)
    assert ladder.null_share == pytest.approx(3e-4 / 0.34, rel=1e-3) and ladder.argmax_differs == pytest.approx(1 / 3)
    # Response 1: part .12 of whole .18; response 2: .16 of .16. share .8235, residuals -.02824, .02824, times sqrt(2).
    assert ladder.steps[1].share_high - ladder.steps[1].share == pytest.approx(
        1.96 * (2 * 0.02824**2) ** 0.5 / 0.34 * 2**0.5, rel=1e-2
    )


def test_k1_has_an_interval_over_responses():
    rollouts, rungs = hand_made()
    step = split_gap("vllm:int8", rollouts, rungs, rungs["prefill"], torch.zeros(3, dtype=torch.bool)).steps[1]
    # Quantisation .2 .2 | -.4: mean 0, residuals .4 and -.4 over 3 tokens, times sqrt(2 / 1).
    assert step.k1 == pytest.approx(0, abs=1e-6)
    half = 1.96 * (2 * 0.4**2) ** 0.5 / 3 * 2**0.5
    assert (step.k1_low, step.k1_high) == pytest.approx((-half, half), rel=1e-4)


def test_what_int8_does_between_two_orders_of_sums_is_half_their_squared_difference():
    rollouts, rungs = hand_made()
    twice = [rungs["prefill"] + torch.tensor([0.2, 0.0, 0.0]), rungs["prefill"]]
    ladder = split_gap("vllm:int8", rollouts, rungs, rungs["prefill"], torch.zeros(3, dtype=torch.bool), twice)
    assert ladder.rounding_share == pytest.approx(0.02 / 0.34, rel=1e-4)
    # Response 1: .02 of .18, response 2: 0 of .16; residuals +-.0094118, times sqrt(2).
    assert ladder.rounding_high - ladder.rounding_share == pytest.approx(1.96 * 2 * 0.0094118 / 0.34, rel=1e-3)
    assert split_gap("vllm:bf16", rollouts, rungs, rungs["prefill"], torch.zeros(3)).rounding_share is None


def test_growth_is_the_slope_over_doublings_of_the_position():
    offsets, known = torch.tensor([0, 4, 8]), torch.ones(8, dtype=torch.bool)
    gap_N = torch.tensor([0.1, 0.3, 0.0, 0.5] * 2, dtype=torch.float64)
    known[[2, 6]] = False  # position 3 is not measured; positions 1, 2, 4 are 0, 1, 2 doublings
    found = growth(torch.where(known, gap_N * torch.tensor([1, -1] * 4), 0), known, offsets)
    assert found == pytest.approx({"per_doubling": 0.2, "low": 0.2, "high": 0.2})
    # One response grows by .2, the other not at all: slope .1, each .2 of .4 away from it.
    gap_N[4:] = 0.3
    found = growth(torch.where(known, gap_N, 0), known, offsets)
    assert found["per_doubling"] == pytest.approx(0.1)
    assert found["high"] - 0.1 == pytest.approx(1.96 * (2 * 0.2**2) ** 0.5 / 4 * 2**0.5)


def test_the_gap_by_position_has_intervals_and_the_size_of_each_step():
    offsets, known = torch.tensor([0, 2, 4]), torch.ones(4, dtype=torch.bool)
    gap_N, step_N = torch.tensor([0.1, -0.4, 0.3, 0.4]), torch.tensor([0.1, 0.0, -0.2, 0.2])
    first, second = by_position(gap_N, {"kernels": step_N}, known, offsets)
    assert (first["from"], first["to"], second["from"], second["to"]) == (0, 1, 1, 2)
    assert first["log_rho_abs_mean"] == pytest.approx(0.2) and first["step_abs_mean"]["kernels"] == pytest.approx(0.15)
    assert first["high"] == pytest.approx(0.2 + 1.96 * (2 * 0.1**2) ** 0.5 / 2 * 2**0.5)
    assert (second["low"], second["high"]) == pytest.approx((0.4, 0.4))


def test_tokens_outside_the_loss_mask_or_without_a_log_prob_do_not_count():
    rollouts, rungs = hand_made()
    rollouts.loss_mask[2] = False
    rungs["decode"][0] = float("nan")
    ladder = split_gap("vllm:int8", rollouts, rungs, rungs["prefill"], torch.zeros(3, dtype=torch.bool))
    assert ladder.tokens == 1 and ladder.steps[0].share == 0
    assert [(found["row"], found["position"]) for found in ladder.largest] == [(0, 1)]


def test_the_largest_differences_are_shown_once_and_in_their_text(tokenizer):
    prompt, response = tokenizer.encode("1+2="), tokenizer.encode("1+2=3;#3")
    rollouts = Rollouts.from_lists([prompt, prompt], [response, response])
    learner = torch.full((16,), -1.0)
    decode = learner.clone()
    decode[[4, 12]] = -0.1  # the same place of the same text, twice
    rungs = {"bf16": learner, "fp32": learner, "prefill": decode, "decode": decode}
    ladder = split_gap("vllm:bf16", rollouts, rungs, decode, torch.zeros(16, dtype=torch.bool))
    assert [step.cause for step in ladder.steps] == ["learner precision", "kernels", "decode and cache"]
    assert ladder.largest[0]["prob_diff"] == pytest.approx(0.9048 - 0.3679, abs=1e-3)
    assert sum(found["prob_diff"] > 0.1 for found in ladder.largest) == 1
    assert text_around(ladder.largest[0], rollouts, tokenizer) == "1+2=«3»;#3"
    assert context(ladder.largest[0], rollouts, tokenizer) == ["1+2=", "3", ";#3"]
    assert ladder.largest[0]["step"] == "kernels"


def test_what_was_measured_is_written_one_dump_a_sampler(tmp_path, tokenizer):
    rollouts, rungs = hand_made()
    ladder = split_gap("vllm:int8", rollouts, rungs, rungs["prefill"], torch.zeros(3, dtype=torch.bool))
    rollouts.learner_logprobs = rungs["bf16"]
    one, two = Measured("vllm:int8", ladder, rollouts), Measured("vllm:bf16", ladder, rollouts)
    found = measured_json("mini", "sums", [one, two], tokenizer)
    written = write_measured(found, [one, two], tmp_path / "new" / "both.parquet")
    assert [path.name for path in written] == ["both.json", "both-vllm-int8.parquet", "both-vllm-bf16.parquet"]
    read = json.loads(written[0].read_text())
    assert [sampler["dump"] for sampler in read["samplers"]] == [path.name for path in written[1:]]
    assert read["samplers"][0]["steps"][1]["share"] == ladder.steps[1].share and "NaN" not in written[0].read_text()
    assert Rollouts.from_parquet(written[1]).tokens == 3
    found = measured_json("mini", "sums", [one], tokenizer)
    assert [path.name for path in write_measured(found, [one], tmp_path)] == ["measure.json", "measure.parquet"]


def test_rollouts_that_a_prefill_cannot_repeat_are_refused(engines, prompts):
    rollouts = Rollouts.from_lists([[5]], [[6]], [[-1.0]], temperature=0.6)
    with pytest.raises(ValueError, match="needs rollouts at temperature 1"):
        climb(str(MINI), engines("transformers:fp32"), rollouts)


def test_a_float32_sampler_shows_only_the_learners_precision(engines, policy, prompts):
    sampler = engines("transformers:fp32")
    sampler.load(policy.weights(), 0)
    ladder = climb(str(MINI), sampler, sampler.generate(prompts, Sampling(40, (1,), n=4, seed=0)))
    assert ladder.steps[0].cause == "learner precision" and ladder.steps[0].share > 0.99


@pytest.mark.engine
def test_quantisation_is_named_the_larger_part_of_an_int8_gap_and_absent_in_bf16(tmp_path):
    command = [
        sys.executable,
        "-m",
        "trueup.cli",
        "measure",
        "mini",
        "--sampler",
        "vllm:int8",
        "--sampler",
        "vllm:bf16",
    ]
    command += ["--prompts", "32", "--samples", "4", "--json", "--out", str(tmp_path / "measured.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    int8, bf16 = json.loads(done.stdout)["samplers"]
    shares = {step["cause"]: step["share"] for step in int8["steps"]}
    assert max(shares, key=shares.get) == "quantisation" and sum(shares.values()) == pytest.approx(1)
    assert [step["cause"] for step in bf16["steps"]] == ["learner precision", "kernels", "decode and cache"]
    assert bf16["stats"]["mismatch/kl_k3"] < 0.1 * int8["stats"]["mismatch/kl_k3"]
    assert "«" in int8["largest"][0]["text"] and int8["by_position"][-1]["to"] > 30
    assert int8["rounding_share"] > 0.02 and bf16["rounding_share"] is None
    for spec in ("vllm:int8", "vllm:bf16"):
        dump = Rollouts.from_parquet(tmp_path / f"measured-{spec.replace(':', '-')}.parquet")
        assert len(dump) == 128 and set(dump.engine) == {spec} and dump.learner_logprobs is not None
    report = [sys.executable, "-m", "trueup.cli", "report", str(tmp_path / "measured.json"), "--json"]
    done = subprocess.run(report, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    page = Path(json.loads(done.stdout)["report"])
    assert page.name == "measured-report.html" and "vllm:int8 against the bf16 learner" in page.read_text()
