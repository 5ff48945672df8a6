"""`python deploy/requirements.py gateway|engine|models`: what an image installs, as pyproject.toml has it.

Torch is in no lock: each index has builds of its own for it, of which the one that fits the device is chosen by
`PIP_OPTIONS`. What each build of it needs stands in its place; builds for GPUs need packages of NVIDIA's beside that.
"""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# A lock holds for each Python that the base image may have: redis needs async-timeout before 3.11.3.
GATEWAY = [*PROJECT["dependencies"], *EXTRAS["gateway"], *EXTRAS["redis"], "async-timeout"]
# The others are made of the gateway's environment; pip fetches the assistant.
WANTED = {
    "gateway": GATEWAY,
    "engine": [line for line in EXTRAS["engine"] if line not in GATEWAY],
    "models": ["pip"],
}
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")

if __name__ == "__main__":
    wanted = WANTED[sys.argv[1]]
    lines = [needed for line in wanted for needed in (TORCH_NEEDS if line.startswith("torch") else [line])]
    sys.stdout.write("\n".join(lines) + "\n")
