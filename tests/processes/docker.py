"""Stands in for the command docker: runs what a container would run, here, and notes its arguments.

Folder DOCKER has its file ``calls``; files ``down``, ``slow`` and ``hung`` there make it refuse, be
slow to start, and answer nothing at all.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(os.environ["DOCKER"])


def main() -> int:
    arguments = sys.argv[1:]
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if (FOLDER / "down").exists():
        sys.stderr.write(
            "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock\n"
        )
        return 125
    if arguments[0] == "rm" and not (FOLDER / "hung").exists():
        return 0
    if (FOLDER / "slow").exists():
        time.sleep(60)
    options = [argument for argument in arguments if argument.startswith("--")]
    command = arguments[1 + len(options) + 1 :]  # behind the image
    with tempfile.TemporaryDirectory() as folder:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        done = subprocess.run(command, cwd=folder, env={"PATH": path}, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    sys.exit(main())
