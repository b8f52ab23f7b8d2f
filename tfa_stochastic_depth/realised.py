"""Which branches really ran in a training step."""

from __future__ import annotations

import numbers

import numpy as np

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import draw_reader, stochastic_depth_layers
from tfa_stochastic_depth.rows import count_rows
from tfa_stochastic_depth.switch import draw_switches

keras = _keras.keras


class RealisedDepth(keras.callbacks.Callback):
    """Logs `realised_depth`, the number of branches that ran in a training step.

    It is the mean over the steps of an epoch, to be compared with `expected_depth` of
    `find_residuals` (that of `SurvivalProbSchedule` is of the end of the epoch). A step of
    `mode="row"` counts the share of the samples that a branch ran on, also in a last, smaller
    batch; a layer that is called several times in a step counts several times.

    Nothing is added to the step for this. The switches of a layer follow from the seed and the
    count of draws that it keeps, so they are drawn once more from those read before and after a
    step, which takes some tens of microseconds for each. Put this callback before those that write
    logs (`TensorBoard`, `CSVLogger`).

    Args:
        batch_size: Samples in a batch, an int. Only needed for layers with `mode="row"`, where it
            decides how many samples a probability stands for.

    Attributes:
        switches: Array (executions, layers) of float64, of the epoch that runs or ran last: how
            often each layer ran in a step, in the order of `get_survival_probs`. 1 or 0 for one
            call, or the share of the samples in `mode="row"`. With `steps_per_execution=n` the
            mean over the `n` steps of an execution.

    Raises:
        TypeError: If `batch_size` is not an integer.
        ValueError: If it is not positive. When training begins: if the model holds no
            `StochasticDepth` layer, or some with `mode="row"` and `batch_size` is not given.

    Example:

    >>> import numpy as np, tensorflow as tf
    >>> from tfa_stochastic_depth import RealisedDepth, StochasticDepth
    >>> x = tf.keras.Input(shape=(4,))
    >>> y = StochasticDepth(tf.keras.layers.Dense(4), survival_prob=0.5, seed=1)(x, shortcut=x)
    >>> model = tf.keras.Model(x, y)
    >>> model.compile("sgd", "mse")
    >>> data, depth = np.ones((32, 4)), RealisedDepth()
    >>> history = model.fit(data, data, 4, callbacks=[depth], verbose=0)
    >>> depth.switches[:, 0].tolist()
    [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    >>> history.history["realised_depth"]
    [0.375]
    """

    def __init__(self, batch_size=None):
        super().__init__()
        if batch_size is not None:
            if not isinstance(batch_size, numbers.Integral) or isinstance(batch_size, bool):
                raise TypeError(
                    f"`batch_size` must be an integer or None. Received: {batch_size!r}."
                )
            if batch_size < 1:
                raise ValueError(f"`batch_size` must be positive. Received: {batch_size!r}.")
        self.batch_size = batch_size
        self._layers = []
        self._records = []

    @property
    def switches(self):
        return self._replay()[0]

    def set_model(self, model):
        """Takes the model whose layers to watch."""
        layers = stochastic_depth_layers(model)
        in_rows = np.array([layer.mode == "row" for layer in layers])
        if in_rows.any() and self.batch_size is None:
            raise ValueError(
                "`batch_size` must be given to RealisedDepth for a model with layers of "
                'mode="row", in which it decides how many samples a layer runs on. Received: None.'
            )
        super().set_model(model)
        if layers != self._layers:
            self._layers, self._in_rows, self._read = layers, in_rows, draw_reader(layers)

    def on_train_begin(self, logs=None):
        self._read()  # traced here: Keras 2 warns of a callback that takes long in the first steps

    def on_epoch_begin(self, epoch, logs=None):
        self._records = []

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch
        self._before, _ = self._read()

    def on_train_batch_end(self, batch, logs=None):
        after, probs = self._read()  # a schedule may have written them after the other reading
        if _keras.fits_with_xla(self.model):  # which has fixed the number of rows
            for i in np.flatnonzero(self._in_rows):
                probs[i] = self._layers[i].compiled_survival_prob
        self._records.append((batch - self._first + 1, self._before, after, probs))

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            switches, steps = self._replay()
            logs["realised_depth"] = float(steps @ switches.sum(axis=1) / steps.sum())

    def _replay(self):
        """Returns the switches of the epoch, and how many steps each execution had."""
        if not self._records:
            return np.zeros((0, len(self._layers))), np.zeros(0)
        steps, seeds, after, probs = map(np.array, zip(*self._records))
        draws = after[..., 1] - seeds[..., 1]
        # Where the data end within an execution, Keras may count more steps than there were.
        steps = np.clip(steps, 1, np.maximum(draws.max(axis=1), 1))
        place = np.repeat(np.arange(draws.size), draws.ravel())  # of each draw
        nth = np.arange(len(place)) - np.searchsorted(place, place)
        seeds, probs = seeds.reshape(-1, 2)[place], probs.ravel()[place]
        ran = draw_switches(seeds + nth[:, np.newaxis] * [0, 1], probs).numpy().astype("float64")
        for i in np.flatnonzero(np.tile(self._in_rows, len(steps))[place]):
            ran[i] = count_rows(float(probs[i]), self.batch_size) / self.batch_size
        ran = np.bincount(place, ran, draws.size).reshape(draws.shape)
        return ran / steps[:, np.newaxis], steps
