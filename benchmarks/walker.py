"""Time to analyse chains of 100, 500 and 2,000 blocks, and to wrap the paper's 1,202 layers.

    python benchmarks/walker.py

The chains are of one dense layer and one sum per block; medians of three runs. The 1,202 layers are
those of the deepest CIFAR ResNet of arXiv 1603.09382, 600 blocks of two convolutions with batch
normalization, here one channel wide: width plays no part in it.
"""

import statistics
import sys

import tensorflow as tf

from models import chain, cifar_resnet
from tfa_stochastic_depth import find_residuals, wrap_residuals
from wrapping import timed


def main():
    """Prints the table."""
    sys.setrecursionlimit(100_000)  # Keras goes through the layers of a new model by recursion
    print(f"TensorFlow {tf.__version__}, Keras of {tf.keras.Model.__module__}")
    print("blocks  seconds to analyse  milliseconds a block")
    for blocks in (100, 500, 2000):
        model = chain(blocks)
        times = []
        for _ in range(3):
            taken, found = timed(find_residuals, model)
            assert len(found.blocks) == blocks
            times.append(taken)
        median = statistics.median(times)
        print(f"{blocks:6}  {median:18.2f}  {1000 * median / blocks:20.2f}")
        tf.keras.backend.clear_session()
    built, model = timed(cifar_resnet, depth=1202, width=1)
    wrapped, _ = timed(wrap_residuals, model, 0.5)
    print(f"ResNet-1202: built in {built:.1f} s, its 600 blocks wrapped in {wrapped:.1f} s")


if __name__ == "__main__":
    main()
