"""What `_keras.py` takes for granted about Keras and does not find in its documentation.

One small test for each, that touches nothing of this package. When Keras changes one, the test
that fails says what breaks.
"""

import inspect
import random
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

keras = tf.keras
L = keras.layers
KERAS_3 = hasattr(keras, "ops")


def functional():
    """One input, one dense layer, and a sum: a model and its tensors."""
    x = keras.Input((4,), name="x")
    y = L.Dense(4, name="dense")(x)
    z = L.Add(name="sum")([x, y])
    return keras.Model(x, z, name="model"), x, y, z


def nodes(model):
    """The records of a model's calls by the name of what is called."""
    depths = model._nodes_by_depth
    listed = [node for depth in sorted(depths, reverse=True) for node in depths[depth]]
    return {(node.operation if KERAS_3 else node.layer).name: node for node in listed}


# ------------------------------------------------------------------ the graph of a model


def test_nodes_by_depth_lists_the_calls_that_make_all_tensors_of_a_model():
    """Else `calls` cannot read a model: it goes from the outputs back to the inputs."""
    model, x, y, z = functional()
    listed = nodes(model)
    assert set(listed) == {"x", "dense", "sum"}
    made = [t for node in listed.values() for t in tf.nest.flatten(node.outputs)]
    assert {id(t) for t in made} == {id(t) for t in (x, y, z)}


def test_nodes_by_depth_lists_calls_of_this_model_only():
    """Else a layer's calls in other models would be taken for its calls in this one."""
    model, x, y, _ = functional()
    keras.Model(x, model.get_layer("dense")(y))
    depths = model._nodes_by_depth
    assert sum(len(depths[depth]) for depth in depths) == 3


def test_a_node_knows_its_callee_arguments_and_outputs():
    """Else `callee`, `call_arguments` and `tensors_out` cannot read a call."""
    model, x, y, z = functional()
    node = nodes(model)["sum"]
    if KERAS_3:
        callee, args, kwargs = node.operation, node.arguments.args, node.arguments.kwargs
    else:
        callee, args, kwargs = node.layer, node.call_args, node.call_kwargs
    assert callee is model.get_layer("sum")
    assert [id(t) for t in tf.nest.flatten(list(args))] == [id(x), id(y)]
    assert not kwargs
    assert [id(t) for t in tf.nest.flatten(node.outputs)] == [id(z)]


def test_arguments_keep_names_constants_and_structures():
    """Else a call cannot be repeated as it was written."""

    class Take(L.Layer):
        def call(self, x, pair=None, factor=1.0):
            return (x + pair["a"][0]) * factor

    x = keras.Input((4,))
    y = Take(name="take")(x, pair={"a": [x]}, factor=2.0)
    node = nodes(keras.Model(x, y))["take"]
    kwargs = node.arguments.kwargs if KERAS_3 else node.call_kwargs
    assert kwargs["factor"] == 2.0
    assert kwargs["pair"]["a"][0] is x


def test_the_structure_of_inputs_and_outputs_is_kept_with_single_lists():
    """Else `signature` loses it: `model.input` unwraps a list of one."""
    model, x, _, z = functional()
    dicts = keras.Model({"x": x}, {"z": z})
    if KERAS_3:
        assert dicts._inputs_struct["x"] is x and dicts._outputs_struct["z"] is z
        assert model._inputs_struct is x and model._outputs_struct is z
    else:
        assert dicts._nested_inputs["x"] is x and dicts._nested_outputs["z"] is z
        assert model._nested_inputs is x and model._nested_outputs is z


def test_a_tensor_knows_the_layer_that_made_it():
    """Else `copy_input` does not find the input layer, and `is_symbolic` no symbolic tensor."""
    model, x, _, z = functional()
    assert x._keras_history[0] is model.get_layer("x")
    assert z._keras_history[0] is model.get_layer("sum")
    assert not hasattr(tf.constant(1.0), "_keras_history")
    if KERAS_3:
        assert isinstance(x, keras.KerasTensor)


def test_an_input_layer_is_made_anew_from_its_configuration():
    """Else `copy_input` cannot copy names, shapes, dtypes and sparseness."""
    x = keras.Input((4,), batch_size=2, dtype="int32", sparse=True, name="ids")
    layer = x._keras_history[0]
    copy = type(layer).from_config(layer.get_config()).output
    assert copy is not x
    assert (copy._keras_history[0].name, tuple(copy.shape)) == ("ids", (2, 4))
    assert tf.as_dtype(copy.dtype) == tf.int32
    if KERAS_3:
        assert copy.sparse
    else:
        assert isinstance(copy.type_spec, tf.SparseTensorSpec)


