"""Memory that is free on this machine, and that a model takes. Allocates none."""

from pathlib import Path

from outrider.cli.doctor.findings import CONFIG, Finding, failed, gibibytes, ok, skipped, warning
from outrider.cli.doctor.models import ModelFiles

CHECK = "memory"
MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# What an engine takes for keys and values unless it is told otherwise, and at most for the sake of one context.
DEFAULT_KV_BYTES, MOST_KV_BYTES = 512 << 20, 4 << 30
# torch and gRPC in each service, and the gateway: measured, rounded up.
PROCESS_BYTES, GATEWAY_BYTES = 400 << 20, 150 << 20


def available_bytes() -> int | None:
    """What is free, by the system and by the control group; None where neither tells."""
    system = parse_available(MEMORY_INFO.read_text()) if MEMORY_INFO.is_file() else None
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    left = None if limit is None or used is None else max(0, limit - used)
    return min((each for each in (system, left) if each is not None), default=None)


def parse_available(text: str) -> int | None:
    """MemAvailable of /proc/meminfo in bytes."""
    line = next((each for each in text.splitlines() if each.startswith("MemAvailable:")), "")
    words = line.split()
    return int(words[1]) * 1024 if len(words) == 3 and words[1].isdecimal() else None


def needed_bytes(model: ModelFiles, dtype: str) -> int:
    """Weights, cache and process of a service with this model on the CPU, where keys and values are float32."""
    item_bytes = 2 if dtype == "bfloat16" else 4
    token_bytes = 2 * 4 * model.key_value_width
    cache = max(DEFAULT_KV_BYTES, min(model.context_len * token_bytes, MOST_KV_BYTES))
    return model.parameter_count * item_bytes + cache + PROCESS_BYTES


def judge(needs: dict[str, int], available: int | None) -> Finding:
    """Needs by role against what is free."""
    if available is None:
        return skipped(CHECK, "This system does not say how much memory is free.")
    total = sum(needs.values()) + GATEWAY_BYTES
    parts = ", ".join(f"{gibibytes(count)} for the {role}" for role, count in needs.items())
    sentence = f"A stack takes about {gibibytes(total)} ({parts}); {gibibytes(available)} are free."
    if total <= available:
        return ok(CHECK, sentence)
    if total - sum(needs.values()) + min(needs.values(), default=0) > available:
        return failed(CHECK, sentence, "Choose smaller models, or a machine with more memory.", CONFIG)
    return warning(CHECK, sentence, "Close other programs, choose smaller models, or lower --kv-tokens of a service.")


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None
