"""The wheel of deploy/wheel.sh where nothing else is: an empty environment, whose torch is the tests' own.

torch and what it needs come by a .pth file that names a folder of links (only_torch.py); neither the repository nor the
tests' own ballast is to be found from there.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bare_root import NAMESPACES, BareRoot
from daemon import BUILD, ROOT
from only_torch import link_torch

# What manylinux leaves to the machine: glibc, the compiler's libraries, zlib.
OF_THE_MACHINE = re.compile(
    r"(ld-linux-x86-64|lib(c|m|mvec|pthread|dl|rt|resolv|util|anl|stdc\+\+|gcc_s|z))\.so\.\d.*|linux-vdso.*"
)
TRAINER = """
import torch, ballast
torch.manual_seed(1)
layer = torch.nn.Linear(8, 1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
optimizer = ballast.AdamW(layer.named_parameters(), lr=0.05, run="wheel")
losses = []
for _ in range(20):
    loss = ((layer(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step(loss=loss)
    losses.append(loss.item())
print(ballast.__file__, optimizer.server.removeprefix("unix:"), optimizer.last_result.step, losses[-1] < losses[0] / 2)
"""


def run(*command, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """With no variable but those given."""
    command = [str(part) for part in command]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("BALLAST_")}
    made = run(ROOT / "deploy" / "wheel.sh", "--preset", BUILD.name, "--out", folder, cwd=folder, **variables)
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    (file,) = folder.iterdir()
    return file


class Empty:
    """An environment with the wheel and torch; `site` is where its packages are."""

    def __init__(self, folder: Path, wheel: Path):
        self.folder = folder / "work"
        self.folder.mkdir()
        self.environment = folder / "environment"
        self.bare("python3", "-m", "venv", str(self.environment), PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
        link_torch(folder / "torch-alone")
        (self.site,) = self.environment.glob("lib/python*/site-packages")
        (self.site / "torch-alone.pth").write_text(f"{folder / 'torch-alone'}\n")
        self.bare(self.environment / "bin" / "python", "-m", "pip", "install", "--no-index", "--no-deps", wheel)

    def bare(self, *command, **environment: str) -> str:
        done = run(*command, cwd=self.folder, **{"HOME": str(self.folder), **environment})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def activated(self, *command) -> str:
        return self.bare(*command, PATH=f"{self.environment / 'bin'}:/usr/bin:/bin")


@pytest.fixture(scope="module")
def empty(wheel, tmp_path_factory) -> Empty:
    return Empty(tmp_path_factory.mktemp("empty"), wheel)


def test_its_name_says_where_it_runs(wheel):
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_2_\d+_x86_64\.whl$", wheel.name), wheel.name


@pytest.mark.parametrize("program", ["ballastd", "ballastctl"])
def test_the_programs_are_on_path(empty, program):
    assert empty.activated(program, "--version").startswith(f"{program} ")


def test_what_is_carried_is_what_is_loaded(empty):
    """Of the programs and of the extension: gRPC, Protobuf and all the others come from the wheel."""
    carried = [*(empty.site / "ballast" / "bin").iterdir(), *(empty.site / "ballast").glob("_core*.so")]
    assert len(carried) == 3
    for file in carried:
        listed = empty.activated("ldd", file)
        assert "not found" not in listed, listed
        loaded = {name: Path(where).resolve() for name, where in re.findall(r"(\S+) => (/\S+)", listed)}
        inside = {
            name for name, where in loaded.items() if where.parent == (empty.site / "ballast_optim.libs").resolve()
        }
        assert any(name.startswith("libgrpc") for name in inside) and any("protobuf" in name for name in inside), listed
        assert {name for name in loaded if not OF_THE_MACHINE.fullmatch(name)} == inside, listed


def test_a_script_that_names_no_server_trains(empty):
    answer = empty.activated("python", "-c", TRAINER).split()
    where, socket, step, learned = answer
    assert Path(where).is_relative_to(empty.site)
    assert (step, learned) == ("20", "True")
    assert not Path(socket).parent.exists(), "the daemon has ended, and its folder is gone"


def test_a_daemon_that_is_started_by_hand_serves(empty):
    """As on another machine: the entry point is the daemon, and ends as one."""
    with subprocess.Popen(
        ["ballastd", "--listen", "127.0.0.1:0", "--ops_http.listen", "off", "--device", "cpu", "--shm_socket", "off"],
        executable=empty.environment / "bin" / "ballastd",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={},
    ) as daemon:
        server = re.search(r"grpc (\S+)", daemon.stdout.readline())[1]
        assert "no runs" in empty.activated("ballastctl", "--server", server, "runs")
        daemon.terminate()
        assert daemon.wait(60) == 0


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> BareRoot:
    if subprocess.run([*NAMESPACES, "/bin/true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no user namespaces: nothing here is tried without the machine's libraries")
    bare = BareRoot(tmp_path_factory.mktemp("bare"))
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", bare.site, wheel]
    installed = run(*pip, cwd=bare.root)
    assert installed.returncode == 0, installed.stderr
    return bare


def test_it_trains_where_there_is_nothing_but_python(bare):
    """No gRPC, no Protobuf, no shell: an empty container with Python and torch."""
    machine = [path for path in bare.root.rglob("*.so*") if not path.is_relative_to(bare.site)]
    assert machine and not any(re.search("grpc|protobuf|absl", path.name) for path in machine)
    trained = bare.python("-c", TRAINER)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    where, _, step, learned = trained.stdout.split()
    assert (where, step, learned) == ("/site/ballast/__init__.py", "20", "True")
