"""tests/gpu_check.sh --built in a tree whose GPU and programs are made up: what runs beside what, what fails, what it reports."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon import ROOT

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  -L) echo "GPU 0: NVIDIA H100" ;;
  *clocks.sm*) echo x >>samples; echo "$((1000 + $(wc -l <samples))) MHz, 2619 MHz, [N/A], 54" ;;
  *) echo "of the GPU" ;;
esac
"""
# Passes if three of its kind run at the same time: the identity and, under the sanitizer, twice a part of it.
CHECKS_BITS = """#!/bin/sh
[ ! -e alone ] || exit 3
mkdir -p beside && touch beside/$$
for _ in $(seq 100); do
  [ "$(ls beside | wc -l)" -lt 3 ] || exit 0
  sleep 0.05
done
exit 4
"""
SANITIZER = """#!/bin/sh
shift 6
exec "$@"
"""
# Passes if nothing else of its kind runs; {} is what it leaves behind.
TIMES = """#!/bin/sh
mkdir alone || exit 3
sleep 0.{pause}
cat >"${{FILE:-/dev/null}}" <<'END'
{left}
END
rmdir alone
"""
# nvcc and g++: the object, or the program, is the list of what it is made of.
COMPILER = """#!/bin/sh
case "$*" in
  *--dryrun*) echo "#\\$ INCLUDES=\\"-I$PWD/include\\"" >&2; exit ;;
  --version) echo "compilation tools, release 13.0, V13.0.1"; exit ;;
esac
all="$*"
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2 ;; -MF) echo "x:" >"$2" ;; esac
  shift
done
printf '#!/bin/sh\\n# %s\\n' "$all" >"$out" && chmod +x "$out"
"""
BITS = {"part": "bits", "kernels": 72, "of": 72, "differences": 0, "pieces": 99, "statistics": 7, "first": ""}
RATES = {way + "_gb_per_second": [1, 2, 3] for way in ("in", "out", "both")}
COPIES = {"part": "copies", "bytes": 1 << 30, **RATES, "rounds": 7}
QUEUE = {"part": "queue", "what": "many small tensors", "tensors": 20000, "elements": 1000}
STALLS = {
    "part": "stalls",
    "alone_ms": [1, 1.5],
    "beside_ms": [1.25, 90],
    "taking_ms": [123, 200],
    "steps": 1700,
}
FIGURES = {
    "served": "bf16",
    "microseconds_per_tensor": [4, 5, 6],
    "gparams_per_second": [0.1, 0.2, 0.3],
    "share_of_copies": [0.4, 0.5, 0.6],
    "rounds": 7,
}


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def timed(file: str = "", rows: tuple = (), pause: int = 1) -> str:
    left = "\n".join(json.dumps(row) for row in rows)
    return TIMES.format(pause=pause, left=left).replace("FILE:-/dev/null", f"FILE:-{file or '/dev/null'}")


