"""Blocks inside layers whose `call` does nothing but call layers."""

import numpy as np
import pytest
import tensorflow as tf

from helpers import (
    KERAS_3,
    assert_same_outputs,
    assert_same_weights,
    data,
    node_counts,
    randomize,
    weights_by_layer,
    wrappers,
)
from tfa_stochastic_depth import (
    StochasticDepth,
    constant,
    copy_weights,
    find_residuals,
    set_survival_probs,
    wrap_residuals,
)

keras = tf.keras
L = keras.layers
register = keras.utils.register_keras_serializable(package="opening")


@register
class Block(L.Layer):
    """`x + dense(x)`, as a layer that is a whole block."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.dense = L.Dense(width, name="dense")

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x, scale=None):
        y = self.dense(x)
        return x + (y if scale is None else y * scale)

    def get_config(self):
        return {**super().get_config(), "width": self.width}


@register
class Stack(L.Layer):
    """Blocks in a row between two normalizations, like a ViT encoder."""

    block = Block

    def __init__(self, width=4, count=3, **kwargs):
        super().__init__(**kwargs)
        self.width, self.count = width, count
        self.first = L.LayerNormalization(name="first")
        self.blocks = [self.block(width, name=f"block{i}") for i in range(count)]
        self.drop = L.Dropout(0.0, name="drop")
        self.last = L.LayerNormalization(name="last")

    def build(self, shape):
        for layer in (self.first, *self.blocks, self.last):
            layer.build(shape)
        super().build(shape)

    def call(self, x, training=False):  # a default that Keras overrides
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.drop(x, training=training))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "count": self.count}


@register
class Row(L.Layer):
    """Blocks in a row and nothing else."""

    def __init__(self, count=3, **kwargs):
        super().__init__(**kwargs)
        self.count = count
        self.blocks = [Block(4, name=f"block{i}") for i in range(count)]

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)
        super().build(shape)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def get_config(self):
        return {**super().get_config(), "count": self.count}


@register
class TwoInputs(Row):
    def call(self, x, scale=None):
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


def model_of(layer, **kwargs):
    x = inputs = keras.Input((4,), name="in")
    x = layer(L.Dense(4, name="stem")(x), **kwargs)
    return randomize(keras.Model(inputs, L.Dense(2, name="head")(x), name="outer"))


def by_hand(model, x, switches):
    stack = model.get_layer("stack")
    x = stack.first(model.get_layer("stem")(x))
    for block, switch in zip(stack.blocks, switches):
        x = block(x) if switch else x
    return np.asarray(model.get_layer("head")(stack.last(x)))


def test_the_blocks_inside_are_found():
    found = find_residuals(model_of(Stack(name="stack")), block_layers=Block)
    assert [(b.name, b.kind, b.params) for b in found.blocks] == [
        (f"stack/block{i}", "layer", 20) for i in range(3)
    ]
    assert not found.refusals


@pytest.mark.parametrize("share_layers", [False, True])
def test_the_blocks_inside_are_wrapped(share_layers):
    model = model_of(Stack(name="stack"))
    wrapped = wrap_residuals(
        model, constant(1), block_layers=Block, rescale="training", share_layers=share_layers
    )
    x = data(3, 4)
    assert [w.name for w in wrappers(wrapped)] == ["block0", "block1", "block2"]
    assert [layer.name for layer in wrapped.layers] == [layer.name for layer in model.layers]
    assert_same_outputs(wrapped, model, x)
    for switches in ([1, 1, 1], [0, 1, 0], [1, 0, 1], [0, 0, 0]):
        set_survival_probs(wrapped, switches)
        np.testing.assert_allclose(
            wrapped(x, training=True), by_hand(model, x, switches), atol=1e-6
        )
    dense = model.get_layer("stack").blocks[1].dense
    assert (wrappers(wrapped)[1].layer.dense is dense) == share_layers


def test_the_input_model_is_left_alone():
    model = model_of(Stack(name="stack"))
    stack = model.get_layer("stack")
    parts = [stack, stack.first, stack.last, *stack.blocks]
    before = node_counts(model), [len(part._inbound_nodes) for part in parts]
    weights = model.get_weights()
    find_residuals(model, block_layers=Block)
    wrapped = wrap_residuals(model, block_layers=Block)
    assert (node_counts(model), [len(part._inbound_nodes) for part in parts]) == before
    wrapped.compile("sgd", "mse")
    wrapped.fit(data(8, 4), data(8, 2), verbose=0)
    for ours, theirs in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(ours, theirs)


def test_weights_and_flags_go_along():
    model = model_of(Stack(name="stack"))
    model.get_layer("stack").blocks[1].trainable = False
    wrapped = wrap_residuals(model, block_layers=Block)
    stack = model.get_layer("stack")
    theirs = {x.name: x.get_weights() for x in (stack.first, stack.last, *stack.blocks)}
    ours = {w.name: w.layer.get_weights() for w in wrappers(wrapped)}
    ours |= {n: wrapped.get_layer("stack").get_layer(n).get_weights() for n in ("first", "last")}
    assert_same_weights({k: ours[k] for k in theirs}, theirs)
    assert [w.layer.trainable for w in wrappers(wrapped)] == [True, False, True]
    assert len(wrapped.trainable_weights) == len(model.trainable_weights)


def test_saved_and_loaded(tmp_path):
    wrapped = wrap_residuals(model_of(Stack(name="stack")), 0.5, block_layers=Block)
    path = str(tmp_path / "wrapped.keras")
    wrapped.save(path)
    again = keras.models.load_model(path)
    assert_same_outputs(again, wrapped, data(3, 4))
    assert len(wrappers(again)) == 3


def test_a_tensor_beside_the_first_goes_along():
    inputs, scale = keras.Input((4,)), keras.Input((1,))
    y = TwoInputs(name="stack")(L.Dense(4, name="stem")(inputs), scale=scale)
    model = randomize(keras.Model([inputs, scale], y))
    wrapped = wrap_residuals(model, constant(1), block_layers=Block, rescale="training")
    assert len(wrappers(wrapped)) == 3
    x = [data(3, 4), data(3, 1, seed=1)]
    assert_same_outputs(wrapped, model, x)
    set_survival_probs(wrapped, [0, 0, 0])
    stem = np.asarray(model.get_layer("stem")(x[0]))
    np.testing.assert_allclose(wrapped(x, training=True), stem, atol=1e-6)


def test_a_block_left_out_stays_in_its_layer():
    """With none of its blocks wanted, the layer itself is kept."""
    model = model_of(Stack(name="stack"))
    x = model.outputs[0]
    model = randomize(keras.Model(model.inputs, L.Add(name="sum")([x, L.Dense(2)(x)])))
    wrapped = wrap_residuals(model, block_layers=Block, where=lambda b: b.name == "sum")
    assert type(wrapped.get_layer("stack")) is Stack
    assert [w.name for w in wrappers(wrapped)] == ["sum"]
    some = wrap_residuals(model, block_layers=Block, where=lambda b: b.name == "stack/block1")
    assert [w.name for w in wrappers(some)] == ["block1"]
    assert_same_outputs(
        wrap_residuals(model, constant(1), block_layers=Block, rescale="training"),
        model,
        data(3, 4),
    )


def test_a_stack_of_stacks():
    class Tower(Stack):
        block = Stack

        def __init__(self, **kwargs):
            super().__init__(4, 2, **kwargs)

        def get_config(self):
            return L.Layer.get_config(self)

    model = model_of(Tower(name="tower"))
    found = find_residuals(model, block_layers=Block)
    names = [b.name for b in found.blocks]
    assert names == [f"tower/block{j}/block{i}" for j in range(2) for i in range(3)]
    wrapped = wrap_residuals(model, constant(1), block_layers=Block, rescale="training")
    assert_same_outputs(wrapped, model, data(3, 4))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_what_is_opened_computes_in_the_dtype_of_the_layer(policy):
    x = inputs = keras.Input((4,), name="in")  # float32
    model = randomize(keras.Model(inputs, Stack(name="stack", dtype=policy)(x)))
    wrapped = wrap_residuals(model, constant(1), block_layers=Block, rescale="training")
    assert len(wrappers(wrapped)) == 3
    x = data(3, 4)
    ours, theirs = wrapped(x), model(x)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(tf.cast(ours, "float64"), tf.cast(theirs, "float64"))


def test_training_reaches_the_layers_inside():
    class Dropping(Stack):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.drop = L.Dropout(0.5, seed=3, name="drop")

    model = model_of(Dropping(name="stack"))
    wrapped = wrap_residuals(model, constant(1), block_layers=Block)
    x = data(3, 4)
    assert_same_outputs(wrapped, model, x, training=False)
    assert np.abs(np.asarray(wrapped(x, training=True)) - np.asarray(wrapped(x))).max() > 1e-3


def test_weights_go_back_into_the_layer_that_was_opened():
    model = model_of(Stack(name="stack"))
    wrapped = wrap_residuals(model, block_layers=Block, rescale="training")
    assert weights_by_layer(wrapped)["stem"][0].shape == (4, 4)
    randomize(wrapped, seed=2)
    copy_weights(wrapped, model)
    assert_same_outputs(model, wrapped, data(3, 4))


# ------------------------------------------------------------------ what stays closed


class OwnWeight(Row):
    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=(4,), initializer="ones")
        super().build(shape)

    def call(self, x):
        return super().call(x) * self.gain


class TwoWays(Row):
    def call(self, x, training=None):
        for block in self.blocks[: 1 if training else 3]:
            x = block(x)
        return x


class Constant(Row):
    def call(self, x):
        return super().call(x + tf.constant([[1.0, 2.0, 3.0, 4.0]]))


class Pinned(Row):
    """Its dropout never drops, and a Functional would not keep that in mind."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = L.Dropout(0.5, name="drop")

    def call(self, x):
        return super().call(self.drop(x, training=False))


