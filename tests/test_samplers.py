"""Samplers on real engines: ids in, ids out, log-probs of what was sampled, weights that can be replaced."""

import re

import pytest
import torch

from trueup.learner.model import MINI, Policy, best_tokens, load_causal_lm
from trueup.quantize import SCHEMES, simulated_int8
from trueup.rollouts import Rollouts
from trueup.samplers import EngineError, Sampling, open_sampler, parse_spec
from trueup.sync import own_answers

REFERENCE = ["transformers:fp32", "transformers:bf16"]
VLLM = [pytest.param("vllm:bf16", marks=pytest.mark.engine), pytest.param("vllm:int8", marks=pytest.mark.engine)]
# Mean |pi - mu| of the mini model against its bf16 learner, with a margin for other machines.
NORMAL = {"transformers:fp32": 0.002, "transformers:bf16": 0.002, "vllm:bf16": 0.002, "vllm:int8": 0.01}


@pytest.fixture(params=REFERENCE + VLLM)
def sampler(request, engines, policy):
    sampler = engines(request.param)
    sampler.load(policy.weights(), 0)
    return sampler


@pytest.fixture
def sampling(tokenizer):
    return Sampling(max_tokens=60, stop_token_ids=(tokenizer.eos_token_id,), n=4, seed=1)


