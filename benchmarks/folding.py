"""How far an unwrapped model is from the wrapped one: every network of `keras.applications`.

`unwrap_residuals` moves the survival probabilities into weights, which are rounded once more. For
each network, as Keras makes it, with linear decay to 0.5: the number of blocks, the number of
`Rescaling` layers that had to be added, and the largest difference of the two models' outputs,
over the largest output. Beside it stands how far the wrapped model's own output moves if each pixel
moves by one unit in its last place, which tells what float32 is good for in that network.

    python benchmarks/folding.py [NAMES]
"""

import gc
import sys

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth import get_survival_probs, unwrap_residuals, wrap_residuals

keras = tf.keras
SIZES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}


def measure(name):
    """Returns (blocks, rescalings, two differences), or `None` for a network without blocks."""
    size = SIZES.get(name, 32)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classifier_activation=None
    )
    try:
        wrapped = wrap_residuals(model, 0.5)
    except ValueError:
        return None
    plain = unwrap_residuals(wrapped)
    images = np.random.default_rng(0).uniform(0, 255, (4, size, size, 3)).astype("float32")
    moved = np.nextafter(images, np.float32(256))
    ours, theirs, noise = (
        np.asarray(m(x, training=False), "float64")
        for m, x in ((plain, images), (wrapped, images), (wrapped, moved))
    )
    added = [x for x in plain.layers if x.name.endswith("_branch_factor")]
    differences = [np.abs(y - theirs).max() / np.abs(theirs).max() for y in (ours, noise)]
    return len(get_survival_probs(wrapped)), len(added), *differences


def main():
    """Prints a line for each network."""
    names = sys.argv[1:] or [name for name in dir(keras.applications) if name[0].isupper()]
    print(f"{'network':20} {'blocks':>6} {'rescalings':>10} {'difference':>10} {'one ulp':>8}")
    largest = 0.0
    for name in names:
        keras.utils.set_random_seed(1)
        found = measure(name)
        if found is not None:
            blocks, added, difference, noise = found
            largest = max(largest, difference)
            print(f"{name:20} {blocks:6} {added:10} {difference:10.1e} {noise:8.1e}", flush=True)
        keras.backend.clear_session()
        gc.collect()
    print(f"largest difference {largest:.1e}")


if __name__ == "__main__":
    main()
