"""The one file that knows which Keras this is, and that touches what Keras keeps private.

Functions are verbs on Keras objects with the same meaning on Keras 3, Keras 2.15 and tf_keras.
Each private attribute used here is pinned by a test in `tests/test_keras_assumptions.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import random
import re
import sys
import tempfile
import warnings

import numpy as np

try:
    import tensorflow as tf
    from tensorflow.python.framework import op_def_registry
    from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs
except ImportError as error:
    raise ImportError(
        "tfa_stochastic_depth needs TensorFlow 2.15 or newer: "
        "pip install tfa-stochastic-depth[tensorflow]"
    ) from error

keras = tf.keras
IS_KERAS_3 = hasattr(keras, "ops")
NAME = f"Keras {keras.__version__}" if IS_KERAS_3 else f"the Keras 2 of {keras.Model.__module__}"

if IS_KERAS_3 and keras.config.backend() != "tensorflow":
    raise ImportError(
        "tfa_stochastic_depth runs on Keras's TensorFlow backend only, and the backend here is "
        f"{keras.config.backend()!r}: set the environment variable KERAS_BACKEND=tensorflow."
    )

if IS_KERAS_3:
    flatten = keras.tree.flatten
    map_structure = keras.tree.map_structure
else:
    flatten = tf.nest.flatten
    map_structure = tf.nest.map_structure

register = keras.utils.register_keras_serializable(package="tfa_stochastic_depth")


# ------------------------------------------------------------------ symbolic tensors


def is_symbolic(value):
    """Whether a value is a symbolic tensor that belongs to a graph of calls."""
    return isinstance(value, keras.KerasTensor) if IS_KERAS_3 else hasattr(value, "_keras_history")


def shape(tensor):
    """Static shape as a tuple, or `None` if even the rank is unknown."""
    if isinstance(tensor.shape, tf.TensorShape):
        return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    return None if tensor.shape is None else tuple(tensor.shape)


def is_floating(tensor):
    return tf.as_dtype(tensor.dtype).is_floating


def dtype_name(tensor):
    return tf.as_dtype(tensor.dtype).name


def is_dense(tensor):
    """Whether it is an ordinary tensor, neither sparse nor ragged."""
    if IS_KERAS_3:
        return not (tensor.sparse or getattr(tensor, "ragged", False))
    return isinstance(tensor.type_spec, tf.TensorSpec)


def input_like(tensor, name, any_batch=False):
    """A fresh model input with the shape and dtype of a symbolic tensor.

    With `any_batch` its first axis may be of any size.
    """
    if IS_KERAS_3 or is_dense(tensor):
        size = shape(tensor)
        size = (None, *size[1:]) if any_batch and size else size
        kwargs = {"batch_shape": size, "dtype": tensor.dtype}
        if IS_KERAS_3 and tensor.sparse:
            kwargs["sparse"] = True
        return keras.Input(name=name, **kwargs)
    return keras.Input(type_spec=tensor.type_spec, name=name)


# ------------------------------------------------------------------ models and their calls


@functools.cache
def functional_class():
    """The class of functional models; Keras 3 and Keras 2 export it under no common name."""
    x = keras.Input(shape=(1,), name="x")
    return type(keras.Model(x, x, name="x"))


def functional(model):
    """The object that holds a model's graph of calls, or `None` if it has none to be read.

    A class with a `call` of its own has none: its graph says nothing about what it does.
    """
    if isinstance(model, keras.Sequential):
        graph = model._functional if IS_KERAS_3 else model
        runs_graph = type(model).call is keras.Sequential.call
    else:
        graph = model
        runs_graph = isinstance(model, keras.Model) and (
            getattr(type(model), "call", None) is functional_class().call
        )
    return graph if runs_graph and hasattr(graph, "_nodes_by_depth") else None


def is_functional(layer):
    """Whether a layer is itself a model whose graph of calls can be read."""
    return isinstance(layer, keras.Model) and functional(layer) is not None


def check_functional(model):
    """Raises an error that says what to do if a model has no graph to be read."""
    cls = type(model)
    if not isinstance(model, keras.Model):
        if any(c.__name__ == "Model" and "keras" in c.__module__ for c in cls.__mro__):
            raise TypeError(
                f"`model` belongs to another Keras than the one in use here ({NAME}). Build it "
                "with `tf.keras`, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported if "
                f"it must be a `tf_keras` model. Received: {cls.__module__}.{cls.__name__}."
            )
        raise TypeError(
            "`model` must be a functional or Sequential keras.Model. "
            f"Received: {model!r} (of type {cls.__name__})."
        )
    if functional(model) is None:
        if isinstance(model, keras.Sequential) and cls.call is keras.Sequential.call:
            raise ValueError(
                f"`model` must be built, and the Sequential model {model.name!r} is not: start it "
                "with a keras.Input, or call `model.build(input_shape)` first."
            )
        raise TypeError(
            "`model` must be a functional or Sequential model: the code of a subclassed model "
            "cannot be searched for residual sums. Put `StochasticDepth(layer, survival_prob)` "
            "around the residual branches where the class makes them, or build the model with "
            f"keras.Model(inputs, outputs). Received: {model.name!r} (of type {cls.__name__}, "
            "which has a `call` of its own)."
        )


def check_no_side_losses(graph):
    """Keras 2: refuses losses and metrics added to a model's tensors, which a rebuild loses."""
    if min(graph._nodes_by_depth) < 0:
        raise ValueError(
            f"`model` {graph.name!r} has losses or metrics added with `model.add_loss(tensor)` or "
            "`model.add_metric(tensor)`, which a rebuilt model would lose. Add them inside a "
            "layer's `call`, or compute them from the model's outputs."
        )


def calls(graph):
    """Keras's records of the calls that belong to a functional model, in an order they can run in.

    It is the order in which one finds them following the outputs back to the inputs: unlike
    Keras's own, by depth, it keeps towers together and is not changed by wrapping blocks.
    """
    nodes = [node for nodes in graph._nodes_by_depth.values() for node in nodes]
    maker = {id(t): node for node in nodes for t in tensors_out(node)}
    ordered, entered = {}, set()
    todo = [maker[id(t)] for t in reversed(flatten(signature(graph)[1]))]
    while todo:
        node = todo.pop()
        if id(node) in entered:  # all that it needs is in order by now
            ordered.setdefault(id(node), node)
            continue
        entered.add(id(node))
        needed = [maker[id(t)] for t in reversed(tensors_in(node))]
        todo += [node, *(n for n in needed if id(n) not in entered)]
    return list(ordered.values())


def signature(graph):
    """The inputs and the outputs of a functional model, in the structures they were given in."""
    if IS_KERAS_3:
        return graph._inputs_struct, graph._outputs_struct
    return graph._nested_inputs, graph._nested_outputs


def is_input_call(node):
    return isinstance(callee(node), keras.layers.InputLayer)


def callee(node):
    """The layer or operation that is called."""
    return node.operation if IS_KERAS_3 else node.layer


def call_arguments(node):
    """The positional and keyword arguments of a call, symbolic tensors and all."""
    if IS_KERAS_3:
        return node.arguments.args, node.arguments.kwargs
    return node.call_args, node.call_kwargs


def tensors_in(node):
    """The symbolic tensors among a call's arguments, with repeats."""
    return [t for t in flatten(call_arguments(node)) if is_symbolic(t)]


def tensors_out(node):
    return flatten(node.outputs)


@dataclasses.dataclass(frozen=True)
class Sum:
    """What a call adds.

    Attributes:
        addends: The symbolic tensors that it adds up; () if it is no sum or adds a constant.
        branch: Which of two is the residual branch, 0 or 1, if the layer's class says so.
        factor: What it multiplies the branch with.
        survival_prob: The probability with which it keeps the branch, if it drops it at random.
    """

    addends: tuple = ()
    branch: int | None = None
    factor: float = 1.0
    survival_prob: float | None = None


