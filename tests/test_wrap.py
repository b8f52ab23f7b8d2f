"""`find_residuals` and `wrap_residuals` on real models."""

import operator
import warnings

import numpy as np
import pytest
import tensorflow as tf

from helpers import (
    KERAS_3,
    assert_same_outputs,
    assert_same_weights,
    data,
    every_layer,
    node_counts,
    outputs,
    randomize,
    weights_by_layer,
    wrappers,
)
from tfa_stochastic_depth import (
    StochasticDepth,
    constant,
    existing,
    find_residuals,
    get_survival_probs,
    set_survival_probs,
    wrap_residuals,
)

keras = tf.keras
L = keras.layers


# ------------------------------------------------------------------ helpers


def mlp(*names, width=8):
    """A row of identity blocks of one dense layer each; the sums are named `<name>_sum`."""
    x = inputs = keras.Input((width,), name="in")
    for name in names:
        x = L.Add(name=f"{name}_sum")([x, L.Dense(width, name=name)(x)])
    return randomize(keras.Model(inputs, x, name="mlp"))


def cifar_resnet(depth, width=2, image=8, keep=None):
    """The CIFAR ResNet of 6n + 2 layers; `keep` says which branches are there at all."""

    def conv_norm(x, filters, size, strides, name):
        x = L.Conv2D(filters, size, strides, "same", use_bias=False, name=f"{name}_conv")(x)
        return L.BatchNormalization(name=f"{name}_norm")(x)

    keep = iter(keep or [1] * ((depth - 2) // 2))
    inputs = keras.Input((image, image, 3), name="image")
    x = L.ReLU()(conv_norm(inputs, width, 3, 1, "stem"))
    for stage in range(3):
        for block in range((depth - 2) // 6):
            name = f"stage{stage}_block{block}"
            filters, strides = width * 2**stage, 2 if stage and not block else 1
            shortcut = x
            if strides > 1:
                shortcut = conv_norm(x, filters, 1, strides, f"{name}_short")
            if next(keep):
                y = L.ReLU()(conv_norm(x, filters, 3, strides, f"{name}_1"))
                y = conv_norm(y, filters, 3, 1, f"{name}_2")
                shortcut = L.Add(name=name)([shortcut, y])
            x = L.ReLU()(shortcut)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(3, name="head")(x), name=f"resnet{depth}")


# ------------------------------------------------------------------ ways to write a sum


SUMS = {
    "Add()": lambda a, b: L.Add()([a, b]),
    "Add() of a tuple": lambda a, b: L.Add()((a, b)),
    "layers.add": lambda a, b: L.add([a, b]),
    "x + y": operator.add,
    "x += y": operator.iadd,
}
if KERAS_3:
    SUMS["keras.ops.add"] = keras.ops.add
    SUMS["keras.ops.add by name"] = lambda a, b: keras.ops.add(x1=a, x2=b)
else:
    SUMS["tf.add"] = tf.add
    SUMS["tf.math.add by name"] = lambda a, b: tf.math.add(x=a, y=b)
    SUMS["tf.math.add_n"] = lambda a, b: tf.math.add_n([a, b])


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_every_way_to_write_a_sum_in_either_order(add):
    inputs = keras.Input((4,))
    x = L.Dense(4, name="stem")(inputs)
    x = add(x, L.ReLU(name="relu1")(L.Dense(4, name="id1")(x)))
    x = add(L.ReLU(name="relu2")(L.Dense(4, name="id2")(x)), x)
    x = add(L.Dense(6, name="short1")(x), L.Dense(6, name="far1")(L.Dense(5, name="near1")(x)))
    x = add(L.Dense(3, name="far2")(L.Dense(5, name="near2")(x)), L.Dense(3, name="short2")(x))
    model = randomize(keras.Model(inputs, x))
    found = find_residuals(model)
    assert [(b.kind, set(b.layers)) for b in found.blocks] == [
        ("identity", {"id1", "relu1"}),
        ("identity", {"id2", "relu2"}),
        ("projection", {"near1", "far1"}),
        ("projection", {"near2", "far2"}),
    ]
    assert [b.shortcut for b in found.blocks][2:] == ["short1", "short2"]
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, data(5, 4))
    set_survival_probs(wrapped, [0, 0, 0, 0])
    shortcuts = keras.Sequential([model.get_layer(n) for n in ("stem", "short1", "short2")])
    assert_same_outputs(wrapped, shortcuts, data(5, 4), training=True)


@pytest.mark.parametrize("constant", [1.0, np.ones(4, "float32")], ids=["scalar", "array"])
def test_a_sum_with_a_constant_is_no_merge(constant):
    inputs = keras.Input((4,))
    x = L.Dense(4)(inputs) + constant
    found = find_residuals(keras.Model(inputs, L.Dense(4)(x)))
    assert found.blocks == found.refusals == ()


def test_an_add_layer_with_a_constant_is_no_merge():
    inputs = keras.Input((4,))
    x = L.Add()([L.Dense(4)(inputs), tf.ones((1, 4))])
    found = find_residuals(keras.Model(inputs, x))
    assert found.blocks == found.refusals == ()


def scaled_sum(method):
    """A subclass of `Add` that is no plain sum: it overrides one method."""

    def scaled(self, tensors):
        return tensors[0] + 0.1 * tensors[1]

    return type("ScaledSum", (L.Add,), {method: scaled})


@pytest.mark.parametrize("method", ["_merge_function", "call"])
def test_a_subclass_of_add_that_adds_in_its_own_way_is_no_merge(method):
    inputs = keras.Input((4,))
    x = scaled_sum(method)()([inputs, L.Dense(4)(inputs)])
    found = find_residuals(keras.Model(inputs, x))
    assert found.blocks == found.refusals == ()


@pytest.mark.parametrize("layer", ["Subtract", "Multiply", "Average", "Maximum", "Concatenate"])
def test_other_merges_are_no_sums(layer):
    inputs = keras.Input((4,))
    x = getattr(L, layer)()([inputs, L.Dense(4)(inputs)])
    found = find_residuals(keras.Model(inputs, x))
    assert found.blocks == found.refusals == ()


def test_one_add_layer_called_for_every_sum():
    inputs = x = keras.Input((8,))
    add = L.Add(name="plus")
    for name in ("a", "b"):
        x = add([x, L.Dense(8, name=name)(x)])
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, rescale="training")
    assert len(wrappers(wrapped)) == 2
    assert_same_outputs(wrapped, model, data(3, 8))


# ------------------------------------------------------------------ CIFAR ResNets


@pytest.mark.parametrize(("depth", "blocks"), [(20, 9), (56, 27), (110, 54)])
def test_cifar_resnets(depth, blocks):
    found = find_residuals(cifar_resnet(depth), 0.5)
    assert len(found.blocks) == blocks
    assert not found.refusals
    assert [b.kind for b in found.blocks].count("projection") == 2
    assert all(len(b.layers) == 5 for b in found.blocks)
    assert found.expected_depth == pytest.approx((3 * blocks - 1) / 4)  # 40.25 of 54


