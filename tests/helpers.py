"""What several test files use: data, weights that can be told apart, comparisons."""

import collections

import numpy as np
import tensorflow as tf

from tfa_stochastic_depth import StochasticDepth

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def randomize(model, seed=0):
    """Gives every weight a value of its own, moving statistics and biases too.

    Survival probabilities are left alone.
    """
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        name = weight.path if KERAS_3 else weight.name
        if tf.as_dtype(weight.dtype).is_floating and "survival_prob" not in name:
            value = rng.normal(size=weight.shape) * 0.3
            weight.assign(np.abs(value) + 0.5 if "variance" in name else value)
    return model


class Counter(keras.layers.Layer):
    """2 x. Counts how often it runs, whoever runs it."""

    def __init__(self):
        super().__init__()
        self.ran = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.ran.assign_add(1.0)
        return 2.0 * x


def trainable_variables(layer):
    """The trainable weights of a layer as what a tape takes gradients with respect to."""
    return [w.value if KERAS_3 else w for w in layer.trainable_variables]


def outputs(model, x, **kwargs):
    return [np.asarray(y, "float64") for y in tf.nest.flatten(model(x, **kwargs))]


def assert_same_outputs(model, other, x, atol=1e-6, **kwargs):
    ours, theirs = outputs(model, x, **kwargs), outputs(other, x, **kwargs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def every_layer(model):
    """All layers of a model by name, those in nested models and branches too."""
    found = {}
    for layer in model.layers:
        found[layer.name] = layer
        inner = layer.layer if isinstance(layer, StochasticDepth) else layer
        if isinstance(inner, keras.Model):
            found.update(every_layer(inner))
    return found


def wrappers(model):
    """The `StochasticDepth` layers of a model, those in nested models too."""
    found = [x for layer in model.layers if isinstance(layer, keras.Model) for x in wrappers(layer)]
    found += [x for x in model.layers if isinstance(x, StochasticDepth)]
    order = [layer.name for layer in every_layer(model).values()]
    return sorted(found, key=lambda layer: order.index(layer.name))


def weights_by_layer(model):
    """Values of the weights of all layers that hold no others, by name."""
    layers = every_layer(model).items()
    return {
        name: layer.get_weights()
        for name, layer in layers
        if layer.weights and not isinstance(layer, (keras.Model, StochasticDepth))
    }


def assert_same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        for a, b in zip(ours[name], theirs[name]):
            np.testing.assert_array_equal(a, b)


def node_counts(model):
    """How often each layer and operation was called, in nested models too."""
    counts = {}
    for op in getattr(model, "operations", model.layers):
        counts[op.name] = len(op._inbound_nodes), len(op._outbound_nodes)
        if isinstance(op, keras.Model):
            counts.update(node_counts(op))
    return counts


def operations_in(function):
    """The types of all operations of a traced function, also of the functions it calls."""
    return set(all_operations(function))


def operation_counts(model, x):
    """How many operations of each type a model takes for a prediction."""
    run = tf.function(lambda x: model(x, training=False)).get_concrete_function(x)
    return collections.Counter(all_operations(run))


def all_operations(function):
    """As `operations_in`, each as often as it is there."""
    return [node.op for node in nodes_of(function.graph.as_graph_def())]


def nodes_of(graph):
    """The nodes of a GraphDef and of the functions it calls."""
    called = (node for inner in functions_of(graph).values() for node in inner.node_def)
    return [*graph.node, *called]


def functions_of(graph):
    """The functions that a GraphDef brings along (in its field `library`), by their names."""
    return {inner.signature.name: inner for inner in graph.library.function}
