"""Which branches a training step is about to run."""

import numpy as np

from tfa_stochastic_depth.layer import draw_reader, stochastic_depth_layers
from tfa_stochastic_depth.switch import draw_switches


class Switches:
    """The switches of a model's `StochasticDepth` layers, known without drawing any.

    A layer's next switch follows from its weight `seed_state`, which moves on with each step.

    Args:
        model: The model.
        costs: Multiply-adds of each branch, in the order of the blocks.
    """

    def __init__(self, model, costs):
        self._read = draw_reader(stochastic_depth_layers(model))
        self._probs = []
        self._shares = np.array(costs) / sum(costs)
        self._seeds = []

    def record(self):
        """Notes the seeds of the step about to be run."""
        seeds, probs = self._read()
        self._seeds.append(seeds)
        self._probs.append(probs)

    def drawn(self):
        """The switches of the steps noted, bools `(step, block)`."""
        drawn = draw_switches(np.reshape(self._seeds, (-1, 2)), np.ravel(self._probs))
        return drawn.numpy().reshape(len(self._seeds), -1)

    def executed(self):
        """The executed share of each step noted."""
        return self.drawn() @ self._shares
