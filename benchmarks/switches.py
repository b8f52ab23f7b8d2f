"""Which branches a training step is about to run."""

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth.layer import stochastic_depth_layers
from tfa_stochastic_depth.switch import draw_switch


class Switches:
    """The switches of a model's `StochasticDepth` layers, known without drawing any.

    A layer's next switch follows from its weight `seed_state`, which moves on with each step.

    Args:
        model: The model.
        costs: Multiply-adds of each branch, in the order of the blocks.
    """

    def __init__(self, model, costs):
        layers = stochastic_depth_layers(model)
        self._states = [
            next(w for w in layer.non_trainable_weights if "seed_state" in w.name)
            for layer in layers
        ]
        self._probs = np.array([layer.survival_prob for layer in layers], "float32")
        self._shares = np.array(costs) / sum(costs)
        self._seeds = []

    def record(self):
        """Notes the seeds of the step about to be run."""
        self._seeds.append([state.numpy() for state in self._states])

    def drawn(self):
        """The switches of the steps noted, bools `(step, block)`."""
        seeds = tf.constant(np.reshape(self._seeds, (-1, 2)))
        drawn = _draw(seeds, tf.tile(self._probs, [len(self._seeds)]))
        return drawn.numpy().reshape(len(self._seeds), -1)

    def executed(self):
        """The executed share of each step noted."""
        return self.drawn() @ self._shares


@tf.function(reduce_retracing=True)
def _draw(seeds, probs):
    return tf.map_fn(lambda pair: draw_switch(*pair), (seeds, probs), fn_output_signature=tf.bool)
