"""The config of a model that Keras 2 saved, rewritten as Keras 3 writes it."""

from __future__ import annotations

from tfa_stochastic_depth import _keras

# The arithmetic that Keras 2 records for `x + y` and the like -> the function of `keras.ops`.
_OPERATORS = {
    "__operators__.add": "add",
    "math.add": "add",
    "math.subtract": "subtract",
    "math.multiply": "multiply",
    "math.truediv": "true_divide",
}
_OPERATION_LAYERS = (
    "TFOpLambda",
    "SlicingOpLambda",
    "ClassMethod",
    "InstanceMethod",
    "InstanceProperty",
    "TensorFlowOpLayer",
)

_RENAMED = {
    ("InputLayer", "batch_input_shape"): "batch_shape",
    ("LeakyReLU", "alpha"): "negative_slope",
}
# Entries that layers of Keras 3 do not take where Keras 2 saved them without a use, and those of
# which one value says that nothing is to be done.
_WITHOUT_USE = (
    "batch_input_shape",
    "kernel_constraint",
    "kernel_initializer",
    "kernel_regularizer",
    "key_shape",
    "query_shape",
    "rng_type",
    "value_shape",
)
_WITHOUT_EFFECT = {
    "groups": 1,
    "noise_shape": None,
    "softmax_robust_masking": False,
    "time_major": False,
    "trainable": True,
}


def modernize(saved):
    """Rewrites the config of an object, and of those inside.

    Args:
        saved: What was decoded from JSON: an object's dict with `class_name` and `config`, or
            anything that holds such dicts.

    Returns:
        The same with the places of classes, the entries and the records of calls of Keras 3.

    Raises:
        ValueError: If a TensorFlow operation other than `+`, `-`, `*` and `/` is called.
    """
    if isinstance(saved, list):
        return [modernize(x) for x in saved]
    if not isinstance(saved, dict):
        return saved
    if "class_name" not in saved or not isinstance(saved.get("config"), dict):
        return {key: modernize(value) for key, value in saved.items()}
    if saved["class_name"] == "Policy":
        return saved["config"]["name"]
    return _modern_object(saved)


def modern_name(name):
    """The name of a layer as Keras 3 allows it."""
    return name.replace("/", "_")


def _modern_object(saved):
    name = saved["class_name"]
    modern = {**saved, "config": modernize(saved["config"])}
    for entries in (modern, modern["config"]):
        if isinstance(entries.get("name"), str):
            entries["name"] = modern_name(entries["name"])
    # Calls build layers; how a model was compiled is no business of its graph.
    for key in ("build_config", "compile_config", "inbound_nodes"):
        modern.pop(key, None)
    if _keras.is_registered(saved.get("registered_name") or name):
        modern.update(module=None, registered_name=saved.get("registered_name") or name)
    elif name in ("Functional", "Model") and "layers" in saved["config"]:
        modern.update(_keras.address(_keras.functional_class()))
    elif name == "Sequential":
        modern.update(module="keras", registered_name=None)
        modern["config"]["layers"] = _with_input(modern["config"]["layers"], saved["config"])
    elif name in _keras.layer_classes():
        modern.update(module="keras.layers", registered_name=None)
        modern["config"] = _modern_entries(name, modern["config"])
    if _is_graph(saved["config"]):
        modern["config"].update(_modern_graph(saved["config"]))
    return modern


def _modern_entries(class_name, config):
    """The entries of a Keras layer's config, without those that Keras 3 has no use for."""
    if "hard_sigmoid" in (config.get("activation"), config.get("recurrent_activation")):
        raise ValueError(
            f"the layer {config.get('name')!r} has the activation hard_sigmoid, by which Keras 3 "
            "means another function. Load it on Keras 2 (TF_USE_LEGACY_KERAS=1)"
        )
    known = _keras.constructor_arguments(_keras.layer_classes()[class_name])
    modern = {}
    for key, value in config.items():
        if key == "axis" and isinstance(value, list) and len(value) == 1:
            value = value[0]
        key = _RENAMED.get((class_name, key), key)
        gone = key in _WITHOUT_USE or (key, value) in _WITHOUT_EFFECT.items()
        if key in known or not gone:
            modern[key] = value
    return modern


