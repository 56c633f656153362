"""The public API as other trainers call it: packed and padded, tensors and arrays, results in the caller's kind and shape;
and the examples of the documentation, which run."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_correction import batches, corrections

from trueup.correction import PRESETS, correct
from trueup.mismatch import measure
from trueup.rollouts import offsets_of

ROOT = Path(__file__).parent.parent
NAN = float("nan")


def pad(values, places, fill):
    """Packed [N] -> [B, T] with each response's tokens at `places`, bool [B, T]."""
    return torch.full(places.shape, fill, dtype=values.dtype).masked_scatter(places, values)


@st.composite
def padded(draw):
    """A batch, and places for its tokens: left, right or scattered over a few positions more than it needs."""
    mu, pi, offsets, mask, advantages = batch = draw(batches())
    lengths = offsets.diff().tolist()
    width = max(lengths) + draw(st.integers(0, 3))
    places = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        places[row, sorted(draw(st.permutations(range(width)))[:length])] = True
    return batch, places


@given(corrections, padded())
@settings(max_examples=150, deadline=None)
def test_packed_padded_and_numpy_give_the_same_weights_masks_and_counts(correction, case):
    (mu, pi, offsets, mask, advantages), places = case
    packed = correct(correction, mu, pi, offsets, mask, advantages)
    shaped = pad(mask, places, False)
    # what stands at padding is never looked at, whatever it is
    inputs = (pad(mu, places, NAN), pad(pi, places, 1e9), None, shaped, pad(advantages, places, NAN))
    found = correct(correction, *inputs)
    arrays = correct(correction, *(None if value is None else value.numpy() for value in inputs))
    flat = correct(correction, mu.numpy(), pi.numpy(), offsets.numpy(), mask.numpy(), advantages.numpy())
    for name in ("weights_N", "keep_N", "valid_N", "denominator_N"):
        want = getattr(packed, name)
        assert torch.equal(getattr(found, name), pad(want, places, 0))
        assert np.array_equal(getattr(arrays, name), pad(want, places, 0).numpy())
        assert np.array_equal(getattr(flat, name), want.numpy())
        assert isinstance(getattr(arrays, name), np.ndarray) and isinstance(getattr(flat, name), np.ndarray)
    for other in (found, arrays, flat):  # sums over other lengths differ in the last bit
        assert other.counts == pytest.approx(packed.counts, rel=1e-12)


@given(padded())
@settings(max_examples=100, deadline=None)
def test_packed_padded_and_numpy_give_the_same_statistics(case):
    (mu, pi, offsets, mask, entropy), places = case
    packed = pytest.approx(measure(mu, pi, offsets, mask, entropy), rel=1e-12, abs=1e-12)
    inputs = (pad(mu, places, NAN), pad(pi, places, 1e9), None, pad(mask, places, False), pad(entropy, places, NAN))
    assert measure(*inputs) == packed
    assert measure(*(None if value is None else value.numpy() for value in inputs)) == packed
    assert measure(mu.numpy(), pi.numpy(), offsets.numpy(), mask.numpy(), entropy.numpy()) == packed


def test_results_are_of_the_kind_and_type_documented():
    mu, pi = np.log([0.5, 0.25]), np.log([0.5, 0.5])
    found = correct("tis", mu, pi, [0, 2])
    assert found.weights_N.dtype == np.float32 and found.keep_N.dtype == np.bool_
    assert (
        correct("tis", mu, torch.from_numpy(pi), [0, 2]).weights_N.dtype == torch.float32
    )  # one tensor makes all tensors
    half = correct("tis", torch.from_numpy(mu).bfloat16(), torch.from_numpy(pi).half(), torch.tensor([0, 2]))
    assert half.weights_N.dtype == torch.float32


def test_a_list_with_none_where_the_engine_gave_no_log_prob_is_read_as_missing():
    found = correct("tis", [-1.0, None], [-1.0, -1.0], [0, 2])
    assert found.keep_N.tolist() == [True, False]
    assert measure([-1.0, None], [-1.0, -1.0], [0, 2])["mismatch/missing_fraction"] == 0.5


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_a_padded_batch_takes_advantages_a_response_or_a_token(shape):
    mu, pi = torch.zeros(2, 3) - 1, torch.zeros(2, 3) - 2  # mean k1 = 1
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages = torch.tensor([-1.0, 1.0]).reshape(2, -1).expand(2, shape[-1] if len(shape) == 2 else 1).reshape(shape)
    found = correct("deepseek-v3.2", mu, pi, None, mask, advantages)
    assert found.weights_N.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert found.denominator_N.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize(
    "inputs, message",
    [
        (
            (torch.zeros(2), torch.zeros(3), offsets_of([2])),
            r"learner_logprobs_N has shape \(3,\) but sampler_logprobs_N",
        ),
        ((torch.zeros(2), torch.zeros(2), offsets_of([3])), "offsets must rise from 0 to the number of tokens, 2"),
        ((torch.zeros(1, 2), torch.zeros(1, 2), None), "need loss_mask_N"),
        ((torch.zeros(1, 2), torch.zeros(1, 2), offsets_of([2])), "for padded tensors pass offsets=None"),
        ((torch.zeros(2), torch.zeros(2), offsets_of([2]), None, torch.zeros(1)), "advantages_N has shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_what_was_given_and_expected(inputs, message):
    with pytest.raises(ValueError, match=message):
        correct("tis", *inputs)


@pytest.mark.parametrize("page", ["corrections.md", "metrics.md"])
def test_the_examples_of_the_documentation_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(code, {})


def test_the_documentation_names_every_preset_and_every_statistic():
    corrections_page, metrics_page = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("corrections", "metrics"))
    assert [name for name in PRESETS if f"`{name}`" not in corrections_page] == []
    found = measure([-1.0, -2.0], [-1.0, -1.5], [0, 1, 2], entropy_N=[1.0, 1.0])
    names = [*found, *correct("tis", [-1.0], [-1.0], [0, 1]).stats]
    assert [name for name in names if f"`{name}`" not in metrics_page] == []