class Always(Row):
    def call(self, x, training=True):
        return super().call(x)


class Losing(Row):
    def call(self, x):
        self.add_loss(keras.ops.mean(x) if KERAS_3 else tf.reduce_mean(x))
        return super().call(x)


class Regularized(Row):
    def __init__(self, **kwargs):
        super().__init__(activity_regularizer="l2", **kwargs)


class Asking(Row):
    """Its code asks for values, of which a symbolic tensor has none."""

    def call(self, x):
        if hasattr(x, "_keras_history"):
            float(x[0, 0])
        return super().call(x)


REASONS = {
    "weights": (OwnWeight, "it has weights or random numbers outside the layers that it calls ("),
    "pinned": (Pinned, "its `call` tells 'drop' whether it is in training."),
    "always": (Always, "its `call` takes itself to be in training unless it is told."),
    "two ways": (TwoWays, "its `call` has two ways, one for training."),
    "constants": (Constant, "its `call` computes with tensors that are not its inputs."),
    "losses": (Losing, "its `call` "),
    "activity": (Regularized, "its `call` adds losses."),
    "values": (Asking, "its `call` does not run on symbolic tensors ("),
}


@pytest.mark.parametrize(("cls", "reason"), REASONS.values(), ids=REASONS)
def test_a_layer_that_cannot_be_opened_says_why(cls, reason):
    model = model_of(cls(name="stack"))
    found = find_residuals(model, block_layers=Block)
    assert not found.blocks
    (refusal,) = found.refusals
    assert refusal.name == "stack"
    assert refusal.reason.startswith(f"the blocks inside cannot be reached: {reason}")
    with pytest.raises(ValueError, match="the blocks inside cannot be reached"):
        wrap_residuals(model, block_layers=Block)