# Layers that add `x[0]` and their branch `x[1]` under another name: those of InceptionResNetV2,
# tensorflow-addons and KerasCV, and the stand-ins of `legacy.py`. They are known by their class's
# name (their packages need not be installed) and a number that they hold, which says the rest.
_SUM_LAYERS = {
    ("CustomScaleLayer", "scale"): lambda scale: {"factor": float(scale)},
    ("StochasticDepth", "survival_probability"): lambda p: {"survival_prob": float(p)},
    ("StochasticDepth", "rate"): lambda rate: {"survival_prob": 1.0 - rate},
    ("AddonsStochasticDepth", "survival_probability"): lambda p: {"survival_prob": float(p)},
    ("KerasCVStochasticDepth", "rate"): lambda rate: {"survival_prob": 1.0 - rate},
}


def as_sum(node, merge_layers):
    """The `Sum` that a call is.

    Args:
        node: Keras's record of the call.
        merge_layers: Layer class -> function from such a layer to (branch, factor), for classes
            whose layers take a list of two tensors.
    """
    layer = callee(node)
    for cls, rule in merge_layers.items():
        if isinstance(layer, cls):
            branch, factor = rule(layer)
            return _sum_of_two(node, branch=branch, factor=factor)
    if isinstance(layer, keras.layers.Layer):
        for (name, attribute), rule in _SUM_LAYERS.items():
            number = getattr(layer, attribute, None)
            if type(layer).__name__ == name and isinstance(number, (int, float)):
                return _sum_of_two(node, branch=1, **rule(number))
    return Sum(_addends(node))


def _sum_of_two(node, **fields):
    """A `Sum` of the two tensors that a layer is called with; an empty one if they are not two."""
    operands = _listed(node)
    whole = len(operands) == 2 and all(map(is_symbolic, operands))
    return Sum(tuple(operands), **fields) if whole else Sum()


def _listed(node):
    """What a layer that takes one list is called with."""
    args, kwargs = call_arguments(node)
    return flatten(args[0]) if args else flatten(kwargs)


def _addends(node):
    """The symbolic tensors that a call adds up, or () if it is no sum or adds a constant."""
    op = callee(node)
    args, kwargs = call_arguments(node)
    if isinstance(op, keras.layers.Add):
        own = type(op)
        plain = keras.layers.Add
        if own.call is not plain.call or own._merge_function is not plain._merge_function:
            return ()
        operands = _listed(node)
    elif _operation(op) in ("Add", "__operators__.add", "math.add"):
        operands = [*args, *(kwargs[k] for k in ("x", "x1", "y", "x2") if k in kwargs)]
    elif _operation(op) in ("math.add_n", "math.accumulate_n"):
        operands = flatten(args[0] if args else kwargs["inputs"])
    else:
        return ()
    return tuple(operands) if all(map(is_symbolic, operands)) else ()


def _operation(op):
    """What an operation that is no layer does: its class on Keras 3, TensorFlow's name on 2."""
    if IS_KERAS_3:
        return None if isinstance(op, keras.layers.Layer) else type(op).__name__
    return getattr(op, "symbol", None)


@functools.cache
def _plus():
    """The operation that `x + y` is."""
    x = keras.Input(shape=(1,), name="x")
    return (x + x)._keras_history[0]


def plus(name):
    """An operation of this name that is called with two symbolic tensors, and is `x + y`."""
    return type(_plus()).from_config({**_plus().get_config(), "name": name})


# ------------------------------------------------------------------ what layers are

_SIZING = re.compile(
    r"Dense|EinsumDense|Reshape|Permute|Flatten|Rescaling|\w*Normalization|\w*Pool(ing)?\dD|"
    r"Concatenate|Lambda|"  # how the paper's CIFAR networks pad channels with zeros
    r"(Depthwise|Separable)?Conv\dD(Transpose)?|(ZeroPadding|Cropping|UpSampling)\dD"
)
_PROJECTION_LAYERS = tuple(
    getattr(keras.layers, name) for name in dir(keras.layers) if _SIZING.fullmatch(name)
)
_PROJECTION_OPERATIONS = frozenset(
    # Keras 3's operation classes
    "AveragePool MaxPool Pad Reshape Transpose GetItem Squeeze ExpandDims Concatenate ZerosLike "
    # TensorFlow's symbols, as Keras 2 records them
    "nn.avg_pool nn.avg_pool2d nn.max_pool nn.max_pool2d pad reshape transpose squeeze "
    "expand_dims __operators__.getitem strided_slice concat zeros_like".split()
)


def is_projection(layer):
    """Whether a layer may be part of a projection shortcut: it only changes the size, or may.

    A Lambda is taken to, and so is a concatenation: CIFAR ResNets pad channels with them.
    """
    if is_functional(layer):
        nodes = calls(functional(layer))
        return all(is_input_call(n) or is_projection(callee(n)) for n in nodes)
    if isinstance(layer, _PROJECTION_LAYERS):
        return True
    if type(layer).__name__ == "SlicingOpLambda":
        return True
    return _operation(layer) in _PROJECTION_OPERATIONS


def is_embedding(layer):
    """Whether a layer looks vectors up: `Embedding`, and position embeddings of any library."""
    return isinstance(layer, keras.layers.Embedding) or "Embedding" in type(layer).__name__


def own_survival_prob(layer):
    """The probability with which a drop of whole branches keeps them, or `None` for other layers.

    Known are `Dropout` with a `noise_shape` of ones, and the layers named `DropPath` or
    `StochasticDepth` that hold a drop rate (keras.applications, KerasHub, KerasCV).
    """
    if isinstance(layer, keras.layers.Dropout):
        noise_shape = getattr(layer, "noise_shape", None)
        whole = noise_shape is not None and len(noise_shape) > 1 and set(noise_shape[1:]) == {1}
        return 1.0 - layer.rate if whole else None
    if type(layer).__name__ in ("DropPath", "StochasticDepth", "KerasCVDropPath"):
        for attribute in ("drop_path_rate", "rate"):
            if isinstance(getattr(layer, attribute, None), (int, float)):
                return 1.0 - getattr(layer, attribute)
    return None


_HOMOGENEOUS = [keras.activations.linear, keras.activations.relu]
_HOMOGENEOUS += [getattr(keras.activations, "leaky_relu", None)]

# Layers whose output is multiplied by a number if these weights of theirs are.
_LINEAR = {
    r"Dense|EinsumDense|Conv[123]D(Transpose)?": ("kernel", "bias"),
    r"DepthwiseConv[12]D": ("kernel" if IS_KERAS_3 else "depthwise_kernel", "bias"),
    r"SeparableConv[12]D": ("pointwise_kernel", "bias"),
    r"BatchNormalization|LayerNormalization|GroupNormalization": ("gamma", "beta"),
    r"RMSNormalization": ("scale",),
    r"MultiHeadAttention|GroupQueryAttention": ("_output_dense.kernel", "_output_dense.bias"),
}
_LINEAR = {
    getattr(keras.layers, name): weights
    for pattern, weights in _LINEAR.items()
    for name in dir(keras.layers)
    if re.fullmatch(pattern, name)
}


def linear_weights(layer):
    """The weights that multiply all that a layer gives if they are multiplied by a number >= 0.

    Returns:
        Their names, as paths of attributes. () if no weights do that, or it is not known.
    """
    if type(layer) is keras.layers.TimeDistributed:
        return tuple(f"layer.{path}" for path in linear_weights(layer.layer))
    names = _own_linear_weights(layer)
    found = tuple(path for path in names if _attribute(layer, path) is not None)
    return found if found[:1] == names[:1] else ()  # an offset alone is not enough


