"""A token and the access file with its grant, as an operator makes them.

token, access = give_token(folder, "team-a-*", "push", "most_runs: 1")
with Daemon(folder, "--access", str(access), ...): ...  # clients with BALLAST_TOKEN_FILE=token
"""

import subprocess
from pathlib import Path

from daemon import BALLASTCTL, plain_environment

NAME = "team-a"


def give_token(folder: Path, runs: str, scope: str, *quota: str) -> tuple[Path, Path]:
    """quota: lines of the grant, such as "most_runs: 1"."""
    token, access = folder / f"{NAME}.token", folder / "access.yaml"
    command = [BALLASTCTL, "token", "new", "--out", token, "--name", NAME, "--run", runs, "--scope", scope]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=plain_environment()).stdout
    grant = made[made.index("- name:") :].rstrip("\n") + "\n"
    access.write_text("grants:\n" + grant + "".join(f"  {key}\n" for key in quota))
    return token, access