def test_a_layer_that_is_always_called_in_training_stays_closed():
    x = keras.Input((4,))
    model = keras.Model(x, Stack(name="stack")(x, training=True))
    assert [r.reason for r in find_residuals(model, block_layers=Block).refusals] == [
        "the blocks inside cannot be reached: it is called with a `training` of its own."
    ]


def test_wrapped_before():
    wrapped = wrap_residuals(model_of(Stack(name="stack")), block_layers=Block)
    found = find_residuals(wrapped, block_layers=Block)
    assert found.blocks == found.refusals == ()
    with pytest.raises(ValueError, match="It already holds StochasticDepth layers"):
        wrap_residuals(wrapped, block_layers=Block)


@register
class NeedsItsMask(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(4, name="dense")
        self.supports_masking = True

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x, mask=None):
        return x + self.dense(x) * tf.cast(mask, x.dtype)[..., None]


def test_a_block_that_needs_its_mask():
    ids = keras.Input((5,), dtype="int32")
    x = NeedsItsMask()(L.Embedding(9, 4, mask_zero=True)(ids))
    model = randomize(keras.Model(ids, x))
    wrapped = wrap_residuals(model, constant(1), block_layers=NeedsItsMask, rescale="training")
    x = np.array([[1, 2, 3, 0, 0]])
    for training in (False, True):
        assert_same_outputs(wrapped, model, x, training=training)