def _own_linear_weights(layer):
    if type(layer).__name__ == "LayerScale":  # keras.applications, KerasHub and KerasCV
        return ("gamma",)
    if getattr(layer, "activation", None) not in (None, *_HOMOGENEOUS):
        return ()
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False):
        return ()
    for cls, names in _LINEAR.items():
        if isinstance(layer, cls) and type(layer).call is cls.call:
            return names
    return ()


def _attribute(layer, path):
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def scale_weight(layer, path, factor):
    """Multiplies a weight of a layer by a number, rounding once."""
    weight = _attribute(layer, path)
    dtype = tf.as_dtype(weight.dtype)
    value = np.asarray(_not_cast(weight)).astype("float64") * factor
    weight.assign(tf.cast(value, dtype))


_PASSING = re.compile(
    r"Reshape|Flatten|Permute|RepeatVector|Identity|PReLU|LeakyReLU|"
    r"(Spatial)?Dropout(\dD)?|(Cropping|ZeroPadding|UpSampling)\dD|"
    r"(Global)?(Average|Max)Pool(ing)?\dD"
)
_PASSING_LAYERS = {
    getattr(keras.layers, name) for name in dir(keras.layers) if _PASSING.fullmatch(name)
}
_PASSING_OPERATIONS = frozenset(
    # Keras 3's operation classes, and TensorFlow's symbols, as Keras 2 records them
    "Reshape Transpose GetItem Squeeze ExpandDims AveragePool MaxPool Relu LeakyRelu "
    "nn.relu nn.leaky_relu nn.avg_pool nn.avg_pool2d nn.max_pool nn.max_pool2d reshape transpose "
    "squeeze expand_dims __operators__.getitem strided_slice".split()
)
_PRODUCTS = frozenset("Multiply math.multiply __operators__.mul".split())


def scales_with(node):
    """On which of its inputs it depends, how a call's output is multiplied by a number >= 0.

    Returns:
        A list of choices, each a list of symbolic tensors: if all of those in one choice are
        multiplied by the number, so is the output.
    """
    op = callee(node)
    tensors = [t for t in tensors_in(node) if is_floating(t)]
    if isinstance(op, keras.layers.Add) or _operation(op) in ("Add", "__operators__.add"):
        return [list(addends)] if (addends := _addends(node)) else []
    if type(op) is keras.layers.Concatenate or _operation(op) in ("Concatenate", "concat"):
        return [tensors] if all(map(is_symbolic, _listed(node))) else []
    if type(op) is keras.layers.Multiply or _operation(op) in _PRODUCTS:
        return [[t] for t in tensors]
    if len(tensors) == 1 and _is_homogeneous(op):
        return [tensors]
    return []


def _is_homogeneous(op):
    """Whether a call with a number >= 0 times a tensor gives the number times what it gave."""
    if type(op) is keras.layers.Activation:
        return op.activation in _HOMOGENEOUS
    if type(op) is keras.layers.ReLU:
        return op.max_value is None and not op.threshold
    if type(op) is keras.layers.Rescaling:
        return np.all(np.equal(op.offset, 0))
    if type(op) is keras.layers.TimeDistributed:
        return _is_homogeneous(op.layer)
    return (
        type(op) in _PASSING_LAYERS
        or _operation(op) in _PASSING_OPERATIONS
        or own_survival_prob(op) is not None
        or type(op).__name__ == "SlicingOpLambda"
    )


def without_mask(tensor):
    """The same symbolic tensor without its mask, by an operation, which hands none on."""
    return tensor * 1.0


def layers_in_order(model):
    """A model's layers and all layers inside them, each once, in the order of the model's calls."""
    found = {}
    for child in children(model):
        found.setdefault(id(child), child)
        found.update((id(x), x) for x in layers_in_order(child) if id(x) not in found)
    return list(found.values())


def children(layer):
    """The layers directly inside a layer; in a functional model, in the order of its calls."""
    if is_functional(layer):
        called = [callee(node) for node in calls(functional(layer))]
        called = [child for child in called if isinstance(child, keras.layers.Layer)]
        return list({id(child): child for child in called}.values())
    return sublayers(layer)


def own_weights(layer):
    """The weights of a layer that are not those of layers inside it."""
    inside = {id(w) for child in children(layer) for w in child.weights}
    return [w for w in weights(layer) if id(w) not in inside]


def is_layer(value):
    return isinstance(value, keras.layers.Layer)


def sublayers(layer):
    """The layers directly inside a layer, in order."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    return list(layer._flatten_layers(include_self=False, recursive=False))


def with_sublayers(layer):
    """A layer and all layers inside it, each once, in an order that depends on its class only."""
    found = {id(layer): layer}
    for child in sublayers(layer):
        found.update((id(part), part) for part in with_sublayers(child) if id(part) not in found)
    return list(found.values())


def weights(layer):
    return layer.weights if isinstance(layer, keras.layers.Layer) else []


def shapes(variables):
    """The shapes of weights. On Keras 2 a vocabulary is among them, which has none."""
    return [tuple(getattr(v, "shape", (None,))) for v in variables]


def count_params(layer):
    """How many numbers a layer's weights hold; what has no known shape is not counted."""
    return sum(math.prod(size) for size in shapes(weights(layer)) if None not in size)


_BY_INPUT = r"\w*Transpose|\w*RNN\w*|LSTM|GRU|Bidirectional"


def count_macs(node):
    """How many multiply-adds of kernels a call takes for one sample.

    Every entry of a kernel (a weight of two or more axes) is used once for each position: each
    pixel of the output, each step of the sequence. To this come the two products of attention.

    Returns:
        An int, or `None` if it depends on sizes that are not known.
    """
    layer = callee(node)
    kernels = 0
    for part in with_sublayers(layer) if weights(layer) else ():
        if not sublayers(part) and not is_embedding(part):
            kernels += sum(
                math.prod(size)
                for weight, size in zip(part.weights, shapes(part.weights))
                if len(size) >= 2 and None not in size and "bias" not in weight.name.split("/")[-1]
            )
    if not kernels:
        return 0
    by_input = re.fullmatch(_BY_INPUT, type(layer).__name__)
    positions = _positions(layer, (tensors_in(node) if by_input else tensors_out(node))[0])
    if positions is None:
        return None
    macs = kernels * positions
    if isinstance(layer, keras.layers.MultiHeadAttention):
        args, kwargs = call_arguments(node)
        keys = _positions(layer, args[1] if len(args) > 1 else kwargs["value"])
        config = layer.get_config()
        if keys is None:
            return None
        macs += 2 * positions * keys * config["num_heads"] * config["key_dim"]
    return macs


def _positions(layer, tensor):
    """How many vectors a tensor holds for one sample, or `None` if it is not known."""
    size = shape(tensor)
    if size is None:
        return None
    first = getattr(layer, "data_format", None) == "channels_first"
    size = size[2:] if first else size[1:-1]
    return None if None in size else math.prod(size)


def count_weighted(layer):
    """How many layers with weights a layer holds; 1 for one that has its own."""
    if not weights(layer):
        return 0
    leaves = [part for part in with_sublayers(layer) if not sublayers(part) and weights(part)]
    return max(1, len(leaves))


def is_synchronized(layer):
    """Whether a layer is a BatchNormalization that takes its statistics over all replicas."""
    return bool(getattr(layer, "synchronized", False)) or "SyncBatchNorm" in type(layer).__name__


def synchronizes():
    """Whether a synchronized BatchNormalization talks to replicas under the strategy in use.

    It does under every strategy that could have several, even where there is one.
    """
    one = isinstance(tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy)
    return tf.distribute.has_strategy() and not one


def accepts(layer, argument):
    """Whether a layer's `call` takes an argument of this name."""
    return argument in inspect.signature(layer.call).parameters


# ------------------------------------------------------------------ dtypes


