"""The house rules, applied to this repository; and each rule applied to a planted violation, so that it can fail."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tidy_documents
import tidy_rules
from tidy_build import type_names, unbuilt_tests
from tidy_references import file_names, references
from tidy_rules import cpp_functions, list_files, read_tree

RULES = [*tidy_rules.RULES, *tidy_documents.RULES, type_names, unbuilt_tests, references, file_names]

ROOT = Path(__file__).resolve().parents[1]
CONFIGURED = {
    "proto/ballast/v1/config.proto": "message DaemonConfig {\n  LimitsConfig limits = 1;\n}\n\n"
    "message LimitsConfig {\n  double lease = 6;  // seconds\n}\n"
}
LONG_BODY = "  f();\n" * 80

# (rule, files of a small tree, what the rule says about it)
PLANTED = [
    (
        "dependency_direction",
        {"client/cpp/a.cc": '#include "server/run/run.h"\n'},
        "client must not include server/run/run.h",
    ),
    ("dependency_direction", {"client/cpp/a.h": '#include "kernels/registry.h"\n'}, "must not include kernels"),
    ("dependency_direction", {"kernels/a.h": '#include "proto/checksum.h"\n'}, "kernels must not include proto"),
    ("dependency_direction", {"kernels/a.cc": '#include "absl/status/status.h"\n'}, "the standard library and CUDA"),
    ("dependency_direction", {"kernels/a.cc": "#include <nanobind/nanobind.h>\n"}, "the standard library and CUDA"),
    (
        "dependency_direction",
        {"proto/a.cc": '#include "server/run/run.h"\n'},
        "proto must not include server/run/run.h",
    ),
    (
        "dependency_direction",
        {"tests/kernels/a.cc": '#include "server/run/run.h"\n'},
        "tests must not include server/run/run.h",
    ),
    ("server_rooms", {"server/step/a.cc": '#include "server/run/run.h"\n'}, "step must not include server/run/run.h"),
    ("server_rooms", {"server/run/a.cc": '#include "server/rpc/rpc.h"\n'}, "run must not include server/rpc/rpc.h"),
    ("server_rooms", {"server/run/a.cc": '#include "server/server.h"\n'}, "run must not include server/server.h"),
    ("server_rooms", {"server/plan/a.h": '#include "absl/synchronization/mutex.h"\n'}, "plan decides"),
    ("server_rooms", {"server/run/a.h": "#include <grpcpp/grpcpp.h>\n"}, "only relay, rpc and shm include gRPC"),
    ("server_rooms", {"server/run/a.h": '#include "ballast/v1/run.pb.h"\n'}, "include messages"),
    ("server_rooms", {"server/attic/a.h": ""}, "no room of that name"),
    ("include_paths", {"server/a.cc": '#include "a.h"\n', "server/a.h": ""}, '"server/a.h", from the root'),
    ("include_paths", {"server/a.cc": '#include "../proto/a.h"\n'}, "from the root"),
    ("file_length", {"server/a.cc": "\n" * 401}, "401 lines"),
    ("file_length", {"tests/run.sh": "#!/bin/sh\n" * 401}, "401 lines"),
    ("function_length", {"server/a.cc": f"namespace b {{\nint F(int x) const {{\n{LONG_BODY}}}\n}}\n"}, "int F(int x)"),
    ("function_length", {"client/a.cc": f"struct S {{\n  S() : a(1) {{\n{LONG_BODY}}}\n}};\n"}, "the limit"),
    ("function_length", {"tests/a.py": "def long():\n" + "    pass\n" * 80}, "long: 81 lines"),
    ("function_length", {"deploy/a.sh": "#!/bin/sh\nlong() {\n" + "  true\n" * 80 + "}\n"}, "long: 82 lines"),
    ("banned_words", {"server/a.cc": "// TO" "DO: later\n"}, "do it, or leave it out"),
    ("banned_words", {"tests/a_test.cc": "std::this_thread::sleep_for(x);\n"}, "wait for the event"),
    ("banned_words", {"server/a.h": "using namespace std;\n"}, "name what you use"),
    ("banned_words", {"server/run/run.cc": 'getenv("X");\n'}, "config.cc"),
    ("banned_words", {"server/run/run.cc": "try { f(); } catch (...) {}\n"}, "catch what the library throws"),
    ("banned_words", {"server/run/run.cc": "#ifdef CUDA\n#endif\n"}, "choose at run time"),
    ("banned_words", {"client/cpp/a.cc": "void F() { std::exit(1); }\n"}, "return a Status"),
    ("vague_names", {"server/string_util.cc": ""}, "'util' says nothing"),
    ("vague_names", {"server/helpers/a.cc": ""}, "'helpers' says nothing"),
    (
        "type_names",
        {
            f"{room}/a.h": "namespace ballast {\nclass A final : public B {\n};\n}  // namespace ballast\n"
            for room in ("client", "server")
        },
        "client/a.h: ballast::A is a type of server/a.h, too",
    ),
    ("top_level", {"docs/a.md": ""}, "docs: the root holds"),
    ("forbidden_text", {"README.md": "see /wor" "k/main\n"}, "a path of one machine"),
    ("forbidden_text", {"deploy/a.sh": "curl https://pypi" ".org/x\n"}, "the host of a package registry"),
    ("forbidden_text", {"README.md": "written by an age" "nt\n"}, "speaks of itself alone"),
    ("forbidden_text", {"server/a.cc": "// see iss" "ue 12\n"}, "speaks of itself alone"),
    ("references", {"server/a.h": "// see server/A.m" 'd, "Sums"\n'}, "server/a.h:1: there is no server/A.md"),
    (
        "references",
        {"kernels/A.md": "# Sums\n```\n# Orders\n```\n", "tests/a.py": "# kernels/A.m" 'd, "Orders"\n'},
        "tests/a.py:1: kernels/A.md has no heading 'Orders'",
    ),
    (
        "references",
        {"kernels/A.md": "# Sums\n", "kernels/a.h": "// `kernels/A.m" 'd`,\n// "The order of\n// sums".\n'},
        "kernels/A.md has no heading 'The order of sums'",
    ),
    ("file_names", {"server/a.h": "int x;  // as in server/b.h\n"}, "server/a.h:1: there is no file server/b.h"),
    (
        "file_names",
        {"server/README.md": "# A\n`step/gone.cc` does it.\n"},
        "server/README.md:2: there is no file step/gone",
    ),
    (
        "file_names",
        {"tests/a.py": 'def f():\n    """As in\n    gone.py."""\n'},
        "tests/a.py:3: there is no file gone.py",
    ),
    ("file_names", {"proto/a.proto": "// See proto/WIRE.md.\n"}, "there is no file proto/WIRE.md"),
    (
        "unbuilt_tests",
        {"tests/server/a_test.cc": "", "tests/server/CMakeLists.txt": "ballast_test(b_test SOURCES b_test.cc)\n"},
        "tests/server/a_test.cc: tests/server/CMakeLists.txt does not name it",
    ),
    (
        "metric_names",
        {"deploy/prometheus/a.yml": "expr: ballast_x > 1\n"},
        "ballast_x is not in server/metrics/METRICS.md",
    ),
    (
        "links",
        {"deploy/README.md": "see [it](../server/GONE.m" "d)\n"},
        "deploy/README.md:1: there is no server/GONE.md",
    ),
    ("links", {"README.md": "see [it](#how)\n# Why\n"}, "README.md has no heading for #how"),
    (
        "document_metrics",
        {
            "README.md": "`ballast_x` and `ballast_y`\n",
            "server/metrics/METRICS.md": "| `ballast_x` | gauge |  | X. |\n",
        },
        "README.md:1: ballast_y is not in",
    ),
    (
        "document_metrics",
        {
            "server/README.md": "\n## Limits\n| a | 1 | `limits.a` | `x_total{all,some}` | `a_test` |\n",
            "server/metrics/METRICS.md": "| `ballast_x_total` | counter | `reason` = all, none | X. |\n",
        },
        "server/README.md:3: ballast_x_total has no label with the value some",
    ),
    ("configuration_keys", CONFIGURED | {"README.md": "`limits.lease: 1s`, `limits.leese`\n"}, "no key limits.leese"),
    ("configuration_keys", CONFIGURED | {"README.md": "`limits.most_...`\n"}, "there is no key limits.most_"),
    ("variables", CONFIGURED | {"README.md": "BALLAST_LIMITS_LEASE, BALLAST_LISTEN\n"}, "nothing reads BALLAST_LISTEN"),
    (
        "message_fields",
        {
            "README.md": "`RunSpec.ranks`, `RunSpec.rank`\n",
            "proto/a.proto": "message RunSpec {\n  uint32 ranks = 1;\n}\n",
        },
        "README.md:1: RunSpec has no field rank",
    ),
    (
        "log_events",
        {
            "server/a.cc": 'Log(LogLevel::kInfo, "restored", "a run is restored");\n',
            "README.md": "The log names the file (`restored`).\nThe log's last `restore`; an event: `restored` (`a`), `b`.\n",
        },
        "README.md:2: the daemon logs no event b",
    ),
    ("alerts_have_runbooks", {"deploy/prometheus/alerts.yml": "  - alert: A\n    expr: up\n"}, "A has no summary"),
]

# What the rules must let pass.
HARMLESS = {
    "kernels/a.cc": '#include <cstdint>\n#include <immintrin.h>\n#include <cuda_runtime.h>\n#include "kernels/a.h"\n',
    "kernels/a.h": "void Kernel() {\n" + LONG_BODY + "}\n",
    "client/python/numerics.cc": '#include "kernels/a.h"\n',
    "server/rpc/train_stream.cc": '#include <grpcpp/grpcpp.h>\n#include "ballast/v1/run.pb.h"\n#include "server/plan/plan.h"\n',
    "server/run/run.cc": '// getenv("X")\nconst char* text = "std::exit(1) // sleep_for";\nint n = 1\'000\'000;\n',
    "server/config/config.cc": 'getenv("X");\n',
    "server/plan/plan.h": '#include "absl/status/status.h"\n#include "kernels/a.h"\n#include "server/spec/run_spec.h"\n',
    "server/run/b.h": '// run/run.cc, b.h, kernels/rules/NAME.h, OUT/a.md, /etc/x.h, https://x.org/c.h\nconst char* kName = "gone.h";\n',
    "server/table.cc": "const int kTable[] = {\n" + "    1,\n" * 80 + "};\nenum class E {\n" + "  kA,\n" * 80 + "};\n",
    "server/metrics/METRICS.md": "| `ballast_x` | gauge |\n| `ballast_step_seconds` | histogram |\n",
    "deploy/README.md": "## BallastHot\n",
    "client/a.cc": "namespace {\nstruct A {};\n}  // namespace\n",
    "server/a.cc": "struct A;\nnamespace b {\nstruct A : B {};\n}  // namespace b\nstruct A::C {};\n",
    "client/b.h": "struct A {};\n",
    "server/README.md": "[a](../kernels/A.md#the-order-of-sums), [b](#limits), [c](https://x.org/c.md), ![d](d.png), `x.yaml`, `A.b()`\n"
    "\n## Limits\n| a | 1 | fixed | `x` | `a_test` |\n",
    "kernels/sums.h": "// kernels/A.m"
    'd, "The order\n// of sums"; `kernels/A.m'
    'd`, "One"\nconst char* kNames = {"b.md", "c"};\n',
    "kernels/A.md": "# One\n\n### The order of sums\n",
    "deploy/prometheus/alerts.yml": "rules:\n  - alert: BallastHot\n    expr: rate(ballast_step_seconds_bucket[1m]) > run_id:ballast_y:max"
    "\n    severity: w\n    summary: s\n    description: d\n    runbook_url: deploy/README.md#ballasthot\n",
}


def plant(folder: Path, files: dict[str, str]) -> list[tidy_rules.Source]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_tree(folder)


@pytest.fixture(scope="module")
def repository():
    return read_tree(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps(rule, repository):
    violations = rule(repository)
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(("rule", "files", "said"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
def test_rule_finds_what_is_planted(rule, files, said, tmp_path):
    violations = {own.__name__: own for own in RULES}[rule](plant(tmp_path, files))
    assert any(said in violation for violation in violations), violations


def test_every_rule_has_a_planted_violation():
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in PLANTED}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_the_harmless_pass(rule, tmp_path):
    assert rule(plant(tmp_path, HARMLESS)) == []


def test_bodies_of_functions_are_found():
    code = (
        "namespace n {\nclass C {\n  C(int a) : a_{a} {\n    if (a) {\n    }\n  }\n};\nint G() {\n  return 1;\n}\n}\n"
    )
    assert [(first, last) for _, first, last in cpp_functions(code)] == [(3, 6), (8, 10)]


# --- tools ----------------------------------------------------------------------------------------------------------


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


def cpp_files():
    return [path for path in list_files(ROOT) if path.suffix in tidy_rules.CPP]


def shell_files():
    return [ROOT / source.path for source in read_tree(ROOT) if source.is_shell]


def test_cpp_is_formatted():
    if not shutil.which("clang-format"):
        pytest.skip("clang-format is not installed")
    version = run("clang-format", "--version").stdout
    if " 14." not in version:
        pytest.skip(f"the layout is that of clang-format 14; here is {version.strip()}")
    result = run("clang-format", "--dry-run", "--Werror", *cpp_files())
    assert result.returncode == 0, result.stderr[-4000:]


def test_clang_format_check_can_fail(tmp_path):
    if not shutil.which("clang-format"):
        pytest.skip("clang-format is not installed")
    (tmp_path / "a.cc").write_text("int   f( ){return 1 ;}\n")
    assert run("clang-format", "--dry-run", "--Werror", "--style=Google", tmp_path / "a.cc").returncode != 0


def test_python_is_formatted():
    if run(sys.executable, "-m", "black", "--version").returncode != 0:
        pytest.skip("black is not installed")
    files = [path for path in list_files(ROOT) if path.suffix == ".py"]
    result = run(sys.executable, "-m", "black", "--check", "--quiet", "--diff", "--line-length", "120", *files)
    assert result.returncode == 0, result.stdout[-4000:]


def test_drawn_pictures_are_what_their_programs_draw():
    result = run(sys.executable, ROOT / "deploy" / "data_flow.py", "--check")
    assert result.returncode == 0, result.stderr


def test_shell_scripts_parse():
    for path in shell_files():
        result = run("bash", "-n", path)
        assert result.returncode == 0, result.stderr


def test_shell_scripts_pass_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    result = run("shellcheck", "--external-sources", f"--source-path={ROOT}", *shell_files())
    assert result.returncode == 0, result.stdout[-4000:]


def test_shell_scripts_stop_at_errors():
    for source in read_tree(ROOT):
        if source.is_shell and source.text.startswith("#!") and "# Sourced by" not in source.text[:200]:
            assert "set -euo pipefail" in source.text, f"{source.path} does not set -euo pipefail"
