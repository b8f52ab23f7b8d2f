"""`python -m tfa_stochastic_depth report`."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from tfa_stochastic_depth import find_residuals
from tfa_stochastic_depth.__main__ import main

keras = tf.keras
L = keras.layers
KERAS_3 = hasattr(keras, "ops")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def model():
    x = inputs = keras.Input((4,), name="in")
    for i in range(2):
        x = L.Add(name=f"sum{i}")([x, L.Dense(4, name=f"dense{i}")(x)])
    return keras.Model(inputs, x, name="saved")


@pytest.fixture
def path(tmp_path):
    model().save(tmp_path / "model.keras")
    return str(tmp_path / "model.keras")


def test_it_prints_what_find_residuals_prints(path, capsys):
    assert main(["report", path]) == 0
    assert capsys.readouterr().out == f"{find_residuals(model())}\n"
    assert main(["report", path, "--survival-prob", "0.2", "--nested", "outer"]) == 0
    assert capsys.readouterr().out == f"{find_residuals(model(), 0.2)}\n"


def test_it_draws(path, tmp_path, capsys):
    picture = tmp_path / "blocks.svg"
    assert main(["report", path, "--plot", str(picture)]) == 0
    assert "2 residual blocks in 'saved'" in capsys.readouterr().out
    assert b"sum1" in picture.read_bytes()


def test_as_a_program(path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tfa_stochastic_depth", "report", path]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, f"{find_residuals(model())}\n")
    command[-1] += "x"
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last == f"python -m tfa_stochastic_depth: error: {path}x: no such file."


def refused(capsys, *arguments):
    """The one line that is printed, without its beginning."""
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    beginning = f"python -m tfa_stochastic_depth: error: {arguments[0]}: "
    assert line.startswith(beginning)
    return line[len(beginning) :]


def with_code(saved):
    """A model whose file holds code, which would leave a trace if it were run."""
    x = keras.Input((4,))
    y = L.Lambda(lambda x: (x, __import__("os").environ.update(RAN="yes"))[0])(x)
    keras.Model(x, L.Add()([y, L.Dense(4)(y)])).save(saved)
    os.environ.pop("RAN", None)


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_code_in_a_file_is_not_run(ending, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAN", "")
    saved = str(tmp_path / f"code{ending}")
    with_code(saved)
    assert "lambda" in refused(capsys, saved).lower()
    assert "RAN" not in os.environ


def test_a_file_that_is_no_model(tmp_path, capsys):
    for name in ("nothing.keras", "nothing.h5"):
        saved = tmp_path / name
        saved.write_text("no model")
        assert refused(capsys, str(saved))


def test_a_model_with_a_class_that_is_not_known(tmp_path, capsys):
    class Unknown(L.Layer):
        def call(self, x):
            return x

    x = keras.Input((4,))
    saved = str(tmp_path / "unknown.keras")
    keras.Model(x, Unknown()(x)).save(saved)
    text = refused(capsys, saved)
    assert "Unknown" in text or not KERAS_3  # Keras 2 does not say which
    assert text.endswith(
        "(A model that needs code or classes of your own can be loaded in Python and given to "
        "find_residuals.)"
    )


def test_arguments_out_of_range(path, capsys):
    text = refused(capsys, path, "--survival-prob", "1.5")
    assert text.startswith("`survival_prob` must be in [0, 1]")
    text = refused(capsys, path, "--plot", "blocks.jpeg")
    assert text.startswith("`path` must end in .svg, .png, .pdf")


@pytest.mark.parametrize(
    "arguments", [[], ["report"], ["report", "a", "--survival-prob", "x"], ["reports", "a"]]
)
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: python -m tfa_stochastic_depth" in capsys.readouterr().err
