"""Train the same ResNet plain and with stochastic depth, side by side, then hand it on.

    python tutorials/digits_resnet.py

The network is the CIFAR-style ResNet of the stochastic depth paper (arXiv 1603.09382): 6n+2 layers
in three stages, here on the hand-written digits that scikit-learn ships, scaled up. Both models
start from the same weights, see the same batches, and take turns of a few steps each, so that
whatever else the machine is doing slows both alike.

What to look at: the table of blocks that were found, the time of a step beside the share of the
branches that is expected to run, and the exported model: a plain one again, which a process without
this package reloads.
"""

import argparse
import contextlib
import dataclasses
import io
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

from tfa_stochastic_depth import (
    find_residuals,
    get_survival_probs,
    unwrap_residuals,
    wrap_residuals,
)

layers = keras.layers

STEPS_PER_TURN = 4

# The program of the process that reloads the model: TensorFlow alone, and nothing of this package.
RELOAD = """
import sys

import numpy as np
import tensorflow as tf

model_dir, images, predictions = sys.argv[1:]
serve = tf.saved_model.load(model_dir).signatures["serving_default"]
(name,) = serve.structured_input_signature[1]
(logits,) = serve(**{name: tf.constant(np.load(images))}).values()
np.save(predictions, logits.numpy())
"""


def parse_args(argv=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--depth", type=int, default=20, help="6n+2: 8, 14, 20, 26, 32, ...")
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--survival-prob", type=float, default=0.5, help="of the last block")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo-output"))
    args = parser.parse_args(argv)
    if args.depth < 8 or args.depth % 6 != 2:
        parser.error(f"--depth must be 6n+2 with n at least 1. Received: {args.depth}")
    return args


# ---- data ----------------------------------------------------------------------------------------


def load_data(dataset, image_size, seed):
    """Loads images of `(image_size, image_size, channels)`, scaled to mean 0 and deviation 1.

    Returns:
        `(train_images, train_labels), (test_images, test_labels)`.
    """
    if dataset == "digits":
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8, 1)
        train, test, train_labels, test_labels = train_test_split(
            images, labels, test_size=0.2, random_state=seed, stratify=labels
        )
    else:
        (train, train_labels), (test, test_labels) = keras.datasets.cifar10.load_data()
    mean, deviation = train.mean(), train.std()
    train, test = (resize((images - mean) / deviation, image_size) for images in (train, test))
    return (train, train_labels.ravel()), (test, test_labels.ravel())


def resize(images, image_size):
    """Scales images `(count, height, width, channels)` to float32 squares of `image_size`."""
    return tf.image.resize(images.astype("float32"), (image_size, image_size)).numpy()


def batches(images, labels, batch_size, rng):
    """Yields the shuffled batches of one epoch; the incomplete last one is left out."""
    order = rng.permutation(len(images))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield images[chosen], labels[chosen]


# ---- model ---------------------------------------------------------------------------------------


def convolution(x, filters, kernel_size, strides=1):
    """A convolution and its batch normalization."""
    x = layers.Conv2D(
        filters,
        kernel_size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(1e-4),
    )(x)
    # Keras's default momentum of 0.99 is made for runs of many thousand steps.
    return layers.BatchNormalization(momentum=0.9)(x)


def build_resnet(depth, width, input_shape, classes=10):
    """Builds a ResNet of `depth` = 6n+2 layers: three stages of n blocks.

    Each stage after the first halves the image and doubles the channels. The shortcut into it is a
    1x1 convolution; every other one is the identity.
    """
    inputs = keras.Input(input_shape)
    x = layers.ReLU()(convolution(inputs, width, 3))
    for stage in range(3):
        filters = width * 2**stage
        for block in range((depth - 2) // 6):
            narrows = stage > 0 and block == 0
            strides = 2 if narrows else 1
            shortcut = convolution(x, filters, 1, strides) if narrows else x
            branch = layers.ReLU()(convolution(x, filters, 3, strides))
            branch = convolution(branch, filters, 3)
            merged = layers.Add(name=f"stage{stage + 1}_block{block + 1}")([shortcut, branch])
            x = layers.ReLU()(merged)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, name="logits")(x))