def policy_like(layer):
    """The dtype policy of a layer, to be given to another."""
    return layer.dtype_policy


def policy_for(dtype):
    """The name of a dtype policy that computes in `dtype` and keeps its variables in float32."""
    dtype = tf.as_dtype(dtype).name
    return f"mixed_{dtype}" if dtype in ("float16", "bfloat16") else dtype


def output_policy(node):
    """The dtype policy under which a layer gives what a call gives."""
    op = callee(node)
    if isinstance(op, keras.layers.Add):
        return policy_like(op)
    return policy_for(tensors_out(node)[0].dtype)


def emits_mask(node):
    """Whether a sum hands the masks of its inputs on: the `Add` layer does, operators do not."""
    return isinstance(callee(node), keras.layers.Add)


# ------------------------------------------------------------------ saved models


def load_safely(path):
    """Loads a saved model without running code that the file holds (that of `Lambda` layers).

    Keras 2 makes sure of that for `.keras` files only, unless it is told to.
    """
    with _safe_mode():
        return keras.models.load_model(path, compile=False)


def _safe_mode():
    if IS_KERAS_3:  # as it is by default
        return contextlib.nullcontext()
    home = sys.modules[keras.layers.Lambda.__module__]
    return home.serialization_lib.SafeModeScope(True)


def from_modern_config(config):
    """A model of Keras 3 from its config, without running code that this holds."""
    return keras.layers.deserialize(config)


def is_registered(name):
    """Whether a class that is not Keras's own is known by a name."""
    return keras.utils.get_registered_object(name) is not None


@functools.cache
def layer_classes():
    """Name -> class, of Keras's own layers."""
    return {
        name: cls
        for name, cls in vars(keras.layers).items()
        if isinstance(cls, type) and issubclass(cls, keras.layers.Layer)
    }


def operation_class(name):
    """The class of the operation that a function of Keras 3's `keras.ops` of two tensors makes."""
    x = keras.KerasTensor((1,))
    return type(getattr(keras.ops, name)(x, x)._keras_history.operation)


def address(cls):
    """What a config of Keras 3 says about where to find a class of Keras."""
    return {"module": cls.__module__, "class_name": cls.__name__, "registered_name": cls.__name__}


# ------------------------------------------------------------------ copies and rebuilt models


def copy_input(tensor):
    """A fresh symbolic input, made like the one that `tensor` is."""
    layer = tensor._keras_history[0]
    return type(layer).from_config(layer.get_config()).output


def copy_layer(layer, way_out):
    """A new layer or operation of the same configuration, without its weights.

    Raises:
        ValueError: If it cannot be copied. It ends in `way_out`: what to do instead.
    """
    if type(layer) is keras.layers.Lambda:
        return _copy_lambda(layer)
    parts = {type(part).__name__: type(part) for part in with_sublayers(layer)}
    try:
        with keras.utils.custom_object_scope(parts):
            copy = _from_config(layer)
        if IS_KERAS_3 and copy.name != layer.name:  # a configuration made by Keras has no name
            copy.name = layer.name
        _build_by_calling(copy)
        return copy
    except Exception as error:  # whatever a foreign get_config or constructor may raise
        raise ValueError(
            f"The layer {layer.name!r} (of type {type(layer).__name__}) cannot be copied. Give its "
            f"class a `get_config` that returns its constructor's arguments, or {way_out}. "
            f"The error was: {type(error).__name__}: {error}"
        ) from error


def _from_config(layer):
    """A layer of the same configuration.

    Some classes put more into their config than their constructor takes back. Their copies
    leave that out, from the configs that they give as well, so that they can be saved.
    """
    cls = type(layer)
    if isinstance(layer, keras.Sequential) and not IS_KERAS_3:
        return cls.from_config(_unbuilt(layer.get_config()))
    try:
        return cls.from_config(layer.get_config())
    except TypeError:
        config = layer.get_config()
        extra = config.keys() - constructor_arguments(cls) - {"name", "trainable", "dtype"}
        if not extra:
            raise
        copy = cls.from_config({k: v for k, v in config.items() if k not in extra})
        get_config = copy.get_config
        copy.get_config = lambda: {k: v for k, v in get_config().items() if k not in extra}
        return copy


def _unbuilt(config):
    """A configuration whose layers are built by calls: their weights get the layer's name then."""
    if isinstance(config, dict):
        return {k: _unbuilt(v) for k, v in config.items() if k != "build_config"}
    return [_unbuilt(x) for x in config] if isinstance(config, list) else config


def _build_by_calling(layer):
    """Has a foreign layer of a saved model built by its call again, and not before that.

    Keras calls `build` with the shape that it saved, a list by then, which many cannot take.
    """
    cls, base = type(layer), keras.layers.Layer
    own = getattr(cls, "get_build_config", None) is not getattr(base, "get_build_config", None)
    foreign = cls.__module__.partition(".")[0] not in ("keras", "tf_keras")
    if isinstance(layer, base) and foreign and not own:
        layer.get_build_config = _no_config


def _no_config():
    return None


def constructor_arguments(cls):
    """The names of the arguments that a class takes, those handed on to its bases included."""
    names = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names.update(p.name for p in parameters)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


def _copy_lambda(layer):
    """Keras refuses to load a Lambda's code from a config; here the function is at hand."""
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        name=layer.name,
        dtype=policy_like(layer),
    )


def serialize(layer):
    """A layer's class and configuration, for `deserialize`; `None` if it has no usable one."""
    if not isinstance(layer, keras.layers.Layer):
        return None
    with contextlib.suppress(Exception):  # whatever a foreign get_config may raise
        config = keras.layers.serialize(layer)
        json.dumps(config)
        return config


def same_without_weights(layer):
    """A text that is the same for layers without weights that do the same under one name."""
    saved = serialize(layer)
    if saved is None:
        return layer.name
    # Not whether it is trained, nor the shape that it was built for.
    config = {k: v for k, v in saved["config"].items() if k != "trainable"}
    return json.dumps([layer.name, saved["class_name"], config], sort_keys=True)


def deserialize(config):
    """A layer from its class and configuration; `None` if it cannot be made."""
    with contextlib.suppress(Exception):  # an unknown class, or whatever its code may raise
        layer = keras.layers.deserialize(config)
        return layer if is_layer(layer) else None


def called_layers(model):
    """The layers that a functional model and those nested in it call, each once."""
    found = {}
    for child in children(model):
        inside = called_layers(child) if is_functional(child) else [child]
        found.update((id(layer), layer) for layer in inside)
    return list(found.values())


def holders(layers):
    """Id of a layer -> those of `layers` that it is, or is inside of."""
    held = collections.defaultdict(list)
    for layer in layers:
        for part in with_sublayers(layer):
            held[id(part)].append(layer)
    return held


def copy_state(layer, twin, way_out):
    """Gives a built copy the weights, the other saved state and the flags of its original.

    Raises:
        ValueError: If their weights do not match. It ends in `way_out`: what to do instead.
    """
    if not isinstance(layer, keras.layers.Layer):
        return
    pairs = list(zip(with_sublayers(layer), with_sublayers(twin)))
    flags = [(copy, bool(original.trainable)) for original, copy in pairs]
    for copy, flag in flags:  # from the outside in: setting an outer flag sets the inner ones
        copy.trainable = flag
    # Keras 2 leaves it out of the config. From the inside out: a wrapper has that of its layer.
    for original, copy in reversed(pairs):
        if original.activity_regularizer is not None and copy.activity_regularizer is None:
            copy.activity_regularizer = original.activity_regularizer
    # After that: the order of a layer's weights depends on which of those inside it are frozen.
    if shapes(layer.weights) != shapes(twin.weights):
        raise ValueError(
            f"The layer {layer.name!r} (of type {type(layer).__name__}) cannot be copied: made "
            f"anew from its configuration it has {len(twin.weights)} weights, and the original "
            f"has {len(layer.weights)}, or their shapes differ. Make its `get_config` complete, "
            f"or {way_out}."
        )
    if layer.weights:
        twin.set_weights(layer.get_weights())
    for original, copy in pairs:
        _copy_saved_state(original, copy)


