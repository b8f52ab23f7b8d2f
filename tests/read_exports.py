"""A program that loads exported models where this package cannot be imported.

`read_exports.py <directory>` loads each file in the directory by its ending, predicts for the
inputs in `<model>.npz`, and writes what it found to `found`.
"""

import collections
import importlib.abc
import pathlib
import pickle
import sys


class Block(importlib.abc.MetaPathFinder):
    """Forbids the import of this package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tfa_stochastic_depth":
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Block())

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf import saved_model_pb2  # noqa: E402
from tensorflow.python.tools import saved_model_cli  # noqa: E402

BATCHES = (5, 1)


def operations(graph):
    """How often each type of operation is in a graph and the functions that it calls.

    They are in the field `library` of TensorFlow's GraphDef. (What the tests have for this imports
    the package.)
    """
    inner = (node for function in graph.library.function for node in function.node_def)
    return collections.Counter(node.op for node in [*graph.node, *inner])


def read_keras(path, x):
    model = tf.keras.models.load_model(path)
    function = tf.function(lambda x: model(x, training=False))
    graph = function.get_concrete_function(tf.TensorSpec((None, *x.shape[1:]))).graph
    return {
        "predict": lambda x: model.predict(x, verbose=0),
        "operations": operations(graph.as_graph_def()),
        "variables": [getattr(v, "path", v.name) for v in model.weights],
    }


def read_saved_model(path, x):
    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]
    (key,) = serve.structured_input_signature[1]
    whole = saved_model_pb2.SavedModel()
    whole.ParseFromString((path / "saved_model.pb").read_bytes())
    stored = tf.train.list_variables(str(path / "variables/variables"))

    def by_command(x):
        np.savez(path.parent / "batch.npz", x=x)
        sys.argv = ["saved_model_cli", "run", "--dir", str(path), "--tag_set", "serve"]
        sys.argv += ["--signature_def", "serving_default", "--overwrite"]
        sys.argv += ["--inputs", f"{key}={path.parent / 'batch.npz'}[x]"]
        sys.argv += ["--outdir", str(path.parent / "command")]
        try:
            saved_model_cli.main()
        except SystemExit as stop:
            assert not stop.code
        (output,) = serve.structured_outputs
        return np.load(path.parent / "command" / f"{output}.npy")

    def predict(x, kept=loaded):  # its variables go when it does
        (output,) = serve(**{key: tf.constant(x)}).values()
        return output.numpy()

    return {
        "predict": predict,
        "predict by command": by_command,
        "shape": serve.structured_input_signature[1][key].shape.as_list(),
        "operations": operations(serve.graph.as_graph_def()),
        "operations in file": operations(whole.meta_graphs[0].graph_def),
        "variables": [variable.name for variable in serve.graph.variables],
        "variables in file": [name for name, _ in stored],
        "shapes in file": collections.Counter(str(shape) for _, shape in stored),
    }


def read_tflite(path, x):
    interpreter = tf.lite.Interpreter(model_path=str(path))
    # Before tensors are allocated: then a delegate takes over some.
    types = collections.Counter(op["op_name"] for op in interpreter._get_ops_details())
    dtypes = {np.dtype(tensor["dtype"]).name for tensor in interpreter.get_tensor_details()}
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()

    def predict(x):
        interpreter.resize_tensor_input(source["index"], x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(source["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(target["index"])

    return {
        "predict": predict,
        "shape": [None if n == -1 else int(n) for n in source["shape_signature"]],
        "operations": types,
        "dtypes": dtypes,
    }


def read_onnx(path, x):
    import onnx
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (source,) = session.get_inputs()
    return {
        "predict": lambda x: session.run(None, {source.name: x})[0],
        "shape": [n if isinstance(n, int) else None for n in source.shape],
        "operations": collections.Counter(node.op_type for node in onnx.load(path).graph.node),
    }


READERS = {
    ".keras": read_keras,
    ".export": read_saved_model,
    ".save": read_saved_model,
    ".tflite": read_tflite,
    ".onnx": read_onnx,
}


def read(path):
    with np.load(path.parent / f"{path.name.partition('-')[0]}.npz") as inputs:
        x = inputs["x"]
    found = READERS[path.suffix](path, x)
    ways = {key: value for key, value in found.items() if key.startswith("predict")}
    for way, predict in ways.items():
        found[way] = attempt(lambda: {size: predict(x[:size]) for size in BATCHES})  # noqa: B023
    return found


def attempt(function):
    """What a function returns, or the error as text: the other results are wanted too."""
    try:
        return function()
    except Exception as error:  # whatever loading or running may raise
        return f"{type(error).__name__}: {error}"


def main(directory):
    results = {}
    try:
        import tfa_stochastic_depth  # noqa: F401
    except ImportError as error:
        results["import"] = str(error)
    for path in sorted(directory.iterdir()):
        if path.suffix in READERS:
            results[path.name] = attempt(lambda: read(path))  # noqa: B023
    results["modules"] = [name for name in sys.modules if name.startswith("tfa_")]
    (directory / "found").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