def compile_for_training(model, steps):
    """Compiles with SGD and momentum, the learning rate falling to zero over `steps`."""
    model.compile(
        optimizer=keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.05, steps), momentum=0.9, nesterov=True
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )


# ---- training side by side -----------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """One model in training, and what was recorded of it.

    Attributes:
        loss: `(step, seconds, training loss)` for each turn; the seconds are spent in steps alone.
        accuracy: `(step, seconds, test accuracy)` for each epoch.
    """

    name: str
    model: keras.Model
    step_seconds: list = dataclasses.field(default_factory=list)
    loss: list = dataclasses.field(default_factory=list)
    accuracy: list = dataclasses.field(default_factory=list)
    steps: int = 0

    @property
    def seconds(self):
        """Training time so far."""
        return sum(self.step_seconds)

    def take_turn(self, turn):
        """Trains on the batches of one turn and records the mean loss over it."""
        self.model.reset_metrics()
        for images, labels in turn:
            started = time.perf_counter()
            loss, _ = self.model.train_on_batch(images, labels)
            if self.steps > 0:  # the first step also traces the graph
                self.step_seconds.append(time.perf_counter() - started)
            self.steps += 1
        self.loss.append((self.steps, self.seconds, float(loss)))

    def test(self, images, labels):
        """Measures the accuracy on test images."""
        _, accuracy = self.model.evaluate(images, labels, batch_size=256, verbose=0)
        self.accuracy.append((self.steps, self.seconds, float(accuracy)))

    def median_step(self):
        """Median seconds of a step, and the quartiles around it."""
        low, median, high = statistics.quantiles(self.step_seconds, n=4)
        return median, low, high


def train_side_by_side(runs, train, test, epochs, batch_size, seed):
    """Trains the runs on the same batches, by turns of `STEPS_PER_TURN` steps."""
    rng = np.random.default_rng(seed)
    for epoch in range(epochs):
        print(f"epoch {epoch + 1}/{epochs}")
        epoch_batches = list(batches(*train, batch_size, rng))
        bar = progress_bar(len(epoch_batches), runs)
        for start in range(0, len(epoch_batches), STEPS_PER_TURN):
            turn = epoch_batches[start : start + STEPS_PER_TURN]
            in_turn = runs if start // STEPS_PER_TURN % 2 == 0 else runs[::-1]
            for run in in_turn:  # nobody always goes first
                run.take_turn(turn)
            bar.update(start + len(turn), [(label(run), run.loss[-1][2]) for run in runs])
        for run in runs:
            run.test(*test)
        print("  test accuracy: " + ", ".join(f"{r.name} {r.accuracy[-1][2]:.3f}" for r in runs))


def progress_bar(steps, runs):
    """A bar that moves on a terminal of 80 columns, and a line for each epoch elsewhere."""
    return keras.utils.Progbar(
        steps,
        width=10,
        verbose=1 if sys.stdout.isatty() else 2,
        stateful_metrics=[label(run) for run in runs],
    )


def label(run):
    """The name of a run's loss in the progress bar, where there is room for one word."""
    return f"{run.name.split()[0]} loss"


# ---- export --------------------------------------------------------------------------------------


def export(model, path):
    """Writes a SavedModel for inference."""
    if not hasattr(model, "export"):
        tf.saved_model.save(model, path)
        return
    with contextlib.redirect_stdout(io.StringIO()):  # Keras 3 lists every captured tensor
        model.export(path)


def predict_in_new_process(model_dir, images):
    """Predicts with a SavedModel in a fresh Python process that imports TensorFlow alone."""
    with tempfile.TemporaryDirectory() as folder:
        images_path = pathlib.Path(folder, "images.npy")
        predictions_path = pathlib.Path(folder, "predictions.npy")
        np.save(images_path, images)
        subprocess.run(
            [sys.executable, "-c", RELOAD, model_dir, images_path, predictions_path],
            check=True,
            cwd=folder,
        )
        return np.load(predictions_path)


