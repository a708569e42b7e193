"""float32 is true float32 whatever torch was set to, and the settings are restored."""

import json
import subprocess
import sys

import pytest

# Each setting is made in a separate process, forked from one that has imported torch: some cannot be undone.
SCRIPT = """
import json, os, sys
import torch
from harvest.model.capture import true_float32

SETTINGS = {
    "as torch is": lambda: None,
    "legacy, high": lambda: torch.set_float32_matmul_precision("high"),
    "legacy, medium": lambda: torch.set_float32_matmul_precision("medium"),
    "legacy, allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "new, matmul": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "new, all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "new, oneDNN": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "new, convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}
OPERATIONS = {
    "cuda matmul": torch.backends.cuda.matmul,
    "cudnn conv": torch.backends.cudnn.conv,
    "cudnn rnn": torch.backends.cudnn.rnn,
    "oneDNN matmul": torch.backends.mkldnn.matmul,
    "oneDNN conv": torch.backends.mkldnn.conv,
}

def legacy(read):
    try:
        return read()
    except RuntimeError:
        return "RuntimeError"

def state():
    found = {name: operation.fp32_precision for name, operation in OPERATIONS.items()}
    found["legacy matmul"] = legacy(torch.get_float32_matmul_precision)
    found["legacy cudnn"] = legacy(lambda: torch.backends.cudnn.allow_tf32)
    return found

for name, change in SETTINGS.items():
    if os.fork() == 0:
        change()
        before = state()
        try:
            with true_float32():
                during = state()
                raise KeyError
        except KeyError:
            pass
        print(json.dumps({"name": name, "before": before, "during": during, "after": state()}), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, dict[str, str]]]:
    """What torch's settings are before, within and after `true_float32`, by what the process had set."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_no_setting_of_the_process_lets_float32_be_less(states: dict[str, dict[str, dict[str, str]]]) -> None:
    assert len(states) == 8
    for name, found in states.items():
        during = found["during"]
        assert {during[operation] for operation in during if not operation.startswith("legacy")} == {"ieee"}, name
        assert during["legacy matmul"] in ("highest", "RuntimeError"), name
        assert during["legacy cudnn"] in (False, "RuntimeError"), name
    assert states["as torch is"]["before"]["legacy cudnn"] is True, "torch's own default is TF32 in cuDNN"


def test_the_process_finds_its_settings_again(states: dict[str, dict[str, dict[str, str]]]) -> None:
    for name, found in states.items():
        assert found["after"] == found["before"], name
