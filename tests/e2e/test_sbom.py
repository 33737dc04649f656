"""deploy/sbom.py: valid SPDX, and whole: every library that the programs link, as dpkg has it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from daemon import BALLASTCTL, BALLASTD, ROOT
from spdx_tools.spdx.model import RelationshipType
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

SCRIPT = ROOT / "deploy" / "sbom.py"
pytestmark = [
    pytest.mark.skipif(not shutil.which("dpkg-query"), reason="no dpkg here: no SBOM is written"),
    pytest.mark.skipif(not BALLASTD.exists(), reason="needs a built daemon"),
]


def printed(**environment: str) -> str:
    command = [sys.executable, SCRIPT, BALLASTD, BALLASTCTL]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.fixture(scope="module")
def text() -> str:
    return printed(SOURCE_DATE_EPOCH="1800000000")


@pytest.fixture(scope="module")
def document(text):
    return JsonLikeDictParser().parse(json.loads(text))


@pytest.fixture(scope="module")
def owners_by_name() -> dict[str, set[str]]:
    """Of each file of a package, by its name alone."""
    owners = defaultdict(set)
    for listed in Path("/var/lib/dpkg/info").glob("*.list"):
        for file in listed.read_text().splitlines():
            owners[file.rpartition("/")[2]].add(listed.stem.split(":")[0])
    return owners


def test_it_is_valid(document):
    assert [message.validation_message for message in validate_full_spdx_document(document, "SPDX-2.3")] == []


def test_an_invalid_one_would_be_found(text):
    broken = json.loads(text)
    broken["relationships"][0]["relatedSpdxElement"] = "SPDXRef-nobody"
    assert validate_full_spdx_document(JsonLikeDictParser().parse(broken), "SPDX-2.3")


def test_the_same_moment_gives_the_same_bits(text):
    assert printed(SOURCE_DATE_EPOCH="1800000000") == text
    assert json.loads(text)["creationInfo"]["created"] == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize("program", [BALLASTD, BALLASTCTL], ids=lambda path: path.name)
def test_every_library_is_there(document, owners_by_name, program):
    """By another way than the script's: of what objdump says, the packages that have a file of that name."""
    [file] = [file for file in document.files if file.name == f"./{program.name}"]
    linked = {
        relation.related_spdx_element_id
        for relation in document.relationships
        if relation.spdx_element_id == file.spdx_id and relation.relationship_type == RelationshipType.DYNAMIC_LINK
    }
    dynamic = subprocess.run(["objdump", "-p", program], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"NEEDED\s+(\S+)", dynamic)
    assert len(libraries) > 5
    for library in libraries:
        owners = owners_by_name[library]
        assert owners, library
        named = [made for made in document.packages if made.name in owners and made.spdx_id in linked]
        assert named or library.startswith("ld-linux"), f"{library} of {owners} is not listed"
        for made in named:
            version = subprocess.run(["dpkg-query", "-Wf", "${Version}", made.name], capture_output=True, text=True)
            assert made.version == version.stdout


def test_what_is_loaded_and_what_python_wants_is_there(document):
    kinds = {
        made.name: {r.relationship_type for r in document.relationships if r.spdx_element_id == made.spdx_id}
        for made in document.packages
    }
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "deploy" / "requirements.txt").read_text(), re.MULTILINE)
    built = re.findall(r"^([\w.-]+)==", (ROOT / "deploy" / "requirements-wheel.txt").read_text(), re.MULTILINE)
    assert pinned and all(RelationshipType.RUNTIME_DEPENDENCY_OF in kinds[name] for name in pinned)
    assert built and all(RelationshipType.BUILD_DEPENDENCY_OF in kinds[name] for name in built)
    if "libopenblas0-pthread" in kinds:
        assert RelationshipType.RUNTIME_DEPENDENCY_OF in kinds["libopenblas0-pthread"]


def test_licences_are_read_where_they_can_be(document):
    """Debian 12's, where the tests run there."""
    declared = {made.name: str(made.license_declared) for made in document.packages}
    assert declared["ballast"] == declared["ballast-optim"] == "Apache-2.0"
    known = {"libssl3": "Apache-2.0", "libgrpc29": "Apache-2.0", "libxxhash0": "BSD-2-Clause", "libcivetweb1": "MIT"}
    if known.keys() <= declared.keys():
        assert {name: declared[name] for name in known} == known
    for made in document.packages:
        if made.spdx_id.startswith("SPDXRef-deb-") and declared[made.name] == "NOASSERTION":
            assert made.license_comment, f"why {made.name} has no licence is not said"


@pytest.mark.parametrize("there", [True, False])
def test_what_is_no_program_is_refused(tmp_path, there):
    file = tmp_path / "ballastd"
    if there:
        file.write_text("#!/bin/sh\n")
    told = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1 and told.stdout == ""
    assert told.stderr.startswith(f"sbom.py: {file} is no program: build it first")