# ---- report --------------------------------------------------------------------------------------


def draw_curves(runs, path):
    """Draws training loss and test accuracy against steps and against seconds."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for run in runs:
        steps, seconds, losses = np.transpose(run.loss)
        axes[0, 0].plot(steps, losses, label=run.name)
        axes[0, 1].plot(seconds, losses, label=run.name)
        steps, seconds, accuracies = np.transpose(run.accuracy)
        axes[1, 0].plot(steps, accuracies, marker="o", label=run.name)
        axes[1, 1].plot(seconds, accuracies, marker="o", label=run.name)
    axes[0, 0].set_ylabel("training loss, weight penalty included")
    axes[1, 0].set_ylabel("test accuracy")
    for column, label in enumerate(["training step", "seconds spent in training steps"]):
        axes[1, column].set_xlabel(label)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("The same ResNet on the same batches, plain and with stochastic depth")
    figure.savefig(path, dpi=120)


def print_timing(runs, executed):
    """Prints the seconds per step of both, and their ratio beside the share that had to run."""
    for run in runs:
        median, low, high = run.median_step()
        print(
            f"  {run.name:<17} test accuracy {run.accuracy[-1][2]:.3f}   "
            f"{median:.4f} s/step (middle half {low:.4f} to {high:.4f})   "
            f"{run.seconds:.1f} s in {len(run.step_seconds)} steps"
        )
    plain, wrapped = runs
    print(f"  median step, stochastic depth / plain   {ratio(wrapped, plain):.3f}")
    print(f"  all seconds, stochastic depth / plain   {wrapped.seconds / plain.seconds:.3f}")
    print(f"  share of the branches expected to run   {executed:.3f}")


def ratio(run, other):
    """Returns the median step of `run` as a fraction of that of `other`."""
    return run.median_step()[0] / other.median_step()[0]


def section(title):
    """Prints the headline of one part of the demo."""
    print(f"\n== {title}", flush=True)


def main(argv=None):
    """Runs the demo.

    Args:
        argv: the command line options; those of the process if None.

    Returns:
        A dict of what was measured and written.
    """
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(args.seed)
    train, test = load_data(args.dataset, args.image_size, args.seed)
    model = build_resnet(args.depth, args.width, train[0].shape[1:])
    steps = args.epochs * (len(train[0]) // args.batch_size)

    section(f"The residual blocks of a ResNet-{args.depth}")
    residuals = find_residuals(model, args.survival_prob)
    print(residuals)
    executed = residuals.expected_depth / len(residuals.blocks)
    wrapped = wrap_residuals(model, args.survival_prob, seed=args.seed)

    section(f"Training both for {steps} steps of {args.batch_size} images, by turns")
    runs = [Run("plain", model), Run("stochastic depth", wrapped)]
    for run in runs:
        compile_for_training(run.model, steps)
    train_side_by_side(runs, train, test, args.epochs, args.batch_size, args.seed)

    section("Results; the first step of each, which traces the graph, is not timed")
    print_timing(runs, executed)

    section("Back to a plain model, exported, and reloaded where only TensorFlow is imported")
    model_dir, images = args.out / "saved_model", test[0][:256]
    export(unwrap_residuals(wrapped), str(model_dir))
    here = np.asarray(wrapped(images, training=False))
    difference = float(np.abs(predict_in_new_process(model_dir.resolve(), images) - here).max())
    print(f"  {model_dir}: largest difference in {len(images)} predictions {difference:.1e}")

    section("Learning curves")
    curves = args.out / "learning_curves.png"
    draw_curves(runs, curves)
    print(f"  {curves}")
    return {
        "blocks": [block.name for block in residuals.blocks],
        "survival_probs": get_survival_probs(wrapped),
        "executed": executed,
        "accuracy": {run.name: run.accuracy[-1][2] for run in runs},
        "step_seconds": {run.name: run.median_step()[0] for run in runs},
        "max_difference": difference,
        "saved_model": model_dir,
        "curves": curves,
    }


if __name__ == "__main__":
    main()