def test_the_class_of_functional_models_has_the_call_that_they_run():
    """Else `functional` cannot tell them from subclassed models."""
    model, *_ = functional()

    class OnlyMethods(keras.Model):
        def answer(self):
            return 42

    class OwnCall(keras.Model):
        def call(self, x):
            return x

    inputs, outputs = model.input, model.output
    assert type(model).call is not keras.Model.call
    assert type(OnlyMethods(inputs, outputs)).call is type(model).call
    assert type(OwnCall(inputs, outputs)).call is not type(model).call


def test_a_functional_subclass_has_the_constructors_of_kerass_classes_only():
    """Else `rebuild` takes them for constructors of its own, and loses the class."""

    class OnlyMethods(keras.Model):
        pass

    model, *_ = functional()
    subclass = type(OnlyMethods(model.input, model.output))
    library = {*keras.Model.__mro__, *type(model).__mro__}
    assert [c.__name__ for c in subclass.__mro__ if c not in library] == ["OnlyMethods"]


def test_a_sequential_model_holds_a_functional_one_once_it_is_built():
    """Else `functional` cannot read it."""
    unbuilt = keras.Sequential([L.Dense(4)])
    built = keras.Sequential([keras.Input((4,)), L.Dense(4, name="dense")])
    if KERAS_3:
        assert unbuilt._functional is None
        assert "dense" in nodes(built._functional)
    else:
        assert not hasattr(unbuilt, "_nodes_by_depth")
        assert "dense" in nodes(built)


def test_losses_of_tensors_have_negative_depths_or_do_not_exist():
    """Else `check_no_side_losses` does not see what a rebuilt model would lose."""
    model, *_ = functional()
    assert min(model._nodes_by_depth) == 0
    if KERAS_3:
        with pytest.raises(NotImplementedError):  # what Keras says: it has no such losses
            model.add_loss(0.0)
    else:
        model.add_loss(tf.reduce_mean(model.output))
        assert min(model._nodes_by_depth) < 0


def test_names_are_unique_in_a_model():
    """Why one `Add` layer that is called twice needs two names when it becomes two layers."""
    x = keras.Input((4,))
    with pytest.raises(ValueError, match="should be unique"):
        keras.Model(x, L.ReLU(name="same")(L.ReLU(name="same")(x)))


# ------------------------------------------------------------------ sums and other operations


def test_a_sum_by_operator_is_called_as_expected():
    """Else `addends` does not see `x + y`."""
    _, x, y, _ = functional()
    op = (x + y)._keras_history[0]
    if KERAS_3:
        assert not isinstance(op, L.Layer)
        assert type(op).__name__ == type(keras.ops.add(x, y)._keras_history[0]).__name__ == "Add"
    else:
        assert op.symbol == "__operators__.add"
        assert tf.add(x, y)._keras_history[0].symbol == "math.add"
        assert tf.math.add_n([x, y])._keras_history[0].symbol == "math.add_n"


def test_the_operands_of_a_sum_are_where_they_are_looked_for():
    """Else `addends` reads the wrong tensors, or one of two."""
    _, x, y, _ = functional()
    calls = {"+": x + y}
    if KERAS_3:
        calls["by name"] = keras.ops.add(x1=x, x2=y)
    else:
        calls["by name"] = tf.add(x=x, y=y)
    for total in calls.values():
        node = nodes(keras.Model(x, total))[total._keras_history[0].name]
        args = node.arguments.args if KERAS_3 else node.call_args
        kwargs = node.arguments.kwargs if KERAS_3 else node.call_kwargs
        operands = [*args, *(kwargs[k] for k in ("x", "x1", "y", "x2") if k in kwargs)]
        assert [id(t) for t in operands] == [id(x), id(y)]


def test_a_constant_operand_stays_a_constant():
    """Else `x + 1` would be taken for a merge."""
    x = keras.Input((4,))
    y = x + 1.0
    node = nodes(keras.Model(x, y))[y._keras_history[0].name]
    args = node.arguments.args if KERAS_3 else node.call_args
    assert args[0] is x and float(args[1]) == 1.0


