"""The ways to train one model that are compared: what each does in a step, and how much of it.

`executed` is the share of the multiply-adds in the branches that a step computes (forward; the
backward pass follows it). For a random variant it differs from step to step, and is found from the
switches that were really drawn.
"""

import contextlib
import functools

import numpy as np
import tensorflow as tf

from masks import MaskedSum, NotHere, tfa_layer
from models import add
from switches import Switches
from tfa_stochastic_depth import constant, find_residuals, wrap_residuals

keras = tf.keras

EXECUTIONS = ("graph", "xla")
DTYPES = ("float32", "mixed_bfloat16")
EXACT = {"1": constant(1.0), "0": constant(0.0)}


def names(case):
    """The names of the variants of a `Case`, `plain` first: what each does, and its depth rule."""
    rules = [*case.rules, *EXACT]
    return [
        "plain",
        *(f"{kind} {case.main}" for kind in ("mask", "mask/sample", "tfa")),
        *(f"batch {label}" for label in rules),
        *(f"row {label}" for label in [*case.rules, *case.row_rules]),
        "plain/half",
        "plain predict",
        f"ours predict {case.main}",
    ]


class Variant:
    """One way to run a model.

    Attributes:
        model: The model.
        function: The compiled function of one step.
        x: What it is called with.
        share: The executed share, where it is the same in every step.
        switches: The `Switches`, where it is not.
    """

    def __init__(self, model, function, x, share=1.0, switches=None):
        self.model = model
        self._function = function
        self._x = x
        self._share = share
        self.switches = switches
        self._steps = 0

    def trace(self):
        """Traces the step without running it."""
        self._function.get_concrete_function(self._x)

    def step(self):
        """Does one step, or one prediction. Returns a scalar tensor."""
        return self._function(self._x)

    def fit_step(self):
        """Compiles the model and does one training step of Keras."""
        self.model.compile("sgd", "mse")
        target = tf.zeros((len(self._x), *self.model.output_shape[1:]))
        self.model.train_on_batch(self._x, target)

    def before_step(self):
        """Notes what the next step is going to execute."""
        self._steps += 1
        if self.switches is not None:
            self.switches.record()

    def executed(self):
        """The executed share of each step noted."""
        if self.switches is None:
            return np.full(self._steps, self._share)
        return self.switches.executed()


class Setting:
    """One model in one execution and dtype, and the variants of it.

    Args:
        case: The `Case`.
        execution: "graph" (`tf.function`) or "xla" (with `jit_compile=True`).
        dtype: The global policy of Keras that the models are made under.
        quick: Whether to take the small sizes.
        batch_size: Another number of samples than the case's.
    """

    def __init__(self, case, execution="graph", dtype="float32", quick=False, batch_size=None):
        self.case = case
        self.execution = execution
        self.dtype = dtype
        self.quick = quick
        self.batch_size = batch_size or (4 if quick else case.batch_size)
        self.plain = self._build(add)
        self.x = tf.random.stateless_normal((self.batch_size, *self.plain.input_shape[1:]), (1, 2))

    def make(self, name):
        """Makes the variant of a name; raises `NotHere` if it cannot run."""
        kind, _, label = name.partition(" ")
        if name.endswith("predict") or kind == "ours":
            model = self.plain if kind == "plain" else self._wrap(label.partition(" ")[2])
            return Variant(model, self._predict(model), self.x)
        if kind == "plain":
            return self._variant(self.plain)
        if kind == "plain/half":
            half = self.x[: self.batch_size // 2]
            return Variant(self.plain, self._train(self.plain), half, len(half) / len(self.x))
        if kind in ("batch", "row"):
            return getattr(self, f"_{kind}")(label)
        return self._variant(self._build(self._merging(kind, self._blocks(label))))

    def branch_share(self):
        """The share of the model's multiply-adds that is in the branches."""
        found = find_residuals(self.plain)
        return sum(b.macs for b in found.blocks) / sum(c.macs or 0 for c in found.graph.calls)

    def _build(self, merge):
        with _policy(self.dtype):
            return self.case.build(self.quick, merge=merge)

    def _rule(self, label):
        return {**self.case.rules, **self.case.row_rules, **EXACT}[label]

    def _blocks(self, label):
        return find_residuals(self.plain, self._rule(label)).blocks

    def _wrap(self, label, **kwargs):
        with _policy(self.dtype):
            return wrap_residuals(self.plain, self._rule(label), seed=1, **kwargs)

    def _batch(self, label):
        if self.execution == "xla" and self.case.convolves:
            raise NotHere("XLA on CPUs has no fast convolution inside a conditional")
        model = self._wrap(label)
        costs = [block.macs for block in self._blocks(label)]
        return self._variant(model, switches=Switches(model, costs))

    def _row(self, label):
        blocks, size = self._blocks(label), self.batch_size
        executed = sum(round(b.survival_prob * size) / size * b.macs for b in blocks)
        model = self._wrap(label, mode="row")
        return self._variant(model, executed / sum(b.macs for b in blocks))

    def _merging(self, kind, blocks):
        """A `merge` function that takes the survival probabilities of `blocks` one by one."""
        if kind == "tfa":
            layer = tfa_layer()
        else:
            layer = functools.partial(MaskedSum, per_sample=kind == "mask/sample")
        probs = iter([block.survival_prob for block in blocks])
        return lambda shortcut, branch: layer(next(probs))([shortcut, branch])

    def _variant(self, model, share=1.0, switches=None):
        return Variant(model, self._train(model), self.x, share, switches)

    def _compiled(self, function):
        jit = {"jit_compile": True} if self.execution == "xla" else {}
        return tf.function(function, **jit)

    def _predict(self, model):
        return self._compiled(lambda x: tf.reduce_sum(model(x, training=False)))

    def _train(self, model):
        """One step of SGD on a fixed loss."""
        optimizer = keras.optimizers.SGD(1e-6)
        weights = model.trainable_variables
        optimizer.build(weights)

        def step(x):
            with tf.GradientTape() as tape:
                y = tf.cast(model(x, training=True), tf.float32)
                loss = tf.reduce_mean(tf.square(y))
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        return self._compiled(step)


@contextlib.contextmanager
def _policy(name):
    """Makes what is built inside follow a dtype policy."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)
