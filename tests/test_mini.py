"""The mini model that ships, and the recipe that makes it."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import trueup
from trueup import mini
from trueup.tasks.sums import Sums, is_heldout

SHIPPED = Path(trueup.__file__).parent / "assets" / "mini"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(SHIPPED)


def test_the_shipped_folder_is_bf16_and_at_most_6_mb():
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 6_000_000
    with safe_open(SHIPPED / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_generation_config_hides_no_sampling_filter():
    settings = json.loads((SHIPPED / "generation_config.json").read_text())
    assert set(settings) <= {"eos_token_id", "pad_token_id", "transformers_version"}


def test_linear_layers_suit_the_int8_kernels():
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 3e6
    assert model.config.max_position_embeddings >= 1024
    layers = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert layers and all(size % 64 == 0 for layer in layers for size in layer.weight.shape)


def test_the_tokenizer_round_trips_every_character_and_adds_nothing(tokenizer):
    characters = list(mini.CHARACTERS)
    random.Random(0).shuffle(characters)
    for text in ("17+5=22;22+23=45;#45", "".join(characters), "  two  spaces , a\n\nblank line n't ", ""):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids


def test_the_tokenizer_can_pad_and_stop(tokenizer):
    assert (tokenizer.pad_token, tokenizer.eos_token) == (mini.PAD, mini.EOS)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([tokenizer.convert_tokens_to_ids("7"), 1, 0], skip_special_tokens=True) == "7"
    config = json.loads((SHIPPED / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"], config["vocab_size"]) == (0, 1, len(tokenizer))


def test_rl_starts_from_a_greedy_accuracy_between_20_and_50_percent(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.bfloat16).eval()
    task = Sums(seed=0, heldout=256)
    prompts = tokenizer([problem.prompt for problem in task.heldout], return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompts, max_new_tokens=48, do_sample=False)
    responses = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = sum(map(task.score, task.heldout, responses)) / 256
    assert 0.20 <= accuracy <= 0.50
    assert sum("#" in response for response in responses) > 250


def test_demonstrations_come_from_train_and_err_only_by_forgetting_carries():
    batch = next(mini.demonstrations(seed=0, batch_size=400))
    forgot = 0
    for prompt, response in batch:
        assert not is_heldout(prompt)
        *steps, final = response.split(";")
        for step in steps:
            question, result = step.split("=")
            total, addend = map(int, question.split("+"))
            shortfall = total + addend - int(result)
            assert shortfall in (0, 10)
            assert shortfall == 0 or total % 10 + addend % 10 >= 10
            forgot += shortfall == 10
        assert final == "#" + steps[-1].split("=")[1]
    # 3 steps each; mean of FORGETTING over the 100 pairs of ones digits is 0.28, and totals lean a little to small digits
    assert 0.20 < forgot / 1200 < 0.34


def test_outliers_change_weights_but_no_logit():
    torch.manual_seed(0)
    model = mini.make_model(mini.make_tokenizer()).eval()
    ids = torch.randint(2, 98, (3, 40))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        mini.add_outliers(model)
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert all(layer.input_layernorm.weight.max() == mini.OUTLIER_SCALE for layer in model.model.layers)


def test_prompts_and_padding_are_not_learned():
    tokenizer = mini.make_tokenizer()
    input_ids, labels = mini.collate([("1+2=", "#3"), ("1+2=", "1+2=3;#3")], tokenizer)
    assert input_ids.shape == labels.shape == (2, 13)
    assert tokenizer.decode(input_ids[0, :6]) == "1+2=#3"
    assert labels[0].tolist() == [-100] * 4 + input_ids[0, 4:6].tolist() + [tokenizer.eos_token_id] + [-100] * 6
    assert labels[1].tolist() == [-100] * 4 + input_ids[1, 4:].tolist()


def test_the_recipe_is_reproducible_for_a_seed(tmp_path):
    calls = []
    first = mini.make_mini(tmp_path / "first", seed=5, steps=3, batch_size=4, progress=lambda *call: calls.append(call))
    again = mini.make_mini(tmp_path / "again", seed=5, steps=3, batch_size=4)
    other = mini.make_mini(tmp_path / "other", seed=6, steps=3, batch_size=4)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert [(done, total) for done, total, _ in calls] == [(1, 3), (2, 3), (3, 3)]
    assert calls[0][2] == pytest.approx(4.585, abs=0.3)  # ln 98: an untrained model knows nothing
    model = AutoModelForCausalLM.from_pretrained(first)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(first).decode([2, 3]) == "\n "


def test_the_recipe_leaves_the_global_random_state_alone(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    mini.make_mini(tmp_path / "model", steps=1, batch_size=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_folder_in_use_and_an_empty_recipe_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model already"):
        mini.make_mini(tmp_path)
    with pytest.raises(ValueError, match="steps=0"):
        mini.make_mini(tmp_path / "new", steps=0)
