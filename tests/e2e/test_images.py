"""The images that deploy/ describes, as far as they can be checked without an engine that builds them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon import ROOT

IMAGES = ["Dockerfile", "Dockerfile.gpu"]


def instructions(image: str) -> list[tuple[str, str]]:
    """Name and words of each, in order."""
    lines = [line for line in (ROOT / "deploy" / image).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line]


def words_of(image: str, name: str) -> list[str]:
    return [words for instruction, words in instructions(image) if instruction == name]


def copied(image: str) -> list[tuple[list[str], str]]:
    """What comes from the tree, and where it goes."""
    found = [words.split() for words in words_of(image, "COPY") if "--from" not in words]
    return [(words[:-1], words[-1]) for words in found]


@pytest.mark.parametrize("image", IMAGES)
def test_it_copies_what_there_is_and_what_is_not_ignored(image):
    ignored = (ROOT / "deploy" / f"{image}.dockerignore").read_text().split()
    assert ignored[0] == "*" and all(word.startswith("!") for word in ignored[1:])
    sources = {source for sources, _ in copied(image) for source in sources}
    assert sources == {word[1:] for word in ignored[1:]}
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("image", IMAGES)
def test_what_it_copies_can_be_configured(image, tmp_path):
    """And has the targets that it builds."""
    if image == "Dockerfile.gpu" and not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("no nvcc: the image for GPUs is not configured")
    for sources, to in copied(image):
        for source in sources if not to.startswith("/tmp") else []:
            place = tmp_path / to / (Path(source).name if to.endswith("/") else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy2
            copy(ROOT / source, place)
    build = next(words for words in words_of(image, "RUN") if words.startswith("cmake "))
    configure, *later = [command.strip() for command in build.split("&&")]
    command = configure.replace('"$BALLAST_REVISION"', "0123abc").replace('"', "").split()
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout + told.stderr
    targets = re.search(r"--target ([\w ]+)", later[0])[1].split()
    listed = subprocess.run(
        ["cmake", "--build", "--preset", "release", "--target", "help"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert targets and all(re.search(rf"^{target}: phony$", listed, re.MULTILINE) for target in targets)
    assert image == "Dockerfile" or "libballast_cuda.a: phony" in listed


@pytest.mark.parametrize("image", IMAGES)
def test_it_keeps_to_what_is_good_practice(image):
    arguments = dict(words.split("=", 1) for words in words_of(image, "ARG"))
    for words in words_of(image, "FROM"):
        name = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], words.split()[0])
        assert re.fullmatch(r"[\w/]+:\d[\w.-]+", name), f"{name} is not named by a version"
    assert all(words.startswith("/") for words in words_of(image, "WORKDIR"))
    for words in words_of(image, "RUN"):
        assert "sudo" not in words and ("packages.sh" not in words or "rm -rf /var/lib/apt/lists/*" in words)
    assert words_of(image, "USER")[-1] == "65532:65532"
    for name in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(words_of(image, name)[-1]), list)
    assert not words_of(image, "ADD") and len(words_of(image, "HEALTHCHECK")) == 1


@pytest.mark.parametrize("name", ["USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "LABEL"])
def test_both_are_used_alike(name):
    cpu, gpu = (words_of(image, name) for image in IMAGES)
    assert cpu and cpu == gpu


def test_the_one_for_gpus_does_not_start_without_one():
    flags = [json.loads(words_of(image, "CMD")[-1]) for image in IMAGES]
    assert flags[1] == ["--device", "cuda:all", *flags[0]]


def test_its_packages_are_on_the_list():
    groups = re.findall(r"packages\.sh ([\w ]+?) &&", " ".join(words_of("Dockerfile.gpu", "RUN")))
    assert groups == ["build libs", "cuda"]
    listed = subprocess.run(
        [ROOT / "deploy" / "packages.sh", "--list", "cuda"], capture_output=True, text=True, check=True
    )
    # The library that kernels/cuda/cuda_orthogonalizer.cu looks for, of the CUDA that the image compiles with.
    version = re.search(r"nvidia/cuda:(\d+)\.(\d+)", " ".join(words_of("Dockerfile.gpu", "ARG")))
    assert f"libcublas-{version[1]}-{version[2]}" in listed.stdout.split()
    assert f'"libcublas.so.{version[1]}"' in (ROOT / "kernels" / "cuda" / "cuda_orthogonalizer.cu").read_text()
