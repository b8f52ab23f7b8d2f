"""`StochasticDepth`, the layer wrapper, and the function under it."""

from __future__ import annotations

import numbers

import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.survival import check_sequence, check_survival_prob

keras = _keras.keras

RESCALES = ("inference", "training")


def draw_switch(seed, survival_prob):
    """Draws the paper's b, true with probability `survival_prob`.

    The draw is a function of the seed alone, the same in eager mode, in a graph and under XLA:
    Philox is named because the default generator depends on the device, and the uniform number
    is made from its bits here because TensorFlow and XLA round them differently.

    Args:
        seed: Integer tensor of shape (2,).
        survival_prob: float32 scalar tensor in [0, 1]. 0 is never true and 1 always.

    Returns:
        A bool scalar tensor.
    """
    bits = tf.random.stateless_uniform(
        (), seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    upper = tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.int32)
    u = tf.cast(upper, tf.float32) * 2.0**-24  # in [0, 1), exact
    return u < survival_prob


def run_or_skip(switch, run, skip):
    """`run()` where the switch is on and `skip(...)` where it is off; the other is not computed.

    Args:
        switch: Bool scalar tensor.
        run: A function that returns (outputs, losses), losses being a list of tensors.
        skip: A function that returns outputs of the same structure, shapes and dtypes. It is given
            what `run` returned as symbolic tensors of another graph, of use only for their static
            shapes, or `None` in eager mode.

    Returns:
        (outputs, losses). When skipped, the losses are zeros in a graph and absent in eager mode.
    """
    traced = []

    def kept():
        traced.append(run())
        return traced[-1]

    def dropped():  # traced after `kept`; in eager mode the only one that is called
        outputs, losses = traced[-1] if traced else (None, [])
        return skip(outputs), [tf.zeros(loss.shape, loss.dtype) for loss in losses]

    return tf.cond(switch, kept, dropped)


@tf.custom_gradient
def _with_zero_gradients(y, *weights):
    """`y`, as a function of `weights` on which it does not depend.

    In a graph the gradient of a dropped branch is zero; in eager mode there would be none, and
    Keras would warn about that in every step.
    """

    def gradient(dy):
        return (dy, *(tf.zeros_like(w) for w in weights))

    return tf.identity(y), gradient


class _Arguments:
    """The arguments of one call.

    Attributes:
        shortcut: The shortcut in the wrapper's compute dtype, or `None`.
        stand_in: What stands in for the layer: the shortcut as it came, or else the inputs.
        mask: The masks of `stand_in`, if they were given, and do not come with it.
    """

    def __init__(self, inputs, args, kwargs, shortcut, stand_in, mask):
        self.inputs = inputs
        self.args = args
        self.kwargs = kwargs
        self.shortcut = shortcut
        self.stand_in = stand_in
        self.mask = mask

    def masks(self):
        """The masks of what stands in for the layer, by place, as they are now.

        Keras 3's attention takes the mask from the query that it is called with, and a sum after
        it sees none.
        """
        if self.mask is None:
            return _keras.masks_of(self.stand_in)
        return {i: mask for i, mask in enumerate(_keras.flatten(self.mask)) if mask is not None}


class _Specs:
    """Symbolic outputs of layers by the shapes and dtypes of their inputs, traced once each."""

    def __init__(self):
        self._known = {}

    def outputs(self, layer, args, kwargs):
        key = _keras.trace_key(layer, args, kwargs)
        if key not in self._known:
            self._known[key] = _keras.trace(layer, args, kwargs)
        return self._known[key]


