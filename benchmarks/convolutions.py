"""Train-step cost of eleven equal residual 3x3 convolutions, each dropped with its own switch.

The model of the TensorFlow issue in which users asked for branches that are really not computed:
batch 16 of 64x64x32, graph mode, SGD. All variants are stepped in turn, one step each, so that
each sees the same noise of the machine; printed are medians and quartiles of the ratio to the
plain model's step of the same turn.

    python benchmarks/convolutions.py --steps 60
"""

import argparse
import json
import statistics
import time

import tensorflow as tf

from tfa_stochastic_depth import constant, wrap_residuals

keras = tf.keras


def plain_model(blocks, size, channels):
    """`blocks` residual convolutions on `(size, size, channels)` images."""
    x = inputs = keras.Input((size, size, channels))
    for _ in range(blocks):
        y = keras.layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        x = keras.layers.Add()([x, y])
    return keras.Model(inputs, x)


def train_step(model):
    """A compiled function that does one step of SGD on a fixed loss."""
    optimizer = keras.optimizers.SGD(1e-6)
    weights = model.trainable_variables
    if hasattr(optimizer, "build"):
        optimizer.build(weights)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights))
        return loss

    return step


def measure(steps, turns, x):
    """Seconds of each step, `{name: [seconds of turn 0, ...]}`; the first of each is left out."""
    seconds = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step(x).numpy()
    names = list(steps)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            steps[name](x).numpy()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main(argv=None):
    """Prints the table, and returns it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args(argv)

    plain = plain_model(args.blocks, args.size, args.channels)
    models = {"plain": plain}
    for p in (1.0, 0.8, 0.5, 0.2, 0.0):
        models[f"p = {p}"] = wrap_residuals(plain, constant(p), seed=1)
    steps = {name: train_step(model) for name, model in models.items()}
    x = tf.random.normal((args.batch_size, args.size, args.size, args.channels))
    seconds = measure(steps, args.steps, x)

    results = {}
    print(
        f"{args.blocks} convolutions, batch {args.batch_size} of {args.size}x{args.size}x"
        f"{args.channels}, TensorFlow {tf.__version__}, {args.steps} turns"
    )
    print(f"{'':10}{'ms':>9}{'mean / plain':>14}{'median':>9}{'quartiles':>17}")
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["plain"])]
        low, median, high = statistics.quantiles(ratios, n=4)
        mean = statistics.fmean(values) / statistics.fmean(seconds["plain"])
        results[name] = {"ms": statistics.median(values) * 1e3, "mean": mean, "median": median}
        print(f"{name:10}{results[name]['ms']:9.2f}{mean:14.3f}{median:9.3f}{low:9.3f}{high:8.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    return results


if __name__ == "__main__":
    main()
