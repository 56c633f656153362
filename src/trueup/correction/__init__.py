"""rho -> weights and masks, and the named presets. Pure functions.

Shapes in names: N response tokens end to end, B responses. mu is the sampler, pi_old the learner at the weights that
were delivered, and rho = pi_old / mu the mismatch ratio. The weights multiply each token's loss outside the policy
clip, after any dual clip, before aggregation (see `objectives.policy_loss`); they never carry gradient. Everything is
local to a response, so micro-batching cannot change it. `docs/corrections.md` says when to use which preset.
"""

from trueup.correction.apply import Corrected, add_counts, correct, fractions
from trueup.correction.presets import PRESETS, preset
from trueup.correction.spec import Correction, Filter

__all__ = ["PRESETS", "Corrected", "Correction", "Filter", "add_counts", "correct", "fractions", "preset"]
