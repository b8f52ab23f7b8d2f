"""Schedules: how far the drop probabilities of a model are turned up in the course of training."""

from __future__ import annotations

import math
import numbers
import warnings

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.layer import stochastic_depth_layers, survival_prob_writer
from tfa_stochastic_depth.survival import check_sequence

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


class SurvivalProbSchedule(keras.callbacks.Callback):
    """Turns the drop probabilities of a model's `StochasticDepth` layers up or down in training.

    A schedule gives the share `s` of each layer's drop probability that is on: a layer with the
    target `p` survives step `t` with probability `1 - s(t) * (1 - p)`. At `s = 1` it is exactly
    `p`, and at `s = 0` exactly 1.

    Steps are those that the optimizer has counted (`optimizer.iterations`, 0 in the first). So
    training goes on where it was after loading a checkpoint, and several calls of `fit` are one
    training; `compile` with a new optimizer begins anew. With `unit="epoch"` it is the epoch as
    `fit` counts it: pass it an `initial_epoch` to go on.

    Values are written before a step, into the variables that the step reads: nothing is traced
    again, in eager mode, graphs or under XLA. With `steps_per_execution=n` there is one value for
    the `n` steps of an execution, that of its first. After `fit` the layers hold the value of the
    step that would come next, so that a warm-up as long as the training has reached its end.
    Layers with `mode="row"` are refused where XLA compiles `fit`: there the number of rows is
    fixed when the step is compiled.

    Each epoch logs `survival_prob`, the mean over the layers, and `expected_depth`, their sum (the
    number of branches that are expected to run), as they were in its last step. Put this callback
    before those that write logs (`TensorBoard`, `CSVLogger`) or restore weights.

    Args:
        schedule: A function from a step (an int) to a share in [0, 1], such as
            `linear_warmup(1000)`.
        survival_probs: The targets: a sequence of floats in [0, 1], one per layer, in the order of
            `get_survival_probs`. By default those that the layers hold when this callback first
            meets the model. They have to be said if the model has been trained before and the
            schedule is not full: what its layers hold may come from a schedule then.
        unit: "step" or "epoch".

    Raises:
        TypeError: If `schedule` is not such a function. What it returns is checked in training.
        ValueError: If `unit` is none of the two. When training begins: if the model holds no
            `StochasticDepth` layer, or if something said above does not hold.

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
        self._given = survival_probs
        self._layers = []
        self._next_epoch = 0

    def set_model(self, model):
        """Takes the model whose layers to write to."""
        layers = stochastic_depth_layers(model)
        steps = _keras.steps_done(model)
        if steps is not None and _keras.fits_with_xla(model):
            self._check_modes(layers)
        super().set_model(model)
        if layers == self._layers:
            return
        if self._given is None:
            targets = [layer.survival_prob for layer in layers]
        else:
            targets = check_sequence(self._given, len(layers), "survival_probs", "layer")
        self._layers, self._targets, self._write = layers, targets, survival_prob_writer(layers)
        self._in_doubt = self._given is None and bool(steps)
        self._probs = targets
        self._share = None  # not written

    def update(self, step):
        """Writes the survival probabilities of a step, if they are others than before.

        `fit` calls it. In a training loop of your own, call it before each step.

        Args:
            step: The step (or epoch) that comes next, an int, 0 for the first.
        """
        if not self._layers:
            raise ValueError("Call `set_model(model)` before the first `update(step)`.")
        share = self._share_at(step)
        if self._in_doubt and share < 1:
            raise ValueError(
                "`survival_probs` must be given to SurvivalProbSchedule here: the model has been "
                "trained before, and the probabilities that its layers hold may be those of a "
                "schedule instead of its targets. Pass the targets, one per layer; "
                f"`get_survival_probs(model)` if they are these. Received: None, at {self.unit} "
                f"{step}, where the share is {share:.4g}."
            )
        self._in_doubt = False
        if share != self._share:
            probs = [1.0 - share + share * p for p in self._targets]
            self._write(probs)
            self._probs, self._share = probs, share

    def on_train_begin(self, logs=None):
        held = [layer.survival_prob for layer in self._layers]
        if self._share is not None and not np.array_equal(
            np.float32(held), np.float32(self._probs)
        ):
            warnings.warn(
                "The survival probabilities of the model's layers were changed since "
                "SurvivalProbSchedule wrote them. It writes over them, by its own targets: make a "
                "new one with `survival_probs=` for others.",
                stacklevel=2,
            )
        self._share = None
        if self.unit == "step":
            self.update(self._steps_done())

    def on_epoch_begin(self, epoch, logs=None):
        self._share = None  # other callbacks may have restored weights
        self._next_epoch = epoch + 1
        self._steps_before = _keras.steps_done(self.model)
        if self.unit == "epoch":
            self.update(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if self.unit == "step":
            self.update(self._steps_done())

    def on_epoch_end(self, epoch, logs=None):
        if self.unit == "step" and self._steps_done() == self._steps_before:
            warnings.warn(
                "`model.optimizer` has counted no step in this epoch, so that "
                "SurvivalProbSchedule stands still. Where a model trains with other optimizers, "
                'use `unit="epoch"`, or call `update(step)` in its `train_step` loop.',
                stacklevel=2,
            )
        if logs is not None:
            logs["survival_prob"] = sum(self._probs) / len(self._probs)
            logs["expected_depth"] = sum(self._probs)

    def on_train_end(self, logs=None):
        self.update(self._steps_done() if self.unit == "step" else self._next_epoch)

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