def test_resnet20_wrapped():
    model = randomize(cifar_resnet(20))
    x = data(2, 8, 8, 3)
    wrapped = wrap_residuals(model, 0.5, rescale="training")
    assert get_survival_probs(wrapped) == pytest.approx([1 - i / 18 for i in range(1, 10)])
    assert_same_weights(weights_by_layer(wrapped), weights_by_layer(model))
    assert_same_outputs(wrapped, model, x)


@pytest.mark.parametrize(
    ("rescale", "keep"),
    [
        ("inference", [0, 1, 1, 0, 1, 0, 1, 0, 0]),
        ("training", [0, 1, 1, 0, 1, 0, 1, 0, 0]),
        ("inference", [0] * 9),
    ],
    ids=["inference", "training", "all dropped"],
)
def test_forced_switches_equal_a_model_built_without_those_branches(rescale, keep):
    model = randomize(cifar_resnet(20))
    expected = cifar_resnet(20, keep=keep)
    for name in weights_by_layer(expected):
        expected.get_layer(name).set_weights(model.get_layer(name).get_weights())
    wrapped = wrap_residuals(model, rescale=rescale)
    set_survival_probs(wrapped, keep)
    x = data(2, 8, 8, 3)
    assert_same_outputs(wrapped, expected, x, training=True, atol=1e-5)
    # Moving statistics of dropped branches have not moved; those of all others moved alike.
    ours, theirs = weights_by_layer(wrapped), weights_by_layer(expected)
    for name, values in weights_by_layer(model).items():
        for ours_now, now in zip(ours[name], theirs.get(name, values)):
            np.testing.assert_allclose(ours_now, now, atol=1e-5)


# ------------------------------------------------------------------ what it computes


def dense_block(p, rescale):
    """x + relu(x W + b) wrapped, and the numbers in it."""
    inputs = keras.Input((4,), name="in")
    x = L.Add(name="sum")([L.Dense(4, "relu", name="dense")(inputs), inputs])
    model = randomize(keras.Model(inputs, x))
    kernel, bias = model.get_layer("dense").get_weights()
    return wrap_residuals(model, [p], rescale=rescale), kernel, bias


@pytest.mark.parametrize("p", [0, 0.3, 0.8, 1])
@pytest.mark.parametrize("rescale", ["inference", "training"])
def test_inference_by_hand(p, rescale):
    wrapped, kernel, bias = dense_block(p, rescale)
    x = data(6, 4)
    branch = np.maximum(x @ kernel + bias, 0)
    expected = x + (p if rescale == "inference" else 1) * branch
    np.testing.assert_allclose(outputs(wrapped, x)[0], expected, atol=1e-6)
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), expected, atol=1e-6)


@pytest.mark.parametrize("rescale", ["inference", "training"])
def test_training_by_hand(rescale):
    p = 0.3
    wrapped, kernel, bias = dense_block(p, rescale)
    x = data(6, 4)
    kept = x + np.maximum(x @ kernel + bias, 0) / (1 if rescale == "inference" else p)
    seen = set()
    for _ in range(40):
        (y,) = outputs(wrapped, x, training=True)
        seen.add("kept" if np.allclose(y, kept, atol=1e-5) else "dropped")
        assert np.allclose(y, kept, atol=1e-5) or np.array_equal(y, x)
    assert seen == {"kept", "dropped"}  # one of them is missing once in 1.6 million


def test_dropout_acts_in_training_inside_branches_and_outside():
    inputs = keras.Input((200,))
    x = L.Dropout(0.5)(inputs)
    dense = L.Dense(200, kernel_initializer="identity")
    x = x + L.Dropout(0.5)(dense(x))
    wrapped = wrap_residuals(keras.Model(inputs, x), constant(1))
    ones = np.ones((4, 200), "float32")
    assert set(np.unique(outputs(wrapped, ones, training=True)[0])) == {0, 2, 6}
    assert set(np.unique(outputs(wrapped, ones)[0])) == {2}


def test_arguments_that_were_given_in_a_call_are_given_again():
    inputs = keras.Input((4,))
    x = L.BatchNormalization()(inputs, training=False)
    x = x + L.BatchNormalization()(L.Dense(4)(x), training=False)
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, constant(1))
    for training in (None, False, True):
        assert_same_outputs(wrapped, model, data(5, 4), training=training)


