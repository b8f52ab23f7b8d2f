"""`StochasticDepth`, the layer wrapper, and the function under it."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import warnings

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.alike import call_shared
from tfa_stochastic_depth.arguments import Arguments
from tfa_stochastic_depth.masks import set_masks, stand_in_masks, sum_masks
from tfa_stochastic_depth.recompute import describe, note_dear, run_or_skip_twice
from tfa_stochastic_depth.rows import ALL, Rows, choose_rows
from tfa_stochastic_depth.survival import check_sequence, check_survival_prob
from tfa_stochastic_depth.switch import draw_switch_by_call, run_or_skip
from tfa_stochastic_depth.zeros import Specs, zeros_like_output

keras = _keras.keras

MODES = ("batch", "row")
RESCALES = ("inference", "training")


@tf.custom_gradient
def _with_zero_gradients(y, *weights):
    """`y`, as a function of `weights` on which it does not depend.

    In a graph the gradient of a dropped branch is zero; in eager mode there would be none, and
    Keras would warn about that in every step.
    """

    def gradient(dy):
        return (dy, *(tf.zeros_like(w) for w in weights))

    return tf.identity(y), gradient


_map = tf.nest.map_structure


def _without_gradients(outputs, layer):
    """Outputs whose gradients with respect to the weights of a layer that was not run are zero."""
    weights = layer.trainable_weights if _keras.is_layer(layer) else []
    weights = [tf.convert_to_tensor(w) for w in weights]
    return _map(lambda y: _with_zero_gradients(y, *weights), outputs)


def _static(training):
    """`training` as a Python bool, or as a bool tensor if its value is not known yet."""
    if tf.is_tensor(training):
        value = tf.get_static_value(training)
        return tf.cast(training, tf.bool) if value is None else bool(value)
    return bool(training)


def _of_this_graph(x):
    """An eager tensor as one of the graph being traced: a cond loses track of the former."""
    if tf.executing_eagerly() or not (tf.is_tensor(x) and hasattr(x, "numpy")):
        return x
    y = tf.identity(x)
    _keras.set_mask(y, _keras.mask_of(x))
    return y


def _same_structure(value, like):
    try:
        tf.nest.assert_same_structure(value, like, check_types=False)
    except ValueError:
        return False
    return True


def _scaled(y, weight):
    return y if weight is None else y * tf.cast(weight, y.dtype)


_warned_of_convolutions = False


def _warn_of_convolutions(layers):
    """Warns, once, of convolutions that XLA would compile into a conditional on a CPU."""
    global _warned_of_convolutions
    if _warned_of_convolutions or _keras.has_accelerator():
        return
    found = [x for layer in layers for x in _keras.convolutions(layer)]
    if found:
        _warned_of_convolutions = True
        warnings.warn(
            f"{found[0].name!r} is a convolution in a StochasticDepth layer that XLA compiles for "
            "a CPU, where convolutions inside a conditional take many times as long. Train with "
            'jit_compile=False, or with mode="row", which needs no conditional.',
            stacklevel=2,
        )


def _check_layer(layer):
    if not _keras.is_layer(layer):
        raise TypeError(
            "`layer` must be a keras layer or model (an object, not a class). "
            f"Received: {layer!r} (of type {type(layer).__name__})."
        )


def check_options(mode, rescale, seed):
    """Checks the options that the layer and `wrap_residuals` share."""
    if mode not in MODES:
        raise ValueError(
            '`mode` must be "batch" (one switch for the whole batch) or "row" (each sample on its '
            f"own). Received: {mode!r}."
        )
    if rescale not in RESCALES:
        raise ValueError(f'`rescale` must be "inference" or "training". Received: {rescale!r}.')
    if seed is not None and (not isinstance(seed, numbers.Integral) or isinstance(seed, bool)):
        raise TypeError(f"`seed` must be an integer or None. Received: {seed!r}.")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"`seed` must fit into 64 bits. Received: {seed!r}.")


def _check_skip(skip):
    if not (skip is None or _keras.is_layer(skip) or skip == "identity"):
        raise ValueError(
            '`skip` must be None (zeros), "identity" (the inputs) or a keras layer. '
            f"Received: {skip!r}."
        )


@dataclasses.dataclass(frozen=True)
class Replaced:
    """What was there before `wrap_residuals`, for `unwrap_residuals`.

    Attributes:
        branch: Which of the two tensors of the sum was the branch, 0 or 1.
        merge: Class and configuration of the layer that made the sum, if it is not a plain one.
        drop: Class and configuration of the drop that the branch ended in.
    """

    branch: int
    merge: dict | None = None
    drop: dict | None = None


@_keras.register
class StochasticDepth(_keras.Wrapper):
    """Runs a layer in a random part of the training steps, and always, scaled, at inference.

    With `f = layer(x)`, `s` what stands in for it, `p = survival_prob` and the switch
    `b ~ Bernoulli(p)`, one for the whole batch (of `mode="row"` below):

    | `rescale` | training | inference |
    |---|---|---|
    | "inference" (the paper, TFA) | `f` if b else `s` | `p * f + (1 - p) * s` |
    | "training" (timm, torchvision) | `s + (f - s) / p` if b else `s` | `f` |

    When the switch is off the layer is not computed, forward or backward: it runs inside
    `tf.cond`. The usual residual sum goes inside as well if the shortcut is handed over:
    `StochasticDepth(branch, 0.8)(x, shortcut=x)` is `x + branch(x)`, or just `x`.

    A dropped step leaves everything in the layer alone (moving statistics, dropout masks,
    activity losses), and its weights get a gradient of zero. Optimizers with momentum or weight
    decay still move weights whose gradient is zero.

    With `mode="row"` each sample is kept or dropped on its own, and the layer runs on the kept ones
    only: of a batch of B, `k = round(p * B)` rows are drawn (halves go to the even number; at least
    1 unless p is 0), gathered, run, and put back; `b / p` in the table is `b * B / k`. Rows are not
    drawn independently of each other, so that every step takes the same time and XLA can compile
    it; with few rows `k / B` is not quite p, and a batch of one is never dropped. (Where p is 0 in
    a graph, in which it may change, one row is run for nothing.) Tensors in the arguments that have
    the batch as their first axis are gathered as well. Layers see only the kept rows:
    BatchNormalization takes its statistics over them, and the rows of the output must be those of
    the input.

    Source: Huang, Sun, Liu, Sedra, Weinberger, "Deep Networks with Stochastic Depth",
    arXiv 1603.09382. Rows: the "efficient stochastic depth" of Oquab et al., "DINOv2",
    arXiv 2304.07193.

    Args:
        layer: The `keras.layers.Layer` (or model) to run or drop. Its outputs must be
            floating-point.
        survival_prob: Probability in [0, 1] that the layer runs in a training step. 0 and 1 are
            exact: never and always. It is kept in a non-trainable float32 variable, so that
            assigning to `.survival_prob` acts at once, without a new trace. What it was made with
            or assigned last stays known as `.target_survival_prob`, for a `SurvivalProbSchedule`
            that is on its way to it.
        mode: "batch": one switch per step for the whole batch. "row": each sample on its own. Under
            XLA (`jit_compile=True`) the number of rows is fixed when the step is compiled:
            compile the model again when `survival_prob` has changed.
        rescale: "inference" or "training", as in the table above.
        skip: What stands in for the layer when it is dropped. `None`: zeros, to be added to a
            shortcut (by the caller, or in here by `shortcut=`). "identity": the inputs, for a
            layer that is a whole residual block. A layer: that layer on the inputs, for blocks
            that change the shape.
        seed: Integer of up to 64 bits from which the switches follow, or `None` for one that
            follows from `keras.utils.set_random_seed`. Layers that shall drop independently need
            different seeds.
        **kwargs: `name`, `trainable`, and `dtype`, which is `layer`'s own policy by default.
            `supports_masking=False` stops masks here. `replaced` is a note of `wrap_residuals`
            for `unwrap_residuals`.

    Call arguments:
        inputs: What `layer` takes first: a tensor `(batch, ...)` or a nested structure of them.
        *args, **kwargs: What else `layer` takes.
        shortcut: A tensor of the shape of `layer`'s output `(batch, ...)`, to which the branch
            is added. Only with `skip=None`.
        training: Python bool: whether to draw a switch.
        mask: Handed to `layer` if it takes one.

    Returns:
        A tensor (or structure) of the shape of `layer`'s output, in this layer's compute dtype.

    Raises:
        TypeError: If `layer` is not a layer, or `survival_prob` not a number.
        ValueError: If an argument is not one of those named above, if `shortcut` or what `skip`
            gives has another shape than the layer's output, if the layer holds a synchronized
            BatchNormalization and is trained on several replicas, or if it gives other rows than
            it takes in `mode="row"` (where only a run shows that, a
            `tf.errors.InvalidArgumentError`).

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import StochasticDepth
    >>> x = tf.keras.Input(shape=(16,))
    >>> y = StochasticDepth(tf.keras.layers.Dense(16), survival_prob=0.8)(x, shortcut=x)
    >>> model = tf.keras.Model(x, y)
    >>> model.layers[-1].survival_prob
    0.8
    """

    def __init__(
        self,
        layer,
        survival_prob=0.5,
        *,
        mode="batch",
        rescale="inference",
        skip=None,
        seed=None,
        **kwargs,
    ):
        _check_layer(layer)
        check_options(mode, rescale, seed)
        _check_skip(skip)
        survival_prob = check_survival_prob(survival_prob)
        passes_masks = kwargs.pop("supports_masking", True)
        replaced = kwargs.pop("replaced", None)
        kwargs.setdefault("dtype", _keras.policy_like(layer))
        # The wrapped layer casts what it takes by its own policy. Casting here as well would
        # round its inputs twice.
        super().__init__(layer, autocast=False, **kwargs)
        self.mode = mode
        self.rescale = rescale
        self.skip = skip
        self.seed = None if seed is None else int(seed)
        self.supports_masking = True  # Keras 3 warns of masks that end in a layer without
        self.passes_masks = passes_masks
        self.replaced = Replaced(**replaced) if isinstance(replaced, dict) else replaced
        self._specs = Specs()
        self._gives_rows = False
        self.compiled_survival_prob = None
        self._survival_prob = _keras.add_scalar(self, "survival_prob", survival_prob)
        # What was asked for, where a schedule is on its way to it. Weights do not hold it.
        self.target_survival_prob = survival_prob
        self._seed_state = _keras.make_seed_state(self, self.seed)
        _keras.take_call_arguments(self, layer)
        _keras.silence_masks(layer)

    @property
    def survival_prob(self):
        """Probability in [0, 1] that the layer runs in a training step, a float.

        Assigning writes the variable behind it, which acts on the next step of a compiled model.
        """
        return _keras.read_scalar(self._survival_prob)

    @survival_prob.setter
    def survival_prob(self, value):
        value = check_survival_prob(value)
        self.warn_if_compiled(value)
        self._survival_prob.assign(value)
        self.target_survival_prob = value

    def write_survival_prob(self, value):
        """Assigns a survival probability for a while: the target stays what it is."""
        self.warn_if_compiled(value)
        self._survival_prob.assign(value)

    def warn_if_compiled(self, value):
        """Warns of a probability that rows compiled by XLA do not follow."""
        compiled = self.compiled_survival_prob
        if compiled is not None and np.float32(value) != np.float32(compiled):
            warnings.warn(
                f"StochasticDepth {self.name!r} was compiled by XLA with the survival probability "
                f'{compiled}, which stands for a fixed number of rows in mode="row". Compile the '
                f"model again for {value} to act in training.",
                stacklevel=3,
            )

    def build(self, input_shape=None):
        for layer in (self.layer, self.skip):
            if _keras.is_layer(layer):
                _keras.build_from_shape(layer, input_shape)
        keras.layers.Layer.build(self, input_shape)

    @_keras.unconverted
    def call(self, inputs, *args, shortcut=None, training=None, mask=None, **kwargs):
        inputs, args, shortcut, kwargs = _map(self._own, (inputs, args, shortcut, kwargs))
        if mask is not None and _keras.accepts(self.layer, "mask"):
            kwargs["mask"] = mask
        stand_in, own_mask = (inputs, mask) if shortcut is None else (shortcut, None)
        arguments = Arguments((inputs, *args), kwargs, self._shortcut(shortcut), stand_in, own_mask)
        training = _static(training)
        if training is False:
            outputs, masks = self._kept(arguments, training)
        else:
            outputs, masks = self._train(arguments, training)
        return set_masks(outputs, masks if self.passes_masks else {})

    def _own(self, x):
        if self.mode == "row" and isinstance(x, np.ndarray):
            x = tf.convert_to_tensor(x)  # rows are taken of tensors
        return _of_this_graph(x)

    def _train(self, arguments, training):
        """Computes the layer, or the rows, by a random draw. Returns (outputs, masks)."""
        self._check_replicas()
        _keras.build(self.layer, arguments.args, arguments.kwargs)
        if _keras.is_layer(self.skip):
            _keras.build(self.skip, (arguments.inputs,), {})
        if tf.executing_eagerly():  # one side is computed now, and the other may be wrong
            self._check_sides(arguments)
        draw = self._draw_rows if self.mode == "row" else self._draw_switch
        with _keras.on_host():
            rows, switch = draw(arguments, training)

        def run(arguments):
            return _keras.collect_losses(self, lambda: self._kept(arguments, training, rows))

        def skip(arguments, kept):
            return self._dropped(arguments, training, kept)

        sides = [lambda: run(arguments), lambda kept: skip(arguments, kept)]
        shared = self._run_like_others(switch, arguments, training, rows)
        if shared is not None:
            results, losses = shared
        elif self.mode == "row" and tf.is_tensor(switch):
            results, losses = self._run_on_rows(switch, sides[0])
        elif _keras.compiles_with_xla() and tf.is_tensor(switch):
            results, losses = self._run_or_skip_by_xla(switch, sides, run, skip, arguments)
        else:
            results, losses = run_or_skip(switch, *sides)
        _keras.add_losses(self, losses)
        return results

    def _draw_switch(self, arguments, training):
        """Returns (all rows, the switch for them)."""
        seed, p = _keras.next_seed(self._seed_state), tf.convert_to_tensor(self._survival_prob)
        switch = draw_switch_by_call(seed, p)
        if training is not True:  # a tensor: at inference every layer runs
            switch = tf.logical_or(switch, tf.logical_not(training))
        return ALL, switch

    def _draw_rows(self, arguments, training):
        """Returns (the rows to run, whether there are any)."""
        self._check_row_by_row(arguments)
        seed, size = _keras.next_seed(self._seed_state), arguments.batch_size()
        by_xla = _keras.compiles_with_xla()
        if by_xla:  # it needs to know the number of rows
            self.compiled_survival_prob = self.survival_prob
            if training is not True:
                raise ValueError(
                    f"`training` must be a Python bool for StochasticDepth {self.name!r}, in "
                    f'mode="row" and compiled by XLA. Received: {training!r}.'
                )
        known = by_xla or tf.executing_eagerly()
        p = self.survival_prob if known else tf.convert_to_tensor(self._survival_prob)
        return choose_rows(seed, p, size, training, static=by_xla)

    def _likeness(self, switch, training):
        """What is equal for blocks that can share a traced function; `None` if this cannot."""
        in_graph = not tf.executing_eagerly() and not _keras.compiles_with_xla()
        if not (in_graph and training is True and tf.is_tensor(switch) and _keras.runs_stateless()):
            return None
        if _keras.has_stand_in(self._survival_prob):
            return None
        parts = [_keras.likeness(x) if _keras.is_layer(x) else x for x in (self.layer, self.skip)]
        if parts[0] is None or (parts[1] is None and self.skip is not None):
            return None
        return *parts, self.mode, self.rescale, self.compute_dtype

    def _run_like_others(self, switch, arguments, training, rows):
        """Runs the layer or not, by a function that is traced for one of those that are alike.

        Returns (results, losses), or `None` if that cannot be.
        """
        key = self._likeness(switch, training)
        if key is None:
            return None
        parts = [x for x in (self.layer, self.skip) if _keras.is_layer(x)]
        variables = [v for x in parts for v in _keras.variables_in_order(x)]
        variables = list({id(v): v for v in variables}.values())
        # Weights can be frozen one by one, which the layers' likeness does not tell.
        key = *key, *(v.trainable for v in variables)
        assigned = [v for v in variables if not v.trainable]
        read = [*assigned, *(v for v in variables if v.trainable), self._survival_prob]

        def function(switch, arguments, rows, values):
            arguments, rows = Arguments(*arguments), Rows(*rows)

            def run():
                kept = lambda: self._kept(arguments, training, rows)  # noqa: E731
                results, after, losses = _keras.run_with_values(read, values, kept, assigned)
                return (results, after), losses

            def skip(kept):
                kept = kept and kept[0]
                dropped = lambda: self._dropped(arguments, training, kept)  # noqa: E731
                return _keras.run_with_values(read, values, dropped, assigned)[:2]

            if self.mode == "batch":
                return run_or_skip(switch, run, skip)
            (results, after), losses = run()
            after = [tf.where(switch, new, old) for new, old in zip(after, values)]
            return (results, after), [tf.where(switch, x, tf.zeros_like(x)) for x in losses]

        values = _keras.current_values(read)
        given = switch, arguments.parts(), rows.parts(), values
        try:
            # Rows are added in place, which a function cannot do to what it is called with.
            (results, after), losses = call_shared(key, function, given, self.mode == "batch")
        except _keras.Reassigned:
            return None
        for variable, value in zip(assigned, after):
            variable.assign(value)
        return results, losses

    def _run_on_rows(self, some, run):
        """Runs the layer on rows of which it may turn out in a run that there are none.

        A conditional around it would take memory: for its gradient TensorFlow keeps tensors of
        which only the shape is needed, as their number of rows is not known before. Where there are
        none it runs on one, and what it makes of that, its state and losses included, is undone.
        """
        undo = _keras.remember_state(self.layer)
        results, losses = run()
        undo(unless=some)
        return results, [tf.where(some, loss, tf.zeros_like(loss)) for loss in losses]

    def _run_or_skip_by_xla(self, switch, sides, run, skip, arguments):
        parts = [x for x in (self.layer, self.skip) if _keras.is_layer(x)]
        _warn_of_convolutions(parts)
        as_then = _keras.remember(parts)

        def run_again():
            (results, losses), others = as_then(lambda: run(arguments.copy()))
            return results, losses + others

        def skip_again(kept):
            return as_then(lambda: skip(arguments.copy(), kept))[0]

        dear = []

        def both():
            (results, losses), found = note_dear(run_again)
            dear[:] = describe(found)
            return results, losses, skip_again(results)

        # TensorFlow takes the gradient of an outer conditional or loop from its graph, in which one
        # that brings in variables of its own has no place.
        if _keras.in_control_flow() or not _keras.can_repeat(both):
            return run_or_skip(switch, *sides)
        sources = [x for x in arguments.tensors() if x.dtype.is_floating]
        sources += _keras.trainable_variables(parts)
        return run_or_skip_twice(switch, *sides, run_again, skip_again, sources, dear)

    def _kept(self, arguments, training, rows=ALL):
        """`weight * f + (1 - weight) * s`, plus the shortcut, in some rows, and `s` in the others.

        Returns (outputs, masks).
        """
        taken = arguments.take(rows, self.layer, self._specs)
        f = self.layer(*taken.args, training=training, **taken.kwargs)
        arguments.lose_masks(taken)
        masks = _keras.masks_of(f)
        f = _map(lambda y: rows.check(y, f"What {self.layer.name!r} gives"), self._cast(f))
        weight = self._weight(training, rows)
        stand_in = arguments.masks()
        if arguments.shortcut is not None:
            self.check_sum(taken.shortcut, f, rows)
            masks = sum_masks(taken.shortcut, stand_in, masks, rows)
            outputs = _map(lambda a, y: rows.add(a, _scaled(y, weight)), taken.shortcut, f)
        elif self.skip is None:
            outputs = _map(lambda y: rows.spread(_scaled(y, weight)), f)
        elif weight is None and rows.are_all:
            outputs = f
            # Where no conditional gives the weights of `skip` a gradient of zero.
            if training is True and (self.mode == "row" or tf.executing_eagerly()):
                outputs = _without_gradients(f, self.skip)
        else:
            s, stand_in = self._skipped(arguments, training, f, rows)
            if weight is not None:
                f = _map(
                    lambda y, z: _scaled(y, weight) + _scaled(rows.take(z), 1.0 - weight), f, s
                )
            outputs = _map(rows.put, s, f)
        if not rows.are_all:
            whole = stand_in_masks(outputs, stand_in, masks)
            masks = {i: rows.put(whole[i], mask) for i, mask in masks.items()}
        return outputs, masks

    def _dropped(self, arguments, training, kept):
        """What takes the layer's place, as (outputs, masks).

        `kept` is what `_kept` returned when it was traced, `None` if it was not.
        """
        if kept is None:
            f = self._specs.outputs(self.layer, arguments.args, arguments.kwargs)
            like = _keras.masks_of(f)
        else:
            f, like = kept
        masks = arguments.masks()
        if arguments.shortcut is not None:
            self.check_sum(arguments.shortcut, f)
            outputs = arguments.shortcut
            if kept is None:
                like = sum_masks(outputs, masks, stand_in_masks(outputs, {}, like))
        elif self.skip is not None:
            outputs, masks = self._skipped(arguments, training, f)
        else:
            outputs = zeros_like_output(self.layer, arguments, f, self.compute_dtype)
        masks = stand_in_masks(outputs, masks, like)
        if kept is None:
            outputs = _without_gradients(outputs, self.layer)
        return outputs, masks

    def _check_sides(self, arguments):
        """Checks what either value of the switch would give, without computing it."""
        branch = self._specs.outputs(self.layer, arguments.args, arguments.kwargs)
        self._check_floating(branch, f"what {self.layer.name!r} gives")
        if arguments.shortcut is not None:
            self.check_sum(arguments.shortcut, branch)
        elif self.skip is not None:
            skipped = arguments.inputs
            if self.skip != "identity":
                skipped = self._specs.outputs(self.skip, (skipped,), {})
            self._check_floating(skipped, "what `skip` gives")
            self._check_shapes("what `skip` gives", skipped, branch)

    def _check_row_by_row(self, arguments):
        """Raises an error if it can be seen that the layer does not give a row for each row.

        With a shortcut or a `skip` the shapes of the two are compared anyway.
        """
        if arguments.shortcut is not None or self.skip is not None or self._gives_rows:
            return
        known = arguments.batch_size()
        # Two are tried, since a number of its own may be built into the layer.
        for size in (known,) if isinstance(known, int) else (64, 88):
            sizes = [size, *[None] * 31]
            shapes = _keras.trace_sizes(self.layer, arguments.args, arguments.kwargs, sizes)
            for shape in shapes:
                if not shape or shape[0] not in (size, None):
                    raise ValueError(
                        f"{self.layer.name!r} must give one row for each row that it takes, in "
                        f'mode="row". Received: the shape {shape} for a batch of {size}. Use '
                        'mode="batch" for a layer that moves rows (a reshape across the batch).'
                    )
        self._gives_rows = True

    def _skipped(self, arguments, training, like, rows=ALL):
        """What `skip` gives, as (outputs, masks)."""
        outputs, masks = arguments.inputs, arguments.masks()
        if _keras.is_layer(self.skip):
            outputs = self.skip(outputs, training=training)
            masks = _keras.masks_of(outputs)
        outputs = self._cast(outputs, "what `skip` gives")
        self._check_shapes("what `skip` gives", outputs, like, rows)
        return outputs, masks

    def _weight(self, training, rows):
        """The factor on a kept layer's output, a scalar tensor, or `None` where it is 1."""
        if training is (self.rescale == "inference"):
            return None
        if training is True and self.mode == "row" and rows.are_all:
            return None
        # At least float32: in float16 1 / p and 1 - p would be off by more than the rounding of
        # what they are multiplied with.
        dtype = tf.float64 if self.compute_dtype == "float64" else tf.float32
        p = tf.cast(self._survival_prob, dtype)
        if training is True:  # or the gradient of p, which is not trained, is computed in each step
            p = tf.stop_gradient(p)
        if self.rescale == "inference":
            factor = p
        else:
            factor = 1.0 / p if self.mode == "batch" else tf.cast(rows.scale, dtype)
        if isinstance(training, bool):
            return factor
        one = tf.ones((), dtype)
        return tf.where(
            training, *((one, factor) if self.rescale == "inference" else (factor, one))
        )

    def _cast(self, tensors, what=None):
        """Tensors in this layer's compute dtype."""
        self._check_floating(tensors, what or f"what {self.layer.name!r} gives")
        return _map(lambda x: tf.cast(x, self.compute_dtype), tensors)

    def _check_floating(self, tensors, what):
        for x in tf.nest.flatten(tensors):
            if not x.dtype.is_floating:
                raise ValueError(
                    f"{what} must be floating-point in StochasticDepth {self.name!r}, which scales "
                    f"and adds it. Received: {x.dtype.name}."
                )

    def _shortcut(self, shortcut):
        if shortcut is None:
            return None
        return self._cast(_map(tf.convert_to_tensor, shortcut), "`shortcut`")

    def check_sum(self, shortcut, branch, rows=ALL):
        """Raises an error unless a shortcut and a branch output have the same static shapes.

        The branch output has only these rows.
        """
        if self.skip is not None:
            raise ValueError(
                "`shortcut` goes with `skip=None`: with another `skip` the layer's output already "
                f"has a stand-in. Received: a shortcut, and skip={self.skip!r}."
            )
        self._check_shapes("`shortcut`", shortcut, branch, rows)

    def _check_shapes(self, what, value, like, rows=ALL):
        """Raises an error unless two structures hold tensors of the same static shapes.

        The second has only these rows of the batch.
        """
        first = 0 if rows.are_all else 1
        shapes = [[tuple(x.shape)[first:] for x in tf.nest.flatten(v)] for v in (value, like)]
        same = _same_structure(value, like) and all(
            len(a) == len(b) and all(i == j or None in (i, j) for i, j in zip(a, b))
            for a, b in zip(*shapes)
        )
        if not same:
            got, expected = (
                _map(lambda x: tuple(x.shape), structure) for structure in (value, like)
            )
            raise ValueError(
                f"{what} must have the shape of the output of {self.layer.name!r}, {expected}, in "
                f"StochasticDepth {self.name!r}. Received: {got}. Where a block changes the shape, "
                "project the shortcut, or pass the projection as `skip`."
            )

    def _check_replicas(self):
        if not _keras.synchronizes():
            return
        for part in _keras.with_sublayers(self):
            if _keras.is_synchronized(part):
                raise ValueError(
                    f"StochasticDepth {self.name!r} holds {part.name!r}, a synchronized "
                    "BatchNormalization, and is trained on several replicas: replicas cannot "
                    "exchange statistics inside a tf.cond. Use BatchNormalization with "
                    "synchronized=False inside residual branches."
                )

    def compute_mask(self, inputs, mask=None):
        """The mask of the wrapped layer's output, for layers that ask before they call."""
        return None if not self.passes_masks else _keras.output_mask(self.layer, inputs, mask)

    def compute_output_shape(self, input_shape):
        """The shape of the wrapped layer's output."""
        return self.layer.compute_output_shape(input_shape)

    def get_config(self):
        config = keras.layers.Layer.get_config(self)
        config.update(
            layer=keras.layers.serialize(self.layer),
            survival_prob=self.target_survival_prob,
            mode=self.mode,
            rescale=self.rescale,
            skip=self.skip,
            seed=self.seed,
        )
        if _keras.is_layer(self.skip):
            config["skip"] = keras.layers.serialize(self.skip)
        if not self.passes_masks:
            config["supports_masking"] = False
        if self.replaced is not None:
            config["replaced"] = dataclasses.asdict(self.replaced)
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        for key in ("layer", "skip"):
            if isinstance(config.get(key), dict):
                config[key] = keras.layers.deserialize(config[key], custom_objects=custom_objects)
        return cls(**config)


