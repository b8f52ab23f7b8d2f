"""What could be saved by an optimizer that leaves the weights of dropped blocks alone?

    python benchmarks/update.py

measures how much of a training step is AdamW's update of the weights, in steps of the plain models
with and without it, by turns. An update that leaves out the dropped blocks can save no more than
the dropped share of that.
"""

import argparse

import numpy as np
import tensorflow as tf

from measure import interleave
from models import CASES
from variants import Setting, Variant

keras = tf.keras


def variants(case, quick):
    """Steps with the update (`whole`) and without it (`gradients`), of the plain model."""
    setting = Setting(case, quick=quick)
    weights = setting.plain.trainable_variables
    optimizer = keras.optimizers.AdamW(1e-6)
    optimizer.build(weights)

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(setting.plain(x, training=True)))
        return loss, tape.gradient(loss, weights)

    @tf.function
    def whole(x):
        loss, found = gradients(x)
        optimizer.apply_gradients(zip(found, weights))
        return loss

    # TensorFlow computes what a function returns, and nothing else.
    steps = {"whole": whole, "gradients": lambda x: gradients(x)[0]}
    return {name: Variant(setting.plain, step, setting.x) for name, step in steps.items()}


def main(argv=None):
    """Prints the share of the update, and returns it: model -> array, one for each turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=["resnet110", "transformer"])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    args = parser.parse_args(argv)
    found = {}
    for name in args.models:
        seconds = interleave(variants(CASES[name], args.quick), args.turns)
        found[name] = 1 - seconds["gradients"] / seconds["whole"]
        low, middle, high = np.quantile(found[name], (0.25, 0.5, 0.75))
        print(f"{name}: the update is {middle:.3f} of a step ({low:.3f} to {high:.3f})", flush=True)
    return found


if __name__ == "__main__":
    main()
