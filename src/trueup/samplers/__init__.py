"""Who generates. `open_sampler` starts an engine by its SPEC."""

from __future__ import annotations

from trueup.samplers.base import EngineError, Sampler, Sampling, parse_spec

__all__ = ["EngineError", "Sampler", "Sampling", "open_sampler", "parse_spec"]


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