def test_a_frozen_batch_normalization_stays_frozen_in_its_branch():
    inputs = keras.Input((4,))
    x = inputs + L.BatchNormalization(trainable=False)(L.Dense(4)(inputs))
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, constant(1))
    assert_same_outputs(wrapped, model, data(5, 4), training=True)


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_fit_trains_the_wrapped_model_and_leaves_the_original(run_eagerly):
    inputs = keras.Input((8,))
    x = L.Dense(8)(inputs)
    for _ in range(2):
        y = L.BatchNormalization()(L.Dense(8, "relu", kernel_regularizer="l2")(x))
        x = L.Add()([x, L.Dropout(0.2)(y)])
    model = randomize(keras.Model(inputs, L.Dense(1)(x)))
    before = weights_by_layer(model)
    wrapped = wrap_residuals(model, 0.6)
    wrapped.compile("sgd", "mse", run_eagerly=run_eagerly)
    x, y = data(24, 8), data(24, 1, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = wrapped.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    after = weights_by_layer(wrapped)
    for name in before:
        assert not np.array_equal(before[name][0], after[name][0]), name
    assert_same_weights(weights_by_layer(model), before)


def test_probabilities_set_after_compile_act_in_the_next_step():
    inputs = x = keras.Input((8,))
    for name in ("a", "b"):
        x = L.Add(name=f"{name}_sum")([x, L.Dense(8, name=name)(x)])
    model = randomize(keras.Model(inputs, L.Dense(1, name="head")(x)))
    wrapped = wrap_residuals(model, constant(1))
    wrapped.compile("sgd", "mse")
    x, y = data(4, 8), data(4, 1)
    for probs, moving in (
        ([1, 1], {"a", "b", "head"}),
        ([0, 1], {"b", "head"}),
        ([0, 0], {"head"}),
    ):
        set_survival_probs(wrapped, probs)
        before = weights_by_layer(wrapped)
        wrapped.fit(x, y, verbose=0)
        after = weights_by_layer(wrapped)
        moved = {name for name in after if not np.array_equal(after[name][0], before[name][0])}
        assert moved == moving


def test_the_result_is_not_compiled():
    model = mlp("a")
    model.compile("adam", "mse")
    wrapped = wrap_residuals(model)
    assert getattr(wrapped, "optimizer", None) is None
    assert model.optimizer is not None


# ------------------------------------------------------------------ the original stays


@pytest.mark.parametrize("make", [lambda: cifar_resnet(8), lambda: nested_model()[0]])
def test_the_original_stays_as_it_was(make):
    model = randomize(make())
    model.compile("sgd", "mse", run_eagerly=True)
    shape = (4, *model.input_shape[1:])
    x, y = data(*shape), data(4, *model.output_shape[1:])
    config, nodes = model.to_json(), node_counts(model)
    weights, predictions = weights_by_layer(model), model.predict(x, verbose=0)
    wrapped = wrap_residuals(model, 0.3)
    wrapped.compile("sgd", "mse", run_eagerly=True)
    wrapped.fit(x, y, verbose=0)
    assert model.to_json() == config
    assert node_counts(model) == nodes
    assert_same_weights(weights_by_layer(model), weights)
    np.testing.assert_array_equal(model.predict(x, verbose=0), predictions)
    originals = {id(layer) for layer in every_layer(model).values()}
    assert not originals & {id(layer) for layer in every_layer(wrapped).values()}
    model.fit(x, y, verbose=0)
    assert any(
        not np.array_equal(a, b)
        for name in weights
        for a, b in zip(weights[name], weights_by_layer(model)[name])
    )


def test_finding_changes_nothing():
    model = randomize(cifar_resnet(8))
    config, nodes, weights = model.to_json(), node_counts(model), weights_by_layer(model)
    found = find_residuals(model)
    assert found == find_residuals(model)
    assert (model.to_json(), node_counts(model)) == (config, nodes)
    assert_same_weights(weights_by_layer(model), weights)


def test_training_the_original_does_not_move_the_result():
    model = mlp("a")
    wrapped = wrap_residuals(model, rescale="training")
    before = outputs(wrapped, data(2, 8))
    randomize(model, seed=1)
    np.testing.assert_array_equal(outputs(wrapped, data(2, 8)), before)


def test_share_layers_trains_the_originals_own_variables():
    inputs = keras.Input((8,))
    x = L.Dense(8, name="stem")(inputs)
    x = L.Add(name="sum")([x, L.BatchNormalization()(L.Dense(8, name="dense")(x))])
    model = randomize(keras.Model(inputs, L.Dense(1, name="head")(x)))
    wrapped = wrap_residuals(model, [1], share_layers=True)
    assert {id(w) for w in model.weights} < {id(w) for w in wrapped.weights}
    before, x = weights_by_layer(model), data(4, 8)
    assert_same_outputs(wrapped, model, x)
    wrapped.compile("sgd", "mse")
    wrapped.fit(x, data(4, 1), verbose=0)
    for name, values in weights_by_layer(model).items():
        assert not np.array_equal(values[0], before[name][0])
    assert_same_outputs(wrapped, model, x)


def test_share_layers_leaves_the_original_usable():
    model = randomize(cifar_resnet(8))
    config, predictions = model.to_json(), outputs(model, data(2, 8, 8, 3))
    wrap_residuals(model, share_layers=True)
    assert model.to_json() == config
    np.testing.assert_array_equal(outputs(model, data(2, 8, 8, 3)), predictions)


def test_share_layers_in_nested_models():
    model, x = nested_model()
    wrapped = wrap_residuals(model, rescale="training", share_layers=True)
    assert {id(w) for w in model.weights} < {id(w) for w in wrapped.weights}
    assert_same_outputs(wrapped, model, x)


# ------------------------------------------------------------------ names and structure


def test_the_wrapper_takes_the_merges_name_and_the_others_keep_theirs():
    model = cifar_resnet(8)
    wrapped = wrap_residuals(model)
    assert wrapped.name == model.name
    blocks = find_residuals(model).blocks
    branches = {name for block in blocks for name in block.layers}
    assert {x.name for x in wrapped.layers} == {x.name for x in model.layers} - branches
    for block in blocks:
        wrapper = wrapped.get_layer(block.name)
        assert isinstance(wrapper, StochasticDepth)
        assert set(block.layers) < {x.name for x in wrapper.layer.layers}


def structures():
    """Models whose inputs and outputs have a structure, and data for them."""
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = a + L.Dense(8)(a)
    y, z = L.Dense(2, name="y")(L.Concatenate()([x, b])), L.Dense(1, name="z")(x)
    one, two = data(4, 8), data(4, 8, seed=1)
    yield "dict to dict", keras.Model({"a": a, "b": b}, {"y": y, "z": z}), {"a": one, "b": two}
    yield "list to list", keras.Model([b, a], [z, y]), [two, one]
    yield "list to dict", keras.Model([a, b], {"z": z, "y": y}), [one, two]
    yield "one to list", keras.Model(a, [z, x]), one
    yield "one to the same twice", keras.Model(a, [x, x]), one
    yield "one to itself and more", keras.Model(a, [a, x]), one


@pytest.mark.parametrize("index", range(6))
def test_inputs_and_outputs_keep_their_structure_and_names(index):
    name, model, x = list(structures())[index]
    randomize(model)
    wrapped = wrap_residuals(model, rescale="training")
    for ours, theirs in ((wrapped.input, model.input), (wrapped.output, model.output)):
        tf.nest.assert_same_structure(ours, theirs)
        if isinstance(theirs, dict):
            assert list(ours) == list(theirs)
    for ours, theirs in zip(wrapped.outputs, model.outputs):
        assert (tuple(ours.shape), ours.dtype) == (tuple(theirs.shape), theirs.dtype)
    tf.nest.assert_same_structure(wrapped(x), model(x))
    assert wrapped.output_names == model.output_names
    assert [t.name for t in wrapped.inputs] == [t.name for t in model.inputs]
    assert_same_outputs(wrapped, model, x)


def test_losses_by_output_name_and_data_by_input_name():
    _, model, x = next(structures())
    wrapped = wrap_residuals(model)
    wrapped.compile("sgd", {"y": "mse", "z": "mae"})
    history = wrapped.fit(x, {"y": data(4, 2), "z": data(4, 1)}, verbose=0).history
    assert {"y_loss", "z_loss"} <= set(history)


def test_an_input_that_no_output_needs_stays():
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    wrapped = wrap_residuals(keras.Model([a, b], a + L.Dense(8)(a)))
    assert [tuple(t.shape) for t in wrapped.inputs] == [(None, 8)] * 2


def test_a_fixed_batch_size_and_a_sparse_input_stay():
    inputs = keras.Input((8,), batch_size=4)
    wrapped = wrap_residuals(keras.Model(inputs, inputs + L.Dense(8)(inputs)))
    assert tuple(wrapped.input_shape) == (4, 8)
    inputs = keras.Input((8,), sparse=True)
    x = L.Dense(8)(inputs)
    model = randomize(keras.Model(inputs, x + L.Dense(8)(x)))
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, tf.sparse.from_dense(np.eye(8, dtype="float32")))