def zeros_like_output(layer, arguments, outputs, dtype):
    """Zeros of the shapes that a layer's outputs would have, without running it.

    A size that is unknown statically is taken from the layer's first input: axis 0 is the batch,
    as everywhere in Keras, and for another axis the layer is traced on two made-up sizes to see
    which axis of the input it follows.

    Args:
        layer: The layer.
        arguments: What it is called with.
        outputs: Its outputs as symbolic tensors.
        dtype: Dtype of the zeros.

    Raises:
        ValueError: If a size follows no axis of the input.
    """
    first = tf.nest.flatten(arguments.inputs)[0]
    leaves = tf.nest.flatten(outputs)
    probes = []
    if any(size is None for y in leaves for size in tuple(y.shape)[1:]):
        for step in (8, 24):
            sizes = [None, *(64 + step * axis for axis in range(1, 32))]
            shapes = _keras.trace_sizes(layer, arguments.args, arguments.kwargs, sizes)
            probes.append((sizes, shapes))

    def size(leaf, axis, known):
        if known is not None:
            return known
        if axis == 0:
            return tf.shape(first)[0]
        for source in range(1, len(first.shape)):
            if all(shapes[leaf][axis] == sizes[source] for sizes, shapes in probes):
                return tf.shape(first)[source]
        raise ValueError(
            f"The size of axis {axis} of what {layer.name!r} gives, {tuple(leaves[leaf].shape)}, "
            "is not known before it runs, so nothing can stand in for it when it is dropped. Pass "
            "`shortcut=` in the call, or a `skip`."
        )

    zeros = [
        tf.zeros([size(leaf, axis, known) for axis, known in enumerate(y.shape)], dtype)
        for leaf, y in enumerate(leaves)
    ]
    return tf.nest.pack_sequence_as(outputs, zeros)


_map = tf.nest.map_structure


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


def _set_masks(tensors, masks):
    """Tensors with these masks, and no others."""
    leaves = []
    for i, x in enumerate(tf.nest.flatten(tensors)):
        if _keras.mask_of(x) is not None:
            x = tf.identity(x)  # the mask belongs to whoever made the tensor
        _keras.set_mask(x, masks.get(i))
        leaves.append(x)
    return tf.nest.pack_sequence_as(tensors, leaves)


def _sum_masks(shortcut, shortcut_masks, branch_masks):
    """The masks of the sums of shortcut and branch."""
    masks = {
        i: _keras.sum_mask([x, x], [shortcut_masks.get(i), branch_masks.get(i)])
        for i, x in enumerate(tf.nest.flatten(shortcut))
    }
    return {i: mask for i, mask in masks.items() if mask is not None}


def _stand_in_masks(outputs, masks, like):
    """Masks for a dropped layer's outputs: `masks` where they fit, else nothing is masked.

    Args:
        outputs: What stands in for the layer's outputs.
        masks: Place -> the mask that it has.
        like: Place -> the mask that the layer's output would have. These places must be filled.
    """
    leaves, filled = tf.nest.flatten(outputs), {}
    for i, mask in like.items():
        filled[i] = masks.get(i)
        if filled[i] is None or not filled[i].shape.is_compatible_with(mask.shape):
            filled[i] = tf.ones(tf.shape(leaves[i])[: mask.shape.rank], tf.bool)
    return filled


def _same_structure(value, like):
    try:
        tf.nest.assert_same_structure(value, like, check_types=False)
    except ValueError:
        return False
    return True


def _scaled(y, weight):
    return y if weight is None else y * tf.cast(weight, y.dtype)


def _check_layer(layer):
    if not isinstance(layer, keras.layers.Layer):
        raise TypeError(
            "`layer` must be a keras layer or model (an object, not a class). "
            f"Received: {layer!r} (of type {type(layer).__name__})."
        )


def check_options(mode, rescale, seed):
    """Checks the options that the layer and `wrap_residuals` share."""
    if mode == "row":
        raise ValueError(
            '`mode="row"` (each sample on its own) is not in this version. Use mode="batch": one '
            "switch per step for the whole batch, as in the paper."
        )
    if mode != "batch":
        raise ValueError(f'`mode` must be "batch". Received: {mode!r}.')
    if rescale not in RESCALES:
        raise ValueError(f'`rescale` must be "inference" or "training". Received: {rescale!r}.')
    if seed is not None and (not isinstance(seed, numbers.Integral) or isinstance(seed, bool)):
        raise TypeError(f"`seed` must be an integer or None. Received: {seed!r}.")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"`seed` must fit into 64 bits. Received: {seed!r}.")


def _check_skip(skip):
    if not (skip is None or isinstance(skip, keras.layers.Layer) or skip == "identity"):
        raise ValueError(
            '`skip` must be None (zeros), "identity" (the inputs) or a keras layer. '
            f"Received: {skip!r}."
        )


