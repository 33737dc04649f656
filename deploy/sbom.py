#!/usr/bin/env python3
"""Prints what the programs and the Python package are made of, as SPDX 2.3 in JSON.

    .venv/bin/python deploy/sbom.py build/release/server/ballastd build/release/client/cpp/ballastctl > ballast.spdx.json

The programs with their digests; each package of the distribution whose libraries they link, or load, with its version, and
its licence where its copyright file can be read by programs; NVIDIA's runtime, where a program has kernels for GPUs; and
the Python package's requirements (deploy/requirements.txt, and requirements-wheel.txt to build it), with the licences of those
that the Python which runs this has installed. On the machine that built the programs, Debian or Ubuntu; with SOURCE_DATE_EPOCH
the same bits each time.
"""

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
NONE_SAID = "NOASSERTION"
# Debian's short names of licences that SPDX has under others; names that are in neither column are SPDX's own.
LICENCES = {
    "expat": "MIT",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "zlib": "Zlib",
    "gpl-2+": "GPL-2.0-or-later",
    "gpl-3+": "GPL-3.0-or-later",
    "lgpl-2.1": "LGPL-2.1-only",
    "lgpl-2.1+": "LGPL-2.1-or-later",
}
OF_SPDX = {"Apache-2.0", "MIT", "ISC", "BSL-1.0", "CC0-1.0", *LICENCES.values()}


def run(*command: str | Path) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    told = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if told.returncode != 0:
        sys.exit(f"sbom.py: {' '.join(map(str, command))}: {told.stderr.strip()}")
    return told.stdout


# --- what the machine says --------------------------------------------------------------------------------------------


def libraries(program: Path) -> dict[str, Path]:
    """The shared libraries that the loader finds for it, its libraries' own among them, by name."""
    found = re.findall(r"^\s*(\S+) => (\S+|not found)", run("ldd", program), re.MULTILINE)
    missing = [name for name, path in found if path == "not"]
    if missing:
        sys.exit(f"sbom.py: {program}: not found: {', '.join(missing)}")
    return {name: Path(path) for name, path in found}


def needed(elf: Path) -> list[str]:
    """Those that it names itself; the loader is libc's, which is among them."""
    named = re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", run("readelf", "-dW", elf))
    return [name for name in named if not name.startswith("ld-linux")]


def packages_of(patterns: Iterable[str]) -> dict[str, str]:
    """By file that is like one of these: its package."""
    told = subprocess.run(["dpkg-query", "-S", *patterns], capture_output=True, text=True).stdout
    return dict(reversed(line.split(": ")) for line in told.splitlines() if not line.startswith("diversion by"))


def owners(found: dict[str, Path]) -> dict[str, str]:
    """Each library's package: whose file it is; or, of a copy such as the portable folder's, whose file of that name is."""
    places = {
        name: [str(path), f"/usr{path}", str(path).removeprefix("/usr"), str(path.resolve())]
        for name, path in found.items()
    }
    files = packages_of(place for some in places.values() for place in some)
    copies = [name for name in found if not files.keys() & places[name]]
    if copies:
        files |= packages_of(f"*/{name}" for name in copies)  # of which each takes dpkg a tenth of a second
    packages = {}
    for name in found:
        there = [*places[name], *(place for place in files if place.endswith(f"/{name}"))]
        packages[name] = next((files[place] for place in there if place in files), "")
    if unknown := [name for name, of in packages.items() if not of]:
        sys.exit(f"sbom.py: of no package of this machine: {', '.join(unknown)}; run it where the programs were built")
    return packages


def distribution() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def declared_licence(package: str) -> tuple[str, str]:
    """In SPDX's words what `Files: *` of the copyright file says, and a comment where it says nothing that SPDX has."""
    file = Path("/usr/share/doc") / package.split(":")[0] / "copyright"
    text = file.read_text(errors="replace") if file.exists() else ""
    if not re.match(r"Format: https?://www\.debian\.org/doc/packaging-manuals/copyright-format/", text):
        return NONE_SAID, f"{file} is not in the format that programs read"
    whole = [part for part in re.split(r"\n\s*\n", text) if re.search(r"^Files:\s*\*\s*$", part, re.MULTILINE)]
    names = [found[1].strip() for part in whole if (found := re.search(r"^License:(.*)$", part, re.MULTILINE))]
    words = re.split(r"\s+(and|or)\s+", names[0]) if names else []
    for i in range(0, len(words), 2):
        words[i] = LICENCES.get(words[i].lower(), words[i])
    if not words or not set(words[::2]) <= OF_SPDX:
        return NONE_SAID, f"{file} says {names[0] if names else 'nothing of all files'}"
    return " ".join(word.upper() if i % 2 else word for i, word in enumerate(words)), ""


# --- what SPDX calls them ---------------------------------------------------------------------------------------------


def spdx_id(kind: str, name: str) -> str:
    return f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', name)}"


def package(kind: str, name: str, version: str, licence: str, **more: object) -> dict:
    return {
        "SPDXID": spdx_id(kind, name),
        "name": name,
        "versionInfo": version,
        "downloadLocation": NONE_SAID,
        "filesAnalyzed": False,
        "licenseConcluded": NONE_SAID,
        "licenseDeclared": licence,
        "copyrightText": NONE_SAID,
        **more,
    }


def package_url(locator: str) -> list[dict]:
    return [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}]


