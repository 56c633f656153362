"""trueup: RL of language models on rollouts of fast, even 8-bit, inference engines, kept honest.

Start with `trueup.rollouts.Rollouts`, `trueup.mismatch.measure` and `trueup.correction.correct`.
"""

__version__ = "0.1.0"
