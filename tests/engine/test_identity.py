import json
import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn

from mlxspec.engine.costs import machine_identity, model_identity
from tests.support.openblas import needs_openblas
from tests.support.random_models import random_model

_PRINT_BLAS = """
import mlxspec
from mlxspec.engine.costs import global_blas
print(global_blas())
"""


def wide() -> nn.Module:
    return random_model("llama", hidden_size=64, head_dim=16)


def quantized(bits: int, group_size: int = 32) -> nn.Module:
    model = wide()
    nn.quantize(model, group_size=group_size, bits=bits)
    return model


def test_weights_do_not_matter_and_sizes_do():
    base, tuned = random_model("llama"), random_model("llama")
    tuned.apply(lambda p: p * 2)
    assert model_identity(tuned) == model_identity(base)
    assert model_identity(random_model("llama", num_hidden_layers=3)) != model_identity(base)
    assert model_identity(random_model("llama", rope_theta=5e5)) != model_identity(base)


def test_data_type_and_quantisation_matter():
    half = wide()
    half.set_dtype(mx.float16)
    models = (wide(), half, quantized(4), quantized(8), quantized(4, 64))
    assert len({model_identity(model)["digest"] for model in models}) == len(models)


def test_an_identity_says_what_it_is_and_survives_json():
    identity = model_identity(random_model("llama"))
    assert identity["type"] == "llama"
    assert identity["bits_per_weight"] == 32
    assert json.loads(json.dumps(identity)) == identity
    machine = machine_identity()
    assert machine["chip"]
    assert machine["device"] in ("cpu", "gpu")
    assert json.loads(json.dumps(machine)) == machine


@needs_openblas
def test_the_blas_in_use_is_told_apart():
    def blas(choice: str) -> str:
        environment = {**os.environ, "MLXSPEC_OPENBLAS": choice}
        command = [sys.executable, "-c", _PRINT_BLAS]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert blas("0") == "own"
    assert blas("1").startswith("libopenblas")
