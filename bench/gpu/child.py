"""Runs one section in this process: `python -m bench.gpu.child SECTION DEVICE FOLDER`."""

import sys
from pathlib import Path

import torch

from bench.gpu.plan import SECTIONS
from bench.gpu.records import Recorder
from bench.gpu.sizes import sizes_for


def main(name: str, device_name: str, folder: str) -> None:
    """Writes the section's records; what ends it at its top is one of them."""
    section = next(each for each in SECTIONS if each.name == name)
    device = torch.device(device_name)
    torch.manual_seed(0)
    recorder = Recorder(Path(folder), name)
    with recorder.case("section"), torch.inference_mode():
        section.run(recorder, sizes_for(device), device)


if __name__ == "__main__":
    main(*sys.argv[1:])