def stochastic_depth_layers(model):
    """The `StochasticDepth` layers of a model, nested ones included, in the order of its calls."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a keras.Model. Received: {model!r} (of type {type(model).__name__})."
        )
    layers = [x for x in _keras.layers_in_order(model) if isinstance(x, StochasticDepth)]
    if not layers:
        raise ValueError(
            f"`model` {model.name!r} holds no StochasticDepth layer: wrap it with "
            "`wrap_residuals(model)` and use the model that this returns."
        )
    return layers


def survival_prob_writer(layers):
    """Returns a function that does `write_survival_prob`, of floats in [0, 1], one per layer.

    It assigns all at once: one by one, those of a deep model take as long as a small step.
    """
    write = _keras.scalar_writer([layer._survival_prob for layer in layers])

    def assign(probs):
        for layer, p in zip(layers, probs):
            layer.warn_if_compiled(p)
        write(probs)

    return assign


def draw_reader(layers):
    """Returns a function that reads what the next draws of layers follow from.

    It returns the arrays (seeds, survival probabilities), of shapes (layers, 2) and (layers,). The
    second number of a seed counts the draws.
    """
    seeds, probs = zip(*((layer._seed_state, layer._survival_prob) for layer in layers))
    return _keras.reader(seeds, probs)


def get_survival_probs(model):
    """Reads the survival probabilities of a model's `StochasticDepth` layers.

    Args:
        model: A `keras.Model` that holds such layers.

    Returns:
        A list of floats in [0, 1], one per layer, in the order of the blocks of `find_residuals`.

    Raises:
        ValueError: If the model holds no `StochasticDepth` layer.
    """
    return [layer.survival_prob for layer in stochastic_depth_layers(model)]


def set_survival_probs(model, probs):
    """Assigns the survival probabilities of a model's `StochasticDepth` layers.

    They act on the next step, of a compiled model too (but for `mode="row"` under XLA, where the
    model has to be compiled again). Nothing is assigned if one of them is
    invalid.

    Args:
        model: A `keras.Model` that holds such layers.
        probs: Sequence of floats in [0, 1], one per layer, in the order of `get_survival_probs`.

    Raises:
        TypeError: If `probs` is not a sequence of numbers.
        ValueError: If it has another length, or a value is outside [0, 1].

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import StochasticDepth, get_survival_probs, set_survival_probs
    >>> x = tf.keras.Input(shape=(4,))
    >>> y = StochasticDepth(tf.keras.layers.Dense(4))(x, shortcut=x)
    >>> model = tf.keras.Model(x, y)
    >>> set_survival_probs(model, [0.25])
    >>> get_survival_probs(model)
    [0.25]
    """
    layers = stochastic_depth_layers(model)
    probs = check_sequence(probs, len(layers), "probs", "layer")
    for layer, p in zip(layers, probs):
        layer.survival_prob = p


@contextlib.contextmanager
def survival_probs(model, probs):
    """Assigns survival probabilities as `set_survival_probs` does, for the body of a `with`.

    After it, the layers have those back that they had before, also if the body raises an error.
    With zeros and ones it decides which branches run. It is no target of a schedule.

    Args:
        model: A `keras.Model` that holds such layers.
        probs: Sequence of floats in [0, 1], one per layer, in the order of `get_survival_probs`.

    Raises:
        TypeError: If `probs` is not a sequence of numbers.
        ValueError: If it has another length, or a value is outside [0, 1].

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import StochasticDepth, get_survival_probs, survival_probs
    >>> x = tf.keras.Input(shape=(4,))
    >>> y = StochasticDepth(tf.keras.layers.Dense(4), 0.8)(x, shortcut=x)
    >>> model = tf.keras.Model(x, y)
    >>> with survival_probs(model, [0]):
    ...     model(tf.ones((1, 4)), training=True).numpy().tolist()  # the branch is dropped
    [[1.0, 1.0, 1.0, 1.0]]
    >>> get_survival_probs(model)
    [0.8]
    """
    layers = stochastic_depth_layers(model)
    probs = check_sequence(probs, len(layers), "probs", "layer")
    if not tf.executing_eagerly():
        raise ValueError(
            "`survival_probs` assigns when it is called, and not when a traced function runs. "
            "Received: a call inside a tf.function. Put the `with` around the function's call."
        )
    before = [layer.survival_prob for layer in layers]
    try:
        for layer, p in zip(layers, probs):
            layer.write_survival_prob(p)
        yield
    finally:
        for layer, p in zip(layers, before):
            layer.write_survival_prob(p)