def test_unknown_image_sizes():
    inputs = keras.Input((None, None, 3))
    x = L.Conv2D(4, 3, padding="same")(inputs)
    x = x + L.BatchNormalization()(L.Conv2D(4, 3, padding="same")(x))
    y = L.Conv2D(6, 3, 2, padding="same", activation="relu")(x)
    x = L.Add()([L.Conv2D(6, 3, padding="same")(y), L.Conv2D(6, 1, 2)(x)])
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, rescale="training")
    assert tuple(wrapped.output_shape) == (None, None, None, 6)
    images = [data(2, 8, 8, 3), data(2, 6, 10, 3)]
    for image in images:
        assert_same_outputs(wrapped, model, image)
    step = tf.function(lambda x: wrapped(x, training=True), reduce_retracing=True)
    for image in images:
        for probs in ([0, 0], [1, 1]):
            set_survival_probs(wrapped, probs)
            half = image.shape[1] // 2, image.shape[2] // 2
            assert step(image).shape == (2, *half, 6)


# ------------------------------------------------------------------ survival_prob, where, nested


@pytest.mark.parametrize(
    ("survival_prob", "probs"),
    [
        (0.4, [0.8, 0.6, 0.4]),
        ([0.9, 0.1, 0.3], [0.9, 0.1, 0.3]),
        (np.array([0.9, 0.1, 0.3]), [0.9, 0.1, 0.3]),
        (constant(0.7), [0.7, 0.7, 0.7]),
        (lambda block: 0.25 if block.name == "b_sum" else 1, [1, 0.25, 1]),
    ],
    ids=["number", "list", "array", "constant", "function"],
)
def test_survival_prob_is_a_number_a_sequence_or_a_rule(survival_prob, probs):
    model = mlp("a", "b", "c")
    wrapped = wrap_residuals(model, survival_prob)
    assert get_survival_probs(wrapped) == pytest.approx(probs)
    assert [wrapped.get_layer(f"{n}_sum").survival_prob for n in "abc"] == pytest.approx(probs)


def test_survival_prob_is_half_and_options_are_the_layers_by_default():
    for layer in wrappers(wrap_residuals(mlp("a"))):
        assert (layer.survival_prob, layer.mode, layer.rescale) == (0.5, "batch", "inference")
    for layer in wrappers(wrap_residuals(mlp("a"), rescale="training")):
        assert layer.rescale == "training"


def test_where_leaves_the_other_blocks_as_they_were():
    model = mlp("a", "b", "c")
    wrapped = wrap_residuals(model, where=lambda block: block.name != "b_sum", rescale="training")
    assert [x.name for x in wrappers(wrapped)] == ["a_sum", "c_sum"]
    assert isinstance(wrapped.get_layer("b_sum"), L.Add)
    assert get_survival_probs(wrapped) == [0.75, 0.5]
    assert_same_outputs(wrapped, model, data(3, 8))


@pytest.mark.parametrize(("nested", "name"), [("inner", "inner_sum"), ("outer", "outer_sum")])
def test_nested_chooses_between_blocks_in_blocks(nested, name):
    inputs = keras.Input((8,))
    y = L.Dense(8)(inputs)
    y = L.Add(name="inner_sum")([y, L.Dense(8)(y)])
    x = L.Add(name="outer_sum")([inputs, L.Dense(8)(y)])
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, nested=nested, rescale="training")
    assert [x.name for x in wrappers(wrapped)] == [name]
    assert_same_outputs(wrapped, model, data(3, 8))


def test_the_table_of_a_real_model():
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, padding="same", name="stem")(inputs)
    y = L.ReLU(name="relu")(L.Conv2D(4, 3, padding="same", name="conv")(x))
    x = L.Add(name="sum")([y, x])
    x = L.Add(name="twice")([x, x])
    model = keras.Model(inputs, x, name="tiny")
    assert str(find_residuals(model, 0.25)) == (
        "1 residual block in 'tiny'\n"
        "#  merge  shortcut  branch        layers  params  survival_prob\n"
        "-  -----  --------  ------------  ------  ------  -------------\n"
        "1  sum    identity  conv .. relu  2       148     0.25\n"
        "expected depth: 0.25 of 1 block (25.0%)\n"
        "expected share of the branches' multiply-adds: 25.0%\n"
        "not wrapped:\n"
        "  twice: adds a tensor to itself."
    )


# ------------------------------------------------------------------ branches of many kinds


def attention_model():
    """Two attention blocks with a mask and a context, and one of dense layers."""
    x = keras.Input((6, 8), name="x")
    mask, context = keras.Input((6, 6), dtype="bool", name="mask"), keras.Input((5, 8), name="c")
    inputs = [x, mask, context]
    attend = L.MultiHeadAttention(2, 4, name="attend")
    x = L.Add(name="attend_sum")([x, attend(x, x, attention_mask=mask)])
    x = L.Add(name="cross_sum")([L.MultiHeadAttention(2, 4, name="cross")(x, context), x])
    y = L.Dense(16, "gelu", name="up")(L.LayerNormalization(name="norm")(x))
    x = x + L.Dense(8, name="down")(y)
    mask = np.random.default_rng(1).random((3, 6, 6)) > 0.4
    return randomize(keras.Model(inputs, x)), [data(3, 6, 8), mask, data(3, 5, 8, seed=2)]


def test_branches_with_a_mask_and_a_context():
    model, x = attention_model()
    found = find_residuals(model)
    assert [b.layers for b in found.blocks] == [("attend",), ("cross",), ("norm", "up", "down")]
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, x, atol=1e-5)
    other_mask = [x[0], ~x[1], x[2]]
    assert not np.allclose(outputs(wrapped, other_mask)[0], outputs(wrapped, x)[0])
    set_survival_probs(wrapped, [0, 0, 0])
    np.testing.assert_array_equal(outputs(wrapped, x, training=True)[0], x[0])