@functools.cache
def debian_package(name: str) -> dict:
    fields = "${Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\t${Maintainer}"
    plain, version, architecture, source, source_version, maintainer = run("dpkg-query", "-Wf", fields, name).split(
        "\t"
    )
    system = distribution()
    locator = f"pkg:deb/{system['ID']}/{quote(plain, safe='')}@{quote(version, safe='')}?arch={architecture}"
    licence, comment = declared_licence(name)
    more = {"licenseComments": comment} if comment else {}
    return package(
        "deb",
        plain,
        version,
        licence,
        supplier=f"Organization: {maintainer.replace('<', '(').replace('>', ')')}",
        sourceInfo=f"built from the source package {source} {source_version}",
        externalRefs=package_url(f"{locator}&distro={system['ID']}-{system['VERSION_ID']}"),
        **more,
    )


def python_package(name: str, version: str) -> dict:
    licence = NONE_SAID
    try:
        installed = importlib.metadata.metadata(name)
        if installed["Version"].split("+")[0] == version and " WITH " not in (
            installed["License-Expression"] or " WITH "
        ):
            licence = installed["License-Expression"]
    except importlib.metadata.PackageNotFoundError:
        pass
    return package("pypi", name, version, licence, externalRefs=package_url(f"pkg:pypi/{name.lower()}@{version}"))


def program_file(program: Path) -> dict:
    content = program.read_bytes()
    digests = [
        {"algorithm": name, "checksumValue": hashlib.new(name.lower(), content).hexdigest()}
        for name in ("SHA1", "SHA256")
    ]
    return {
        "SPDXID": spdx_id("program", program.name),
        "fileName": f"./{program.name}",
        "fileTypes": ["BINARY"],
        "checksums": digests,
        "licenseConcluded": "Apache-2.0",
        "copyrightText": NONE_SAID,
    }


# --- the document -----------------------------------------------------------------------------------------------------


class Document:
    def __init__(self, version: str):
        self.version = version
        self.packages: dict[str, dict] = {}
        self.files: list[dict] = []
        self.relations: set[tuple[str, str, str]] = set()

    def add(self, made: dict) -> str:
        return self.packages.setdefault(made["SPDXID"], made)["SPDXID"]

    def relate(self, one: str, relation: str, other: str) -> None:
        if one != other:
            self.relations.add((one, relation, other))

    def add_program(self, program: Path, ballast: str) -> None:
        made = program_file(program)
        self.files.append(made)
        self.relate(made["SPDXID"], "GENERATED_FROM", ballast)
        found = libraries(program)
        of = {name: self.add(debian_package(whose)) for name, whose in owners(found).items()}
        for name in needed(program):
            self.relate(made["SPDXID"], "DYNAMIC_LINK", of[name])
        for name, path in found.items():
            for other in needed(path):
                self.relate(of[name], "DEPENDS_ON", of[other])
        if ".nv_fatbin" in run("readelf", "-SW", program):
            runtime = package("static", "cuda-cudart", NONE_SAID, "LicenseRef-NVIDIA-CUDA-EULA")
            self.relate(made["SPDXID"], "STATIC_LINK", self.add(runtime))

    def add_loaded(self, ballast: str) -> None:
        """Libraries that the programs look for when they run, where the machine has them."""
        listed = run(ROOT / "deploy" / "packages.sh", "--list", "runtime").split()
        for name in (name for name in listed if spdx_id("deb", name) not in self.packages):
            known = subprocess.run(["dpkg-query", "-Wf", "${db:Status-Status}", name], capture_output=True, text=True)
            if known.stdout == "installed":
                self.relate(self.add(debian_package(name)), "RUNTIME_DEPENDENCY_OF", ballast)

    def add_requirements(self, file: str, relation: str, client: str) -> None:
        lines = (ROOT / "deploy" / file).read_text()
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", lines, re.MULTILINE):
            self.relate(self.add(python_package(name, version)), relation, client)

    def as_json(self) -> str:
        relations = [
            {"spdxElementId": one, "relationshipType": relation, "relatedSpdxElement": other}
            for one, relation, other in sorted(self.relations)
        ]
        packages = [self.packages[key] for key in sorted(self.packages)]
        content = {"packages": packages, "files": self.files, "relationships": relations}
        if any(made["licenseDeclared"].startswith("LicenseRef-") for made in packages):
            content["hasExtractedLicensingInfos"] = [
                {"licenseId": "LicenseRef-NVIDIA-CUDA-EULA", "extractedText": "https://docs.nvidia.com/cuda/eula/"}
            ]
        head = {
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": f"ballast-{self.version}",
            "creationInfo": {"created": moment(), "creators": [f"Tool: ballast-sbom-{self.version}"]},
        }
        # A name that no other document has: it is made of all that this one says.
        head["documentNamespace"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([head, content]))}"
        return json.dumps(head | content, indent=2)


def moment() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    when = datetime.fromtimestamp(int(epoch), timezone.utc) if epoch else datetime.now(timezone.utc)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", type=Path, metavar="PROGRAM")
    programs = parser.parse_args().programs
    for program in programs:
        if not program.is_file() or program.read_bytes()[:4] != b"\x7fELF":
            sys.exit(
                f"sbom.py: {program} is no program: build it first (deploy/setup.sh build release ballastd ballastctl)"
            )
    version = re.search(r"project\(ballast VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    document = Document(version)
    ballast = document.add(package("source", "ballast", version, "Apache-2.0"))
    client = document.add(package("source", "ballast-optim", version, "Apache-2.0"))
    for made in (ballast, client):
        document.relate("SPDXRef-DOCUMENT", "DESCRIBES", made)
    for program in programs:
        document.add_program(program, ballast)
    document.add_loaded(ballast)
    document.add_requirements("requirements.txt", "RUNTIME_DEPENDENCY_OF", client)
    document.add_requirements("requirements-wheel.txt", "BUILD_DEPENDENCY_OF", client)
    print(document.as_json())


if __name__ == "__main__":
    main()