@pytest.fixture
def tree(tmp_path):
    for name in ("tests/gpu_check.sh", "tests/bench/gpu_report.py", "deploy/options.sh", "deploy/stages.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "bench" / "results").mkdir()
    write_program(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    write_program(tmp_path / "bin" / "compute-sanitizer", SANITIZER)
    for compiler in ("nvcc", "g++"):
        write_program(tmp_path / "bin" / compiler, "#!/bin/sh\ntouch compiler_called\nexit 1\n")
    built, portable, found = tmp_path / "build/gpu-check", tmp_path / "build/portable/bin", "build/gpu-check/found/"
    write_program(built / "gpu_identity", CHECKS_BITS)
    write_program(built / "gpu_bench", timed(found + "bench.jsonl", pause=999).replace("0.999", "1.7"))
    (built / "built.txt").write_text("commit: of the build\n")
    write_program(
        portable / "gpu_device_bench", timed(found + "device.jsonl", (BITS, COPIES, {**QUEUE, **FIGURES}, STALLS))
    )
    # The script asks Python to run these; here it runs sh.
    for name in ("gpu_peers.py", "gpu_training.py", "gpu_trainer.py", "gpu_follower.py", "gpu_layers.py"):
        write_program(tmp_path / "tests" / "bench" / name, timed())
    write_program(
        tmp_path / "bin" / "python",
        f'#!/bin/sh\ncase $1 in *report*) exec {sys.executable} "$@" ;; *) exec sh "$@" ;; esac\n',
    )
    return tmp_path


def start(tree: Path, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [tree / "tests" / "gpu_check.sh", *flags],
        env={**os.environ, "PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "PYTHON": str(tree / "bin" / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell ignores Ctrl-C in what it runs in the background, and so would the script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(tree: Path, *flags: str) -> tuple[int, str]:
    with start(tree, *flags) as script:
        said, _ = script.communicate(timeout=180)
    return script.returncode, said


def outcomes(tree: Path) -> dict[str, str]:
    lines = (tree / "build/gpu-check/found/parts.tsv").read_text().splitlines()
    return dict(line.split("\t")[:2] for line in lines)


def test_bits_are_checked_side_by_side_and_times_taken_alone(tree):
    code, said = run(tree, "--built")
    assert code == 0, said
    passed = {
        "identity",
        "memcheck",
        "racecheck",
        "benchmark",
        "device",
        "peers",
        "training",
        "trainer",
        "follower",
        "layers",
    }
    assert outcomes(tree) == {"build": "skipped", **dict.fromkeys(passed, "passed")}, said
    assert not (tree / "compiler_called").exists()
    report = (tree / "tests/bench/results/gpu.md").read_text()
    assert "| commit | of the build |" in report and "| GPU | of the GPU |" in report
    assert report in said


def test_the_report_has_the_clocks_and_the_device_layer(tree):
    run(tree, "--built")
    report = (tree / "tests/bench/results/gpu.md").read_text()
    samples = len((tree / "build/gpu-check/found/clocks.csv").read_text().splitlines())
    assert samples >= 2, report
    assert f"| clock of the memory, MHz | 2619 | 2619 | 2619 | {samples} |" in report
    assert f"| clock of the multiprocessors, MHz | 1001 |" in report and "| power | not measured |" in report
    assert f"| temperature, degrees Celsius | 54 | 54 | 54 | {samples} |" in report
    assert "72 of 72 kernels" in report and "**0 kernels differ**" in report
    assert "1 GiB of pinned memory, GB/s: 2 (1 to 3) to the GPU" in report
    assert (
        "takes 1 ms, at most 1.5; while memory of 1 GiB" in report
        and "123 ms each time, 1.25 ms, at most 90," in report
    )
    row = "| many small tensors | 20000 | 1000 | bf16 | 5 (4 to 6) | 0.2 (0.1 to 0.3) | 0.5 (0.4 to 0.6) | 7 |"
    assert row in report, report


def test_the_report_has_the_trainer_on_the_gpu(tree):
    torch = {"side": "torch fp32, autocast", "tokens": 16384, "step_s": 0.1, "backward_s": 0.02, "gpu_bytes": 5e9}
    ours = {"side": "ballast shm", "tokens": 16384, "step_s": 0.15, "backward_s": 0.1, "pushed_in_backward": 0.75}
    rows = ({"check": "staged", "holds": True}, {"check": "grpc", "holds": False, "error": "lost"}, torch, ours)
    program = timed("build/gpu-check/found/trainer.jsonl", (*rows, {**torch, "tokens": 64, "step_s": 1}))
    write_program(tree / "tests/bench/gpu_trainer.py", program)
    run(tree, "--built")
    report = (tree / "tests/bench/results/gpu.md").read_text()
    assert "| staged | yes |" in report and "| grpc | NO lost |" in report
    assert "| 16384 | torch fp32, autocast | 100.0 | 1.00 | 20.0 | 5.00 | - | - |" in report, report
    assert "| 16384 | ballast shm | 150.0 | 1.50 | 100.0 | - | 75 % | - |" in report, report


def test_the_report_has_the_layers_in_8_bits(tree):
    linear = {"layer": "nn.Linear", "width": 1024, "tokens": 64, "ms": 2.5, "speed": [1, 1, 1], "rounds": 9}
    rows = ({"check": "int8", "holds": True}, linear, {"layer": "fp8", "width": 1024, "skipped": "no such product"})
    write_program(tree / "tests/bench/gpu_layers.py", timed("build/gpu-check/found/layers.jsonl", rows))
    run(tree, "--built")
    report = (tree / "tests/bench/results/gpu.md").read_text()
    assert "| int8 | yes |" in report, report
    assert "| nn.Linear | 64 | 1024 | 2.5 | 1 (1 to 1) times | 9 |" in report, report
    assert "| fp8 | - | 1024 | not measured: no such product |" in report, report


def test_the_report_has_the_module_that_follows(tree):
    landing = {"landing": "newer weights", "bytes": 436e6, "ms": [20, 30.5, 41], "copy_ms": [8, 9, 10], "rounds": 15}
    rows = ({"check": "bits", "holds": True}, {"check": "graph", "holds": False, "error": "none"}, landing)
    write_program(tree / "tests/bench/gpu_follower.py", timed("build/gpu-check/found/follower.jsonl", rows))
    run(tree, "--built")
    report = (tree / "tests/bench/results/gpu.md").read_text()
    assert "| bits | yes |" in report and "| graph | NO none |" in report, report
    assert "| newer weights | 436 | 30.5 (20 to 41) | 9 (8 to 10) | 15 |" in report, report


def test_what_ran_out_of_time_is_in_the_report(tree):
    skipped = {**QUEUE, "skipped": "no time left"}
    program = timed("build/gpu-check/found/device.jsonl", (BITS, {"part": "copies", "skipped": "no"}, skipped))
    write_program(tree / "build/portable/bin/gpu_device_bench", program)
    run(tree, "--built")
    report = (tree / "tests/bench/results/gpu.md").read_text()
    assert "Copies of pinned memory: not measured: no." in report
    assert "| many small tensors | 20000 | 1000 | not measured: no time left |" in report, report


@pytest.mark.parametrize(
    ("program", "exits", "part", "outcome", "fails"),
    [
        ("build/gpu-check/gpu_identity", 1, "identity", "FAILED", True),
        ("build/gpu-check/gpu_identity", 77, "identity", "FAILED", True),  # there is a GPU
        ("bin/compute-sanitizer", 9, "racecheck", "FAILED", True),
        ("bin/compute-sanitizer", 124, "memcheck", "not finished", False),
        ("build/gpu-check/gpu_bench", 77, "benchmark", "FAILED", True),
        ("build/portable/bin/gpu_device_bench", 1, "device", "FAILED", True),
        ("tests/bench/gpu_peers.py", 77, "peers", "skipped", False),
        ("tests/bench/gpu_training.py", 124, "training", "OUT OF TIME", True),
    ],
)
def test_a_failure_is_told_wherever_it_was(tree, program, exits, part, outcome, fails):
    write_program(tree / "build/gpu-check/gpu_identity", "#!/bin/sh\n")  # it waits for none
    write_program(tree / program, f"#!/bin/sh\nexit {exits}\n")
    code, said = run(tree, "--built")
    assert outcomes(tree)[part] == outcome, said
    assert code == (1 if fails else 0), said


def test_without_a_portable_folder_the_device_layer_is_skipped_loudly(tree):
    (tree / "build/portable/bin/gpu_device_bench").unlink()
    code, said = run(tree, "--built")
    assert code == 0 and outcomes(tree)["device"] == "skipped", said
    assert "!! SKIPPED: device: there is no build/portable/bin/gpu_device_bench" in said


@pytest.mark.parametrize("program", ["gpu_identity", "gpu_bench"])
def test_a_program_that_was_not_built_is_named(tree, program):
    (tree / "build/gpu-check" / program).unlink()
    code, said = run(tree, "--built")
    assert code == 1 and f"there is no build/gpu-check/{program}" in said, said


def test_what_built_the_programs_may_be_unknown(tree):
    (tree / "build/gpu-check/built.txt").unlink()
    code, _ = run(tree, "--built")
    report = (tree / "tests/bench/results/gpu.md").read_text()
    assert code == 0 and "| CUDA compiler | unknown |" in report and "| commit | unknown |" in report, report


def test_what_build_only_leaves_is_what_built_runs(tree):
    for name in ("nvcc", "g++"):
        write_program(tree / "bin" / name, COMPILER)
    write_program(tree / "bin" / "ccache", '#!/bin/sh\nexec "$@"\n')
    sources = ["kernels/cpu/scalar.cc", "kernels/a.cc", "kernels/cuda/cuda_updates.cu", "tests/bench/gpu_bench.cc"]
    for name in ("include/cuda_runtime.h", "tests/kernels/cuda/gpu_identity.cc", *sources):
        write_program(tree / name, "")
    for program in ("gpu_identity", "gpu_bench", "built.txt"):
        (tree / "build/gpu-check" / program).unlink()
    code, said = run(tree, "--build-only", "--arch", "90")
    assert code == 0, said
    assert "gpu_bench.o" in (tree / "build/gpu-check/gpu_bench").read_text()
    assert "compiled for: sm_90\n" in (tree / "build/gpu-check/built.txt").read_text()
    code, said = run(tree, "--built")
    assert code == 0 and "| CUDA compiler | V13.0.1 |" in said, said
    write_program(tree / "bin" / "g++", "#!/bin/sh\nexit 1\n")
    assert run(tree, "--build-only", "--arch", "80")[0] == 1


def test_the_cpus_kernels_may_be_those_of_another_build(tree):
    for name in ("nvcc", "g++"):
        write_program(tree / "bin" / name, COMPILER)
    programs = ["kernels/cuda/cuda_updates.cu", "tests/kernels/cuda/gpu_identity.cc", "tests/bench/gpu_bench.cc"]
    for name in ("include/cuda_runtime.h", "kernels/cpu/scalar.cc", "kernels/a.cc", *programs):
        write_program(tree / name, "")
    code, said = run(tree, "--build-only", "--arch", "90", "--kernels", "made.a")
    assert code == 1 and "there is no made.a, which --kernels names" in said, said
    write_program(tree / "made.a", "")
    code, said = run(tree, "--build-only", "--arch", "90", "--kernels", "made.a")
    assert code == 0, said
    linked = (tree / "build/gpu-check/gpu_identity").read_text()
    assert " made.a" in linked and "updates_0.o" in linked and "scalar.o" not in linked and "/a.o" not in linked, linked
    assert not (tree / "build/gpu-check/sm_90/kernels/scalar.o").exists()
    assert "kernels of the CPU: made.a\n" in (tree / "build/gpu-check/built.txt").read_text()


def test_a_build_that_fails_is_in_the_report(tree):
    write_program(tree / "bin" / "nvcc", COMPILER)
    write_program(tree / "include" / "cuda_runtime.h", "")
    code, said = run(tree, "--arch", "90")
    assert code == 1 and outcomes(tree) == {"build": "FAILED"} and "| build | FAILED |" in said, said


def test_without_a_gpu_nothing_is_said_to_be_checked(tree):
    write_program(tree / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    code, said = run(tree, "--built")
    assert code == 77 and "!! NO GPU" in said, said


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, signal.SIGINT])
def test_what_was_started_side_by_side_ends_with_the_script(tree, stopped_by):
    write_program(tree / "build/gpu-check/gpu_identity", "#!/bin/sh\ntouch up.$$\nexec sleep 60\n")
    with start(tree, "--built") as script:
        deadline = time.monotonic() + 20
        while len(list(tree.glob("up.*"))) < 3:
            assert time.monotonic() < deadline, "the three were not started"
            time.sleep(0.05)
        script.send_signal(stopped_by)
        script.communicate(timeout=180)
    listed = subprocess.run(["ps", "-o", "args=", "-s", str(script.pid)], capture_output=True, text=True).stdout
    assert script.returncode == 130 and listed == "", listed
