"""Real engines, started once and shared: a test that changes an engine's weights starts by delivering its own."""

import os

# Small models on two cores: one OpenMP thread is faster than two that wait for each other, and it lets tests repeat
# exactly. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from trueup.learner.model import MINI, Policy, load_causal_lm, load_tokenizer  # noqa: E402
from trueup.samplers import open_sampler  # noqa: E402

CONTEXT = 400  # more than two of vLLM's prefix blocks on CPU


@pytest.fixture(scope="session")
def engines():
    """engines("vllm:int8") -> a running sampler of the mini model's architecture."""
    running = {}

    def get(spec: str):
        if spec not in running:
            running[spec] = open_sampler(spec, str(MINI), context=CONTEXT)
        return running[spec]

    yield get
    for sampler in running.values():
        sampler.close()


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("mini")


@pytest.fixture
def policy():
    """The mini model in bf16, fresh for each test."""
    torch.manual_seed(0)
    return Policy(load_causal_lm("mini", "bf16", "eager"))


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Sixteen sums, as ids."""
    texts = [f"{11 + 7 * i % 80}+{13 + 5 * i % 70}+{17 + 3 * i % 60}+{19 + 11 * i % 50}=" for i in range(16)]
    return [tokenizer.encode(text) for text in texts]
