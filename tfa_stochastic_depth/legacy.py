"""`load_legacy_model`, and stand-ins for the layers that tensorflow-addons and KerasCV saved."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import zipfile

import h5py
import tensorflow as tf

from tfa_stochastic_depth import _keras
from tfa_stochastic_depth.errors import first_line
from tfa_stochastic_depth.modernize import modern_name, modernize

keras = _keras.keras


def _in_training(training, drawn, otherwise):
    """A factor that is drawn in training only."""
    if tf.is_tensor(training):
        return tf.where(tf.cast(training, tf.bool), drawn(), otherwise)
    return drawn() if training else otherwise


def _draw(shape, survival_prob, dtype, seed=None):
    """Ones with the given probability, and zeros."""
    return tf.cast(tf.random.uniform(shape, seed=seed) < survival_prob, dtype)


class _DropSum(keras.layers.Layer):
    """`x[0] + b * x[1]`, with one switch `b` for the batch, and its mean in its place at inference.

    A subclass has `_keep`, the probability that the switch is 1.
    """

    def call(self, x, training=None):
        if not isinstance(x, (list, tuple)) or len(x) != 2:
            raise ValueError(
                f"{self.name!r} ({type(self).__name__}) must be called with a list of two tensors, "
                f"[shortcut, branch]. Received: {x!r}."
            )
        keep, dtype = self._keep(), x[1].dtype
        factor = _in_training(training, lambda: _draw((), keep, dtype), tf.constant(keep, dtype))
        return x[0] + factor * x[1]

    def compute_output_shape(self, input_shape):
        return input_shape[0]


@_keras.register
class AddonsStochasticDepth(_DropSum):
    """Does what `tfa.layers.StochasticDepth` does; `wrap_residuals` replaces it.

    Args:
        survival_probability: Probability in [0, 1] that the branch is kept.
        **kwargs: Those of every Keras layer.
    """

    def __init__(self, survival_probability=0.5, **kwargs):
        super().__init__(**kwargs)
        self.survival_probability = survival_probability

    def _keep(self):
        return self.survival_probability

    def get_config(self):
        return {**super().get_config(), "survival_probability": self.survival_probability}


@_keras.register
class KerasCVStochasticDepth(_DropSum):
    """Does what `keras_cv.layers.StochasticDepth` does; `wrap_residuals` replaces it.

    Args:
        rate: Probability in [0, 1] that the branch is dropped.
        **kwargs: Those of every Keras layer.
    """

    def __init__(self, rate=0.5, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def _keep(self):
        return 1.0 - self.rate

    def get_config(self):
        return {**super().get_config(), "rate": self.rate}


@_keras.register
class KerasCVDropPath(keras.layers.Layer):
    """Does what `keras_cv.layers.DropPath` does; `wrap_residuals` replaces it.

    In training each sample is dropped on its own, and those that are kept are divided by
    `1 - rate`. (At rate 1, where KerasCV divides zero by zero, the result is zero.)

    Args:
        rate: Probability in [0, 1] that a sample is dropped.
        seed: Integer or `None`, the seed of TensorFlow's random operation.
        **kwargs: Those of every Keras layer.
    """

    def __init__(self, rate=0.5, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed = seed

    def call(self, x, training=None):
        keep, seed, dtype = 1.0 - self.rate, self.seed, x.dtype
        shape = tf.concat([tf.shape(x)[:1], tf.ones(len(x.shape) - 1, tf.int32)], 0)
        kept = lambda: _draw(shape, keep, dtype, seed) / (keep or 1.0)  # noqa: E731
        return x * _in_training(training, kept, tf.constant(1.0, dtype))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


# The names that the originals are registered, and saved, under.
STAND_INS = {
    "Addons>StochasticDepth": AddonsStochasticDepth,
    "keras_cv>StochasticDepth": KerasCVStochasticDepth,
    "keras_cv>DropPath": KerasCVDropPath,
}


def load_legacy_model(path, custom_objects=None):
    """Loads a model that was saved with layers of tensorflow-addons or KerasCV, without them.

    It reads what `model.save` of Keras 2 and Keras 3 wrote. `tfa.layers.StochasticDepth` and
    KerasCV's `StochasticDepth` and `DropPath` become layers of this package that do the same, in
    training and at inference. They can be saved, and `wrap_residuals(model, existing())` turns the
    blocks that they are part of into `StochasticDepth` layers of the same survival probabilities
    (with `mode="row", rescale="training"` for `DropPath`).

    On Keras 3 functional and Sequential models that Keras 2 saved are rewritten: layers by their
    configuration, weights by their order, and the operators `+`, `-`, `*` and `/` between tensors.
    Code in the file (`Lambda` layers) is not run.

    Args:
        path: The `.keras` or `.h5` file, or, on Keras 2 only, the directory of a SavedModel.
        custom_objects: Dict from names to the classes or functions of your own that the model
            needs, or `None`.

    Returns:
        A `keras.Model` that is not compiled.

    Raises:
        TypeError: If `path` is no path, or `custom_objects` no dict.
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If what is there is no saved model, or cannot be loaded by this Keras. The
            message says why.

    Example:

    >>> import os, tempfile
    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import existing, load_legacy_model, wrap_residuals
    >>> x = tf.keras.Input(shape=(4,))
    >>> y = tf.keras.layers.Add()([x, tf.keras.layers.Dense(4)(x)])
    >>> path = os.path.join(tempfile.mkdtemp(), "model.keras")
    >>> tf.keras.Model(x, y).save(path)
    >>> model = load_legacy_model(path)
    >>> wrapped = wrap_residuals(model, existing(default=0.8))
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`path` must be a path to a saved model. Received: {path!r}.")
    if not isinstance(custom_objects, (dict, type(None))):
        raise TypeError(
            "`custom_objects` must be a dict from names to classes or functions, or None. "
            f"Received: {custom_objects!r}."
        )
    path = os.fspath(path)
    config, version = _read(path)
    rewrite = _keras.IS_KERAS_3 and version < "3"
    if version >= "3" and not _keras.IS_KERAS_3:
        raise ValueError(
            f"`path` must be a model that this Keras ({_keras.NAME}) can read, and Keras {version} "
            f"saved it: load it with Keras 3. Received: {path!r}."
        )
    try:
        with keras.utils.custom_object_scope({**STAND_INS, **(custom_objects or {})}):
            model = _rewritten(path, config) if rewrite else _keras.load_safely(path)
    except Exception as error:  # whatever a file, its classes or Keras may hold ready
        reason = textwrap.shorten(first_line(error), 400).rstrip(".")
        raise ValueError(
            f"`path` holds a model that cannot be loaded here ({_keras.NAME}): {reason}. Classes "
            "and functions of your own must be in `custom_objects`, and code in the file (Lambda "
            f"layers) is not run. Received: {path!r}."
        ) from error
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`path` must hold a keras.Model, with its layers, and holds something else "
            f"({type(model).__name__}). Received: {path!r}."
        )
    return model


