"""ballast.numerics needs neither torch nor a daemon."""

import subprocess
import sys

PROGRAM = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
import ballast
import ballast.numerics as numerics
import numpy as np

encoded = numerics.encode(np.ones(40, np.float32), "split24")
assert (numerics.decode(encoded) == 1).all()
try:
    ballast.AdamW
except ImportError as error:
    print(error)
"""


def test_numerics_works_without_torch_and_training_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install torch" in done.stdout