def test_add_layers_sum_in_merge_function():
    """Else `addends` cannot tell a subclass that does something else."""
    assert callable(L.Add._merge_function)
    for layer in (L.Average, L.Maximum, L.Multiply):
        assert layer._merge_function is not L.Add._merge_function


def test_keras_2_slices_in_a_layer_of_this_name():
    """Else `is_projection` does not know a slice. Keras 3 has an operation, GetItem."""
    x = keras.Input((4, 4))
    op = x[:, 1:]._keras_history[0]
    assert type(op).__name__ == ("GetItem" if KERAS_3 else "SlicingOpLambda")


def test_operations_are_made_anew_from_their_configuration():
    """Else `copy_layer` cannot copy them."""
    x = keras.Input((4,))
    for y in (x + x, x * 2.0, x[:, 1:], -x):
        op = y._keras_history[0]
        copy = type(op).from_config(op.get_config())
        assert copy is not op and copy.name == op.name


# ------------------------------------------------------------------ layers


def test_flatten_layers_gives_the_layers_directly_inside_in_order():
    """Else `sublayers` misses some, and with them weights, losses and trainable flags."""

    class Outer(L.Layer):
        def __init__(self):
            super().__init__()
            self.first = L.Dense(2, name="first")
            self.rest = [L.Dense(2, name="second"), {"third": L.Dense(2, name="third")}]
            self.model = keras.Sequential([L.Dense(2, name="inside")], name="model")

    found = Outer()._flatten_layers(include_self=False, recursive=False)
    assert [layer.name for layer in found] == ["first", "second", "third", "model"]


def test_flatten_layers_of_a_model_and_of_wrappers():
    model, *_ = functional()
    found = [x.name for x in model._flatten_layers(include_self=False, recursive=False)]
    assert found == ["x", "dense", "sum"]
    wrapper = L.TimeDistributed(L.Dense(2, name="dense"))
    (inside,) = wrapper._flatten_layers(include_self=False, recursive=False)
    assert inside.name == "dense"


def test_a_lambda_layer_keeps_what_it_was_made_of():
    """Else `copy_layer` cannot copy one: Keras refuses to load its code from a configuration."""
    function = lambda t, by: t * by  # noqa: E731
    layer = L.Lambda(function, output_shape=(4,), arguments={"by": 2}, name="scale")
    assert layer.function is function
    assert layer.arguments == {"by": 2}
    assert tuple(layer._output_shape) == (4,)
    assert layer.mask is None


def test_a_layer_gives_its_dtype_policy_and_takes_it():
    """Else `policy_like` and `output_policy` cannot hand one on."""
    policy = L.Dense(2, dtype="mixed_float16").dtype_policy
    layer = L.Dense(2, dtype=policy)
    assert (layer.compute_dtype, layer.dtype_policy.name) == ("float16", "mixed_float16")


def test_names_of_policies():
    """Else `policy_for` names none."""
    for name, compute in (("mixed_float16", "float16"), ("float64", "float64")):
        assert L.Dense(2, dtype=name).compute_dtype == compute


