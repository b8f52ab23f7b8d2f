"""Schedules: how far the drop probabilities of a model are turned up in the course of training."""

from __future__ import annotations

import math
import numbers
import warnings

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import stochastic_depth_layers, survival_prob_writer
from tfa_stochastic_depth.survival import as_list, check_sequence

keras = _keras.keras

UNITS = ("step", "epoch")


def linear_warmup(steps):
    """The schedule that turns drop probabilities up in a straight line, from 0 to full.

    Args:
        steps: After how many steps (or epochs, by the schedule's unit) they are full, a positive
            number.

    Returns:
        A schedule: a function from a step, counted from 0, to a share in [0, 1].

    Example:

    >>> from tfa_stochastic_depth import linear_warmup
    >>> [linear_warmup(100)(step) for step in (0, 50, 100, 1000)]
    [0.0, 0.5, 1.0, 1.0]
    """
    steps = _check_positive(steps, "steps")
    return lambda step: min(step / steps, 1.0)


def exponential_warmup(gamma):
    """The schedule `1 - exp(-gamma * step)`: fast at first, and nearer and nearer to full.

    Source: progressive layer dropping, section 4.2 of arXiv 2010.13369, whose
    `theta(t) = (1 - theta_bar) * exp(-gamma * t) + theta_bar` is the survival probability that
    follows for a layer with the target `theta_bar`. There gamma is 100 / (number of steps).

    Args:
        gamma: The rate for each step (or epoch), a positive number.

    Returns:
        A schedule: a function from a step, counted from 0, to a share in [0, 1].

    Example:

    >>> from tfa_stochastic_depth import exponential_warmup
    >>> [round(exponential_warmup(0.01)(step), 4) for step in (0, 100, 500, 10000)]
    [0.0, 0.6321, 0.9933, 1.0]
    """
    gamma = _check_positive(gamma, "gamma")
    return lambda step: -math.expm1(-gamma * step)


def cutoff(steps):
    """The schedule that drops in the first steps only: full before step `steps`, and then 0.

    Source: "early" dropping against underfitting, arXiv 2303.01500.

    Args:
        steps: How many steps (or epochs) drop, a positive number.

    Returns:
        A schedule: a function from a step, counted from 0, to a share in [0, 1].

    Example:

    >>> from tfa_stochastic_depth import cutoff
    >>> [cutoff(100)(step) for step in (0, 99, 100, 1000)]
    [1.0, 1.0, 0.0, 0.0]
    """
    steps = _check_positive(steps, "steps")
    return lambda step: 1.0 if step < steps else 0.0


def _check_positive(value, argument):
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"`{argument}` must be a positive number. "
            f"Received: {value!r} (of type {type(value).__name__})."
        )
    if not 0 < value < math.inf:
        raise ValueError(f"`{argument}` must be a positive number. Received: {value!r}.")
    return float(value)


def _check_step(step):
    if not tf.executing_eagerly():
        raise ValueError(
            "`update` writes when it is called, and not when a traced function runs. Received: a "
            "call inside a tf.function. Call it before the function."
        )
    value = np.asarray(step)
    if value.ndim or value.dtype.kind not in "iuf":
        raise TypeError(
            f"`step` must be a number. Received: {step!r} (of type {type(step).__name__})."
        )
    if not value >= 0:
        raise ValueError(f"`step` must be at least 0. Received: {step!r}.")
    return value.item()