class Mix(L.Layer):
    """Takes tensors inside dicts and lists, positional and by name."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(8)

    def build(self, *_, **__):
        self.dense.build((None, 8))
        self.built = True

    def call(self, x, extras=None):
        return self.dense(x["a"]) * extras["b"][0]


def test_a_branch_that_takes_nested_structures():
    x, y = keras.Input((8,)), keras.Input((8,))
    b = Mix(name="mix")({"a": L.ReLU()(x)}, extras={"b": [y]})
    model = randomize(keras.Model([x, y], x + b))
    assert find_residuals(model).blocks[0].layers[-1] == "mix"
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, [data(2, 8), data(2, 8, seed=1)])


def test_layers_with_several_outputs():
    inputs = keras.Input((5, 8))
    x, state = L.GRU(8, return_sequences=True, return_state=True)(inputs)
    y = L.GRU(8, return_sequences=True)(x, initial_state=state)
    a, _ = L.MultiHeadAttention(2, 4)(y, y, return_attention_scores=True)
    model = randomize(keras.Model(inputs, L.Add()([x, a])))
    (block,) = find_residuals(model).blocks
    assert len(block.layers) == 2
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, data(2, 5, 8), atol=1e-5)


def test_wrapper_layers_and_cells_are_copied_with_their_weights():
    inputs = x = keras.Input((5, 8))
    x = x + L.Bidirectional(L.SimpleRNN(4, return_sequences=True))(x)
    x = x + L.TimeDistributed(L.Dense(8))(x)
    x = x + L.RNN([L.SimpleRNNCell(8), L.SimpleRNNCell(8)], return_sequences=True)(x)
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, rescale="training")
    assert len(wrappers(wrapped)) == 3
    assert_same_outputs(wrapped, model, data(2, 5, 8))


def test_a_layer_without_weights_may_be_shared_between_branches_and_the_rest():
    relu = L.ReLU(name="relu")
    inputs = keras.Input((8,))
    x = relu(inputs)
    for name in ("a", "b"):
        x = L.Add(name=f"{name}_sum")([x, relu(L.Dense(8, name=name)(relu(x)))])
    model = randomize(keras.Model(inputs, relu(x)))
    wrapped = wrap_residuals(model, rescale="training")
    assert len({id(w.layer.get_layer("relu")) for w in wrappers(wrapped)}) == 2
    assert_same_outputs(wrapped, model, data(3, 8))


def test_layers_with_weights_that_are_shared_outside_branches_stay_shared():
    dense, inputs = L.Dense(8, name="tied"), keras.Input((8,))
    x = dense(dense(inputs))
    x = x + L.Dense(8)(x)
    model = randomize(keras.Model(inputs, dense(x)))
    wrapped = wrap_residuals(model, rescale="training")
    assert sum(x.name == "tied" for x in wrapped.layers) == 1
    assert_same_outputs(wrapped, model, data(3, 8))


def test_a_branch_that_shares_weights_with_the_rest_is_refused():
    dense, inputs = L.Dense(8, name="tied"), keras.Input((8,))
    x = dense(inputs)
    found = find_residuals(keras.Model(inputs, L.Add(name="sum")([x, L.ReLU()(dense(x))])))
    assert [r.reason for r in found.refusals] == [
        "the branch shares the layer 'tied' with the rest of the model."
    ]


def test_a_nested_model_in_a_branch_that_shares_weights_with_the_rest_is_refused():
    dense, inputs = L.Dense(8, name="tied"), keras.Input((8,))
    x = dense(inputs)
    branch = keras.Sequential([keras.Input((8,)), dense, L.ReLU()], name="branch")
    found = find_residuals(keras.Model(inputs, L.Add(name="sum")([x, branch(x)])))
    assert [r.reason for r in found.refusals] == [
        "the branch shares the layer 'tied' with the rest of the model."
    ]


# ------------------------------------------------------------------ nested models


def nested_model():
    """A functional model called twice, a Sequential branch, and a Sequential around a model."""
    inputs = keras.Input((8,))
    core = keras.Model(inputs, inputs + L.Dense(8, name="core_dense")(inputs), name="core")
    branch = keras.Sequential(
        [keras.Input((8,)), L.Dense(4, "relu", name="b1"), L.Dense(8, name="b2")], name="branch"
    )
    deep = keras.Input((8,))
    deep = keras.Model(
        deep, L.Add(name="deep_sum")([L.Dense(8, name="d")(deep), deep]), name="deep"
    )
    row = keras.Sequential([keras.Input((8,)), L.Dense(8, name="r1"), deep], name="row")
    inputs = keras.Input((8,))
    x = core(L.Dense(8, name="stem")(inputs))
    x = L.Add(name="sum")([x, branch(x)])
    model = keras.Model(inputs, row(core(x)), name="outer")
    return randomize(model), data(3, 8)


def test_blocks_in_nested_models_are_found_once_and_named_by_their_path():
    model, _ = nested_model()
    names = [b.name for b in find_residuals(model).blocks]
    assert [name.split("/")[0] for name in names] == ["core", "sum", "row"]
    assert names[2] == "row/deep/deep_sum"


def test_nested_models_are_wrapped_inside_and_keep_their_names():
    model, x = nested_model()
    wrapped = wrap_residuals(model, rescale="training")
    assert {"core", "stem", "sum", "row"} <= {x.name for x in wrapped.layers}
    assert len(wrapped.get_layer("core").layers) == 2
    assert isinstance(wrapped.get_layer("row").get_layer("deep"), keras.Model)
    assert len(get_survival_probs(wrapped)) == 3
    assert_same_weights(weights_by_layer(wrapped), weights_by_layer(model))
    assert_same_outputs(wrapped, model, x)
    set_survival_probs(wrapped, [0, 0, 0])
    straight = keras.Sequential([every_layer(model)["stem"], every_layer(model)["r1"]])
    assert_same_outputs(wrapped, straight, x, training=True)


def test_nested_outer_takes_a_nested_model_as_one_branch():
    inputs = keras.Input((8,))
    core = keras.Model(inputs, inputs + L.Dense(8)(inputs), name="core")
    inputs = keras.Input((8,))
    model = randomize(keras.Model(inputs, L.Add(name="sum")([inputs, core(inputs)])))
    wrapped = wrap_residuals(model, nested="outer", rescale="training")
    assert [x.name for x in wrappers(wrapped)] == ["sum"]
    assert_same_outputs(wrapped, model, data(3, 8))


@pytest.mark.parametrize("built", ["Input", "build", "call"])
def test_a_sequential_model_comes_back_as_a_functional_one(built):
    inputs = keras.Input((8,))
    core = keras.Model(inputs, inputs + L.Dense(8)(inputs), name="core")
    layers = [L.Dense(8, name="first"), core, L.Dense(2, name="last")]
    model = keras.Sequential([keras.Input((8,)), *layers] if built == "Input" else layers, name="m")
    if built == "build":
        model.build((None, 8))
    if built == "call":
        model(data(3, 8))
    randomize(model)
    wrapped = wrap_residuals(model, rescale="training")
    assert isinstance(wrapped, keras.Model) and not isinstance(wrapped, keras.Sequential)
    assert wrapped.name == "m"
    assert [x.name for x in wrapped.layers][1:] == ["first", "core", "last"]
    assert_same_outputs(wrapped, model, data(3, 8))


def test_a_sequential_branch_without_an_input_layer():
    inputs = keras.Input((8,))
    branch = keras.Sequential([L.Dense(8), L.ReLU(), L.Dense(8)])
    model = randomize(keras.Model(inputs, inputs + branch(inputs)))
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, data(3, 8))


# ------------------------------------------------------------------ subclasses of Model


class Trainer(keras.Model):
    """Adds only methods."""

    steps = 0

    def train_step(self, *args, **kwargs):
        self.steps += 1
        return super().train_step(*args, **kwargs)

    def answer(self):
        return 42


class Configured(keras.Model):
    """Has a constructor of its own."""

    def __init__(self, extra, **kwargs):
        super().__init__(**kwargs)
        self.extra = extra


class ConfiguredTrainer(Configured):
    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


def one_block():
    inputs = keras.Input((8,))
    return {"inputs": inputs, "outputs": inputs + L.Dense(8)(inputs), "name": "custom"}


def test_a_subclass_that_adds_only_methods_comes_back_as_that_class():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        wrapped = wrap_residuals(Trainer(**one_block()))
    assert isinstance(wrapped, Trainer)
    assert (wrapped.name, wrapped.answer()) == ("custom", 42)
    wrapped.compile("sgd", "mse", run_eagerly=True)
    wrapped.fit(data(4, 8), data(4, 8), batch_size=1, verbose=0)
    assert wrapped.steps == 4


def test_a_subclass_with_a_constructor_and_a_train_step_comes_back_plain_with_a_warning():
    with pytest.warns(UserWarning) as caught:
        wrapped = wrap_residuals(ConfiguredTrainer(3, **one_block()))
    assert not isinstance(wrapped, ConfiguredTrainer)
    assert [str(w.message) for w in caught if w.category is UserWarning] == [
        "ConfiguredTrainer has a constructor of its own, so the result is a plain keras.Model "
        "without its train_step. Wrap the functional model inside, and make the "
        "ConfiguredTrainer from the result."
    ]


def test_a_subclass_with_a_constructor_only_comes_back_plain_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        wrapped = wrap_residuals(Configured(3, **one_block()))
    assert isinstance(wrapped, keras.Model) and not isinstance(wrapped, Configured)


def test_nested_subclasses_come_back_as_their_class_with_and_without_blocks():
    inputs = keras.Input((8,))
    plain = Trainer(inputs, L.Lambda(lambda t: t * 2)(L.Dense(8)(inputs)), name="plain")
    inputs = keras.Input((8,))
    model = keras.Model(inputs, Trainer(**one_block())(plain(inputs)))
    randomize(model)
    wrapped = wrap_residuals(model, rescale="training")
    assert isinstance(wrapped.get_layer("plain"), Trainer)
    assert isinstance(wrapped.get_layer("custom"), Trainer)
    assert_same_outputs(wrapped, model, data(3, 8))


# ------------------------------------------------------------------ trainable flags


def frozen(how):
    """The nested model with some of it frozen."""
    model, _ = nested_model()
    layers = every_layer(model)
    if how == "all":
        model.trainable = False
    elif how == "all but one":
        model.trainable = False
        model.trainable = True
        layers["b1"].trainable = False
    else:
        layers[how].trainable = False
    return model


@pytest.mark.parametrize(
    "how", ["stem", "b2", "core_dense", "core", "branch", "deep", "row", "all", "all but one"]
)
def test_trainable_flags_are_kept(how):
    model = frozen(how)
    wrapped = wrap_residuals(model)
    assert wrapped.trainable == model.trainable
    ours, theirs = every_layer(wrapped), every_layer(model)
    flags = {name: layer.trainable for name, layer in theirs.items() if name in ours}
    assert {name: ours[name].trainable for name in flags} == flags
    assert len(wrapped.trainable_weights) == len(model.trainable_weights)
    assert len(wrap_residuals(model, share_layers=True).trainable_weights) == len(
        model.trainable_weights
    )


@pytest.mark.parametrize("place", ["around", "inside"])
def test_frozen_parts_of_a_custom_layer_stay_frozen(place):
    """Their flags are in no configuration."""
    model = {"around": around, "inside": inside}[place](Unregistered(8, name="custom"))
    every_layer(model)["custom"].first.trainable = False
    wrapped = wrap_residuals(model)
    custom = every_layer(wrapped)["custom"]
    assert (custom.first.trainable, custom.second.trainable) == (False, True)
    assert len(wrapped.trainable_weights) == len(model.trainable_weights)


def test_a_frozen_model_can_be_thawed_after_wrapping():
    wrapped = wrap_residuals(frozen("all"))
    assert not wrapped.trainable_weights
    wrapped.trainable = True
    assert len(wrapped.trainable_weights) == len(nested_model()[0].trainable_weights)


# ------------------------------------------------------------------ copies


def test_lambda_layers_are_copied():
    offset = tf.constant(3.0)
    inputs = keras.Input((8,))
    x = L.Lambda(lambda t, by: t * by + offset, arguments={"by": 2.0}, name="scale")(inputs)
    x = x + L.Lambda(lambda t: t - offset, name="shift")(L.Dense(8)(x))
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, rescale="training")
    assert wrapped.get_layer("scale") is not model.get_layer("scale")
    assert_same_outputs(wrapped, model, data(3, 8))


class Unregistered(L.Layer):
    """A custom layer with sublayers, in no registry of custom objects."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first, self.second = L.Dense(units, "relu"), L.Dense(units)

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], self.units))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class NoConfig(Unregistered):
    """Cannot be copied, as is a layer whose class has no `get_config` on some Kerases.

    They raise this error then, and the message has to hold it.
    """

    def get_config(self):
        raise NotImplementedError("no configuration here")


