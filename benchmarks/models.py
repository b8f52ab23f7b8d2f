"""The models of the benchmarks, and with which survival probabilities each is run.

Every model is a function of its sizes and of `merge`, which makes the sum of a shortcut and a
branch: a plain `Add` here, something that drops in `variants.py`.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfa_stochastic_depth import constant, linear_decay

L = tf.keras.layers


def add(shortcut, branch):
    """The sum of a plain model."""
    return L.Add()([shortcut, branch])


def convolutions(blocks, size, channels, merge=add):
    """A row of equal residual 3x3 convolutions, on images `(size, size, channels)`.

    The model of the TensorFlow issue in which users asked for branches that are not computed.
    """
    x = inputs = tf.keras.Input((size, size, channels))
    for _ in range(blocks):
        x = merge(x, L.Conv2D(channels, 3, padding="same", activation="relu")(x))
    return tf.keras.Model(inputs, x)


def half_the_size(x):
    """The shortcut without weights ("option A"): every other pixel, and channels of zeros."""
    x = L.AveragePooling2D(1, strides=2)(x)
    # Of the last two axes, which this data format takes for the image, the channels are padded.
    return L.ZeroPadding2D(((0, 0), (0, x.shape[-1])), data_format="channels_first")(x)


def cifar_resnet(depth, width, merge=add, image=(32, 32, 3)):
    """The CIFAR ResNet of 6n + 2 layers, three stages of n basic blocks."""

    def conv_norm(x, filters, strides=1):
        x = L.Conv2D(filters, 3, strides, "same", use_bias=False)(x)
        return L.BatchNormalization()(x)

    inputs = tf.keras.Input(image)
    x = L.ReLU()(conv_norm(inputs, width))
    for stage in range(3):
        for block in range((depth - 2) // 6):
            narrows = stage > 0 and block == 0
            filters = width * 2**stage
            y = L.ReLU()(conv_norm(x, filters, 2 if narrows else 1))
            x = L.ReLU()(merge(half_the_size(x) if narrows else x, conv_norm(y, filters)))
    return tf.keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x)))


def transformer(depth, tokens, width, heads, merge=add):
    """A pre-norm encoder of `depth` attention blocks and as many MLP blocks."""
    x = inputs = tf.keras.Input((tokens, width))
    for _ in range(depth):
        y = L.LayerNormalization(epsilon=1e-6)(x)
        x = merge(x, L.MultiHeadAttention(heads, width // heads)(y, y))
        y = L.LayerNormalization(epsilon=1e-6)(x)
        y = L.Dense(4 * width, activation="gelu")(y)
        x = merge(x, L.Dense(width)(y))
    return tf.keras.Model(inputs, L.LayerNormalization(epsilon=1e-6)(x))


class LayerScale(L.Layer):
    """A factor for each channel, small at first."""

    def build(self, shape):
        self.gamma = self.add_weight(
            name="gamma", shape=shape[-1:], initializer=tf.keras.initializers.Constant(1e-2)
        )
        super().build(shape)

    def call(self, x):
        return x * tf.cast(self.gamma, x.dtype)

    def compute_output_shape(self, shape):
        return shape


def convnext(blocks, size, channels, merge=add):
    """A stage of ConvNeXt blocks: 7x7 depthwise, LayerNorm, MLP of four times the width, scale."""
    x = inputs = tf.keras.Input((size, size, channels))
    for _ in range(blocks):
        y = L.DepthwiseConv2D(7, padding="same")(x)
        y = L.LayerNormalization(epsilon=1e-6)(y)
        y = L.Dense(4 * channels, activation="gelu")(y)
        x = merge(x, LayerScale()(L.Dense(channels)(y)))
    return tf.keras.Model(inputs, x)


def chain(blocks, width=2, merge=add):
    """A row of residual blocks of one dense layer each."""
    x = inputs = tf.keras.Input((width,))
    for _ in range(blocks):
        x = merge(x, L.Dense(width)(x))
    return tf.keras.Model(inputs, x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at the sizes that are measured.

    Attributes:
        function: Makes the model.
        sizes: Its arguments.
        quick: The same, as small as they may be, for `--quick`.
        batch_size: How many samples a step takes; four with `--quick`.
        rules: Label -> depth rule. `main` is the one for the variants that are run with one only.
        row_rules: Further rules for `mode="row"`.
        convolves: Whether there are convolutions in the branches.
    """

    function: Callable
    sizes: dict
    quick: dict
    batch_size: int
    rules: dict
    main: str = "0.5"
    row_rules: dict = dataclasses.field(default_factory=dict)
    convolves: bool = False

    def build(self, quick, **kwargs):
        """Makes the model."""
        return self.function(**(self.quick if quick else self.sizes), **kwargs)


HALF = {"0.5": constant(0.5)}

# Of the width of ViT-Ti; `transformer384` is of that of ViT-S.
TRANSFORMER = Case(
    transformer,
    {"depth": 6, "tokens": 64, "width": 192, "heads": 6},
    {"depth": 1, "tokens": 4, "width": 8, "heads": 2},
    32,
    HALF,
    row_rules={"0.6": constant(0.6)},
)

CASES = {
    "convolutions": Case(
        convolutions,
        {"blocks": 11, "size": 64, "channels": 32},
        {"blocks": 2, "size": 8, "channels": 4},
        16,
        {"0.2": constant(0.2), **HALF, "0.8": constant(0.8)},
        convolves=True,
    ),
    "resnet110": Case(
        cifar_resnet,
        {"depth": 110, "width": 16},
        {"depth": 8, "width": 2},
        32,
        {"1 to 0.5": linear_decay(0.5), "0.75": constant(0.75)},
        main="1 to 0.5",
        convolves=True,
    ),
    "transformer": TRANSFORMER,
    "transformer384": dataclasses.replace(
        TRANSFORMER, sizes={"depth": 4, "tokens": 64, "width": 384, "heads": 6}
    ),
    "convnext": Case(
        convnext,
        {"blocks": 6, "size": 16, "channels": 96},
        {"blocks": 2, "size": 8, "channels": 8},
        32,
        HALF,
        convolves=True,
    ),
}

CHAIN = Case(chain, {"blocks": 600}, {"blocks": 20}, 32, HALF)