class SurvivalProbSchedule(keras.callbacks.Callback):
    """Turns the drop probabilities of a model's `StochasticDepth` layers up or down in training.

    A schedule gives the share `s` of each layer's drop probability that is on: a layer with the
    target `p` survives step `t` with probability `1 - s(t) * (1 - p)`. At `s = 1` it is exactly
    `p`, and at `s = 0` exactly 1.

    The targets are what the layers were made with or assigned last (`layer.survival_prob = p`,
    `set_survival_probs`), at any time. What this callback writes does not change them, nor do
    weights that are loaded: a model that is saved in the middle of a schedule, or whose training
    failed, still knows them. To use a model as it shall be at inference before the schedule has
    come to its end, assign them.

    Steps are those that the optimizer has counted (`optimizer.iterations`, 0 in the first). So
    training goes on where it was after loading a checkpoint, and several calls of `fit` are one
    training; `compile` with a new optimizer begins anew. With `unit="epoch"` it is the epoch as
    `fit` counts it, from 0 in each call: pass it an `initial_epoch` to go on.

    Values are written before a step, into the variables that the step reads: nothing is traced
    again, in eager mode, graphs or under XLA. With `steps_per_execution=n` there is one value for
    the `n` steps of an execution, that of its first. After `fit` the layers hold the value of the
    step that would come next, so that a warm-up as long as the training has reached its end (and
    `evaluate` may give another loss than the validation of the last epoch).
    Layers with `mode="row"` are refused where XLA compiles `fit`: there the number of rows is
    fixed when the step is compiled.

    Each epoch logs `survival_prob`, the mean over the layers, and `expected_depth`, their sum (the
    number of branches that are expected to run, where each layer is called once), as the layers
    hold them at its end. Put this callback before those that write logs (`TensorBoard`,
    `CSVLogger`) or restore weights.

    Args:
        schedule: A function from a step (an int) to a share in [0, 1], such as
            `linear_warmup(1000)`.
        survival_probs: Other targets: a sequence of floats in [0, 1], one per layer, in the order
            of `get_survival_probs`.
        unit: "step" or "epoch".

    Raises:
        TypeError: If `schedule` is not such a function.
        ValueError: If it gives no share in [0, 1], at 0 or in training, if one of `survival_probs`
            is outside [0, 1], or `unit` is none of the two. When training begins: if the model
            holds no `StochasticDepth` layer, or if something said above does not hold.

    Example:

    >>> import numpy as np, tensorflow as tf
    >>> from tfa_stochastic_depth import StochasticDepth, SurvivalProbSchedule, linear_warmup
    >>> x = tf.keras.Input(shape=(4,))
    >>> y = StochasticDepth(tf.keras.layers.Dense(4), survival_prob=0.5)(x, shortcut=x)
    >>> model = tf.keras.Model(x, y)
    >>> model.compile("sgd", "mse")
    >>> data = np.ones((8, 4))
    >>> schedule = SurvivalProbSchedule(linear_warmup(4))
    >>> history = model.fit(data, data, 8, epochs=6, callbacks=[schedule], verbose=0)
    >>> history.history["survival_prob"]
    [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]

    In a training loop of your own, `set_model` once and `update` before each step:

    >>> schedule = SurvivalProbSchedule(linear_warmup(4), survival_probs=[0.5])
    >>> schedule.set_model(model)
    >>> for step in range(3):
    ...     schedule.update(step)  # and then the step
    >>> model.layers[-1].survival_prob
    0.75
    """

    def __init__(self, schedule, *, survival_probs=None, unit="step"):
        super().__init__()
        if any(schedule is rule for rule in (linear_warmup, exponential_warmup, cutoff)):
            name = schedule.__name__
            raise TypeError(f"`schedule` is {name} itself. Call it to get a schedule: {name}(100).")
        if not callable(schedule):
            raise TypeError(
                "`schedule` must be a function from a step to the share of the drop probabilities "
                "that is on, such as linear_warmup(1000). "
                f"Received: {schedule!r} (of type {type(schedule).__name__})."
            )
        if unit not in UNITS:
            raise ValueError(f'`unit` must be "step" or "epoch". Received: {unit!r}.')
        self.schedule = schedule
        self.unit = unit
        self._given = None
        if survival_probs is not None:
            survival_probs = as_list(survival_probs, "survival_probs", "layer")
            self._given = check_sequence(
                survival_probs, len(survival_probs), "survival_probs", "layer"
            )
        self._layers = []
        self._next_epoch = 0
        self._check_callable()

    def set_model(self, model):
        """Takes the model whose layers to write to."""
        layers = stochastic_depth_layers(model)
        steps = _keras.steps_done(model)
        if steps is not None and _keras.fits_with_xla(model):
            self._check_modes(layers)
        if self._given is not None:
            check_sequence(self._given, len(layers), "survival_probs", "layer")
        super().set_model(model)
        if layers != self._layers:
            self._layers, self._write = layers, survival_prob_writer(layers)
        self._written = None

    def update(self, step):
        """Writes the survival probabilities of a step.

        For a training loop of your own: call it before each step, not in a `tf.function`.

        Args:
            step: The step (or epoch) that comes next, a number >= 0, 0 for the first; also as a
                tensor or variable (`optimizer.iterations`).
        """
        if not self._layers:
            raise ValueError("Call `set_model(model)` before the first `update(step)`.")
        self._written = None
        self._update(_check_step(step))

    def _update(self, step):
        """Writes the survival probabilities of a step, if they are not those written last."""
        share = self._share_at(step)
        targets = self._given or [layer.target_survival_prob for layer in self._layers]
        probs = [1.0 - share + share * p for p in targets]
        if probs != self._written:
            self._write(probs)
            self._written = probs

    def on_train_begin(self, logs=None):
        self._written = None
        if self.unit == "step":
            self._update(self._steps_done())

    def on_epoch_begin(self, epoch, logs=None):
        self._written = None  # other callbacks may have restored weights
        self._next_epoch = epoch + 1
        self._steps_before = _keras.steps_done(self.model)
        if self.unit == "epoch":
            self._update(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if self.unit == "step":
            self._update(self._steps_done())

    def on_epoch_end(self, epoch, logs=None):
        if self.unit == "step" and self._steps_done() == self._steps_before:
            warnings.warn(
                "`model.optimizer` has counted no step in this epoch, so that "
                "SurvivalProbSchedule stands still. Where a model trains with other optimizers, "
                'use `unit="epoch"`, or call `update(step)` in its `train_step` loop.',
                stacklevel=2,
            )
        if logs is not None:
            probs = [layer.survival_prob for layer in self._layers]
            logs["survival_prob"] = sum(probs) / len(probs)
            logs["expected_depth"] = sum(probs)

    def on_train_end(self, logs=None):
        self._update(self._steps_done() if self.unit == "step" else self._next_epoch)

    def _steps_done(self):
        steps = _keras.steps_done(self.model)
        if steps is None:
            raise ValueError(
                "SurvivalProbSchedule counts the steps of `model.optimizer`, and "
                f"{self.model.name!r} has none that counts. Received: "
                f"{getattr(self.model, 'optimizer', None)!r}. Use "
                '`unit="epoch"`, or call `update(step)` in a training loop of your own.'
            )
        return steps

    def _check_callable(self):
        try:
            self.schedule(0)
        except Exception as error:  # whatever a function of something else may raise
            raise TypeError(
                "`schedule` must be a function of a step, such as linear_warmup(1000). "
                f"Received: {self.schedule!r}, which raises {type(error).__name__} for 0: {error}"
            ) from error
        self._share_at(0)

    def _share_at(self, step):
        share = self.schedule(step)
        if (tf.is_tensor(share) or isinstance(share, np.ndarray)) and np.ndim(share) == 0:
            share = float(share)
        what = f"`schedule({step})` must be a number in [0, 1]"
        if not isinstance(share, numbers.Real) or isinstance(share, bool):
            raise TypeError(f"{what}. Received: {share!r} (of type {type(share).__name__}).")
        if not 0 <= share <= 1:
            raise ValueError(
                f"{what}: the share of the drop probabilities that is on. Received: {share!r}."
            )
        return float(share)

    def _check_modes(self, layers):
        for layer in layers:
            if layer.mode == "row":
                raise ValueError(
                    f'StochasticDepth {layer.name!r} has mode="row", in which XLA fixes the number '
                    "of rows when it compiles a step, so that a schedule has no effect. Compile "
                    'the model with jit_compile=False, or wrap it with mode="batch".'
                )
