"""Judging responses: a verifier that fails is named with what it was given."""

from types import SimpleNamespace

import pytest

from trueup.collect import Collector
from trueup.configfile import load_config
from trueup.rollouts import Rollouts
from trueup.tasks import Problem


def test_a_reward_that_is_nan_names_task_response_and_prompt(tokenizer):
    collector = Collector(load_config(), tokenizer, stops=(1,), context=100)
    collector.task = SimpleNamespace(name="broken", score=lambda problem, response: float("nan"))
    rollouts = Rollouts.from_lists([tokenizer.encode("1+1=")], [tokenizer.encode("2")], group=[0])
    with pytest.raises(
        ValueError, match="task broken scored a response NaN: '2' to '1\\+1='; its verifier must return"
    ):
        collector._judge([Problem("1+1=", "2")], rollouts)


def test_a_held_out_prompt_that_is_too_long_is_refused_before_anything_runs(tokenizer):
    with pytest.raises(ValueError, match="batch.prompt_length is 4: raise it"):
        Collector(load_config(None, ["batch.prompt_length=4"]), tokenizer, stops=(1,), context=100)