def copy_own_state(layer, twin):
    """Gives a layer the own weights, and the state saved in other ways, of one like it."""
    for ours, theirs in zip(own_weights(twin), own_weights(layer)):
        ours.assign(theirs)
    _copy_saved_state(layer, twin)


def _copy_saved_state(layer, twin):
    """State that a class saves in a way of its own: adapted statistics, vocabularies."""
    cls, base = type(layer), keras.layers.Layer
    if cls.load_own_variables is not base.load_own_variables and layer.weights:
        store = {}
        layer.save_own_variables(store)
        twin.load_own_variables({key: np.asarray(value) for key, value in store.items()})
    if getattr(cls, "save_assets", None) is not getattr(base, "save_assets", None):
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            twin.load_assets(folder)


def open_layer(layer, node):
    """A functional model of what a layer does in its `call`, made of the layers inside it.

    Neither the layer nor those inside keep a record of it.

    Args:
        layer: The layer.
        node: Keras's record of the call of the layer: the model takes its symbolic tensors, in
            order, as a list.

    Raises:
        ValueError: If no such model would do the same. It says why.
    """
    tensors = list({id(t): t for t in tensors_in(node)}.values())
    by_training = inspect.signature(layer.call).parameters.get("training")
    if by_training is not None and by_training.default is True:
        raise ValueError("its `call` takes itself to be in training unless it is told")
    args, kwargs = call_arguments(node)
    given = inspect.signature(layer.call).bind_partial(*args, **kwargs).arguments
    if given.get("training") not in ((None, False) if IS_KERAS_3 else (None,)):
        raise ValueError("it is called with a `training` of its own")

    def model(**training):
        inputs = [input_like(t, name=f"{layer.name}_input{i}") for i, t in enumerate(tensors)]
        values = {id(t): _cast_like(layer, x) for t, x in zip(tensors, inputs)}
        args, kwargs = map_structure(
            lambda x: values[id(x)] if is_symbolic(x) else x, call_arguments(node)
        )
        left_to_keras = ("training", "mask")
        kwargs = {k: v for k, v in kwargs.items() if k not in left_to_keras or is_symbolic(v)}
        if by_training is not None:
            training.setdefault("training", None)
        outputs = layer.call(*args, **kwargs, **training)
        return keras.Model(inputs, outputs, name=layer.name)

    losses = _loss_records(layer)
    records = [
        (record, len(record))
        for part in with_sublayers(layer)
        for record in (part._inbound_nodes, part._outbound_nodes)
    ]
    try:
        with _calls_told_to_train() as told:
            opened = model()
        ways = [opened]
        if by_training is not None:
            ways += [model(training=True), model(training=False)]
    except Exception as error:  # whatever a foreign `call` may raise on symbolic tensors
        raise ValueError(
            f"its `call` does not run on symbolic tensors ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]})"
        ) from error
    finally:
        for record, length in records:
            del record[length:]
    if len({tuple(map(_what, calls(way))) for way in ways}) > 1:
        raise ValueError("its `call` has two ways, one for training")
    known = {id(w) for w in opened.variables}
    unused = [w for w in layer.variables if id(w) not in known]
    if unused:
        names = ", ".join(sorted(repr(w.path if IS_KERAS_3 else w.name) for w in unused)[:3])
        raise ValueError(
            f"it has weights or random numbers outside the layers that it calls ({names})"
        )
    if told:
        raise ValueError(f"its `call` tells {told[0]!r} whether it is in training")
    if _loss_records(layer) != losses or layer.activity_regularizer is not None:
        raise ValueError("its `call` adds losses")
    for call in calls(opened):
        plain = (bool, int, float, str, type(None), tf.DType)
        for value in flatten(call_arguments(call)):
            if not (is_symbolic(value) or isinstance(value, plain)):
                raise ValueError("its `call` computes with tensors that are not its inputs")
    return opened


def _loss_records(layer):
    """Which losses were recorded in a layer and those inside, to be compared."""
    kinds = ("_losses",) if IS_KERAS_3 else ("_losses", "_eager_losses", "_callable_losses")
    parts = with_sublayers(layer)
    return [[id(x) for x in getattr(part, kind)] for part in parts for kind in kinds]


@contextlib.contextmanager
def _calls_told_to_train():
    """Collects the names of the layers that are called with a `training` that is not `None`."""
    told = []
    base = keras.layers.Layer
    own = base.__call__

    @functools.wraps(own)
    def call(self, *args, **kwargs):
        # Layers deeper inside are called with tensors of a scratch graph.
        if any(map(is_symbolic, flatten((args, kwargs)))):
            with contextlib.suppress(TypeError):  # to be raised by the call itself
                given = inspect.signature(self.call).bind_partial(*args, **kwargs).arguments
                if given.get("training") is not None:
                    told.append(self.name)
        return own(self, *args, **kwargs)

    base.__call__ = call
    try:
        yield told
    finally:
        base.__call__ = own


def _cast_like(layer, tensor):
    """A symbolic tensor in the dtype that a layer casts its inputs to."""
    dtype = layer.compute_dtype
    casts = layer.autocast if IS_KERAS_3 else layer._autocast
    if not (casts and is_floating(tensor)) or tf.as_dtype(tensor.dtype).name == dtype:
        return tensor
    return keras.ops.cast(tensor, dtype) if IS_KERAS_3 else tf.cast(tensor, dtype)


def _what(node):
    """What is called, in a form that is equal for two traces of the same code."""
    op = callee(node)
    operation = _operation(op)
    if is_input_call(node) or operation is not None:
        return type(op).__name__, operation
    return id(op)


def is_plain(model):
    """Whether a model is of one of Keras's own functional classes."""
    return type(model) in (keras.Model, keras.Sequential, functional_class())


def keeps_class(model):
    """Whether `rebuild` gives a model of the same class."""
    return is_plain(model) or not _has_own_constructor(type(model))


def rebuild(model, inputs, outputs):
    """A model of the same class and name around a new graph.

    Falls back to `keras.Model` for classes with a constructor of their own, with a warning if
    the class also says how to train. A Sequential model becomes a functional one.
    """
    cls = type(model)
    if is_plain(model):
        cls = keras.Model
    elif _has_own_constructor(cls):
        own = [
            name
            for name in ("train_step", "test_step", "predict_step", "compute_loss")
            if getattr(cls, name, None) is not getattr(keras.Model, name, None)
        ]
        if own:
            warnings.warn(
                f"{cls.__name__} has a constructor of its own, so the result is a plain "
                f"keras.Model without its {', '.join(own)}. Wrap the functional model inside, and "
                f"make the {cls.__name__} from the result.",
                stacklevel=5,  # the line that calls `wrap_residuals`
            )
        cls = keras.Model
    return cls(inputs=inputs, outputs=outputs, name=model.name)


def _has_own_constructor(cls):
    library = {*functional_class().__mro__, *keras.Model.__mro__}
    return any("__init__" in vars(c) for c in cls.__mro__ if c not in library)


# ------------------------------------------------------------------ training


