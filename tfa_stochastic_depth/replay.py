"""Calls and layers made once more: what building one model from another needs, either way."""

from __future__ import annotations

from tfa_stochastic_depth import _keras


def new_arguments(node, values):
    """The arguments of a call with new values in place of the old tensors."""
    return _keras.map_structure(
        lambda x: values[id(x)] if _keras.is_symbolic(x) else x, _keras.call_arguments(node)
    )


def record(node, outputs, values):
    """Notes what a call gives now, by what it gave."""
    values.update(zip(map(id, _keras.tensors_out(node)), _keras.flatten(outputs)))


class Copies:
    """Copies of layers and nested models, which get the state of their originals at the end.

    Args:
        way_out: What to do instead where a layer cannot be copied, for an error.
    """

    def __init__(self, way_out):
        self._way_out = way_out
        self._models = {}  # key -> (original, new one)
        self._layers = {}

    def layer(self, layer, key):
        """The one copy of a layer under a key."""
        if key not in self._layers:
            self._layers[key] = layer, _keras.copy_layer(layer, self._way_out)
        return self._layers[key][1]

    def model(self, model, key, build):
        """The one new model that stands for another under a key, made by `build()`."""
        if key not in self._models:
            self._models[key] = model, build()
        return self._models[key][1]

    def copy_state(self):
        """Gives copies the weights and trainable flags of their originals, from the outside in.

        Raises:
            ValueError: If two originals share a layer with weights, which their copies would not.
        """
        self._check_tied()
        for model, twin in reversed(self._models.values()):  # inner ones were made first
            twin.trainable = model.trainable
        for original, twin in self._layers.values():
            _keras.copy_state(original, twin, self._way_out)

    def twins(self):
        """Id of a layer, or of one inside -> its copy."""
        return {
            id(part): copy
            for original, twin in self._layers.values()
            for part, copy in zip(_keras.with_sublayers(original), _keras.with_sublayers(twin))
        }

    def _check_tied(self):
        originals = {id(layer): layer for layer, _ in self._layers.values()}.values()
        originals = [layer for layer in originals if _keras.weights(layer)]
        holders = _keras.holders(originals)
        for original in originals:
            for part in _keras.with_sublayers(original):
                other, *more = holders[id(part)]
                if more and _keras.weights(part):
                    raise ValueError(
                        f"The layer {part.name!r} is used by both {other.name!r} and "
                        f"{more[0].name!r}. Copies of them would not share it any more: "
                        f"{self._way_out}."
                    )
