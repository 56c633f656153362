"""The learner: chunked log-probs, micro-batches that change nothing, masters that remember small steps."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from trueup.config import OptimizerConfig
from trueup.configfile import load_config
from trueup.learner.critic import Critic
from trueup.learner.logprobs import Head, token_logprobs
from trueup.learner.model import MINI, Policy, load_causal_lm, load_tokenizer, micro_batches, resolve, stop_token_ids
from trueup.learner.optimizer import MasterAdamW, join, split
from trueup.learner.update import Batch, Learner
from trueup.rollouts import Rollouts


def random_rollouts(count: int = 12, seed: int = 0, **columns) -> Rollouts:
    """Ragged rows of ordinary characters, with log-probs near the mini model's own uncertainty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(5, 90, (length,), generator=generator).tolist()

    prompts, responses = [draw(3, 20) for _ in range(count)], [draw(1, 30) for _ in range(count)]
    rollouts = Rollouts.from_lists(prompts, responses, **columns)
    rollouts.sampler_logprobs = -3 * torch.rand(rollouts.tokens, generator=generator)
    rollouts.reward = (torch.arange(count) % 3 == 0).float()
    rollouts.group = (torch.arange(count) // 4).to(torch.int32)
    return rollouts


def naive(hidden, head, targets, temperature):
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.multiplier
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logp = (logits / temperature[:, None]).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (0.5, 30.0)])
def test_chunked_log_probs_and_their_gradients_are_the_naive_ones(bias, multiplier, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, requires_grad=True)
    weight = (torch.randn(50, 16) / 4).requires_grad_()
    offset = torch.randn(50, requires_grad=True) if bias else None
    targets, temperature = torch.randint(0, 50, (37,)), torch.rand(37) + 0.5
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    head = Head(weight, offset, multiplier, softcap)
    up_logp, up_entropy = torch.randn(37), torch.randn(37)
    results = []
    for function in (naive, lambda *given: token_logprobs(*given, chunk=8)):
        logp, entropy = function(hidden, head, targets, temperature)
        gradients = torch.autograd.grad((logp * up_logp).sum() + (entropy * up_entropy).sum(), leaves)
        results.append((logp, entropy, *gradients))
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_a_vocabulary_in_parts_are_those_of_the_whole(dtype):
    torch.manual_seed(1)
    hidden, weight = (
        torch.randn(33, 24).to(dtype).requires_grad_(),
        (torch.randn(5000, 24) / 2).to(dtype).requires_grad_(),
    )
    targets, temperature = torch.randint(0, 5000, (33,)), torch.tensor([1.0, 0.6, 1.4]).repeat(11)
    up = torch.randn(33)
    results = []
    for function in (naive, lambda *given: token_logprobs(*given, chunk=10_000)):  # blocks of 1,024 of the vocabulary
        wide = [leaf.float() if function is naive else leaf for leaf in (hidden, weight)]
        logp, entropy = function(wide[0], Head(wide[1]), targets, temperature)
        gradients = torch.autograd.grad((logp * up).sum() + 0.1 * entropy.sum(), (hidden, weight))
        results.append((logp, entropy, *gradients))
    for expected, found in zip(*(result[:2] for result in results)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # bf16 products of the backward round to 8 bits, as bf16 gradients do anyway
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for expected, found in zip(*(result[2:] for result in results)):
        assert (found.float() - expected.float()).norm() < tolerance * expected.float().norm()


def test_the_precision_of_other_products_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(20, 8).bfloat16()
    token_logprobs(hidden, Head(weight), torch.arange(4), torch.ones(4))
    assert torch.get_float32_matmul_precision() == before


def test_log_probs_of_extreme_logits_stay_finite():
    hidden, weight = torch.full((2, 4), 1e3, requires_grad=True), torch.randn(9, 4) * 1e3
    logp, entropy = token_logprobs(hidden, Head(weight), torch.tensor([0, 1]), torch.ones(2))
    (logp.sum() + entropy.sum()).backward()
    assert logp.isfinite().all() and entropy.isfinite().all() and hidden.grad.isfinite().all()


def test_policy_scores_as_the_model_itself_does_at_the_rows_temperature():
    model = load_causal_lm("mini", "fp32", "eager")
    rollouts = random_rollouts(temperature=torch.linspace(0.5, 1.5, 12))
    found, entropy = Policy(model, token_budget=200, chunk=16).score(rollouts)
    start = 0
    for row in range(len(rollouts)):
        prompt, response = rollouts.prompt(row).long(), rollouts.response(row).long()
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logp = (logits / rollouts.temperature[row]).log_softmax(-1)
        stop = start + len(response)
        torch.testing.assert_close(
            found[start:stop], logp.gather(1, response[:, None])[:, 0].detach(), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(entropy[start:stop], -(logp.exp() * logp).sum(1).detach(), rtol=1e-4, atol=1e-4)
        start = stop


def test_micro_batches_hold_each_row_once_within_the_budget():
    rollouts = random_rollouts(40)
    lengths = rollouts.prompt_offsets.diff() + rollouts.lengths
    groups = list(micro_batches(rollouts, 100))
    assert sorted(torch.cat(groups).tolist()) == list(range(40))
    assert len(groups) > 5
    for group in groups:
        assert len(group) * int(lengths[group].max()) <= 100
    assert [len(group) for group in micro_batches(rollouts, 1)] == [1] * 40


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo", "gspo", "cispo", "dr-grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("correction", ["tis", "sequence-mis"])
def test_gradients_do_not_depend_on_micro_batches(algorithm, correction):
    rollouts = random_rollouts(16)
    seen = []
    for budget in (20, 150, 10_000):
        config = load_config(
            None,
            [f"algorithm={algorithm}", f"correction={correction}", "learner.dtype=fp32", "learner.attention=eager"]
            + [f"learner.token_budget={budget}", "reward.dynamic_sampling=false", "objective.entropy_coefficient=0.01"],
        )
        torch.manual_seed(0)
        learner = Learner(config)
        taken = []
        for optimizer in [learner.optimizer] + [learner.critic_optimizer] * (learner.critic is not None):
            optimizer.step = _keep_gradients(optimizer, taken)
        batch, _ = learner.prepare(copy.deepcopy(rollouts))
        metrics = learner.update(batch, torch.Generator().manual_seed(0))
        seen.append((taken, metrics, batch.rollouts.learner_logprobs))
    for taken, metrics, logprobs in seen[1:]:
        for found, expected in zip(taken, seen[0][0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert metrics["policy/loss"] == pytest.approx(seen[0][1]["policy/loss"], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(logprobs, seen[0][2], rtol=1e-4, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in seen[0][0]) > 1e-4


def _keep_gradients(optimizer, taken):
    def step(denominator):
        taken.extend(slot.grad / denominator for slot in optimizer._slots if slot.grad is not None)
        optimizer.clear()
        return 1.0

    return step


def test_a_strictly_on_policy_batch_pays_one_forward():
    config = load_config(None, ["learner.dtype=fp32", "learner.attention=eager", "learner.token_budget=100000"])
    learner, calls = Learner(config), []
    learner.policy.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    batch, _ = learner.prepare(random_rollouts(8))
    learner.update(batch, torch.Generator().manual_seed(0))
    assert len(calls) == 1
    assert batch.rollouts.learner_logprobs.isfinite().all()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_rollouts_of_older_weights_are_scored_with_those(minibatches):
    settings = ["learner.dtype=fp32", "learner.attention=eager", "learner.lr=1e-5", f"batch.minibatches={minibatches}"]
    learner = Learner(load_config(None, settings + ["delivery.every=4", "log.checkpoint_every=0"]))
    rollouts = random_rollouts(8)
    learner.keep_delivered()
    as_delivered, entropy = learner.policy.score(rollouts)
    staleness = []
    for step in range(3):
        now, _ = learner.policy.score(rollouts)
        weights = [weight.clone() for weight in learner.policy.model.parameters()]
        batch, _ = learner.prepare(copy.deepcopy(rollouts))
        assert all(torch.equal(old, new) for old, new in zip(weights, learner.policy.model.parameters()))
        metrics = learner.update(batch, torch.Generator().manual_seed(step))
        torch.testing.assert_close(batch.rollouts.learner_logprobs, as_delivered, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.entropy, entropy, rtol=1e-4, atol=1e-4)
        staleness.append(metrics["staleness/kl"])
        if minibatches == 1:
            log_r = now.double() - as_delivered.double()
            assert staleness[-1] == pytest.approx(float((log_r.exp() - 1 - log_r).mean()), rel=1e-2, abs=1e-9)
    assert staleness[0] == 0 and 1e-6 < staleness[1] < staleness[2]
    learner.keep_delivered()
    batch, _ = learner.prepare(copy.deepcopy(rollouts))
    assert learner.update(batch, torch.Generator())["staleness/kl"] == 0


def test_weights_that_are_delivered_every_step_are_not_copied():
    learner = Learner(load_config(None, ["learner.dtype=fp32", "learner.attention=eager", "batch.minibatches=2"]))
    rollouts, before = random_rollouts(8), None
    for _ in range(2):
        batch, _ = learner.prepare(copy.deepcopy(rollouts))
        assert torch.equal(batch.rollouts.learner_logprobs, learner.policy.score(rollouts)[0])
        assert before is None or not torch.equal(batch.rollouts.learner_logprobs, before)
        before = batch.rollouts.learner_logprobs
        assert learner.update(batch, torch.Generator())["staleness/kl"] == 0
    assert learner._delivered is None


def test_a_batch_whose_responses_are_all_rejected_is_skipped_and_counted():
    config = load_config(None, ["correction=sequence-mis", "learner.dtype=fp32", "learner.attention=eager"])
    learner, rollouts = Learner(config), random_rollouts(8)
    rollouts.sampler_logprobs[:] = -50.0  # the learner finds every response e^40 times as likely
    before = [weight.clone() for weight in learner.policy.model.parameters()]
    batch, _ = learner.prepare(rollouts)
    metrics = learner.update(batch, torch.Generator().manual_seed(0))
    assert metrics["policy/skipped_updates"] == 1
    assert metrics["correction/masked_fraction"] == 1
    for old, new in zip(before, learner.policy.model.parameters()):
        assert torch.equal(old, new)


def test_missing_log_probs_are_dropped_and_do_not_spoil_the_step():
    config = load_config(None, ["correction=tis", "learner.dtype=fp32", "learner.attention=eager"])
    learner, rollouts = Learner(config), random_rollouts(8)
    rollouts.sampler_logprobs[::3] = float("nan")
    batch, _ = learner.prepare(rollouts)
    metrics = learner.update(batch, torch.Generator().manual_seed(0))
    assert all(value == value for value in metrics.values())
    assert all(weight.isfinite().all() for weight in learner.policy.model.parameters())


def test_masters_remember_steps_that_bf16_cannot_hold():
    layer = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    optimizer = MasterAdamW(layer, OptimizerConfig(lr=1e-4), total_steps=100)
    for _ in range(50):  # Adam moves by lr a step: 50 steps are 5e-3, bf16's step at 1 is 8e-3
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1.0)
    ((_, master),) = optimizer.masters()
    assert master.mean().item() == pytest.approx(1 - 50e-4, rel=1e-3)
    assert layer.weight.float().mean().item() == pytest.approx(0.99609375)  # the nearest bf16


def test_gradients_of_micro_batches_add_up_in_float32():
    layer = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(layer, OptimizerConfig(), total_steps=1)
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 is 256
        (layer.weight * value).sum().backward()
    assert optimizer._slots[0].grad.tolist() == [[258.0, 258.0]]


def test_a_gradient_that_is_not_finite_changes_nothing():
    layer = torch.nn.Linear(2, 1, bias=False)
    before = layer.weight.clone()
    optimizer = MasterAdamW(layer, OptimizerConfig(lr=1.0), total_steps=1)
    (layer.weight.sum() * float("inf")).backward()
    assert optimizer.step(1.0) is None
    assert torch.equal(layer.weight, before) and optimizer.steps == 0


@pytest.mark.parametrize(
    "schedule, expected", [("constant", [1 / 3, 2 / 3, 1, 1, 1]), ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5])]
)
def test_warm_up_then_schedule(schedule, expected):
    layer = torch.nn.Linear(1, 1, bias=False)
    optimizer = MasterAdamW(layer, OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule), total_steps=6)
    rates = []
    for _ in expected:
        layer.weight.sum().backward()
        optimizer.step(1.0)
        rates.append(optimizer.learning_rate)
    assert rates == pytest.approx(expected)


def test_gradients_are_clipped_to_the_norm_after_dividing():
    layer = torch.nn.Linear(3, 1, bias=False)
    optimizer = MasterAdamW(layer, OptimizerConfig(max_grad_norm=1.0), total_steps=1)
    (layer.weight * torch.tensor([6.0, 0.0, 8.0])).sum().backward()
    assert optimizer.step(2.0) == pytest.approx(5.0)  # |(6, 0, 8)| / 2
    # Adam's first moment after one step is (1 - beta1) times the clipped gradient.
    torch.testing.assert_close(optimizer._slots[0].exp_avg, 0.1 * torch.tensor([[0.6, 0.0, 0.8]]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torchs_adamw(weight_decay):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 7), torch.nn.Linear(5, 7)
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=1e-2, weight_decay=weight_decay, max_grad_norm=1e9)
    optimizer = MasterAdamW(ours, config, total_steps=20)
    groups = [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, weight_decay=weight_decay)
    for _ in range(20):
        inputs = torch.randn(3, 5)
        for layer in (ours, theirs):
            layer(inputs).square().sum().backward()
        optimizer.step(1.0), reference.step(), reference.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


@given(numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=50))
def test_a_master_is_kept_exactly_in_its_bf16_weight_and_16_bits(numbers):
    master = torch.tensor(numbers)
    weight, remainder = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    split(master, weight, remainder)
    assert torch.equal(weight, master.bfloat16())
    back = join(weight, remainder)
    apart = (back.view(torch.int32) - master.view(torch.int32)).abs()
    assert int(apart.max()) <= 1 and bool((apart == 0).logical_or(remainder == 32767).all())