@_keras.register
class StochasticDepth(_keras.Wrapper):
    """Runs a layer in a random part of the training steps, and always, scaled, at inference.

    With `f = layer(x)`, `s` what stands in for it, `p = survival_prob` and the switch
    `b ~ Bernoulli(p)`, one for the whole batch:

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

    Source: Huang, Sun, Liu, Sedra, Weinberger, "Deep Networks with Stochastic Depth",
    arXiv 1603.09382.

    Args:
        layer: The `keras.layers.Layer` (or model) to run or drop. Its outputs must be
            floating-point.
        survival_prob: Probability in [0, 1] that the layer runs in a training step. 0 and 1 are
            exact: never and always. It is kept in a non-trainable float32 variable, so that
            assigning to `.survival_prob` acts at once, without a new trace.
        mode: "batch": one switch per step for the whole batch.
        rescale: "inference" or "training", as in the table above.
        skip: What stands in for the layer when it is dropped. `None`: zeros, to be added to a
            shortcut (by the caller, or in here by `shortcut=`). "identity": the inputs, for a
            layer that is a whole residual block. A layer: that layer on the inputs, for blocks
            that change the shape.
        seed: Integer of up to 64 bits from which the switches follow, or `None` for one that
            follows from `keras.utils.set_random_seed`. Layers that shall drop independently need
            different seeds.
        **kwargs: `name`, `trainable`, and `dtype`, which is `layer`'s own policy by default.
            `supports_masking=False` stops masks here.

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
            gives has another shape than the layer's output, or if the layer holds a synchronized
            BatchNormalization and is trained on several replicas.

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
        kwargs.setdefault("dtype", _keras.policy_like(layer))
        # The wrapped layer casts what it takes by its own policy. Casting here as well would
        # round its inputs twice.
        super().__init__(layer, autocast=False, **kwargs)
        self.mode = mode
        self.rescale = rescale
        self.skip = skip
        self.seed = None if seed is None else int(seed)
        self.supports_masking = True  # Keras 3 warns of masks that end in a layer without
        self._passes_masks = passes_masks
        self._specs = _Specs()
        self._survival_prob = _keras.add_scalar(self, "survival_prob", survival_prob)
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
        self._survival_prob.assign(check_survival_prob(value))

    def build(self, input_shape=None):
        for layer in (self.layer, self.skip):
            if isinstance(layer, keras.layers.Layer):
                _keras.build_from_shape(layer, input_shape)
        keras.layers.Layer.build(self, input_shape)

    @_keras.unconverted
    def call(self, inputs, *args, shortcut=None, training=None, mask=None, **kwargs):
        inputs, args, shortcut, kwargs = _map(_of_this_graph, (inputs, args, shortcut, kwargs))
        if mask is not None and _keras.accepts(self.layer, "mask"):
            kwargs["mask"] = mask
        stand_in, own_mask = (inputs, mask) if shortcut is None else (shortcut, None)
        arguments = _Arguments(
            inputs, (inputs, *args), kwargs, self._shortcut(shortcut), stand_in, own_mask
        )
        training = _static(training)
        if training is False:
            outputs, masks = self._kept(arguments, training, self._weight(training))
        else:
            outputs, masks = self._train(arguments, training)
        return _set_masks(outputs, masks if self._passes_masks else {})

    def _train(self, arguments, training):
        """Draws the switch, and computes the layer if it is on. Returns (outputs, masks)."""
        self._check_replicas()
        _keras.build(self.layer, arguments.args, arguments.kwargs)
        if isinstance(self.skip, keras.layers.Layer):
            _keras.build(self.skip, (arguments.inputs,), {})
        if tf.executing_eagerly():  # one side is computed now, and the other may be wrong
            self._check_sides(arguments)
        switch = draw_switch(_keras.next_seed(self._seed_state), self._survival_prob)
        if training is not True:  # a tensor: at inference every layer runs
            switch = tf.logical_or(switch, tf.logical_not(training))
        results, losses = run_or_skip(
            switch,
            lambda: _keras.collect_losses(
                self, lambda: self._kept(arguments, training, self._weight(training))
            ),
            lambda kept: self._dropped(arguments, training, kept),
        )
        _keras.add_losses(self, losses)
        return results

    def _kept(self, arguments, training, weight):
        """`weight * f + (1 - weight) * s`, plus the shortcut; a weight of `None` is 1.

        Returns (outputs, masks).
        """
        f = self.layer(*arguments.args, training=training, **arguments.kwargs)
        masks = _keras.masks_of(f)
        f = self._cast(f)
        if arguments.shortcut is not None:
            self.check_sum(arguments.shortcut, f)
            masks = _sum_masks(arguments.shortcut, arguments.masks(), masks)
            return _map(lambda a, y: a + _scaled(y, weight), arguments.shortcut, f), masks
        if self.skip is None or weight is None:
            return _map(lambda y: _scaled(y, weight), f), masks
        s, _ = self._skipped(arguments, training, f)
        return _map(lambda y, z: _scaled(y, weight) + _scaled(z, 1.0 - weight), f, s), masks

    def _dropped(self, arguments, training, kept):
        """What takes the layer's place, as (outputs, masks).

        `kept` is what `_kept` returned when it was traced, `None` in eager mode.
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
                like = _sum_masks(outputs, masks, _stand_in_masks(outputs, {}, like))
        elif self.skip is not None:
            outputs, masks = self._skipped(arguments, training, f)
        else:
            outputs = zeros_like_output(self.layer, arguments, f, self.compute_dtype)
        masks = _stand_in_masks(outputs, masks, like)
        if tf.executing_eagerly():
            weights = [tf.convert_to_tensor(w) for w in self.layer.trainable_weights]
            outputs = _map(lambda y: _with_zero_gradients(y, *weights), outputs)
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

    def _skipped(self, arguments, training, like):
        """What `skip` gives, as (outputs, masks)."""
        outputs, masks = arguments.inputs, arguments.masks()
        if isinstance(self.skip, keras.layers.Layer):
            outputs = self.skip(outputs, training=training)
            masks = _keras.masks_of(outputs)
        outputs = self._cast(outputs, "what `skip` gives")
        self._check_shapes("what `skip` gives", outputs, like)
        return outputs, masks

    def _weight(self, training):
        """The factor on a kept layer's output, a scalar tensor, or `None` where it is 1."""
        if training is (self.rescale == "inference"):
            return None
        # At least float32: in float16 1 / p and 1 - p would be off by more than the rounding of
        # what they are multiplied with.
        dtype = tf.float64 if self.compute_dtype == "float64" else tf.float32
        p = tf.cast(self._survival_prob, dtype)
        factor = p if self.rescale == "inference" else 1.0 / p
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

    def check_sum(self, shortcut, branch):
        """Raises an error unless a shortcut and a branch output have the same static shapes."""
        if self.skip is not None:
            raise ValueError(
                "`shortcut` goes with `skip=None`: with another `skip` the layer's output already "
                f"has a stand-in. Received: a shortcut, and skip={self.skip!r}."
            )
        self._check_shapes("`shortcut`", shortcut, branch)

    def _check_shapes(self, what, value, like):
        """Raises an error unless two structures hold tensors of the same static shapes."""
        shapes = [[tuple(x.shape) for x in tf.nest.flatten(v)] for v in (value, like)]
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
        return None if not self._passes_masks else _keras.output_mask(self.layer, inputs, mask)

    def compute_output_shape(self, input_shape):
        """The shape of the wrapped layer's output."""
        return self.layer.compute_output_shape(input_shape)

    def get_config(self):
        config = keras.layers.Layer.get_config(self)
        config.update(
            layer=keras.layers.serialize(self.layer),
            survival_prob=self.survival_prob,
            mode=self.mode,
            rescale=self.rescale,
            skip=self.skip,
            seed=self.seed,
        )
        if isinstance(self.skip, keras.layers.Layer):
            config["skip"] = keras.layers.serialize(self.skip)
        if not self._passes_masks:
            config["supports_masking"] = False
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

    They act on the next step, of a compiled model too. Nothing is assigned if one of them is
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
