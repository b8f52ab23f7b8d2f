"""Does a warm-up of the drop probabilities help? ResNet-56 on the digits of scikit-learn.

    python benchmarks/warmup.py                            # five seeds of each variant
    python benchmarks/warmup.py --depth 8 --seeds 2 --epochs 2   # does it run?

Variants, for each final survival probability p of the paper's linear decay:

    plain       without stochastic depth
    from start  blocks are dropped from the first step on
    warm-up     the drop probabilities go up in a straight line over the first part of the training
    early       blocks are dropped in that part only

A seed decides the first weights, the order of the images and the switches, and is the same for all
variants. Printed are means over the seeds, and their standard deviation: the accuracy on the test
images after the last epoch, and the training loss of the first and the last epoch.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from models import cifar_resnet
from tfa_stochastic_depth import SurvivalProbSchedule, cutoff, linear_warmup, wrap_residuals

keras = tf.keras

KINDS = {"from start": None, "warm-up": linear_warmup, "early": cutoff}
COLUMNS = ("accuracy", "first_loss", "last_loss", "seconds")


def digits():
    """The images `(count, 8, 8, 1)` of mean 0 and deviation 1, and labels: train, test."""
    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).reshape(-1, 8, 8, 1).astype("float32")
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    return (train, train_labels), (test, test_labels)


def variants(probs):
    """Name -> (final survival probability, what makes the schedule); `None` for none."""
    found = {"plain": (None, None)}
    found.update((f"{kind} {p:g}", (p, make)) for p in probs for kind, make in KINDS.items())
    return found


def train(variant, seed, args):
    """Trains one variant from one seed; returns what came of it, by `COLUMNS`."""
    p, make = variant
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    (images, labels), test = digits()
    model = cifar_resnet(args.depth, args.width, image=images.shape[1:])
    if p is not None:
        model = wrap_residuals(model, p, seed=seed)
    steps = args.epochs * -(-len(images) // args.batch_size)
    rate = keras.optimizers.schedules.CosineDecay(args.rate, steps)
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    schedule = [] if make is None else [SurvivalProbSchedule(make(args.part * steps))]
    start = time.perf_counter()
    fit = model.fit(
        images, labels, args.batch_size, args.epochs, callbacks=schedule, verbose=0, shuffle=True
    )
    seconds = time.perf_counter() - start
    losses = fit.history["loss"]
    accuracy = model.evaluate(*test, batch_size=512, verbose=0)[1]
    return dict(zip(COLUMNS, map(float, (accuracy, losses[0], losses[-1], seconds))))


def summary(runs):
    """Column -> (mean, standard deviation) over runs."""
    table = np.array([[run[column] for column in COLUMNS] for run in runs])
    spread = table.std(axis=0, ddof=min(1, len(runs) - 1))
    return dict(zip(COLUMNS, zip(table.mean(axis=0).tolist(), spread.tolist())))


def parse_args(argv=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=56, help="6n+2")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.01, help="the first learning rate")
    parser.add_argument("--probs", type=float, nargs="+", default=[0.5, 0.2])
    parser.add_argument("--part", type=float, default=0.4, help="of the training, for a warm-up")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="also write all runs to this file")
    return parser.parse_args(argv)


def main(argv=None):
    """Prints the table, and returns all runs: variant -> one dict per seed."""
    args = parse_args(argv)
    print(f"TensorFlow {tf.__version__}, ResNet-{args.depth}, {args.epochs} epochs")
    found = {name: [] for name in variants(args.probs)}
    for seed in range(args.seeds):  # in turns, so that whatever slows the machine slows all alike
        for name, variant in variants(args.probs).items():
            found[name].append(train(variant, seed, args))
            print(f"  seed {seed}, {name}: {found[name][-1]}", flush=True)
    print(f"{'':16}{'test accuracy':>18}{'first loss':>18}{'last loss':>18}{'seconds':>16}")
    for name, runs in found.items():
        cells = [f"{mean:9.4f} ± {spread:.4f}" for mean, spread in summary(runs).values()]
        print(f"{name:16}" + "".join(f"{cell:>18}" for cell in cells))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
