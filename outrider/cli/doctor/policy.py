"""`outrider doctor --policy`: what the policy of a running gateway knows, and what it would choose now."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cli.doctor.checks import REST, TLS_FIX, rest_finding, rest_status
from outrider.cli.doctor.report import Finding, failed
from outrider.cli.output import console_for, write
from outrider.cli.running import Interrupts, note, run
from outrider.rpc.tls import Tls, TlsFailed, why_refused


def show_policy(address: str, api_key: str | None, tls: Tls | None, *, as_json: bool) -> int:
    """Prints what the policy of the gateway that answers REST there knows; returns the exit code."""
    codes: list[int] = []

    async def work(_: Interrupts) -> None:
        found = await policy_of(address, api_key, tls)
        if isinstance(found, Finding):
            note(f"outrider: {found.sentence} {found.fix}")
            codes.append(found.exit_code)
        elif as_json:
            write(sys.stdout, json.dumps(found, ensure_ascii=False) + "\n")
        else:
            print_policy(console_for(sys.stdout), found)

    run(work)
    return sum(codes)


async def policy_of(address: str, api_key: str | None = None, tls: Tls | None = None) -> dict[str, Any] | Finding:
    """Policy in a gateway's status, or why it cannot be had."""
    status = await asyncio.to_thread(rest_status, address, api_key, tls)
    if status is None and (refused := await asyncio.to_thread(why_refused, address, tls)):
        return failed(REST, refused, TLS_FIX, TlsFailed.exit_code)
    if status is None:
        return rest_finding(address, None, "")
    policy: dict[str, Any] = status.get("policy", {})
    if "choice" in policy:
        return policy
    version = status["gateway"].get("version")
    return failed(REST, f"Version {version} on {address} does not say what its policy knows.", "Update the gateway.")


def print_policy(console: Console, policy: Mapping[str, Any]) -> None:
    """Prints the load, the choice and its reason, and a table of what each number of guesses costs and brings."""
    choice, load = policy["choice"], policy["load"]
    plain_us = policy["plain_us"]
    sessions = f"{load} session{'' if load == 1 else 's'}"
    guesses = f"{choice['draft_count']} guess{'' if choice['draft_count'] == 1 else 'es'}"
    who = f" of {_name(choice)}" if choice["draft_count"] else ", plain decoding"
    console.print(
        f"On the target: {sessions}. A token of plain decoding takes {_milliseconds(plain_us)}. "
        f"A row of a lookup costs other sessions {policy['row_price']:.3f} tokens.\n"
        f"A new session would get {guesses}{who} ({choice['case'].replace('_', ' ')}).\n{choice['reason']}",
        soft_wrap=True,
    )
    if policy.get("rest_tokens"):
        rest = f"for the next {policy['rest_tokens']:.0f} plain tokens there are none."
        console.print(f"All sessions together were slower with guesses: {rest}", soft_wrap=True)
    if not choice["drafters"]:
        console.print("Nothing is known of any drafter yet.", soft_wrap=True)
        return
    table = Table("drafter", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("guesses", "tokens a round", "round takes", "tokens/s", "of plain"):
        table.add_column(heading, justify="right")
    table.add_row("plain decoding", "0", "1.00", _milliseconds(plain_us), f"{1e6 / plain_us:.1f}", "1.00")
    for drafter in choice["drafters"]:
        table.add_section()
        worth = "worth it" if drafter["is_allowed"] else "worth it, not for one more session yet"
        table.add_row(f"{_name(drafter)}: {worth if drafter['is_worth'] else 'not worth it'}")
        for each in drafter["candidates"]:
            speed = each["tokens_per_s"]
            table.add_row(
                "",
                str(each["draft_count"]),
                f"{each['tokens']:.2f}",
                _milliseconds(each["round_us"]),
                f"{speed:.1f}",
                f"{speed * plain_us / 1e6:.2f}",
            )
    console.print(table)


def _name(drafter: Mapping[str, Any]) -> str:
    """Drafter with its place and what it makes, as two of one name differ in these."""
    return f"{drafter['drafter'] or 'the draft'} ({drafter['place']}, {drafter['makes']}s)"


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f} ms"