def test_a_weight_can_be_kept_out_of_autocasting():
    """Else the survival probability of a float16 layer would be rounded to float16."""
    seen = []

    class Layer(L.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_float16")
            keep = {"autocast" if KERAS_3 else "experimental_autocast": False}
            self.p = self.add_weight(
                name="p", shape=(), dtype="float32", initializer="ones", trainable=False, **keep
            )

        def call(self, x):
            seen.append(tf.convert_to_tensor(self.p).dtype)
            return x

    Layer()(tf.ones((1, 1)))
    assert set(seen) == {tf.float32}


# ------------------------------------------------------------------ losses


class Lossy(L.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return x


def test_the_losses_of_a_call_are_in_a_list_of_the_layer():
    """Else `collect_losses` cannot take them out of a tf.cond."""
    layer = Lossy()
    layer(tf.ones((2, 3)))
    recorded = layer._losses if KERAS_3 else layer._eager_losses
    assert [float(loss) for loss in recorded] == [6.0]
    assert [float(loss) for loss in layer.losses] == [6.0]


def test_records_of_calls_can_be_taken_back():
    """Else `open_layer` leaves its traces in the layers that it called."""
    x = keras.Input((4,))
    dense, relu = L.Dense(4), L.ReLU()
    y = relu(dense(x))
    first = [*dense._inbound_nodes], [*dense._outbound_nodes]
    assert list(map(len, first)) == [1, 1]
    again = keras.Model(x, relu(dense(x)))
    assert len(dense._inbound_nodes) == len(dense._outbound_nodes) == 2
    del dense._inbound_nodes[1:], dense._outbound_nodes[1:]
    assert ([*dense._inbound_nodes], [*dense._outbound_nodes]) == first
    value = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(again(value), keras.Model(x, y)(value))


def test_losses_that_open_layer_looks_for_have_lists():
    kinds = ["_losses"] if KERAS_3 else ["_losses", "_eager_losses", "_callable_losses"]
    assert all(getattr(L.Dense(1), kind) == [] for kind in kinds)


def test_a_layer_says_whether_it_casts_its_inputs():
    """Else `open_layer` does not know whether to cast in its place."""
    casts = "autocast" if KERAS_3 else "_autocast"
    assert getattr(L.Dense(1), casts) is True
    assert getattr(L.Dense(1, autocast=False), casts) is False


def test_loading_can_be_told_not_to_run_code():
    """Else `load_safely` cannot keep Keras 2 from it; Keras 3 is told by default."""
    layer = L.Lambda(lambda x: x)
    config = layer.get_config()
    if KERAS_3:
        with pytest.raises(ValueError, match="lambda"):
            L.Lambda.from_config(config)
        return
    home = sys.modules[L.Lambda.__module__]
    with home.serialization_lib.SafeModeScope(True):
        with pytest.raises(ValueError, match="lambda"):
            L.Lambda.from_config(config)


def test_losses_taken_out_of_the_list_are_gone():
    layer = Lossy()
    layer(tf.ones((2, 3)))
    del (layer._losses if KERAS_3 else layer._eager_losses)[0:]
    if not KERAS_3:
        del layer._losses[:]
    assert layer.losses == []


def test_a_symbolic_call_leaves_a_loss_of_its_own_on_keras_2():
    """Why `collect_losses` empties `_losses` too: the list is read when the eager one is empty."""
    layer = Lossy()
    layer(keras.Input((3,)))
    if KERAS_3:
        assert not hasattr(layer, "_eager_losses")
    else:
        assert layer._eager_losses == [] and len(layer._losses) == 1


# ------------------------------------------------------------------ masks


def test_masks_are_an_attribute_of_tensors():
    """Else `mask_of` and `set_mask` do not reach the layers that follow."""
    x = tf.constant([[1, 0]])
    y = L.Embedding(3, 2, mask_zero=True)(x)
    np.testing.assert_array_equal(np.asarray(y._keras_mask), [[True, False]])
    seen = []

    class See(L.Layer):
        def call(self, x, mask=None):
            seen.append(mask)
            return x

    value = tf.ones((1, 2, 3))
    value._keras_mask = tf.constant([[False, True]])
    See()(value)
    np.testing.assert_array_equal(np.asarray(seen[0]), [[False, True]])


def test_the_add_layer_says_what_mask_a_sum_has():
    """Else `sum_mask` cannot ask it."""
    tensors = [tf.ones((1, 2)), tf.ones((1, 2))]
    masks = [tf.constant([[True, False]]), tf.constant([[True, True]])]
    mask = np.asarray(L.Add().compute_mask(tensors, masks))
    # Keras 3 keeps what one of the two has, Keras 2 what both have.
    np.testing.assert_array_equal(mask, [[True, True]] if KERAS_3 else [[True, False]])


def test_masks_of_outputs_can_be_left_to_call():
    """Else the `Wrapper` gets the mask of its input on its output, which `call` gave none."""

    class Plain(L.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True
            if not KERAS_3:
                self._compute_output_and_mask_jointly = True

        def call(self, x):
            return x + 1.0

        if KERAS_3:

            def _set_mask_metadata(self, inputs, outputs, previous_mask):
                pass

    class Hands(L.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x):
            return x + 1.0

    x = L.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    assert getattr(Plain()(x), "_keras_mask", None) is None
    assert Hands()(x)._keras_mask is not None


def test_a_layer_with_its_own_compute_mask_is_known():
    """Else `output_mask` does not ask it: Keras 3 sets a flag, Keras 2 marks the default."""

    class Plain(L.Layer):
        pass

    class Own(L.Layer):
        def compute_mask(self, inputs, mask=None):
            return mask

    if KERAS_3:
        assert Own().supports_masking and not Plain().supports_masking
    else:
        assert Plain().compute_mask._is_default
        assert not getattr(Own().compute_mask, "_is_default", False)


# ------------------------------------------------------------------ calls of layers


def test_keras_3_sorts_arguments_by_the_call_signature():
    """Else `take_call_arguments` has no effect, and mixed keyword arguments raise an error."""

    class CatchAll(L.Layer):
        def call(self, x, **kwargs):
            return x * (2.0 if kwargs.get("flag") else 1.0)

    if not KERAS_3:
        assert not hasattr(CatchAll(), "_call_signature")
        return
    named = CatchAll()
    parameters = list(inspect.signature(named.call).parameters.values())
    for name in ("other", "flag"):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.insert(-1, inspect.Parameter(name, kind, default=None))
    named._call_signature = inspect.Signature(parameters)
    x = tf.ones((1, 2))
    np.testing.assert_array_equal(np.asarray(named(x, other=x, flag=True)), [[2.0, 2.0]])


def test_keras_3_works_a_symbolic_output_out_in_operation():
    """Else the `Wrapper` that skips the layer's own way has none to fall back on."""
    if KERAS_3:
        spec = keras.Operation.compute_output_spec(L.ReLU(), keras.KerasTensor((None, 4)))
        assert tuple(spec.shape) == (None, 4)
        assert "compute_output_spec" in dir(L.Wrapper)
    else:
        assert not hasattr(keras, "Operation")


def sign_or_zero(x):
    if x > 0:  # an error on a tensor in a graph, unless AutoGraph has converted it
        return tf.sign(x)
    return tf.zeros_like(x)


def as_keras_2_calls_layers(x):
    """What Keras 2's `Layer.__call__` does with a layer's `call`."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(sign_or_zero, autograph.control_status_ctx())(x)


def test_autograph_runs_a_marked_function_as_it_is_and_converts_the_layers_it_calls():
    """Else `unconverted` costs either minutes or the `if`s in wrapped layers."""

    def mark(function):
        marked = lambda x: function(x)  # noqa: E731
        marked.autograph_info__ = None
        return marked

    x = tf.constant(3.0)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(mark(sign_or_zero))(x)
    assert float(tf.function(mark(as_keras_2_calls_layers))(x)) == 1.0
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(tf.autograph.experimental.do_not_convert(as_keras_2_calls_layers))(x)


# ------------------------------------------------------------------ random state


def test_python_draws_the_default_seeds_and_set_random_seed_decides_them():
    """Else `keras.utils.set_random_seed` would not be enough for `make_seed_state`."""
    seeds = []
    for seed in (7, 7, 8):
        keras.utils.set_random_seed(seed)
        seeds.append(random.randint(1, int(1e9)))
    assert seeds[0] == seeds[1] != seeds[2]


def test_adapted_statistics_are_read_from_and_written_to_a_store():
    """Else `copy_state` copies the weights of a Normalization, and not what follows from them."""
    adapted, other = L.Normalization(), L.Normalization()
    adapted.adapt(np.array([[1.0], [3.0]], "float32"))
    other.build((None, 1))
    store = {}
    adapted.save_own_variables(store)
    other.load_own_variables({key: np.asarray(value) for key, value in store.items()})
    np.testing.assert_allclose(np.asarray(other(np.array([[3.0]]))), [[1.0]], atol=1e-3)


def test_vocabularies_are_read_from_and_written_to_a_folder(tmp_path):
    """Else `copy_state` cannot copy the words of a lookup layer: they are no weights."""
    adapted, other = L.StringLookup(), L.StringLookup()
    adapted.adapt(tf.constant(["b", "a", "b"]))
    adapted.save_assets(str(tmp_path))
    other.load_assets(str(tmp_path))
    assert other.get_vocabulary() == adapted.get_vocabulary() == ["[UNK]", "b", "a"]


# ------------------------------------------------------------------ what XLA is handed


def test_a_function_knows_that_xla_will_compile_it():
    found = {}

    def run(x, name):
        graph = tf.compat.v1.get_default_graph()
        found[name] = control_flow_util.GraphOrParentsInXlaContext(graph)
        inner = tf.cond(x > 0, lambda: _graph(found, f"{name}, inside"), lambda: x)
        return x + inner

    for compiled in (False, True):
        tf.function(run, jit_compile=compiled)(tf.constant(1.0), f"compiled: {compiled}")
    assert found == {
        "compiled: False": False,
        "compiled: False, inside": False,
        "compiled: True": True,
        "compiled: True, inside": True,
    }


def _graph(found, name):
    graph = tf.compat.v1.get_default_graph()
    assert isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)
    found[name] = control_flow_util.GraphOrParentsInXlaContext(graph)
    return tf.constant(1.0)


def test_an_operation_can_be_given_another_input():
    """TensorFlow's own loops need it. One built before, with a graph inside, takes it in too."""

    @tf.function(autograph=False)
    def run(x):
        y = x + 1.0
        outputs = [y * y, tf.cond(x > 0, lambda: y * 3.0, lambda: y)]
        for operation in y.consumers():
            for i, value in enumerate(operation.inputs):
                if value is y:
                    operation._update_input(i, tf.identity(x))
        return outputs

    assert [float(y) for y in run(tf.constant(5.0))] == [25.0, 15.0]


def test_the_graph_of_a_loop_has_a_class_of_its_own():
    graphs = []

    @tf.function(autograph=False)
    def run(x):
        seen = lambda i: graphs.append(tf.compat.v1.get_default_graph()) or i  # noqa: E731
        graphs.append(tf.compat.v1.get_default_graph())
        return tf.while_loop(lambda i: seen(i) < 3, lambda i: [seen(i) + 1], [x])

    run(tf.constant(0))
    outer, condition, body = graphs[:3]
    assert isinstance(condition, control_flow_v2_func_graphs.WhileCondFuncGraph)
    assert isinstance(body, control_flow_v2_func_graphs.WhileBodyFuncGraph)
    assert type(outer) not in (type(condition), type(body))


@pytest.mark.parametrize(
    ("operation", "stateful"),
    [
        ("RandomUniform", True),
        ("AssignVariableOp", True),
        ("AssignAddVariableOp", True),
        ("ReadVariableOp", True),
        ("StatefulPartitionedCall", True),
        ("EagerPyFunc", True),
        ("StatelessRandomUniformFullIntV2", False),
        ("MatMul", False),
        ("PartitionedCall", False),
    ],
)
def test_tensorflow_says_which_operations_are_stateful(operation, stateful):
    assert op_def_registry.get(operation).is_stateful is stateful


def test_a_weight_under_mixed_precision_is_found_in_full_precision():
    dense = keras.layers.Dense(1, dtype="mixed_bfloat16")
    dense.build((None, 1))
    variable = dense.kernel._value if KERAS_3 else dense.kernel._variable
    assert isinstance(variable, tf.Variable) and variable.dtype == "float32"


def test_keras_3_keeps_a_scope_without_state_off_its_variables():
    if not KERAS_3:
        assert not hasattr(keras, "StatelessScope")
        return
    drop = keras.layers.Dropout(0.5, activity_regularizer="l2")
    (state,) = [v for v in drop.variables if not v.trainable]
    before = tf.identity(state.value)
    first = drop(tf.ones((1, 64)), training=True)
    after, losses = state.numpy(), [float(loss) for loss in drop.losses]
    with keras.StatelessScope([(state, before)], collect_losses=True) as scope:
        again = drop(tf.ones((1, 64)), training=True)
    np.testing.assert_array_equal(first, again)
    assert [float(loss) for loss in scope.losses] == losses and len(losses) == 1
    with keras.StatelessScope([(state, before)]):
        drop(tf.ones((1, 64)), training=True)
        other = drop(tf.ones((1, 64)), training=True)  # the scope has a state of its own
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(state.numpy(), after)


def test_the_gradient_of_a_function_is_made_when_it_is_first_needed():
    """By a method that can be replaced, of attributes that can be changed."""
    function = tf.function(tf.square, autograph=False)
    concrete = function.get_concrete_function(tf.constant(2.0))
    pairs = concrete._delayed_rewrite_functions
    construct, made = pairs._construct_forward_backward, []

    def construct_again(count):
        pairs._attrs = {**pairs._attrs, "_noinline": True}
        forward, backward = construct(count)
        assert forward.attributes["_noinline"].b
        assert backward.inference_fn.attributes["_noinline"].b
        made.append(type(backward).from_func_graph(backward.graph, backward.function_type, {}))
        return forward, made[-1]

    pairs._construct_forward_backward = construct_again

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    assert float(step(tf.constant(2.0))) == 4.0
    assert len(made) == 1
    assert "_noinline" not in made[0].inference_fn.attributes
