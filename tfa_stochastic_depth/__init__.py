"""Stochastic depth for TensorFlow: residual branches that are really not computed when dropped.

Huang, Sun, Liu, Sedra, Weinberger, "Deep Networks with Stochastic Depth", arXiv 1603.09382.
"""

__version__ = "0.1.0"

from tfa_stochastic_depth.layer import (
    StochasticDepth,
    get_survival_probs,
    set_survival_probs,
    survival_probs,
)
from tfa_stochastic_depth.legacy import load_legacy_model
from tfa_stochastic_depth.realised import RealisedDepth
from tfa_stochastic_depth.residuals import Block, Refusal, Residuals
from tfa_stochastic_depth.schedule import (
    SurvivalProbSchedule,
    cutoff,
    exponential_warmup,
    linear_warmup,
)
from tfa_stochastic_depth.survival import constant, existing, linear_decay
from tfa_stochastic_depth.transfer import copy_weights
from tfa_stochastic_depth.unwrap import unwrap_residuals
from tfa_stochastic_depth.wrap import find_residuals, wrap_residuals

__all__ = [
    "Block",
    "RealisedDepth",
    "Refusal",
    "Residuals",
    "StochasticDepth",
    "SurvivalProbSchedule",
    "constant",
    "copy_weights",
    "cutoff",
    "existing",
    "exponential_warmup",
    "find_residuals",
    "get_survival_probs",
    "linear_decay",
    "linear_warmup",
    "load_legacy_model",
    "set_survival_probs",
    "survival_probs",
    "unwrap_residuals",
    "wrap_residuals",
]
