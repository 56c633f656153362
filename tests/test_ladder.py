"""The ladder: steps add up to the gap, and name what was done."""

import json
import subprocess
import sys

import pytest
import torch

from trueup.explain.ladder import climb, split_gap, text_around
from trueup.learner.model import MINI
from trueup.rollouts import Rollouts
from trueup.samplers import Sampling


def hand_made():
    """Two responses of two and one token; the steps are precision +.1 0 0, quantisation .2 .2 -.4, kernels 0 .1 0."""
    rollouts = Rollouts.from_lists([[5], [6]], [[7, 8], [9]])
    learner = torch.tensor([-1.0, -2.0, -0.5])
    rungs = {"bf16": learner}
    rungs["fp32"] = rungs["bf16"] + torch.tensor([0.1, 0.0, 0.0])
    rungs["int8 simulated"] = rungs["fp32"] + torch.tensor([0.2, 0.2, -0.4])
    rungs["prefill"] = rungs["int8 simulated"] + torch.tensor([0.0, 0.1, 0.0])
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
    command += ["--prompts", "32", "--samples", "4", "--json", "--out", str(tmp_path / "dump.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    int8, bf16 = json.loads(done.stdout)["samplers"]
    shares = {step["cause"]: step["share"] for step in int8["steps"]}
    assert max(shares, key=shares.get) == "quantisation" and sum(shares.values()) == pytest.approx(1)
    assert [step["cause"] for step in bf16["steps"]] == ["learner precision", "kernels", "decode and cache"]
    assert bf16["stats"]["mismatch/kl_k3"] < 0.1 * int8["stats"]["mismatch/kl_k3"]
    assert "«" in int8["largest"][0]["text"] and int8["by_position"][-1]["to"] > 30
    dump = Rollouts.from_parquet(tmp_path / "dump.parquet")
    assert len(dump) == 256 and set(dump.engine) == {"vllm:int8", "vllm:bf16"} and dump.learner_logprobs is not None