class HalfConfig(Unregistered):
    def __init__(self, units, more=0, **kwargs):
        super().__init__(units + more, **kwargs)

    def get_config(self):
        return L.Layer.get_config(self) | {"units": 2}


def around(layer):
    inputs = keras.Input((8,))
    x = L.Dense(8)(inputs)
    return randomize(keras.Model(inputs, L.Dense(8)(layer(x + L.Dense(8)(x)))))


def inside(layer):
    inputs = keras.Input((8,))
    return randomize(keras.Model(inputs, inputs + L.Dense(8)(layer(inputs))))


@pytest.mark.parametrize("place", [around, inside])
def test_custom_layers_are_copied_with_their_sublayers(place):
    model = place(Unregistered(8))
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, data(3, 8))


@pytest.mark.parametrize("place", [around, inside])
def test_a_layer_that_cannot_be_copied_names_itself_and_the_way_out(place):
    model = place(NoConfig(8, name="stubborn"))
    with pytest.raises(ValueError) as error:
        wrap_residuals(model)
    assert str(error.value) == (
        "The layer 'stubborn' (of type NoConfig) cannot be copied. Give its class a `get_config` "
        "that returns its constructor's arguments, or pass `share_layers=True`, so that the result "
        "uses the model's own layers. The error was: NotImplementedError: no "
        "configuration here"
    )
    wrapped = wrap_residuals(model, rescale="training", share_layers=True)
    assert_same_outputs(wrapped, model, data(3, 8))


def test_a_layer_whose_copy_has_other_weights_names_itself_and_the_way_out():
    model = inside(HalfConfig(3, more=4, name="half"))
    with pytest.raises(ValueError) as error:
        wrap_residuals(model)
    assert str(error.value).startswith("The layer 'half' (of type HalfConfig) cannot be copied: ")
    assert "`share_layers=True`" in str(error.value)


def test_state_that_was_adapted_to_data_is_copied():
    inputs = keras.Input((4,))
    normalize = L.Normalization()
    normalize.adapt(data(50, 4) * 3 + 7)
    x = normalize(inputs)
    model = keras.Model(inputs, x + L.Dense(4)(x))
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, data(3, 4))


def test_bins_that_were_adapted_to_data_are_copied():
    inputs = keras.Input((4,))
    bins = L.Discretization(num_bins=4)
    bins.adapt(data(100, 4))
    x = L.Embedding(4, 8)(bins(inputs))
    model = keras.Model(inputs, x + L.Dense(8)(x))
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, data(3, 4))


