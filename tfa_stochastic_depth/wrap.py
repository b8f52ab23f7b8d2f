"""`find_residuals` and `wrap_residuals`: read, find, rewrite."""

from tfa_stochastic_depth.layer import check_options
from tfa_stochastic_depth.read import read
from tfa_stochastic_depth.residuals import find
from tfa_stochastic_depth.rewrite import rewrite


def find_residuals(
    model, survival_prob=0.5, *, where=None, block_layers=(), nested="inner", merge_layers=None
):
    """Finds the residual blocks of a model and changes nothing: the dry run of `wrap_residuals`.

    A residual block is a sum of two tensors (`Add()`, `x + y`, `keras.ops.add`, `tf.add`) of which
    one, the branch, can be left out. Shortcut and branch are told apart by the paths that lead to
    them, never by their order. A sum that is no such block is a refusal, with the reason.

    Args:
        model: A built functional or Sequential `keras.Model`. Models nested in it are searched.
        survival_prob: Which survival probability each block gets: a float `p` in [0, 1], meaning
            `linear_decay(p)`, the paper's rule; a sequence with one float per block; or a function
            from a `Block` to a float.
        where: A function from a `Block` to a bool, for which blocks to take; `None` for all.
        block_layers: Layer classes that are whole residual blocks by themselves, with a sum
            inside their `call` (transformer layers). They are found inside other layers too, if
            the `call` of those does nothing but call layers and add.
        nested: Which of blocks inside blocks to take, "inner" (the innermost) or "outer".
        merge_layers: Layers that are sums by another name: a dict from a layer class to
            `(branch, factor)`, or to a function from the layer to that. Such a layer takes a list
            of two tensors and gives `x[1 - branch] + factor * x[branch]`. Those of
            InceptionResNetV2, `tfa.layers.StochasticDepth` and KerasCV's `StochasticDepth` are
            known.

    Returns:
        A `Residuals` with `blocks`, `refusals`, `expected_depth` and `expected_share`. Printed, it
        is a table; its `plot(path)` draws the model with its blocks.

    Raises:
        TypeError: If `model` is a subclassed model or no model of this Keras, or an argument is
            of another type than said above.
        ValueError: If `model` is not built, a probability is outside [0, 1], or there are more or
            fewer of them than blocks.

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import find_residuals
    >>> x = tf.keras.Input(shape=(8,))
    >>> y = tf.keras.layers.Dense(8, name="dense")(x)
    >>> y = tf.keras.layers.Add(name="sum")([x, y])
    >>> print(find_residuals(tf.keras.Model(x, y, name="tiny")))
    1 residual block in 'tiny'
    #  merge  shortcut  branch  layers  params  survival_prob
    -  -----  --------  ------  ------  ------  -------------
    1  sum    identity  dense   1       72      0.5
    expected depth: 0.5 of 1 block (50.0%)
    expected share of the branches' multiply-adds: 50.0%
    """
    return find(read(model, block_layers, merge_layers).graph, survival_prob, where, nested)


def wrap_residuals(
    model,
    survival_prob=0.5,
    *,
    mode="batch",
    rescale="inference",
    where=None,
    block_layers=(),
    nested="inner",
    merge_layers=None,
    replace_existing=True,
    share_layers=False,
    seed=None,
):
    """Builds a model like `model` that is trained with stochastic depth.

    Each residual block that `find_residuals` finds becomes one `StochasticDepth` layer, which has
    the name of the sum it replaces and holds the branch as a model of its own (`.layer`). All other
    layers, the structure and the names of inputs and outputs stay as they are. A Sequential model
    comes back as a functional one. The result is not compiled.

    Load pretrained weights before wrapping: the result has the same weights, in another order.

    Args:
        model: A built functional or Sequential `keras.Model`. A subclass that adds only methods
            (a `train_step`) comes back as that class.
        survival_prob: As in `find_residuals`: a float `p` in [0, 1] for the paper's linear decay
            from 1 to `p` over the blocks, a sequence of floats, or a function from a `Block`.
        mode: "batch": one switch per block and step, for the whole batch. "row": each sample on
            its own; the branches run on the kept samples only (see `StochasticDepth`).
        rescale: "inference" (the paper: branches are scaled by their survival probability at
            inference) or "training" (they are divided by it in training, so that a model trained
            without stochastic depth gives the same predictions when wrapped).
        where: As in `find_residuals`.
        block_layers: As in `find_residuals`. Such a layer is dropped by passing its input on.
        nested: As in `find_residuals`.
        merge_layers: As in `find_residuals`.
        replace_existing: Whether a random drop of the whole branch that the model already has at
            the end of a branch (EfficientNet, ConvNeXt, DropPath) gives way to this one. Sums
            that drop their branch themselves always do.
        share_layers: `False`: the result owns copies of all layers, and `model` stays as it was.
            `True`: the result is made of `model`'s own layers, so that training it trains `model`.
        seed: Integer from which each block gets a seed of its own, or `None` for
            seeds that follow from `keras.utils.set_random_seed`.

    Returns:
        A new, uncompiled `keras.Model`.

    Raises:
        TypeError: As for `find_residuals`.
        ValueError: As for `find_residuals`; if no block is found (the text lists every sum and why
            it is no block); or if a layer cannot be copied.

    Example:

    >>> import tensorflow as tf
    >>> from tfa_stochastic_depth import get_survival_probs, wrap_residuals
    >>> model = tf.keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3))
    >>> wrapped = wrap_residuals(model, 0.5)
    >>> get_survival_probs(wrapped)[0], get_survival_probs(wrapped)[-1]
    (0.96875, 0.5)
    """
    check_options(mode, rescale, seed)
    reading = read(model, block_layers, merge_layers)
    residuals = find(reading.graph, survival_prob, where, nested)
    options = {"mode": mode, "rescale": rescale}
    return rewrite(reading, residuals, options, replace_existing, share_layers, seed)