def _with_input(layers, config):
    """The layers of a Sequential model, of which early Keras 2 left the input out."""
    size = config["layers"][0]["config"].get("batch_input_shape") if layers else None
    if size is None or config["layers"][0]["class_name"] == "InputLayer":
        return layers
    dtype = layers[0]["config"].get("dtype")
    entries = {"batch_shape": size, "dtype": dtype, "name": f"{layers[0]['config']['name']}_input"}
    return [{"module": "keras.layers", "class_name": "InputLayer", "config": entries}, *layers]


# ------------------------------------------------------------------ graphs of calls


def _is_graph(config):
    return "layers" in config and "output_layers" in config


def _modern_graph(config):
    """The entries of a functional model's config that make up its graph."""
    # Of models that are called as layers Keras 2 counts the calls from 1 on.
    models = {x["name"]: x for x in config["layers"] if "layers" in x["config"]}
    layers = []
    for saved in config["layers"]:
        nodes = saved["inbound_nodes"]
        if saved["class_name"] in _OPERATION_LAYERS:
            layers.append(_operation(saved, models))
        else:
            nodes = [_modern_call(node, models) for node in nodes]
            layers.append({**modernize(saved), "inbound_nodes": nodes})

    def end(leaf):
        # Keras 3 counts so too here, and here alone, but for Sequential models.
        name, call, place = leaf[:3]
        sequential = name in models and models[name]["class_name"] == "Sequential"
        return [modern_name(name), call - sequential, place]

    ends = {
        key: _map_leaves(end, _single(config[key])) for key in ("input_layers", "output_layers")
    }
    return {"layers": layers, **ends}


def _modern_call(node, models):
    """The arguments of a call, of which Keras 2 puts all but the first beside the first."""
    leaves = []

    def argument(leaf):
        leaves.append(leaf)
        return _tensor(leaf, models)

    first = _map_leaves(argument, _single(node))
    others = leaves[-1][3] if len(leaves[-1]) > 3 else {}
    if others.get("training") is True:
        raise ValueError(
            f"what {leaves[-1][0]!r} gives is handed to a layer with training=True, which Keras 3 "
            "does not hold on to when a model predicts. Load it on Keras 2 (TF_USE_LEGACY_KERAS=1)"
        )
    others = _map_leaves(lambda leaf: _tensor(leaf, models), others)
    return {"args": [first], "kwargs": others}


def _operation(saved, models):
    """An operation of Keras 3 in place of a layer of Keras 2 that calls TensorFlow."""
    name, symbol = saved["name"], saved["config"].get("function")
    calls = [_modern_call(node, models) for node in saved["inbound_nodes"]]
    operands = [[*call["args"], call["kwargs"].get("y")] for call in calls]
    if symbol not in _OPERATORS or not all(map(_is_operand, sum(operands, []))):
        what = f"tf.{symbol}" if symbol else saved["class_name"]
        raise ValueError(
            f"the model calls TensorFlow itself in {name!r} ({what}), which Keras 2 saves as a "
            "layer that Keras 3 does not have. Only +, -, * and / of tensors and numbers can be "
            "taken over. Load it on Keras 2 (TF_USE_LEGACY_KERAS=1), or build it with keras.ops"
        )
    return {
        **_keras.address(_keras.operation_class(_OPERATORS[symbol])),
        "config": {"name": modern_name(name)},
        "name": modern_name(name),
        "inbound_nodes": [{"args": both, "kwargs": {}} for both in operands],
    }


def _is_operand(x):
    return isinstance(x, (int, float)) or (
        isinstance(x, dict) and x.get("class_name") == "__keras_tensor__"
    )


def _tensor(leaf, models):
    """A symbolic tensor, or the constant that stands in for one."""
    name, call, place = leaf[:3]
    if name == "_CONSTANT_VALUE":
        return place
    history = [modern_name(name), call - (name in models), place]
    # Keras 3 puts the tensor of that history in its place.
    config = {"shape": [None], "dtype": "float32", "keras_history": history}
    return {"class_name": "__keras_tensor__", "config": config}


def _single(structure):
    """Keras 2 puts a single tensor into a list."""
    return structure[0] if isinstance(structure, list) and len(structure) == 1 else structure


def _map_leaves(function, structure):
    """Replaces what stands for tensors, `[layer, call, place, ...]`, in a nested structure."""
    if isinstance(structure, dict):
        return {key: _map_leaves(function, value) for key, value in structure.items()}
    if not isinstance(structure, list):
        return structure
    if len(structure) in (3, 4) and isinstance(structure[0], str):
        return function(structure)
    return [_map_leaves(function, x) for x in structure]