def _rewritten(path, config):
    """A model of Keras 3 from a file of Keras 2."""
    model = _keras.from_modern_config(modernize(config))
    _check_order(model, config["config"])
    if zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as file:
            model.load_weights(file.extract(_WEIGHTS, folder))
    else:
        model.load_weights(path)
    return model


def _check_order(model, config):
    """Raises an error unless layers are in the order of the file, by which weights are found."""
    saved = {modern_name(x["config"]["name"]): x["config"] for x in config["layers"]}
    ours = [layer.name for layer in model.layers if layer.weights]
    if ours != [name for name in saved if name in ours]:
        raise ValueError("the layers are in another order than Keras gives them.")
    for name in ours:
        if "layers" in saved[name]:
            _check_order(model.get_layer(name), saved[name])


# ------------------------------------------------------------------ what is at a path

_WEIGHTS = "model.weights.h5"


def _read(path):
    """The config of a saved model and the version of Keras that wrote it.

    Of a SavedModel, which Keras 2 reads by itself, they are `{}` and "2".

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is no saved model, or a SavedModel on Keras 3.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"`path` must be a saved model, and there is nothing. Received: {path!r}."
        )
    if os.path.isdir(path):
        _check_directory(path)
        return {}, "2"
    try:
        read = {".keras": _read_zip, ".h5": _read_h5, ".hdf5": _read_h5}[os.path.splitext(path)[1]]
        return read(path)
    except (KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            "`path` must be a model that Keras saved, as .keras or .h5, and this is none, or only "
            f"weights, or not all of one ({type(error).__name__}: {error}). Received: {path!r}."
        ) from error


def _check_directory(path):
    if not os.path.exists(os.path.join(path, "saved_model.pb")):
        raise ValueError(
            "`path` must be a .keras or .h5 file or a SavedModel, and the directory holds no "
            f"saved_model.pb. Received: {path!r}."
        )
    if _keras.IS_KERAS_3:
        raise ValueError(
            "`path` is a SavedModel, of which Keras 3 can run the graph and not make the layers. "
            "Load it in a process with TF_USE_LEGACY_KERAS=1 (and tf_keras installed), where "
            "load_legacy_model reads it, save it as .keras there, and load that file here. "
            f"Received: {path!r}."
        )


def _read_zip(path):
    with zipfile.ZipFile(path) as file:
        config, metadata = (json.loads(file.read(f"{x}.json")) for x in ("config", "metadata"))
        file.getinfo(_WEIGHTS)
    return config, str(metadata["keras_version"])


def _read_h5(path):
    with h5py.File(path, "r") as file:
        return json.loads(file.attrs["model_config"]), str(file.attrs["keras_version"])
