"""Depth rules: which survival probability each block of a model gets.

A rule is any function from a block to its survival probability. A block has `index`, counted from
1, `count`, `name`, `params` and more (see `Block`).

>>> from types import SimpleNamespace
>>> names = ["conv2_block1_add", "conv3_block1_add", "conv4_block1_add", "conv5_block1_add"]
>>> four = [SimpleNamespace(index=i + 1, count=4, name=names[i]) for i in range(4)]
>>> one = [SimpleNamespace(index=1, count=1)]
>>> def show(rule, blocks=four):
...     print(*(round(rule(block), 4) for block in blocks))

The paper's, at both of its ends and in between, and where there is one block:

>>> show(linear_decay(0))
0.75 0.5 0.25 0.0
>>> show(linear_decay(0.5))
0.875 0.75 0.625 0.5
>>> show(linear_decay(1))
1.0 1.0 1.0 1.0
>>> show(linear_decay(0.5), one)
0.5

Other libraries count from another place. Here `rate` is what they call the drop rate. timm, and
ConvNeXt and Swin with it, goes from 0 in the first block to `rate` in the last:

>>> rate = 0.3
>>> timm = lambda block: 1 - rate * (block.index - 1) / max(block.count - 1, 1)
>>> show(timm)
1.0 0.9 0.8 0.7
>>> show(timm, one)
1.0

EfficientNet goes from 0 towards `rate`, which no block reaches. It also counts blocks that have no
shortcut, so that for its own models `existing()` is the exact rule:

>>> efficientnet = lambda block: 1 - rate * (block.index - 1) / block.count
>>> show(efficientnet)
1.0 0.925 0.85 0.775
>>> show(efficientnet, one)
1.0

The ResNets of tf-models have one probability for each of their stages 2 to 5. In Keras's ResNets
the stage is in the names of the blocks:

>>> tf_models = lambda block: 1 - rate * int(block.name[4]) / 5
>>> show(tf_models)
0.88 0.82 0.76 0.7
"""

import numbers
from collections.abc import Iterable, Mapping, Set

_TO_CHANGE = (
    " To change the probability of a built layer, assign a number to `layer.survival_prob`."
)


def check_survival_prob(value, argument="survival_prob"):
    """Returns `value` as a float in [0, 1].

    Args:
        value: A real number (Python or NumPy scalar) in [0, 1].
        argument: What to call the value in an error.

    Raises:
        TypeError: If `value` is not a real number (a bool, a string, a tensor, ...).
        ValueError: If it is outside [0, 1] or NaN.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"`{argument}` must be a number in [0, 1]. "
            f"Received: {value!r} (of type {type(value).__name__}). Convert arrays and tensors "
            f"with float().{_TO_CHANGE if argument == 'survival_prob' else ''}"
        )
    if not 0 <= value <= 1:
        raise ValueError(
            f"`{argument}` must be in [0, 1]: it is the probability that a branch is kept, "
            f"not that it is dropped. Received: {value!r}."
        )
    return float(value)


def linear_decay(final):
    """The paper's rule: block `l` of `L` survives with probability `1 - l / L * (1 - final)`.

    Early blocks extract features that all later ones use, so they are dropped least; the last
    block survives with probability `final`. Source: section 3 of arXiv 1603.09382.

    Args:
        final: Survival probability of the last block, a float in [0, 1].

    Returns:
        A rule: a function from a block (anything with `index`, counted from 1, and `count`) to its
        survival probability.

    Example:

    >>> from types import SimpleNamespace
    >>> rule = linear_decay(0.5)
    >>> [rule(SimpleNamespace(index=i, count=4)) for i in (1, 2, 3, 4)]
    [0.875, 0.75, 0.625, 0.5]
    """
    final = check_survival_prob(final, "final")
    return lambda block: 1.0 - block.index / block.count * (1.0 - final)


def constant(p):
    """The uniform rule: every block survives with probability `p`, a float in [0, 1]."""
    p = check_survival_prob(p, "p")
    return lambda block: p


def existing(default=1.0):
    """Takes each block's probability from the drop the model already had at the end of its branch.

    Such drops are a `Dropout` with a `noise_shape` of ones (EfficientNet), ConvNeXt's
    `StochasticDepth` and `DropPath` layers. `wrap_residuals` replaces them by default.

    Args:
        default: Survival probability of blocks without such a drop, a float in [0, 1].
    """
    default = check_survival_prob(default, "default")
    return lambda block: default if block.existing is None else block.existing


def probabilities(survival_prob, blocks):
    """Returns one float in [0, 1] for each of `blocks`.

    Args:
        survival_prob: A number `p`, meaning `linear_decay(p)`; or a sequence with one number per
            block; or a rule, called with each block.
        blocks: The blocks, first to last.

    Raises:
        TypeError: If `survival_prob` is none of the three, or a value is not a number.
        ValueError: If a sequence has another length, or a value is outside [0, 1].
    """
    if any(survival_prob is rule for rule in (linear_decay, constant, existing)):
        name = survival_prob.__name__
        raise TypeError(f"`survival_prob` is {name} itself. Call it to get a rule: {name}(0.5).")
    if callable(survival_prob):
        return [
            check_survival_prob(survival_prob(b), f"survival_prob(<block {b.name!r}>)")
            for b in blocks
        ]
    if isinstance(survival_prob, numbers.Real):
        rule = linear_decay(check_survival_prob(survival_prob))
        return [rule(b) for b in blocks]
    return check_sequence(
        survival_prob,
        len(blocks),
        "survival_prob",
        "block",
        "a number in [0, 1], a sequence with one number per block, or a function of a block",
    )


def check_sequence(values, count, argument, noun, expected=None):
    """Returns `values` as a list of `count` floats in [0, 1], or says what is wrong with it."""
    values = as_list(values, argument, noun, expected)
    if len(values) != count:
        raise ValueError(
            f"`{argument}` must have one number per {noun}, and there are {count} {noun}s. "
            f"Received: a sequence of {len(values)}."
        )
    return [check_survival_prob(p, f"{argument}[{i}]") for i, p in enumerate(values)]


def as_list(values, argument, noun, expected=None):
    """Returns a sequence as a list, or says that it is none."""
    unordered = isinstance(values, (str, bytes, Set, Mapping))
    # Arrays and tensors without an axis are `Iterable` by type and fail only when iterated.
    if unordered or not isinstance(values, Iterable) or getattr(values, "shape", None) == ():
        raise TypeError(
            f"`{argument}` must be {expected or f'a sequence with one number per {noun}'}. "
            f"Received: {values!r} (of type {type(values).__name__})."
        )
    return list(values)
