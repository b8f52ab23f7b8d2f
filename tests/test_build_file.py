"""BUILD is read by people as the import diagram, so it must say what the files really import."""

import ast
import importlib.util
import pathlib
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "tfa_stochastic_depth"
FILES = sorted((ROOT / PACKAGE).glob("*.py"))

# The thinking part, and what each file of it may import from outside Python and the package.
TENSORFLOW_FREE = {
    "graph": {"networkx"},
    "survival": set(),
    "residuals": set(),
    "plot": {"pygraphviz"},
}


def target_of(path):
    return PACKAGE if path.name == "__init__.py" else path.stem


def build_targets(text):
    """Maps each py_library for one file of the package to the names it depends on."""
    targets = {}
    for statement in ast.parse(text).body:
        call = getattr(statement, "value", None)
        if not (isinstance(call, ast.Call) and call.func.id == "py_library"):
            continue
        said = {k.arg: k.value for k in call.keywords}
        if not isinstance(said["srcs"], ast.List):  # a glob: not one of the package's files
            continue
        (source,) = ast.literal_eval(said["srcs"])
        deps = ast.literal_eval(said["deps"]) if "deps" in said else []
        name = ast.literal_eval(said["name"])
        assert source == f"{PACKAGE}/{'__init__' if name == PACKAGE else name}.py"
        targets[name] = {dep.lstrip(":") for dep in deps}
    return targets


def imports(text):
    """Returns which files of the package `text` imports, and which packages from outside."""
    inside, outside = set(), set()
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            modules = modules_named(statement)
        else:
            continue
        for module in modules:
            first, _, rest = module.partition(".")
            if first == PACKAGE:
                inside.add(rest.partition(".")[0] or PACKAGE)
            else:
                outside.add(first)
    return inside, outside


def modules_named(statement):
    """Spells a `from ... import ...` of this flat package as full module names."""
    module = statement.module or ""
    if statement.level:
        module = f"{PACKAGE}.{module}".rstrip(".")
    if module != PACKAGE:
        return [module]
    files = {path.stem for path in FILES}
    return [f"{PACKAGE}.{a.name}" if a.name in files else PACKAGE for a in statement.names]


def is_stdlib(module):
    origin = importlib.util.find_spec(module).origin
    if origin in ("built-in", "frozen", None):
        return True
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve()
    origin = pathlib.Path(origin).resolve()
    return stdlib in origin.parents and "site-packages" not in origin.parts


def test_every_file_has_its_target_and_every_target_its_file():
    assert set(build_targets((ROOT / "BUILD").read_text())) == {target_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=target_of)
def test_deps_are_the_imports(path):
    deps = build_targets((ROOT / "BUILD").read_text())[target_of(path)]
    inside, _ = imports(path.read_text())
    assert deps == inside


@pytest.mark.parametrize("name", TENSORFLOW_FREE)
def test_the_thinking_part_stays_free_of_tensorflow(name):
    inside, outside = imports((ROOT / PACKAGE / f"{name}.py").read_text())
    assert inside <= set(TENSORFLOW_FREE)
    assert {module for module in outside if not is_stdlib(module)} <= TENSORFLOW_FREE[name]


@pytest.mark.parametrize("path", FILES, ids=target_of)
def test_only_the_seam_names_a_keras_package(path):
    _, outside = imports(path.read_text())
    if target_of(path) != "_keras":
        assert not outside & {"keras", "tf_keras", "tensorflow_addons"}


@pytest.mark.parametrize(
    ("line", "inside", "outside"),
    [
        ("import numpy as np", set(), {"numpy"}),
        ("import tensorflow.python.framework", set(), {"tensorflow"}),
        ("from keras.layers import Add", set(), {"keras"}),
        ("from . import _keras", {"_keras"}, set()),
        ("from .graph import Call", {"graph"}, set()),
        (f"from {PACKAGE} import _keras, __version__", {"_keras", PACKAGE}, set()),
        (f"from {PACKAGE}.graph import Call", {"graph"}, set()),
        (f"import {PACKAGE}.graph", {"graph"}, set()),
        ("def late():\n    import tensorflow", set(), {"tensorflow"}),
    ],
)
def test_imports_reads_every_spelling(line, inside, outside):
    assert imports(line) == (inside, outside)


def test_build_targets_reads_deps():
    text = f'py_library(name = "a", srcs = ["{PACKAGE}/a.py"], deps = [":b", ":c"])'
    assert build_targets(text) == {"a": {"b", "c"}}


def test_is_stdlib_tells_the_two_apart():
    assert is_stdlib("dataclasses") and is_stdlib("sys")
    assert not is_stdlib("networkx") and not is_stdlib("pytest")