def steps_done(model):
    """How many steps the optimizer of a model has counted; `None` if it has none that counts."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return None if iterations is None else int(iterations.numpy())


def fits_with_xla(model):
    """Whether XLA compiles the training steps of a compiled model."""
    return bool(model.jit_compile) and not model.run_eagerly


# ------------------------------------------------------------------ inside a layer's call


def add_scalar(layer, name, value):
    """Adds a non-trainable float32 scalar to a layer, never cast to another dtype."""
    autocast = {"autocast" if IS_KERAS_3 else "experimental_autocast": False}
    return layer.add_weight(
        name=name,
        shape=(),
        dtype="float32",
        initializer=keras.initializers.Constant(value),
        trainable=False,
        **autocast,
    )


def read_scalar(variable):
    """A scalar float32 variable as the shortest Python float that rounds to it."""
    with tf.init_scope():
        # As it is, whatever a StatelessScope says.
        value = (variable._value if IS_KERAS_3 else variable).numpy()
    return float(str(value))


def scalar_writer(variables):
    """A function that assigns a sequence of numbers to scalar float32 variables, all at once."""
    variables = [_not_cast(v) for v in variables]

    @functools.partial(tf.function, input_signature=[tf.TensorSpec((len(variables),), tf.float32)])
    def write(values):
        for variable, value in zip(variables, tf.unstack(values)):
            variable.assign(value)

    return lambda values: write(tf.constant(values, tf.float32))


def reader(*groups):
    """A function that reads groups of variables, each of one shape, as arrays, all at once."""
    groups = [[_not_cast(v) for v in variables] for variables in groups]

    @tf.function(input_signature=[])
    def read():
        return [tf.stack([tf.convert_to_tensor(v) for v in group]) for group in groups]

    return lambda: [values.numpy() for values in read()]


def make_seed_state(layer, seed):
    """Gives a layer a weight of two integers, a seed and a counter.

    It is not Keras 3's `SeedGenerator`, whose state no TensorFlow checkpoint holds.

    Args:
        layer: The layer that owns it.
        seed: An integer, or `None` for one drawn as Keras draws its default seeds (so that
            `keras.utils.set_random_seed` decides it).
    """
    seed = random.randint(1, int(1e9)) if seed is None else seed
    # Each replica counts for itself, in step with the others: no communication, and so allowed in
    # a cond.
    alone = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
    }
    return layer.add_weight(
        name="seed_state",
        shape=(2,),
        dtype="int64",
        initializer=lambda shape, dtype=None, **_: tf.constant([seed, 0], tf.int64),
        trainable=False,
        **({"aggregation": "none"} if IS_KERAS_3 else alone),
    )


def next_seed(state):
    """The seed of this draw, an integer tensor of shape (2,); the counter moves on."""
    seed = tf.identity(tf.convert_to_tensor(state))
    state.assign(seed + [0, 1])
    return seed


def on_host():
    """Where what decides about the flow of a step is computed: on the CPU, if that can be chosen.

    The predicate of a conditional is needed on the host. Computed on a GPU it would have to be
    waited for, block by block, with all that was queued before it. On the CPU, what it needs (the
    variables of seed and probability) is there at the start of a step, so that a graph draws all
    switches ahead of the blocks, and an eager step does not wait for the GPU.
    XLA compiles a step as one program for one device and ignores this: there a GPU's predicates
    are copied to the host one by one, and a TPU branches by itself.
    """
    return contextlib.nullcontext() if compiles_with_xla() else tf.device("/CPU:0")


def compiles_with_xla():
    """Whether the function that is being traced will be compiled by XLA."""
    graph = tf.compat.v1.get_default_graph()
    in_graph = not tf.executing_eagerly()
    return in_graph and control_flow_util.GraphOrParentsInXlaContext(graph)


def in_control_flow():
    """Whether what is being traced is a side of a conditional, or the body of a loop."""
    graphs = control_flow_v2_func_graphs
    kinds = graphs.CondBranchFuncGraph, graphs.WhileCondFuncGraph, graphs.WhileBodyFuncGraph
    return isinstance(tf.compat.v1.get_default_graph(), kinds)


def declared_shapes(layer):
    """The shapes of the inputs that a functional model was made with; () for other layers."""
    return tuple(shape(x) for x in functional(layer).inputs) if is_functional(layer) else ()


def has_accelerator():
    """Whether TensorFlow sees anything but CPUs."""
    return any(device.device_type != "CPU" for device in tf.config.list_logical_devices())


def convolutions(layer):
    """The convolutions that a layer holds, and itself if it is one."""
    named = re.compile(r"\w*Conv\w*\d?D\w*")
    return [part for part in with_sublayers(layer) if named.fullmatch(type(part).__name__)]


def trainable_variables(layers):
    """The trainable weights of layers as `tf.Variable`s in the dtype that they have."""
    found = {id(w): w for layer in layers for w in layer.trainable_weights}
    return [_not_cast(w) for w in found.values()]


def _not_cast(variable):
    """The `tf.Variable` of a weight, which has its own dtype under mixed precision as well."""
    return variable._value if IS_KERAS_3 else getattr(variable, "_variable", variable)


def remember_state(layer):
    """Remembers the variables of a layer that are not trained.

    Returns:
        A function that gives them their values back, unless a bool tensor is true.
    """
    state = _state([layer])

    def undo(unless):
        for v, value in state:
            v.assign(tf.where(unless, _not_cast(v), value))

    return undo


def _state(layers):
    """The variables of layers that are not trained, each with its value as it is now."""
    found = {id(v): v for layer in layers for v in layer.variables}.values()
    if not IS_KERAS_3:  # vocabularies are among them
        found = [v for v in found if isinstance(v, tf.Variable)]
    return [(v, tf.identity(_not_cast(v))) for v in found if not v.trainable]


def remember(layers):
    """Lets functions that call layers be run again as if for the first time.

    Returns:
        A function that runs a function: it finds the variables that are not trained as they are
        now and, on Keras 3, leaves them so. Returns its result and the losses that were not
        recorded in layers.
    """
    if not IS_KERAS_3:
        return lambda run: (run(), [])
    state = _state(layers)
    trained = [v for layer in layers for v in layer.variables if v.trainable]
    variables = [v for v, _ in state] + trained
    values = [value for _, value in state] + [v._value for v in trained]

    def run_as_then(run):
        result, _, losses = run_with_values(variables, values, run)
        return result, losses

    return run_as_then


def runs_stateless():
    """Whether layers can be run on values that stand in for those of their variables.

    Inside a `keras.StatelessScope` of somebody else they run on its values already.
    """
    return IS_KERAS_3 and not tf.distribute.has_strategy()


def current_values(variables):
    """The values of variables as tensors, in the dtypes that they have."""
    return [tf.convert_to_tensor(_not_cast(v)) for v in variables]


def has_stand_in(variable):
    """Whether a `keras.StatelessScope` has a value in place of that of a variable never cast."""
    return variable.value is not variable._value


class Reassigned(Exception):
    """A layer assigns weights that are trained, in its call."""


def run_with_values(variables, values, run, assigned=()):
    """Runs a function with values in place of those of variables, which stay as they are.

    No gradient goes through what is assigned, as with variables. (TensorFlow would compute it, of
    zeros, in each step.)

    Args:
        variables: The variables.
        values: Tensors, one per variable.
        run: The function.
        assigned: Those of the variables whose later values are wanted.

    Returns:
        (its result, the values that `assigned` would have after it, the losses it recorded).

    Raises:
        Reassigned: If it assigns weights that are trained (`SpectralNormalization`). What is
            computed of the new value would have a gradient with respect to the old one.
    """
    with keras.StatelessScope(collect_losses=True) as scope:
        for update in zip(variables, values):  # not cast, as its constructor would
            scope.add_update(update)
        result = run()
        for variable, value in zip(variables, values):
            if variable.trainable and scope.get_current_value(variable) is not value:
                raise Reassigned(variable.path)
        after = [tf.stop_gradient(scope.get_current_value(v)) for v in assigned]
        return result, after, scope.losses


def variables_in_order(layer):
    """A layer's variables, each once, in an order that is the same for layers of equal likeness."""
    if not is_functional(layer):
        return layer.variables
    found = {}
    for child in children(layer):
        found.update((id(v), v) for v in variables_in_order(child))
    return list(found.values())


