"""A file of API keys for tests. The key of each name is known: it is long, and says whose it is."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gateway.keys.tenant import Tenant


def key_of(name: str) -> str:
    """The key of a name."""
    return f"sk-{name}-0123456789abcdef"


def table_of(name: str, **fields: int | bool) -> str:
    """A name's table, with limits if any."""
    lines = [f"{field} = {str(value).lower()}" for field, value in fields.items()]
    return "\n".join([f"[{name}]", f'sha256 = "{hashlib.sha256(key_of(name).encode()).hexdigest()}"', *lines, ""])


def write_keys(path: Path, **names: Mapping[str, int | bool]) -> str:
    """Writes a file with the keys of these names, each with its limits, and gives its path."""
    path.write_text("".join(table_of(name, **fields) for name, fields in names.items()))
    return str(path)


def bearer(name: str) -> dict[str, str]:
    """The header that carries a name's key."""
    return {"authorization": f"Bearer {key_of(name)}"}


async def samples_of(tenant: Tenant) -> int:
    """Number of samples of a key that run or wait."""
    return await tenant.usage.change(tenant.key, lambda account: account.samples + account.other_samples)
