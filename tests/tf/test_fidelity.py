"""What TensorFlow's techniques do to the gradient, in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("technique_gradients.py")


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        ({"checkpointing": "on"}, 0.0, 1e-6),
        ({"accumulation": 4}, 0.0, 1e-5),
        ({"xla": True}, 0.0, 1e-5),
        ({"precision": "bf16"}, 1e-5, 0.1),  # rounding, and visibly so: the policy took hold
    ],
    ids=str,
)
def test_gradients_are_the_same_up_to_rounding(values: dict[str, Any], least: float, most: float) -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), json.dumps(values)], check=True, capture_output=True, text=True)
    errors = json.loads(ran.stdout.splitlines()[-1])
    assert errors.keys() == {"critic", "policy"}
    assert all(least <= error <= most for error in errors.values()), errors
