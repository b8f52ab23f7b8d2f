"""Time to wrap keras.applications models, beside the time to build them.

Building and wrapping take turns in one process; printed are medians in seconds and their ratio.

    python benchmarks/wrapping.py
"""

import argparse
import statistics
import time

import tensorflow as tf

from tfa_stochastic_depth import find_residuals, wrap_residuals

keras = tf.keras

MODELS = ("ResNet50", "MobileNetV2", "EfficientNetB0", "ConvNeXtTiny")


def timed(function, *args, **kwargs):
    """The seconds that a call took, and what it returned."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def measure(name, turns):
    """Seconds of building, finding and wrapping, one list each; the first turn is left out."""
    build, find, wrap = [], [], []
    for _ in range(turns + 1):
        keras.backend.clear_session()
        architecture = getattr(keras.applications, name)
        seconds, model = timed(architecture, weights=None, input_shape=(64, 64, 3))
        build.append(seconds)
        find.append(timed(find_residuals, model)[0])
        wrap.append(timed(wrap_residuals, model)[0])
    return build[1:], find[1:], wrap[1:]


def main(argv=None):
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args(argv)
    print(f"TensorFlow {tf.__version__}, medians of {args.turns} turns, in seconds")
    print(f"{'':16}{'build':>8}{'find':>8}{'wrap':>8}{'wrap / build':>14}")
    for name in args.models:
        build, find, wrap = map(statistics.median, measure(name, args.turns))
        print(f"{name:16}{build:8.2f}{find:8.2f}{wrap:8.2f}{wrap / build:14.2f}")


if __name__ == "__main__":
    main()