def test_optimizer_state_continues_bit_for_bit():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6).to(torch.bfloat16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [MasterAdamW(layer, OptimizerConfig(lr=1e-3, warmup_steps=3), total_steps=9) for layer in layers]
    inputs = torch.randn(8, 6).bfloat16()

    def advance(which: int, steps: int):
        for _ in range(steps):
            layers[which](inputs).float().square().sum().backward()
            optimizers[which].step(1.0)

    advance(0, 3)
    optimizers[1].load_state({name: value.clone() for name, value in optimizers[0].state()})
    advance(0, 3), advance(1, 3)
    for (_, one), (_, other) in zip(optimizers[0].masters(), optimizers[1].masters()):
        assert torch.equal(one, other)


def test_a_new_critic_values_everything_at_zero_and_learns():
    critic = Critic(load_causal_lm("mini", "fp32", "eager").base_model)
    rollouts = random_rollouts(6)
    assert critic.values(rollouts).tolist() == [0.0] * rollouts.tokens
    ((critic(rollouts) - 1) ** 2).sum().backward()
    assert float(critic.head.bias.grad.abs()) > 0


def test_a_batch_picks_rows_of_every_column():
    rollouts = random_rollouts(5)
    tokens = torch.arange(rollouts.tokens, dtype=torch.float32)
    part = Batch(rollouts, advantages=tokens, values=tokens + 1).rows(torch.tensor([3, 0]))
    expected = tokens[rollouts.offsets[3] : rollouts.offsets[4]].tolist() + tokens[: rollouts.offsets[1]].tolist()
    assert part.advantages.tolist() == expected
    assert part.values.tolist() == [value + 1 for value in expected]
    assert part.returns is None


def test_a_missing_model_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give a Hugging Face model folder"):
        load_causal_lm(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_causal_lm(str(tmp_path / "empty"))


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="is a t5, not a causal language model"):
        load_causal_lm(str(tmp_path))


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    tokenizer = load_tokenizer("mini")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((MINI / "config.json").read_text())
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


def test_stop_tokens_are_those_of_tokenizer_config_and_generation_config():
    tokenizer, model = load_tokenizer("mini"), load_causal_lm("mini")
    assert stop_token_ids(tokenizer, model) == (tokenizer.eos_token_id,)
    model.config.eos_token_id, model.generation_config.eos_token_id = [7, 9], 11
    assert stop_token_ids(tokenizer, model) == tuple(sorted({7, 9, 11, tokenizer.eos_token_id}))


def test_mini_is_the_model_that_ships():
    assert resolve("mini") == str(MINI)


def test_a_model_with_dropout_is_scored_without_it(tmp_path):
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5, attn_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = Policy(load_causal_lm(str(tmp_path), "fp32", "eager"))
    policy.model.train()
    rollouts = random_rollouts(4)
    assert torch.equal(policy.score(rollouts)[0], policy.score(rollouts)[0])


def test_gradient_checkpointing_reaches_policy_and_critic_and_changes_no_gradient():
    gradients = []
    for checkpointing in ("false", "true"):
        settings = ["algorithm=ppo", "learner.dtype=fp32", "learner.attention=eager"]
        learner = Learner(load_config(None, [*settings, f"learner.gradient_checkpointing={checkpointing}"]))
        calls, taken = [], []
        for body in (learner.policy.model.base_model, learner.critic.module["body"]):
            body.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        for optimizer in (learner.optimizer, learner.critic_optimizer):
            optimizer.step = _keep_gradients(optimizer, taken)
        batch, _ = learner.prepare(random_rollouts(6))
        calls.clear()
        learner.update(batch, torch.Generator().manual_seed(0))
        assert len(calls) == (4 if checkpointing == "true" else 2)  # the backward runs each forward again
        gradients.append(taken)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_batch_rejected_whole_moves_nothing_even_where_dropped_tokens_count():
    config = load_config(None, ["correction=icepop", "correction.dropped_in_denominator=true", "learner.dtype=fp32"])
    learner = Learner(config)
    for far in (0.0, -50.0):  # first an ordinary step, so that Adam has momentum
        rollouts = random_rollouts(8)
        rollouts.sampler_logprobs = learner.policy.score(rollouts)[0] + far
        before = [weight.clone() for weight in learner.policy.model.parameters()]
        metrics = learner.update(learner.prepare(rollouts)[0], torch.Generator().manual_seed(0))
        moved = any(not torch.equal(old, new) for old, new in zip(before, learner.policy.model.parameters()))
        assert moved == (far == 0.0) and metrics["policy/skipped_updates"] == (0 if moved else 1)


@pytest.mark.parametrize("scale", [1, 40])
def test_a_head_with_large_bf16_logits_is_accepted_and_an_unknown_one_refused(scale):
    model = load_causal_lm("mini", "bf16", "eager")
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    Policy(model).check_head()
    forward = model.forward

    def other(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 0.5
        return output

    model.forward = other
    with pytest.raises(ValueError, match="computes its logits in a way that trueup does not know"):
        Policy(model).check_head()


def test_the_kl_penalty_pulls_back_to_the_model_that_training_started_from():
    settings = ["learner.dtype=fp32", "learner.attention=eager", "learner.lr=1e-3", "objective.kl_coefficient=100.0"]
    learner, rollouts = Learner(load_config(None, settings)), random_rollouts(8)
    with torch.no_grad():
        for weight in learner.policy.model.model.layers[0].mlp.parameters():
            weight.mul_(1.2)
    seen = []
    for _ in range(10):
        batch, _ = learner.prepare(random_rollouts(8))
        seen.append(learner.update(batch, torch.Generator().manual_seed(0))["policy/kl_reference"])
    assert seen[0] > 1e-4 and seen[-1] < 0.5 * seen[0]
    assert torch.equal(
        learner.reference.score(rollouts)[0], Policy(load_causal_lm("mini", "fp32", "eager")).score(rollouts)[0]
    )