def test_a_layer_that_is_called_twice_stays_closed():
    stack = Stack(name="stack")
    x = keras.Input((4,))
    found = find_residuals(keras.Model(x, stack(stack(x))), block_layers=Block)
    assert [r.reason for r in found.refusals] == [
        "the blocks inside cannot be reached: it is called more than once."
    ]


def test_a_layer_that_shares_a_block_with_another_stays_closed():
    class Borrowing(L.Layer):
        def __init__(self, blocks, **kwargs):
            super().__init__(**kwargs)
            self.blocks = blocks

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    one = Row(name="one")
    two = Borrowing(one.blocks, name="two")
    x = keras.Input((4,))
    found = find_residuals(keras.Model(x, two(one(x))), block_layers=Block)
    assert {r.reason for r in found.refusals} == {
        "the blocks inside cannot be reached: it shares the layer 'block0' with another."
    }


def test_without_block_layers_nothing_is_opened():
    found = find_residuals(model_of(Stack(name="stack")))
    assert found.blocks == found.refusals == ()


# ------------------------------------------------------------------ copies of odd classes


class MoreInItsConfig(L.Layer):
    """Its config holds more than its constructor takes, as happens in libraries."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = L.Dense(units)

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units, "double": 2 * self.units}


class TakesTuples(L.Layer):
    """Cannot be built from the list that a saved shape is."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=shape[-1:] + (4,))
        super().build(shape)

    def call(self, x):
        return x @ tf.cast(self.kernel, x.dtype)


@pytest.mark.parametrize("make", [lambda: MoreInItsConfig(4, name="odd"), TakesTuples])
def test_layers_with_faulty_configs_are_copied_and_saved(make, tmp_path):
    x = inputs = keras.Input((4,))
    x = make()(x)
    model = randomize(keras.Model(inputs, L.Add(name="sum")([x, L.Dense(4)(x)])))
    wrapped = wrap_residuals(model, constant(1), rescale="training")
    assert_same_outputs(wrapped, model, data(3, 4))
    path = str(tmp_path / "odd.keras")
    wrapped.save(path)
    known = {"MoreInItsConfig": MoreInItsConfig, "TakesTuples": TakesTuples}
    again = keras.models.load_model(path, custom_objects=known)
    assert_same_outputs(again, model, data(3, 4))


def test_the_wrapper_of_a_whole_block_stands_aside():
    wrapped = wrap_residuals(model_of(Stack(name="stack")), constant(0), block_layers=Block)
    assert all(isinstance(w, StochasticDepth) and w.skip == "identity" for w in wrappers(wrapped))
