"""Depth rules: which survival probability each block gets, and what is said of wrong ones."""

import fractions
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfa_stochastic_depth import constant, existing, linear_decay, survival
from tfa_stochastic_depth.survival import check_sequence, check_survival_prob, probabilities


def blocks(count, drops=()):
    """Blocks as the rules see them; `drops` are the probabilities their branches had already."""
    drops = list(drops) or [None] * count
    return [
        SimpleNamespace(index=i + 1, count=count, name=f"block{i + 1}", existing=drops[i])
        for i in range(count)
    ]


def has(*parts):
    """A pattern for `pytest.raises(match=)`: these texts, in this order, as they stand."""
    return "(?s)" + ".*".join(map(re.escape, parts))


# ------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        (0.5, [0.875, 0.75, 0.625, 0.5]),
        (0.2, [0.8, 0.6, 0.4, 0.2]),
        (0.0, [0.75, 0.5, 0.25, 0.0]),
        (1.0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_linear_decay_goes_down_by_equal_steps_to_the_final_value(final, expected):
    rule = linear_decay(final)
    assert [rule(block) for block in blocks(4)] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("final", [0.0, 0.1, 0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 3, 54])
def test_linear_decay_reaches_its_final_value_at_the_last_block(final, count):
    assert linear_decay(final)(blocks(count)[-1]) == pytest.approx(final, abs=1e-15)


@pytest.mark.parametrize("final", [0.0, 0.1, 0.3, 0.7, 0.9, 1.0])
def test_linear_decay_stays_a_probability(final):
    for count in range(1, 60):
        assert all(0 <= linear_decay(final)(block) <= 1 for block in blocks(count))


def test_linear_decay_gives_the_expected_depth_of_the_paper():
    """54 blocks of a ResNet-110 with a final value of 0.5: section 3 of arXiv 1603.09382."""
    assert sum(probabilities(linear_decay(0.5), blocks(54))) == pytest.approx(40.25)


def documented(name):
    """A rule as the documentation spells it, for a drop rate of 0.3."""
    (source,) = re.findall(rf">>> {name} = (lambda .*)", survival.__doc__)
    return eval(source, {"rate": 0.3})


@pytest.mark.parametrize("count", [1, 2, 12, 24])
def test_the_rule_of_timm_is_one_lambda(count):
    """`linspace(0, drop_path_rate, depth)`, in timm's vision transformers and ConvNeXts."""
    drops = np.linspace(0, 0.3, count)
    got = probabilities(documented("timm"), blocks(count))
    np.testing.assert_allclose(got, 1 - drops, atol=1e-15)


@pytest.mark.parametrize("count", [1, 2, 16, 39])
def test_the_rule_of_efficientnet_is_one_lambda(count):
    """`drop_connect_rate * b / blocks`, b counted from 0, in keras.applications."""
    drops = [0.3 * b / count for b in range(count)]
    got = probabilities(documented("efficientnet"), blocks(count))
    np.testing.assert_allclose(got, 1 - np.array(drops), atol=1e-15)


def test_the_rule_of_tf_models_is_one_lambda():
    """`init_rate * (i + 2) / 5` for all blocks of stage i of 4, here those of ResNet-50."""
    stages = [3, 4, 6, 3]
    names = [f"conv{i + 2}_block{j + 1}_add" for i in range(4) for j in range(stages[i])]
    drops = np.repeat([0.3 * (i + 2) / 5 for i in range(4)], stages)
    got = probabilities(documented("tf_models"), [SimpleNamespace(name=name) for name in names])
    np.testing.assert_allclose(got, 1 - drops, atol=1e-15)


def test_constant_is_the_same_for_all():
    assert probabilities(constant(0.3), blocks(3)) == [0.3, 0.3, 0.3]


def test_existing_takes_what_the_branch_had_and_keeps_the_others():
    assert probabilities(existing(), blocks(3, [0.9, None, 0.0])) == [0.9, 1.0, 0.0]


def test_existing_has_a_default_for_branches_without_a_drop():
    assert probabilities(existing(0.4), blocks(3, [0.9, None, 0.0])) == [0.9, 0.4, 0.0]


# ------------------------------------------------------------------ probabilities


@pytest.mark.parametrize("p", [0.2, np.float64(0.2), fractions.Fraction(1, 5)])
def test_a_number_means_linear_decay(p):
    assert probabilities(p, blocks(4)) == pytest.approx([0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("make", [list, tuple, np.array, iter], ids=lambda f: f.__name__)
def test_a_sequence_gives_one_number_per_block(make):
    got = probabilities(make([0.9, 0.0, 1.0]), blocks(3))
    assert got == [0.9, 0.0, 1.0]
    assert all(type(p) is float for p in got)


def test_a_rule_is_called_with_each_block_in_order():
    seen = []

    def rule(block):
        seen.append(block.name)
        return 1.0 / block.index

    assert probabilities(rule, blocks(2)) == [1.0, 0.5]
    assert seen == ["block1", "block2"]


@pytest.mark.parametrize("given", [0.5, linear_decay(0.5), []])
def test_no_blocks_no_probabilities(given):
    assert probabilities(given, []) == []


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_sequence_of_another_length_is_told_how_many_blocks_there_are(count):
    expected = f"one number per block, and there are {count} blocks."
    with pytest.raises(ValueError, match=has("`survival_prob`", expected, "Received: a", "of 3.")):
        probabilities([0.9, 0.8, 0.7], blocks(count))


@pytest.mark.parametrize(
    ("given", "error", "received"),
    [
        ("0.5", TypeError, "Received: '0.5' (of type str)."),
        (b"0.5", TypeError, "Received: b'0.5' (of type bytes)."),
        (None, TypeError, "Received: None (of type NoneType)."),
        (np.array(0.5), TypeError, "Received: array(0.5) (of type ndarray)."),
        (tf.constant(0.5), TypeError, "Received: <tf.Tensor"),
        (0.5j, TypeError, "Received: 0.5j (of type complex)."),
        (True, TypeError, "Received: True (of type bool)."),
        (1.5, ValueError, "Received: 1.5."),
        (math.nan, ValueError, "Received: nan."),
    ],
    ids=repr,
)
def test_survival_prob_that_is_no_probability_sequence_or_rule(given, error, received):
    with pytest.raises(error, match=has("`survival_prob` must be ", received)):
        probabilities(given, blocks(2))


@pytest.mark.parametrize(
    ("value", "error", "received"),
    [
        ("a", TypeError, "Received: 'a' (of type str)."),
        (None, TypeError, "Received: None (of type NoneType)."),
        (-0.1, ValueError, "Received: -0.1."),
        (math.nan, ValueError, "Received: nan."),
    ],
    ids=repr,
)
def test_an_error_names_the_place_in_the_sequence(value, error, received):
    with pytest.raises(error, match=has("`survival_prob[1]` must be ", received)):
        probabilities([0.5, value], blocks(2))


@pytest.mark.parametrize(
    ("value", "error", "received"),
    [
        (None, TypeError, "Received: None (of type NoneType)."),
        (2, ValueError, "Received: 2."),
    ],
)
def test_an_error_names_the_block_whose_rule_went_wrong(value, error, received):
    def rule(block):
        return value if block.index == 2 else 0.5

    with pytest.raises(error, match=has("`survival_prob(<block 'block2'>)` must be ", received)):
        probabilities(rule, blocks(3))


def test_check_sequence_speaks_of_what_its_caller_has():
    with pytest.raises(ValueError, match=has("`probs`", "one number per layer", "2 layers")):
        check_sequence([0.5], 2, "probs", "layer")
    with pytest.raises(TypeError, match=has("`probs`", "a sequence with one number per layer")):
        check_sequence(None, 2, "probs", "layer")


# ------------------------------------------------------------------ one number


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, 0.3, np.float64(0.3), np.int64(1)], ids=repr)
def test_check_survival_prob_gives_a_float(value):
    checked = check_survival_prob(value)
    assert type(checked) is float
    assert checked == value


def test_check_survival_prob_takes_numpy_float32():
    assert check_survival_prob(np.float32(0.3)) == float(np.float32(0.3))


WRONG_NUMBERS = [
    (-0.1, ValueError, "Received: -0.1."),
    (-1e-9, ValueError, "Received: -1e-09."),
    (1.0000001, ValueError, "Received: 1.0000001."),
    (2, ValueError, "Received: 2."),
    (math.nan, ValueError, "Received: nan."),
    (math.inf, ValueError, "Received: inf."),
    (-math.inf, ValueError, "Received: -inf."),
    (True, TypeError, "Received: True (of type bool)."),
    (False, TypeError, "Received: False (of type bool)."),
    (np.bool_(True), TypeError, "(of type bool"),
    ("0.5", TypeError, "Received: '0.5' (of type str)."),
    (None, TypeError, "Received: None (of type NoneType)."),
    (0.5j, TypeError, "Received: 0.5j (of type complex)."),
    ([0.5], TypeError, "Received: [0.5] (of type list)."),
    (np.array(0.5), TypeError, "Received: array(0.5) (of type ndarray)."),
    (tf.constant(0.5), TypeError, "Received: <tf.Tensor"),
]


@pytest.mark.parametrize(("value", "error", "received"), WRONG_NUMBERS, ids=repr)
def test_check_survival_prob_refuses(value, error, received):
    with pytest.raises(error, match=has("`survival_prob` must be ", "in [0, 1]", received)):
        check_survival_prob(value)


@pytest.mark.parametrize(
    ("rule", "argument"), [(linear_decay, "final"), (constant, "p"), (existing, "default")]
)
@pytest.mark.parametrize(("value", "error", "received"), WRONG_NUMBERS, ids=repr)
def test_a_rule_names_its_own_argument(rule, argument, value, error, received):
    with pytest.raises(error, match=has(f"`{argument}` must be ", received)):
        rule(value)


def test_a_value_outside_is_told_that_it_is_kept_not_dropped():
    with pytest.raises(ValueError, match="probability that a branch is kept, not that it is drop"):
        check_survival_prob(50)


def test_a_value_of_the_wrong_type_is_told_how_to_change_a_built_layer():
    with pytest.raises(TypeError, match="assign a number to `layer.survival_prob`"):
        check_survival_prob(tf.constant(0.5))
