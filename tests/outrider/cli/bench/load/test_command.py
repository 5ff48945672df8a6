"""`outrider bench load` on the embedded pair: what it asks, counts, reads and writes, not how fast anything was."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter
from support.certificates import issue, trusting
from support.command_line import said, scripted_gateway
from support.keys import key_of, write_keys
from support.stack import running_stack

from outrider.cli.bench.common import AUTO, PLAIN, ComputeThreads, MeasuredModels, fixed
from outrider.cli.bench.load.__main__ import LoadOptions, check, metrics_of, own_stack, plan_of
from outrider.cli.bench.load.driver import CHECKED, CLIENT, LEAST_REQUESTS, Driver, LoadPlan, NothingToMeasure
from outrider.cli.local_stack import gateway_launch
from outrider.cli.options import HostedOptions, Models
from outrider.errors import InvalidRequest, PeerLost
from outrider.process.metrics import new_registry, serve_metrics
from outrider.token_tree import TreeShape
from outrider.v1 import generation_service_pb2 as pb

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "bench", "load")
PLAN = LoadPlan(
    streams=(1, 4),
    draft_counts=(0, 3, None),
    temperatures=(0.8,),
    tokens=16,
    requests=3,
    turns=2,
    connections=2,
    seed=30,
)


async def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(), 240)
    return process.returncode or 0, output.decode(), notes.decode()


def test_lookups_are_on_in_a_stack_of_its_own() -> None:
    """As in what users start: its gateway is not told to leave them out."""
    stack = own_stack(MeasuredModels(), ComputeThreads(), HostedOptions())
    assert "--no-lookup" not in gateway_launch(stack, "127.0.0.1:1", "127.0.0.1:2").command
    assert stack.rest_port == 0


@pytest.mark.grid
async def test_a_stack_of_its_own_from_the_command_line(tmp_path: Path) -> None:
    """All figures of all settings, from every process, and they are those of the messages in the file."""
    file, picture = tmp_path / "load.json", tmp_path / "load.svg"
    grid = ("--streams", "1,3", "--draft-counts", "0,4,auto", "--temperatures", "0.8", "--turns", "2", "--tokens", "96")
    code, output, notes = await command(*grid, "--threads", "1", "--json", "--save", str(file), "--plot", str(picture))
    assert code == 0, notes
    told: dict[str, Any] = json.loads(output)
    assert (told["models"], told["simulated"]) == ({"target": "target", "draft": "draft"}, False)
    loads = [(each["streams"], each["setting"]) for each in told["figures"]]
    assert loads == [(streams, setting) for streams in (1, 3) for setting in (PLAIN, fixed(4), AUTO)]
    kept = json.loads(file.read_text())
    blocks = kept.pop("blocks")
    assert kept == told
    for figures in told["figures"]:
        compared = 0 if figures["setting"] == PLAIN else 2 * CHECKED
        assert figures["equal_answers"] == figures["compared_answers"] == compared
        assert set(figures["cpu_per_round_s"]) == {CLIENT, "gateway", "target", "draft"}
        assert min(figures["cpu_per_round_s"].values()) > 0
        assert (figures["acceptance_rate"] or 0) > 0 or figures["setting"] != fixed(4)
        assert figures["p99_gap_s"] >= figures["gap_s"]["median"] > 0
        check_speed(
            figures,
            [each for each in blocks if (each["streams"], each["setting"]) == (figures["streams"], figures["setting"])],
        )
    assert picture.read_text().startswith("<svg")


@pytest.mark.slow
async def test_a_gateway_with_keys_and_certificates(tmp_path: Path) -> None:
    """Measured like any other with both; without the key, and in plaintext, one sentence says what is missing."""
    folder = issue(tmp_path / "certificates", "gateway", "target", "draft", "client")
    keys = {"api_keys": write_keys(tmp_path / "keys.toml", alice={})}
    grid = ("--streams", "1", "--draft-counts", "0", "--temperatures", "0", "--turns", "2", "--tokens", "8")
    async with running_stack(gateway=keys, certificates=folder) as stack:
        secured = (*grid, "--address", stack.address, "--tls-ca", trusting(folder, "client").ca)
        code, output, notes = await command(*secured, "--api-key", key_of("alice"), "--json")
        assert code == 0, notes
        assert [each["setting"] for each in json.loads(output)["figures"]] == [PLAIN]
        assert key_of("alice") not in output + notes
        code, _, notes = await command(*secured)
        assert (code, "No API key came" in notes) == (77, True)
        code, _, notes = await command(*grid, "--address", stack.address)
        assert (code, "speaks TLS, and was called without it" in notes) == (78, True)


def check_speed(figures: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
    """Tokens of a window over its seconds, counted again from the messages; the median of two turns is their mean."""
    speeds = []
    for block in blocks:
        window_s = block["began"]["at_s"], block["ended"]["at_s"]
        bursts = [burst for each in block["answers"] for burst in each["bursts"]]
        tokens = sum(count for at_s, count, *_ in bursts if window_s[0] <= at_s <= window_s[1])
        assert sum(count for _, count, *_ in bursts) == sum(len(each["token_ids"]) for each in block["answers"])
        speeds.append(tokens / (window_s[1] - window_s[0]))
    assert figures["tokens_per_s"]["median"] == pytest.approx(sum(speeds) / 2)


@pytest.mark.slow
async def test_every_block_asks_what_none_has_asked_before() -> None:
    """In another order of settings each turn; first requests are of rising length, further ones whole.

    What is asked for again without speculation has the same tokens.
    """
    async with running_stack() as stack:
        assert stack.gateway is not None
        blocks = await Driver(PLAN, stack.gateway.address, {}).run()
    orders = [[each.setting for each in blocks if (each.streams, each.turn) == (4, turn)] for turn in (0, 1)]
    assert orders[0] == [PLAIN, fixed(3), AUTO]
    assert orders[1] == [PLAIN, AUTO, fixed(3)]
    for streams, count in ((1, LEAST_REQUESTS), (4, 12)):
        of_load = [each for each in blocks if each.streams == streams]
        for block in of_load:
            first = block.answers[0].number
            assert [each.number for each in block.answers] == list(range(first, first + count))
            lengths = [len(each.token_ids) for each in block.answers]
            assert lengths == [16 * (index + 1) // streams for index in range(streams)] + [16] * (count - streams)
            assert set(block.began.cpu_s) == {CLIENT}
            again = {} if block.setting == PLAIN else {each.number: each.token_ids for each in block.answers[-CHECKED:]}
            assert block.plain == again
    numbers = [each.number for block in blocks for each in block.answers]
    assert len(set(numbers)) == len(numbers)
    drafted = {each.setting: sum(burst.drafted for burst in each.bursts) for each in blocks}
    assert (drafted[PLAIN], drafted[fixed(3)] > 0) == (0, True)


@pytest.mark.slow
async def test_clocks_of_several_workers_are_added() -> None:
    """A gateway of many processes reports each one's; a device's time only where it is exported."""
    registry = new_registry()
    for number, name in enumerate(("process_cpu_seconds", "outrider_device_busy_seconds")):
        counter = Counter(name, "Time.", ["worker"], registry=registry)
        for worker in ("one", "two"):
            counter.labels(worker).inc(2.5 + number)
    metrics = serve_metrics("127.0.0.1:0", registry)
    try:
        async with running_stack(gateway={"metrics_listen": "127.0.0.1:0"}) as stack:
            assert stack.gateway is not None
            assert stack.gateway.metrics is not None
            places = {"others": metrics.address, "gateway": stack.gateway.metrics.address}
            plan = replace(PLAN, streams=(1,), draft_counts=(0,))
            block = (await Driver(plan, stack.gateway.address, places).run())[0]
    finally:
        await metrics.stop()
    assert (block.began.cpu_s["others"], block.began.busy_s) == (5.0, {"others": 7.0})
    assert block.ended.cpu_s["gateway"] > block.began.cpu_s["gateway"]


async def test_a_request_says_its_setting() -> None:
    """With K only where it has an effect; after a request and a block of each setting to warm up."""
    async with scripted_gateway() as gateway:
        await Driver(replace(PLAN, streams=(1,)), gateway.address, {}).run()
    found, count = [], LEAST_REQUESTS
    measured = gateway.requests[3 * (1 + count) :]
    for index in range(6):
        block = measured[index * count : (index + 1) * count]
        first = 30 + 3 * (1 + count) + index * count
        assert [each.seed for each in block] == list(range(first, first + count))
        assert {(each.max_tokens, each.sampling.ignore_eos) for each in block} == {(16, True)}
        assert {each.sampling.temperature for each in block} == {0.8}
        [speculation] = {each.speculation.SerializeToString() for each in block}
        told = pb.SpeculationSettings.FromString(speculation)
        found.append((told.enabled, told.draft_count if told.HasField("draft_count") else None))
    plain, three, auto = (False, None), (True, 3), (True, None)
    assert found == [plain, three, auto, plain, auto, three]
    # And then some answers of the four that speculate once more, without.
    again = measured[6 * count :]
    assert [each.speculation.enabled for each in again] == [False] * 4 * CHECKED
    asked = [each.text for each in gateway.requests[: -len(again)]]
    assert len(set(asked)) == len(asked)
    assert {each.text for each in again} < set(asked)


def test_trees_are_settings_too() -> None:
    """Each of so many rows, so deep at most, and of each of the drafters."""
    settings = plan_of(LoadOptions(draft_counts="0", trees="16x4,8x8,16x4", drafters="model")).settings
    assert list(settings) == [PLAIN, "tree of 16, 4 deep, model", "tree of 8, 8 deep, model"]
    tree = settings["tree of 16, 4 deep, model"]
    assert (tree.draft_count, tree.shape, tree.drafter) == (16, TreeShape(max_depth=4), "model")


@pytest.mark.parametrize("trees", ["16", "x4", "4x5", "33x4", "0x0", "16x0", "16x4,", "16*4"])
def test_no_trees_are_refused(trees: str) -> None:
    """By the option's name and with what may be there."""
    with pytest.raises(InvalidRequest, match=r"^--trees is .*ROWSxDEPTH with commas between"):
        plan_of(LoadOptions(trees=trees))