def kept_here(name):
    """A dict of this name that belongs to the graph that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    kept = graph.get_collection_ref(f"tfa_stochastic_depth/{name}")
    if not kept:
        kept.append({})
    return kept[0]


def call_forward_pass(function, arguments, when):
    """Has the runtime call the forward pass of a `tf.function`, and copy its gradient.

    It does so if `when()` is true at the time that a gradient is asked for. For gradients of
    gradients, and by a TensorFlow that makes them in another way, both are copied.
    """
    concrete = function.get_concrete_function(*arguments)
    pairs = getattr(concrete, "_delayed_rewrite_functions", None)
    construct = getattr(pairs, "_construct_forward_backward", None)
    if construct is None or "_construct_forward_backward" in vars(pairs):  # done before
        return

    def construct_called(count):
        if not when():
            return construct(count)
        copied = pairs._attrs
        pairs._attrs = {**copied, "_noinline": True}
        try:
            forward, backward = construct(count)
        finally:
            pairs._attrs = copied
        attributes = dict(backward.inference_fn.attributes)
        del attributes["_noinline"]
        graph, signature = backward.graph, backward.function_type
        return forward, type(backward).from_func_graph(graph, signature, attributes)

    pairs._construct_forward_backward = construct_called


def likeness(layer):
    """A hashable value that is equal for layers that do the same, but for their weights.

    It is made of their class, configuration and plain attributes, names left out. `None` if that
    does not say all: for classes that are not Keras's own, and functions that somebody wrote.
    """
    if not IS_KERAS_3:
        return None
    try:
        return _likeness(layer)
    except _Unknown:
        return None


class _Unknown(Exception):
    pass


_PLAIN = (bool, int, float, str, type(None), tf.DType)
_NAMES = {"name", "_name", "_path", "_parent_path"}
# They decide about the weights, which are no part of it, or their losses, which a model adds up.
_OF_WEIGHTS = re.compile(r"(?!activity)\w+_(initializer|regularizer|constraint)")


def _likeness(op):
    cls = type(op)
    if is_functional(op) and is_plain(op):
        return _graph_likeness(functional(op))
    own = cls.__module__.startswith(("keras.src.layers.", "keras.src.ops."))
    if not own or cls is keras.layers.Lambda or "call" in vars(op):
        raise _Unknown
    try:
        config = op.get_config()
    except Exception as error:  # whatever a class may raise
        raise _Unknown from error
    attributes = {k: v for k, v in vars(op).items() if isinstance(v, _PLAIN)}
    inside = [_likeness(part) for part in sublayers(op)]
    return cls, _plain(config), _plain(attributes), tuple(inside)


def _plain(value):
    """A configuration without names, as something hashable."""
    if isinstance(value, dict):
        if value.get("registered_name") or value.get("class_name") == "function":
            raise _Unknown
        if str(value.get("class_name")).endswith("DTypePolicy"):
            return str(value)  # its name says all
        kept = [k for k in value if k not in _NAMES and not _OF_WEIGHTS.fullmatch(str(k))]
        return tuple((k, _plain(value[k])) for k in sorted(kept, key=str))
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _Unknown


def _graph_likeness(graph):
    places, ops, found = {}, {}, []
    for t in flatten(signature(graph)[0]):
        places[id(t)] = len(places)
    for node in calls(graph):
        if is_input_call(node):
            continue
        op = callee(node)
        known = ops.setdefault(id(op), len(ops))
        what = _likeness(op) if known == len(ops) - 1 else None

        def argument(x):
            return ("tensor", places[id(x)]) if is_symbolic(x) else x  # noqa: B023

        args, kwargs = map_structure(argument, call_arguments(node))
        for t in tensors_out(node):
            places[id(t)] = len(places)
        found.append((known, what, _plain(args), _plain(kwargs)))
    inputs = tuple((shape(t), t.dtype) for t in flatten(signature(graph)[0]))
    outputs = map_structure(lambda t: ("tensor", places[id(t)]), signature(graph)[1])
    return inputs, tuple(found), _plain(outputs)


def replace_uses(tensor, other):
    """Lets the operations of a graph under construction take another tensor in place of one."""
    for operation in tensor.consumers():
        for i, x in enumerate(operation.inputs):
            if x is tensor:
                operation._update_input(i, other)


def can_repeat(function):
    """Whether a function does nothing but compute: it changes no variable and draws no number.

    Nor may it read variables in a conditional: inside of another, TensorFlow finds no gradient of
    them. It is traced, and not run.
    """
    try:
        graph = tf.function(unconverted(function)).get_concrete_function().graph.as_graph_def()
    except Reassigned:
        return False
    # The functions of a GraphDef are in its field of that name.
    called = [node for inner in graph.library.function for node in inner.node_def]
    nodes = [*graph.node, *called]
    inputs = [node.attr["Tin"].list.type for node in nodes if node.op in _CONDITIONALS]
    if any(tf.resource.as_datatype_enum in types for types in inputs):
        return False
    for operation in {node.op for node in nodes} - _HARMLESS:
        known = op_def_registry.get(operation)
        if known is not None and known.is_stateful:
            return False
    return True


_CONDITIONALS = {"If", "StatelessIf", "Case", "StatelessCase"}

# Operations that TensorFlow calls stateful, and that may be run twice: they read, check, or call
# functions, whose own operations are looked at.
_HARMLESS = frozenset(
    "ReadVariableOp ResourceGather ResourceGatherNd VarHandleOp Placeholder Assert "
    "If While Case StatefulPartitionedCall PartitionedCall XlaLaunch".split()
)


def build(layer, args, kwargs):
    """Makes the variables of a layer that is called with tensors like these; nothing is run."""
    if layer.built:
        return
    if IS_KERAS_3:  # a function cannot be traced for this inside a tf.distribute scope

        def symbolic(x):
            spec = _spec(x)
            return x if spec is None else keras.KerasTensor(spec.shape, dtype=spec.dtype.name)

        args, kwargs = tf.nest.map_structure(symbolic, (args, kwargs))
        layer(*args, **kwargs)
    else:
        trace(layer, args, kwargs)


def build_from_shape(layer, shape):
    """Makes the variables of a layer that takes one tensor, of the given shape.

    One that needs more than that is left to its first call.
    """
    shape = tuple(shape) if isinstance(shape, (tuple, list, tf.TensorShape)) else None
    one_shape = shape is not None and all(d is None or isinstance(d, int) for d in shape)
    required = [
        p
        for p in inspect.signature(layer.call).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if one_shape and len(required) == 1:
        with contextlib.suppress(Exception):
            build(layer, (tf.TensorSpec(shape, layer.compute_dtype),), {})


def trace(layer, args, kwargs):
    """What a layer gives for tensors like these, as symbolic tensors; nothing is computed.

    Args:
        layer: A layer.
        args: Its positional arguments: tensors or `tf.TensorSpec`s, nested or not.
        kwargs: Its keyword arguments: the same, or values of other types.
    """
    leaves = tf.nest.flatten((args, kwargs))
    spots = [i for i, x in enumerate(leaves) if _spec(x) is not None]
    masked = [i for i in spots if mask_of(leaves[i]) is not None]

    def run(tensors, masks):
        values = list(leaves)
        for spot, tensor in zip(spots, tensors):
            values[spot] = tensor
        for spot, mask in zip(masked, masks):
            set_mask(values[spot], mask)
        a, k = tf.nest.pack_sequence_as((args, kwargs), values)
        outputs, _ = collect_losses(layer, lambda: layer(*a, training=False, **k))
        return outputs, masks_of(outputs)

    function = tf.function(unconverted(run)).get_concrete_function(
        [_spec(leaves[i]) for i in spots], [_spec(mask_of(leaves[i])) for i in masked]
    )
    outputs, masks = function.structured_outputs
    for i, y in enumerate(tf.nest.flatten(outputs)):
        set_mask(y, masks.get(i))
    return outputs


def trace_key(layer, args, kwargs):
    """A hashable key, equal where `trace` must give the same."""

    def key(x):
        return repr(x) if _spec(x) is None else (_spec(x), _spec(mask_of(x)))

    return id(layer), *map(key, tf.nest.flatten((args, kwargs)))


def trace_sizes(layer, args, kwargs, sizes):
    """The shapes that a layer gives where axis `i` of its inputs, if unknown, has `sizes[i]`."""

    def resized(x):
        spec = _spec(x)
        if not isinstance(spec, tf.TensorSpec):
            return x
        known = [sizes[axis] if size is None else size for axis, size in enumerate(spec.shape)]
        return tf.TensorSpec(known, spec.dtype)

    args, kwargs = tf.nest.map_structure(resized, (args, kwargs))
    return [tuple(y.shape) for y in tf.nest.flatten(trace(layer, args, kwargs))]


def batch_axes(layer, args, kwargs, doubtful, size):
    """Which of a layer's arguments have the batch as their first axis.

    The layer is traced for a batch of another size, with each choice of arguments that keep theirs,
    fewest first, until one works.

    Args:
        layer: A layer.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        doubtful: Ids of the tensors among them that may go either way. The other tensors whose
            first axis has the size of the batch have it as their first axis.
        size: The size of the batch.

    Returns:
        Those of `doubtful` that have.
    """
    sizes = {size for x in tf.nest.flatten((args, kwargs)) if _spec(x) for size in x.shape}
    other = next(n for n in (61, 67, 71, 73, 79, 83, 89, 97) if n not in sizes)

    def resized(x, whole):
        if not isinstance(_spec(x), tf.TensorSpec):
            return x
        if id(x) in whole or not x.shape.rank or x.shape[0] != size:
            return _spec(x)
        return tf.TensorSpec((other, *x.shape[1:]), x.dtype)

    for count in range(len(doubtful) + 1):
        for whole in itertools.combinations(doubtful, count):
            a, k = tf.nest.map_structure(lambda x: resized(x, whole), (args, kwargs))  # noqa: B023
            with contextlib.suppress(Exception):  # whatever a layer may raise at a wrong size
                shapes = [y.shape for y in tf.nest.flatten(trace(layer, a, k))]
                if all(shape.rank and shape[0] in (other, None) for shape in shapes):
                    return [x for x in doubtful if x not in whole]
    return list(doubtful)


def _spec(x):
    if isinstance(x, tf.TypeSpec):
        return x
    return tf.type_spec_from_value(x) if tf.is_tensor(x) else None


def collect_losses(layer, run):
    """Runs a function that calls `layer`; returns its result and the losses it left in the layer.

    Losses made inside a tf.cond cannot be read outside it, so they are taken out of the layers
    that recorded them, and the caller hands them on as outputs of the cond.
    """
    parts = with_sublayers(layer)
    before = {id(part): len(_recorded(part)) for part in parts}
    result = run()
    losses = []
    for part in with_sublayers(layer):
        recorded = _recorded(part)
        losses += recorded[before.get(id(part), 0) :]
        del recorded[before.get(id(part), 0) :]
    return result, losses


def _recorded(layer):
    if IS_KERAS_3:
        return layer._losses
    # What the symbolic call left there belongs to Keras's scratch graph and would be read again
    # whenever the eager list is empty, as it is after a dropped step.
    del layer._losses[:]
    return layer._eager_losses


def add_losses(layer, losses):
    for loss in losses:
        layer.add_loss(loss)


def mask_of(tensor):
    return getattr(tensor, "_keras_mask", None)


def masks_of(tensors):
    """Place -> mask, for those of a structure of tensors that have one."""
    masks = {i: mask_of(x) for i, x in enumerate(tf.nest.flatten(tensors))}
    return {i: mask for i, mask in masks.items() if mask is not None}


def sum_mask(tensors, masks):
    """The mask that `keras.layers.Add` gives its sum."""
    return keras.layers.Add(name="sum").compute_mask(tensors, masks)


def clear_mask(tensor):
    if mask_of(tensor) is not None:
        tensor._keras_mask = None


def set_mask(tensors, mask):
    if mask is not None:
        for tensor in tf.nest.flatten(tensors):
            tensor._keras_mask = mask


def output_mask(layer, inputs, mask):
    """The mask that a layer gives its output, by what it does with masks, without running it.

    A functional model hands the mask of its (first) input on if all that it calls does.
    """
    if is_functional(layer):
        parts = [callee(node) for node in calls(functional(layer)) if not is_input_call(node)]
        return flatten(mask)[0] if mask is not None and all(map(_passes_masks, parts)) else None
    return layer.compute_mask(inputs, mask) if _passes_masks(layer) else None


def _passes_masks(layer):
    """Whether a layer says that it gives masks."""
    if not isinstance(layer, keras.layers.Layer):
        return False
    if IS_KERAS_3 or layer.supports_masking:
        return layer.supports_masking
    return not getattr(layer.compute_mask, "_is_default", False)


def silence_masks(model):
    """Keeps Keras 3 from warning that a model destroys the masks of its inputs.

    The layers inside get them all the same, and its outputs have the masks that the last ones give.
    """
    if IS_KERAS_3 and isinstance(model, keras.Model) and not model.supports_masking:
        model.supports_masking = True
        model.compute_mask = _no_other_mask


def _no_other_mask(inputs, previous_mask):
    return None


def take_call_arguments(wrapper, layer):
    """Lets a wrapper whose `call` has catch-alls take the arguments of the layer in it by name.

    Keras 3 sorts a call's arguments by name, and refuses tensors beside other values in one
    catch-all (`attention_mask=tensor, use_causal_mask=True`).
    """
    if not IS_KERAS_3:
        return
    own = list(inspect.signature(wrapper.call).parameters.values())
    named = {p.name for p in own}
    inner = [
        p
        for p in list(inspect.signature(layer.call).parameters.values())[1:]
        if p.name not in named and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    rank = lambda p: (p.kind, p is not own[0])  # noqa: E731
    wrapper._call_signature = inspect.Signature(sorted([*own, *inner], key=rank))


def unconverted(function):
    """Marks a function that AutoGraph shall run as it is, and still convert what it calls.

    `tf.autograph.experimental.do_not_convert` would also keep AutoGraph from the wrapped layers,
    whose code may need it; without a mark, converting this package's code takes longer than all
    else when a model is wrapped on Keras 2.
    """
    function.autograph_info__ = None
    return function


if IS_KERAS_3:

    class Wrapper(keras.layers.Wrapper):
        """Keras's `Wrapper`, whose output is found without tracing where that can be.

        The masks of its outputs are those that its `call` sets, and no others. A subclass has
        `check_sum(shortcut, branch)`, which raises an error unless the two add up.
        """

        def compute_output_spec(self, inputs, *args, shortcut=None, **kwargs):
            if is_functional(self.layer) and is_symbolic(shortcut) and not args:
                spec = self.layer.compute_output_spec(inputs)
                self.check_sum(shortcut, spec)
                return keras.KerasTensor(shortcut.shape, dtype=self.compute_dtype)
            if shortcut is not None:
                kwargs["shortcut"] = shortcut
            return keras.Operation.compute_output_spec(self, inputs, *args, **kwargs)

        def _set_mask_metadata(self, inputs, outputs, previous_mask):
            pass

else:

    class Wrapper(keras.layers.Wrapper):
        """Keras's `Wrapper`. The masks of its outputs are those that its `call` sets."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._compute_output_and_mask_jointly = True
