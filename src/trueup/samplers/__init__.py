"""Who generates. `open_sampler` starts an engine by its SPEC."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from trueup.samplers.base import EngineError, Sampler, Sampling, parse_spec

__all__ = ["EngineError", "Sampler", "Sampling", "open_sampler", "parse_spec", "require_vllm"]


def require_vllm() -> None:
    """Raise EngineError if vLLM is not installed, without importing it."""
    if "vllm" in sys.modules and sys.modules["vllm"] is None or find_spec("vllm") is None:
        raise EngineError(
            "the vllm engine is not installed; install it with pip install 'trueup[cpu]' (no GPU) or 'trueup[vllm]' (GPU), "
            "or choose sampler.engine=transformers"
        )


def open_sampler(spec: str, model: str, *, context: int, **options) -> Sampler:
    """Start `engine:precision` for the architecture in `model`; it holds no weights until the first `load`.

    context: longest prompt plus response, tokens. options: what the engine's own class takes.
    """
    engine, precision = parse_spec(spec)
    if engine == "vllm":
        from trueup.samplers.vllm import VLLMSampler

        return VLLMSampler(model, precision, context=context, **options)
    from trueup.samplers.transformers import TransformersSampler

    return TransformersSampler.from_config(model, precision, context=context)
