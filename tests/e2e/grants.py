"""A token and the access file with its grant, as an operator makes them.

token, access = give_token(folder, "team-a-*", "push", "--most-runs=1")
with Daemon(folder, "--access", str(access), ...): ...  # clients with BALLAST_TOKEN_FILE=token
"""

import subprocess
from pathlib import Path

from daemon import BALLASTCTL, plain_environment

NAME = "team-a"


def give_token(folder: Path, runs: str, scope: str, *quota: str) -> tuple[Path, Path]:
    """quota: flags of ballastctl, such as "--most-runs=1"."""
    token, access = folder / f"{NAME}.token", folder / "access.yaml"
    command = [BALLASTCTL, "token", "new", "--out", token, "--name", NAME, "--run", runs, "--scope", scope, *quota]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=plain_environment()).stdout
    access.write_text("grants:\n" + made[made.index("- name:") :])
    return token, access