async def test_too_little_to_measure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one message have no gaps."""

    async def one_message(*_: object) -> AsyncIterator[pb.GenerateResponse]:
        yield said((pb.TOKEN_ORIGIN_PLAIN, "Once"))

    async with scripted_gateway() as gateway:
        monkeypatch.setattr(gateway, "_answer", one_message)
        with pytest.raises(NothingToMeasure, match="4 streams did not run side by side long enough under plain"):
            await Driver(PLAN, gateway.address, {}).run()


@pytest.mark.slow
async def test_nobody_there_is_unavailable() -> None:
    """Exit code 69 and one sentence, before anything is measured; also of the metrics."""
    code, output, notes = await command("--address", "127.0.0.1:1")
    assert (code, output) == (69, "")
    assert notes.splitlines()[-1].startswith("outrider: Nothing answers on 127.0.0.1:1")
    with pytest.raises(PeerLost, match="Nothing serves metrics on"):
        await Driver(PLAN, "127.0.0.1:1", {"gateway": "127.0.0.1:1"}).run()


@pytest.mark.parametrize(
    ("wanted", "models", "cpus", "option"),
    [
        (LoadOptions(address="a:1"), Models(target="x"), ComputeThreads(), "--target"),
        (LoadOptions(address="a:1"), Models(), ComputeThreads(threads=2), "--threads"),
        (LoadOptions(address="a"), Models(), ComputeThreads(), "--address"),
        (LoadOptions(metrics=["gateway=a:1"]), Models(), ComputeThreads(), "--metrics"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(
    wanted: LoadOptions, models: Models, cpus: ComputeThreads, option: str
) -> None:
    """Before a stack is started for it."""
    with pytest.raises(InvalidRequest, match=f"^{option} is "):
        check(wanted, models, HostedOptions(), cpus)


@pytest.mark.parametrize("text", ["", "2,auto", "many,0", "0;4"])
def test_plain_decoding_is_part_of_every_comparison(text: str) -> None:
    """The others are held against it."""
    with pytest.raises(InvalidRequest, match=r"--draft-counts is .* 0 among them"):
        plan_of(LoadOptions(draft_counts=text))
    assert plan_of(LoadOptions(draft_counts="auto,0,4,0")).draft_counts == (None, 0, 4)


@pytest.mark.parametrize("text", ["a:1", "=a:1", "gateway=a"])
def test_metrics_have_a_name_and_an_address(text: str) -> None:
    """Each name once."""
    for texts in ([text], ["target=a:1", "target=b:1"]):
        with pytest.raises(InvalidRequest, match="--metrics"):
            metrics_of(LoadOptions(metrics=texts))
    assert metrics_of(LoadOptions(metrics=["target=a:1"])) == {"target": "a:1"}