def test_rollouts_hold_n_adjacent_responses_a_prompt(sampler, prompts, sampling):
    rollouts = sampler.generate(prompts, sampling)
    assert len(rollouts) == 4 * len(prompts)
    assert rollouts.group.tolist() == [group for group in range(len(prompts)) for _ in range(4)]
    assert all(rollouts.prompt(row).tolist() == prompts[row // 4] for row in range(len(rollouts)))
    assert set(rollouts.engine) == {sampler.engine}
    assert rollouts.sampler_logprobs.isfinite().all() and (rollouts.sampler_logprobs <= 0).all()
    assert len({tuple(rollouts.response(row).tolist()) for row in range(len(rollouts))}) > len(prompts)


def test_finish_reasons_tell_a_stop_from_a_cut(sampler, prompts, tokenizer):
    eos = tokenizer.eos_token_id
    rollouts = sampler.generate(prompts, Sampling(max_tokens=60, stop_token_ids=(eos,), seed=1))
    for row in range(len(rollouts)):
        assert (rollouts.finish_reason[row] == "stop") == (int(rollouts.response(row)[-1]) == eos)
    assert "stop" in rollouts.finish_reason
    cut = sampler.generate(prompts, Sampling(max_tokens=3, stop_token_ids=(eos,), seed=1))
    assert set(cut.finish_reason) == {"length"} and set(cut.lengths.tolist()) == {3}


def test_a_seed_repeats_the_responses_and_another_does_not(sampler, prompts, sampling):
    first, again = sampler.generate(prompts, sampling), sampler.generate(prompts, sampling)
    assert torch.equal(first.response_ids, again.response_ids)
    other = sampler.generate(prompts, Sampling(sampling.max_tokens, sampling.stop_token_ids, n=4, seed=2))
    assert not torch.equal(first.response_ids, other.response_ids)


def test_sampled_log_probs_are_the_learners_but_for_precision(sampler, prompts, sampling, policy):
    rollouts = sampler.generate(prompts, sampling)
    learner, _ = policy.score(rollouts)
    assert float((learner.exp() - rollouts.sampler_logprobs.exp()).abs().mean()) < NORMAL[sampler.engine]


def test_prefill_scores_are_the_learners_but_for_precision(sampler, prompts, sampling, policy):
    rollouts = sampler.generate(prompts, sampling)
    rollouts.temperature[:] = 1.0
    learner, _ = policy.score(rollouts)
    scores = sampler.score(rollouts)
    assert len(scores) == rollouts.tokens
    assert float((learner.exp() - scores.exp()).abs().mean()) < NORMAL[sampler.engine]


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_log_probs_are_those_sampled_from_at_the_temperature(sampler, prompts, sampling, policy, temperature):
    rollouts = sampler.generate(prompts, Sampling(60, sampling.stop_token_ids, n=2, temperature=temperature, seed=1))
    assert rollouts.temperature.tolist() == pytest.approx([temperature] * len(rollouts))
    learner, _ = policy.score(rollouts)  # at the rows' temperature
    assert float((learner.exp() - rollouts.sampler_logprobs.exp()).abs().mean()) < 2 * NORMAL[sampler.engine]


def test_top_k_renormalises_the_returned_log_probs(sampler, prompts, sampling, policy):
    rollouts = sampler.generate(prompts, Sampling(60, sampling.stop_token_ids, n=2, temperature=2.0, top_k=1, seed=1))
    assert rollouts.sampler_logprobs.abs().max() < 1e-6  # one token left: probability 1
    assert set(rollouts.top_k.tolist()) == {1}


def test_greedy_is_the_argmax(sampler, prompts, sampling, policy):
    rollouts = sampler.generate(prompts, Sampling(8, sampling.stop_token_ids, temperature=0))
    row = int(rollouts.lengths.argmax())
    ids = torch.cat([rollouts.prompt(row), rollouts.response(row)]).long()
    with torch.no_grad():
        best = policy.model(input_ids=ids[None]).logits[0, len(rollouts.prompt(row)) - 1 : -1].argmax(-1)
    assert best.tolist() == rollouts.response(row).tolist()


def test_every_weight_is_replaced_and_restored_exactly(sampler, prompts, sampling, policy):
    before = sampler.generate(prompts, sampling)
    changed = [(name, weight * 1.05) for name, weight in policy.weights()]
    sampler.load(changed, 1)
    assert sampler.version == 1
    other = sampler.generate(prompts, sampling)
    assert set(other.sampler_version.tolist()) == {1}
    with torch.no_grad():
        for (_, weight), (_, new) in zip(policy.weights(), changed):
            if weight.data_ptr() != policy.model.get_output_embeddings().weight.data_ptr():
                weight.copy_(new)
        policy.model.get_input_embeddings().weight.mul_(1.05)
    learner, _ = policy.score(other)
    assert float((learner.exp() - other.sampler_logprobs.exp()).abs().mean()) < NORMAL[sampler.engine]
    sampler.load([(name, weight / 1.05 * 1.05) for name, weight in changed], 2)  # and once more
    sampler.load([(name, weight) for name, weight in _original().weights()], 3)
    after = sampler.generate(prompts, sampling)
    assert torch.equal(before.response_ids, after.response_ids)
    assert torch.equal(before.sampler_logprobs, after.sampler_logprobs)


def _original():
    return Policy(load_causal_lm("mini", "bf16", "eager"))


def test_a_prompt_that_cannot_be_answered_in_the_context_is_refused(sampler):
    with pytest.raises(
        ValueError, match="prompt 1 has 390 tokens; with 20 response tokens that is more than the context"
    ):
        sampler.generate([[5], [5] * 390], Sampling(max_tokens=20, stop_token_ids=(1,)))
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        sampler.generate([[]], Sampling(max_tokens=20, stop_token_ids=(1,)))


def test_nothing_to_score_is_no_error(sampler):
    assert len(sampler.score(Rollouts.from_lists([], []))) == 0


@pytest.mark.engine
def test_int8_runs_int8_kernels_in_every_linear_layer(engines):
    int8, bf16 = engines("vllm:int8").linear_kernels(), engines("vllm:bf16").linear_kernels()
    assert len(int8) == len(bf16) > 8
    assert all("Int8" in kernel for kernel in int8.values()), int8
    assert not any("Int8" in kernel for kernel in bf16.values()), bf16


@pytest.mark.engine
def test_int8_log_probs_are_those_of_simulated_int8_arithmetic(engines, policy, prompts, sampling):
    sampler = engines("vllm:int8")
    sampler.load(policy.weights(), 0)
    rollouts = sampler.generate(prompts, sampling)
    exact = Policy(load_causal_lm("mini", "fp32", "eager"))
    plain = exact.score(rollouts)[0]
    with simulated_int8(exact.model):
        simulated = exact.score(rollouts)[0]
    assert torch.equal(exact.score(rollouts)[0], plain)  # and the model is itself again
    off = {
        name: float((rollouts.sampler_logprobs - found).square().mean())
        for name, found in (("plain", plain), ("simulated", simulated))
    }
    assert off["simulated"] < 0.5 * off["plain"], off


COARSE = [name for name in SCHEMES if name != "int8"]
KERNELS = {"int8-tensor": "Int8", "int8-static": "Int8", "int4": "NA16|Marlin", "int4-channel": "NA16|Marlin"}
# Rounding activations turns a difference in the last bit into another code, which later layers multiply.
ERROR_LEFT = {"int8-tensor": 0.6, "int8-static": 0.6, "int4": 0.35, "int4-channel": 0.35}


@pytest.mark.engine
@pytest.mark.parametrize("precision", COARSE)
def test_a_coarse_precision_runs_its_kernel_computes_as_simulated_and_reloads_exactly(
    engines, policy, prompts, sampling, precision
):
    sampler = engines(f"vllm:{precision}")
    quantiser, exact = sampler.quantiser, Policy(load_causal_lm("mini", "fp32", "eager"))
    quantiser.start()
    if quantiser.needs_calibration:
        with quantiser.calibrate(policy.model):
            policy.score(own_answers(policy, prompts, sampling, context=400))
    sampler.load(policy.weights(), 0)
    assert all(re.search(KERNELS[precision], kernel) for kernel in sampler.linear_kernels().values())

    rollouts = sampler.generate(prompts, sampling)
    plain = exact.score(rollouts)[0]
    with quantiser.simulated(exact.model):
        simulated = exact.score(rollouts)[0]
    off = [float((rollouts.sampler_logprobs - found).square().mean().sqrt()) for found in (simulated, plain)]
    assert off[0] < ERROR_LEFT[precision] * off[1], off

    sampler.load([(name, weight * 1.05) for name, weight in policy.weights()], 1)
    assert not torch.equal(sampler.generate(prompts, sampling).sampler_logprobs, rollouts.sampler_logprobs)
    sampler.load(policy.weights(), 2)
    again = sampler.generate(prompts, sampling)
    assert torch.equal(again.response_ids, rollouts.response_ids)
    assert torch.equal(again.sampler_logprobs, rollouts.sampler_logprobs)


def test_an_engine_that_cannot_do_it_says_so_before_it_starts():
    with pytest.raises(ValueError, match="transformers cannot run 'int8'; it runs bf16 and fp32; vllm:int8 has it"):
        open_sampler("transformers:int8", str(MINI), context=64)
    with pytest.raises(ValueError, match="vllm cannot run 'fp8'; it runs bf16, int8, .* and int4-channel"):
        parse_spec("vllm:fp8")
    with pytest.raises(ValueError, match="unknown engine 'vlm'.*Did you mean vllm"):
        parse_spec("vlm:bf16")
    assert parse_spec("vllm") == ("vllm", "bf16")


@pytest.mark.engine
def test_too_little_memory_for_the_cache_is_explained():
    with pytest.raises(EngineError, match="sampler.kv_cache_gib"):
        open_sampler("vllm:bf16", str(MINI), context=1024, kv_cache_gib=100_000)


def test_a_missing_engine_names_the_extra_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"pip install 'trueup\[cpu\]'"):
        open_sampler("vllm:bf16", str(MINI), context=64)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(max_tokens=0), "max_tokens=0"),
        (dict(n=0), "n=0"),
        (dict(temperature=-1), "temperature=-1"),
        (dict(top_p=0), "top_p=0"),
        (dict(top_k=0), "top_k=0"),
        (dict(min_p=2), "min_p=2"),
    ],
)
def test_impossible_sampling_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**(dict(max_tokens=1, stop_token_ids=()) | wrong))


def test_a_log_prob_that_the_engine_did_not_give_is_missing_not_an_error():
    rollouts = Rollouts.from_lists([[1], [1]], [[5, 6], [7]], [[-0.5, None], [None]])
    assert rollouts.sampler_logprobs.isnan().tolist() == [False, True, True]


def test_best_tokens_are_the_learners_but_for_near_ties(sampler, prompts, sampling, policy):
    rollouts = sampler.generate(prompts, sampling)
    engine, learner = sampler.best_tokens(rollouts), best_tokens(policy, rollouts)
    assert engine.shape == learner.shape == rollouts.response_ids.shape
    assert float((engine == learner).float().mean()) > 0.98
