"""Which device a name means, and what is said of one that this process does not see."""

import pytest
import torch

from outrider.engine.devices import checked_device, seen_devices
from outrider.errors import InvalidRequest


@pytest.mark.parametrize(
    ("count", "cuda", "hidden", "words"),
    [
        (0, None, None, "It sees no CUDA device, because torch .* is built without CUDA: install a build that has it"),
        (0, "12.8", "", "It sees no CUDA device, and CUDA_VISIBLE_DEVICES is '': unset it"),
        (0, "12.8", None, "It sees no CUDA device: nvidia-smi has to list it here, and a container has to be given it"),
        (1, "12.8", None, "It sees cuda:0 alone: nvidia-smi"),
        (4, "12.8", "0,1,2,3", "It sees cuda:0 to cuda:3, and CUDA_VISIBLE_DEVICES is '0,1,2,3': unset it"),
    ],
)
def test_a_device_that_is_not_there_is_told_with_what_is_seen(
    monkeypatch: pytest.MonkeyPatch, count: int, cuda: str | None, hidden: str | None, words: str
) -> None:
    """The option, its value, what the process sees, and what to do."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if hidden is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(InvalidRequest, match=f"^--device is 'cuda:4', but must be .*{words}"):
        checked_device("cuda:4", "--device")


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (
            {},
            "It sees no CUDA device: rocm-smi has to list it here, and a container has to be given it (--device",
        ),
        (
            {"HIP_VISIBLE_DEVICES": "1"},
            "It sees no CUDA device, and HIP_VISIBLE_DEVICES is '1': unset it, or name devices",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "It sees no CUDA device, and CUDA_VISIBLE_DEVICES is '': unset it, or name devices",
        ),
    ],
)
def test_a_torch_for_rocm_is_not_asked_for_cuda(
    monkeypatch: pytest.MonkeyPatch, hidden: dict[str, str], words: str
) -> None:
    """It has AMD's cards under CUDA's names, but its own tools and variables."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    assert seen_devices().startswith(words)


def test_a_device_that_is_there_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the first."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(checked_device(name)) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]