@pytest.mark.parametrize("adapted", [False, True])
def test_vocabularies_are_copied(adapted):
    lookup = L.StringLookup() if adapted else L.StringLookup(vocabulary=["b", "a"])
    if adapted:
        lookup.adapt(tf.constant(["b", "a", "b"]))
    inputs = keras.Input((4,), dtype="string")
    x = L.Embedding(4, 8)(lookup(inputs))
    model = keras.Model(inputs, x + L.Dense(8)(x))
    wrapped = wrap_residuals(model, rescale="training")
    assert_same_outputs(wrapped, model, tf.constant([["a", "b", "other", "a"]]))


# ------------------------------------------------------------------ drops that are there already


def with_drop(drop):
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(3, 3, padding="same", name="conv")(inputs)
    return randomize(keras.Model(inputs, L.Add(name="sum")([drop(x), inputs])))


class DropPath(L.Layer):
    """As KerasHub's and KerasCV's, as far as can be seen from outside."""

    def __init__(self, rate=0.3, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, x, training=None):
        return x

    def get_config(self):
        return {**super().get_config(), "rate": self.rate}


ConvNextDrop = type(
    "StochasticDepth", (DropPath,), {"drop_path_rate": property(lambda self: self.rate)}
)


@pytest.mark.parametrize(
    ("make", "p"),
    [
        (lambda: L.Dropout(0.2, noise_shape=(None, 1, 1, 1), name="drop"), 0.8),
        (lambda: DropPath(0.3, name="drop"), 0.7),
        (lambda: ConvNextDrop(0.4, name="drop"), 0.6),
    ],
    ids=["Dropout", "DropPath", "StochasticDepth"],
)
def test_a_drop_at_the_end_of_a_branch_gives_way(make, p):
    model = with_drop(make())
    wrapped = wrap_residuals(model, existing())
    (wrapper,) = wrappers(wrapped)
    assert wrapper.survival_prob == pytest.approx(p)
    assert [x.name for x in wrapper.layer.layers][1:] == ["conv"]
    kept = wrap_residuals(model, existing(), replace_existing=False, rescale="training")
    (wrapper,) = wrappers(kept)
    assert wrapper.survival_prob == pytest.approx(p)
    assert [x.name for x in wrapper.layer.layers][1:] == ["conv", "drop"]
    for each in (wrap_residuals(model, rescale="training"), kept):
        assert_same_outputs(each, model, data(2, 8, 8, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: L.Dropout(0.2, name="drop"),
        lambda: L.Dropout(0.2, noise_shape=(None, 1, 1, 3), name="drop"),
        lambda: L.SpatialDropout2D(0.2, name="drop"),
        lambda: L.GaussianDropout(0.2, name="drop"),
    ],
)
def test_other_dropouts_at_the_end_of_a_branch_stay(make):
    model = with_drop(make())
    (wrapper,) = wrappers(wrap_residuals(model, existing(0.9)))
    assert wrapper.survival_prob == pytest.approx(0.9)
    assert [x.name for x in wrapper.layer.layers][1:] == ["conv", "drop"]


# ------------------------------------------------------------------ whole blocks


