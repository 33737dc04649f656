"""The example of a reader that writes text with the newest weights."""

import re
import subprocess
import sys
import urllib.request

import pytest
import torch
import warm_python

import ballast
from daemon import ROOT, Daemon, plain_environment

EXAMPLES = ROOT / "client" / "python" / "examples"
GENERATE = EXAMPLES / "generate.py"
sys.path.insert(0, str(EXAMPLES))
from king_james import BATCH, CONTEXT, ByteModel, draw_batch  # noqa: E402


def train(model, optimizer, steps):
    text, random = torch.arange(4 * CONTEXT) % 256, torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = model.loss(draw_batch(text, BATCH, random))
        loss.backward()
        optimizer.step(loss=loss)


def test_texts_of_each_version_in_the_terminal_and_on_the_page(tmp_path):
    model = ByteModel()
    with Daemon(tmp_path) as daemon:
        options = {"server": daemon.server, "run": "text", "follow": True}
        with ballast.AdamW(model.named_parameters(), lr=1e-3, **options) as optimizer:
            train(model, optimizer, 2)
            words = ["--server", daemon.server, "--run", "text", "--page", "0", "--texts", "2", "--length", "20"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            with subprocess.Popen([sys.executable, GENERATE, *words], env=plain_environment(), **pipes) as generator:
                address = generator.stdout.readline().strip()
                assert any(line.startswith("--- step 2") for line in iter(generator.stdout.readline, ""))
                with urllib.request.urlopen(address, timeout=60) as answer:
                    page = answer.read().decode()
                assert "run text, step 2" in page, page
                train(model, optimizer, 1)
                out, errors = generator.communicate(timeout=120)
    assert generator.returncode == 0, errors
    assert re.findall(r"--- step (\d+), [\d.]+ s old ---\nAnd it came to pass", out) == ["3"], out


@pytest.mark.parametrize(
    "words, code, what",
    [
        (["--run", "r", "--temperature", "0"], 2, "--temperature must be above 0"),
        (["--run", "r", "--prompt", "Ω"], 2, "the letters of ASCII alone"),
        (["--run", "r", "--server", "127.0.0.1:1"], 1, "no ballastd answers at 127.0.0.1:1"),
        ([], 2, "--run"),
    ],
)
def test_what_is_wrong_is_said(words, code, what):
    told = warm_python.run([GENERATE, *words], timeout=120, env=plain_environment())
    assert told.returncode == code and what in told.stderr, told.stderr
