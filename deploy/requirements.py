"""`python deploy/requirements.py gateway|engine`: what an image installs, as pyproject.toml has it.

Torch is in no lock: each index has builds of its own for it, of which the one that fits the device is chosen by
`PIP_OPTIONS`.
"""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WANTED = {"gateway": PROJECT["dependencies"], "engine": PROJECT["optional-dependencies"]["engine"]}

if __name__ == "__main__":
    lines = [line for line in WANTED[sys.argv[1]] if not line.startswith("torch")]
    sys.stdout.write("\n".join(lines) + "\n")