class Encoder(L.Layer):
    """A residual block with the sum in its `call`, a dropout, and a mask."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense, self.drop = L.Dense(units), L.Dropout(0.5)
        self.supports_masking = True

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def call(self, x, training=None, mask=None):
        y = self.dense(x)
        if mask is not None:
            y = y * tf.cast(mask, y.dtype)[..., None]
        return x + self.drop(y, training=training)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def encoders():
    ids = keras.Input((5,), dtype="int32")
    x = L.Embedding(10, 8, mask_zero=True, name="embed")(ids)
    for name in ("first", "second"):
        x = Encoder(8, name=name)(x)
    return randomize(keras.Model(ids, x)), np.array([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]])


def test_layers_that_are_whole_blocks():
    model, x = encoders()
    assert find_residuals(model).blocks == ()
    found = find_residuals(model, block_layers=(Encoder,))
    assert [(b.name, b.kind) for b in found.blocks] == [("first", "layer"), ("second", "layer")]
    assert found == find_residuals(model, block_layers=Encoder)
    wrapped = wrap_residuals(model, block_layers=[Encoder], rescale="training")
    assert [(x.name, x.skip) for x in wrappers(wrapped)] == [
        ("first", "identity"), ("second", "identity")
    ]  # fmt: skip
    assert isinstance(wrapped.get_layer("first").layer, Encoder)
    assert_same_outputs(wrapped, model, x)


def test_whole_blocks_give_their_input_when_dropped_and_a_mixture_at_inference():
    model, x = encoders()
    wrapped = wrap_residuals(model, [0.25, 0], block_layers=Encoder)
    embedded = np.asarray(model.get_layer("embed")(x))
    mask = (x != 0)[..., None]
    dense = model.get_layer("first").dense
    expected = embedded + 0.25 * mask * np.asarray(dense(embedded))
    np.testing.assert_allclose(outputs(wrapped, x)[0], expected, atol=1e-6)
    set_survival_probs(wrapped, [0, 0])
    np.testing.assert_array_equal(outputs(wrapped, x, training=True)[0], embedded)


def test_whole_blocks_know_when_they_are_trained():
    model, x = encoders()
    wrapped = wrap_residuals(model, [1, 0], block_layers=Encoder)
    first, again = (outputs(wrapped, x, training=True)[0] for _ in range(2))
    assert not np.array_equal(first, again)  # the dropout in the block


# ------------------------------------------------------------------ seeds


def switches(model, steps=40):
    """The switches of a model of `switch_model`: one row per step."""
    step = tf.function(lambda: model(tf.zeros((1, 1)), training=True))
    sums = [round(float(np.squeeze(step()))) for _ in range(steps)]
    return np.array([[int(digit) for digit in f"{value:04d}"] for value in sums])


def switch_model():
    """Four blocks that add 1000, 100, 10 and 1."""
    inputs = x = keras.Input((1,))
    for value in (1000, 100, 10, 1):
        ones = keras.initializers.Constant(value)
        x = x + L.Dense(1, kernel_initializer="zeros", bias_initializer=ones)(x)
    return keras.Model(inputs, x)


def test_with_one_seed_the_blocks_differ_and_two_wraps_agree():
    model = switch_model()
    first = wrap_residuals(model, constant(0.7), seed=3)
    assert len({x.seed for x in wrappers(first)}) == 4
    seen = switches(first)
    for i in range(4):
        for j in range(i):
            assert not np.array_equal(seen[:, i], seen[:, j])
    np.testing.assert_array_equal(switches(wrap_residuals(model, constant(0.7), seed=3)), seen)
    other = switches(wrap_residuals(model, constant(0.7), seed=4))
    assert not np.array_equal(other, seen)


def test_without_a_seed_keras_seed_decides_and_the_blocks_differ():
    model = switch_model()
    seen = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        wrapped = wrap_residuals(model, constant(0.7))
        assert {x.seed for x in wrappers(wrapped)} == {None}
        seen.append(switches(wrapped))
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    assert len({tuple(column) for column in seen[0].T}) == 4


# ------------------------------------------------------------------ masks


# What stands in the branches of a model with masks, by what it does with them.
MIDDLES = {
    "takes and gives a mask": lambda x: L.SimpleRNN(8, return_sequences=True)(x),
    "hands the mask on": lambda x: L.Dense(8)(L.Dense(8, "relu")(x)),
    "takes a mask for its keys": lambda x: L.MultiHeadAttention(2, 4)(x, x),
    "loses the mask": lambda x: L.Conv1D(8, 3, padding="same")(x),
}


def masked(add, middle, end=lambda x: L.LSTM(3)(x)):
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(10, 8, mask_zero=True)(ids)
    for _ in range(2):
        x = add(x, middle(x))
    model = randomize(keras.Model(ids, end(x)))
    return model, np.array([[1, 2, 3, 0, 0, 0], [4] * 6])


@pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
@pytest.mark.parametrize("name", ["Add()", "x + y"])
def test_masks_go_through_blocks_as_they_did(name, middle):
    """An `Add` hands the mask on to the LSTM, an operator does not; in branches it always acts."""
    model, x = masked(SUMS[name], middle)
    wrapped = wrap_residuals(model, rescale="training")
    assert len(wrappers(wrapped)) == 2
    assert_same_outputs(wrapped, model, x)


def test_masks_go_through_blocks_in_predict():
    model, x = masked(SUMS["Add()"], MIDDLES["takes and gives a mask"])
    wrapped = wrap_residuals(model, rescale="training")
    ours, theirs = wrapped.predict(x, verbose=0), model.predict(x, verbose=0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
@pytest.mark.parametrize("name", ["Add()", "x + y"])
def test_masks_reach_the_loss_as_they_did(name, middle):
    model, x = masked(SUMS[name], middle, end=lambda x: x)
    losses = []
    for each in (model, wrap_residuals(model, rescale="training")):
        each.compile("sgd", "mse", run_eagerly=True)
        losses.append(each.evaluate(x, np.ones((2, 6, 8)), verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_masks_go_on_after_a_dropped_block():
    model, x = masked(SUMS["Add()"], MIDDLES["takes and gives a mask"])
    wrapped = wrap_residuals(model)
    set_survival_probs(wrapped, [0, 0])
    embed, lstm = model.layers[1], model.layers[-1]
    ids = keras.Input((6,), dtype="int32")
    straight = keras.Model(ids, lstm(embed(ids)))
    assert_same_outputs(wrapped, straight, x, training=True)


def test_a_mask_made_inside_a_branch_reaches_what_follows():
    """Or the block is refused."""
    inputs = keras.Input((5, 8))
    y = L.SimpleRNN(8, return_sequences=True)(L.Masking()(inputs))
    model = randomize(keras.Model(inputs, L.SimpleRNN(3)(L.Add()([inputs, y]))))
    x = data(2, 5, 8)
    x[:, 3:] = 0
    if find_residuals(model).blocks:
        assert_same_outputs(wrap_residuals(model, rescale="training"), model, x)


@pytest.mark.parametrize("name", ["Add()", "x + y"])
def test_masks_bring_no_warnings(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, x = masked(SUMS[name], MIDDLES["takes and gives a mask"])
        outputs(wrap_residuals(model), x, training=True)


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_dtype_policies(policy):
    keras.mixed_precision.set_global_policy(policy)
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, padding="same")(inputs)
    x = L.Add(name="layer")([x, L.BatchNormalization()(L.Conv2D(4, 3, padding="same")(x))])
    x = x + L.Conv2D(4, 3, padding="same")(x)
    x = L.GlobalAveragePooling2D()(x)
    model = randomize(keras.Model(inputs, L.Dense(2, dtype="float32")(x)))
    wrapped = wrap_residuals(model, rescale="training")
    dtype = policy.replace("mixed_", "")
    for wrapper in wrappers(wrapped):
        assert wrapper.compute_dtype == dtype
        assert tf.as_dtype(wrapper.output.dtype).name == dtype
        kept_in = "float64" if policy == "float64" else "float32"
        assert {tf.as_dtype(w.dtype).name for w in wrapper.layer.weights} == {kept_in}
    x = data(2, 8, 8, 3)
    assert_same_outputs(wrapped, model, x, atol=0 if "mixed" in policy else 1e-12)
    for probs in ([0, 0], [1, 1]):
        set_survival_probs(wrapped, probs)
        assert np.all(np.isfinite(outputs(wrapped, x, training=True)[0]))


def test_policies_of_single_layers_are_kept():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    inputs = keras.Input((8,))
    x = L.Dense(8)(inputs)
    x = L.Add(dtype="float32", name="float32_sum")([x, L.Dense(8)(x)])
    x = L.Add(name="bfloat16_sum")([x, L.Dense(8, dtype="float32", name="float32")(x)])
    model = randomize(keras.Model(inputs, x))
    wrapped = wrap_residuals(model, rescale="training")
    assert wrapped.get_layer("float32_sum").compute_dtype == "float32"
    assert wrapped.get_layer("bfloat16_sum").compute_dtype == "bfloat16"
    assert every_layer(wrapped)["float32"].compute_dtype == "float32"
    assert_same_outputs(wrapped, model, data(3, 8), atol=0)


# ------------------------------------------------------------------ nothing to wrap


def test_wrapping_twice_is_an_error():
    wrapped = wrap_residuals(mlp("a", "b"))
    with pytest.raises(ValueError) as error:
        wrap_residuals(wrapped)
    assert str(error.value) == (
        "`model` 'mlp' has no residual block that can be wrapped.\n"
        "It already holds StochasticDepth layers: has it been wrapped before?\n"
        "It holds no sum of two tensors (Add(), x + y)."
    )


def test_what_the_first_time_left_out_can_be_wrapped_later():
    wrapped = wrap_residuals(mlp("a", "b"), [0.9], where=lambda block: block.index == 1)
    wrapped.get_layer("a_sum").survival_prob = 0.3
    again = wrap_residuals(wrapped, [0.6])
    assert get_survival_probs(again) == pytest.approx([0.3, 0.6])
    assert_same_outputs(wrap_residuals(wrapped, [0.6], rescale="training"), wrapped, data(3, 8))


def test_nothing_to_wrap_lists_the_refusals():
    inputs = keras.Input((8,))
    x = L.Add(name="twice")([inputs, inputs])
    x = L.Add(name="plain")([x, L.ReLU()(x)])
    with pytest.raises(ValueError) as error:
        wrap_residuals(keras.Model(inputs, x, name="flat"))
    assert str(error.value) == (
        "`model` 'flat' has no residual block that can be wrapped.\n"
        "Sums that were found, and why they are none:\n"
        "  twice: adds a tensor to itself.\n"
        "  plain: the branch has no weights."
    )
