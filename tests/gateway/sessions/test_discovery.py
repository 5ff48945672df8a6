"""Services that come and go while a gateway runs: who gets new sessions, and that no session notices."""

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from weakref import ReferenceType, ref

import httpx
import pytest
from structlog.testing import capture_logs
from support.basics import eventually
from support.certificates import issue, server_of, shown_by
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import DraftServicer, Service, TargetServicer, request, serving

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import Round, TokenLog
from gateway.server import start
from gateway.sessions import draft_move
from gateway.sessions.discovery import MAX_ADDRESSES, Discovery, Refresh, look_up, places_of, refreshed
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.peer import ServicePeer
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.settings import GatewaySettings
from gateway.speculation import speculate
from outrider.errors import InvalidRequest, PeerLost, shown
from outrider.model_files.vocabulary import Vocabulary
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.process.options import ServicePlace
from outrider.process.upkeep import Upkeep
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import TlsFailed, TlsFiles
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

PROMPT, SEED, MAX_LEN = (3, 5), 9, 60
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())
GOLD = tuple(plain_decoding(MarkovModel(), PROMPT, SEED, MAX_LEN))
ROLES = {"target": model_pb.SERVICE_ROLE_TARGET, "draft": model_pb.SERVICE_ROLE_DRAFT}


@pytest.mark.parametrize(
    ("known", "answer", "is_ordered", "expected"),
    [
        ("", "ba", True, Refresh(("b", "a"), ("b", "a"))),
        ("", "ba", False, Refresh(("a", "b"), ("b", "a"))),
        ("ab", "", True, Refresh(("a", "b"))),
        ("ab", "", False, Refresh(("a", "b"))),
        ("b", "ab", False, Refresh(("b", "a"), ("a",))),
        ("b", "ab", True, Refresh(("a", "b"), ("a",))),
        ("ab", "bc", False, Refresh(("b", "c"), ("c",), ("a",))),
        ("ab", "cc", True, Refresh(("c",), ("c",), ("a", "b"))),
        ("ab", "ba", False, Refresh(("a", "b"))),
    ],
)
def test_an_answer_decides_who_is_there(known: str, answer: str, is_ordered: bool, expected: Refresh) -> None:
    """Nothing changes with none; without an order those that were known stay first, and none is there twice."""
    assert refreshed(tuple(known), answer, is_ordered=is_ordered) == expected


@dataclass
class Fleet:
    """Services of one role by address, a file of those that count, and the links to them; beside a target or a draft
    that is always there.
    """

    role: str
    file: Path
    other: ServicePeer
    stack: AsyncExitStack
    replicas: Replicas = field(init=False)
    discovery: Discovery = field(init=False)
    place: ServicePlace = field(init=False)
    services: dict[str, Service] = field(default_factory=dict)
    lives: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def add(self) -> str:
        """Starts one more service; no gateway knows of it yet."""
        made = made_service(self.role, len(self.services) + 1)
        life = await self.stack.enter_async_context(AsyncExitStack())
        address = await life.enter_async_context(serving(made))
        self.services[address], self.lives[address] = made, life
        return address

    async def list(self, *addresses: str) -> None:
        """Writes the file, and lets the gateway look at it once; it has found all of them then."""
        self.file.write_text("\n".join(addresses), encoding="utf-8")
        await self.discovery.look(self.place)
        for peer in self.replicas.peers:
            assert await peer.settled(60)

    @asynccontextmanager
    async def session(self, name: bytes) -> AsyncIterator[AsyncIterator[Round]]:
        """The rounds of a request."""
        log = TokenLog(PROMPT)
        planner = RoundPlanner(SpeculationPolicy(), 4, MAX_LEN, max_draft_count=8)
        other = Replicas([self.other])
        targets, drafts = (self.replicas, other) if self.role == "target" else (other, self.replicas)
        timeouts = TargetTimeouts(RoundDeadline(60, 60))
        target = RemoteTargetSession(targets, timeouts, SPEC, log, name * 16, Placing("hash"))
        draft = RemoteDraftSession(drafts, DraftDeadline(60, 60), SPEC, log, name * 16, warm=True)
        async with aclosing(speculate(log, planner, target, draft)) as rounds:
            yield rounds

    async def until_closed(self, address: str) -> None:
        """Waits until the gateway has ended its link there, which it does once it has looked again."""
        await self.discovery.look(self.place)
        await eventually(lambda: self.services[address].open_links == 0)


def made_service(role: str, number: int) -> Service:
    """A service of the tiny model."""
    if role == "target":
        return TargetServicer(ROLES[role], MarkovModel(), instance_id=number)
    return DraftServicer(ROLES[role], MarkovModel(noise=0.3), instance_id=number)


def new_link(role: str, address: str) -> ServicePeer:
    """A link to a service that fits."""
    return ServicePeer(role, address, lambda info: None)


@asynccontextmanager
async def fleet_of(role: str, folder: Path) -> AsyncIterator[Fleet]:
    """A fleet of a role whose file lists none yet."""
    async with AsyncExitStack() as stack:
        other_role = "draft" if role == "target" else "target"
        other = new_link(other_role, await stack.enter_async_context(serving(made_service(other_role, 99))))
        stack.push_async_callback(other.close)
        assert await other.settled(60)
        made = Fleet(role, folder / "addresses", other, stack)
        made.file.touch()
        [made.place] = places_of(role, [f"file:{made.file}"])
        made.replicas = Replicas([], role, made.place.words)
        made.discovery = Discovery(made.replicas, [made.place], lambda address, _name: new_link(role, address))
        stack.push_async_callback(made.replicas.close)
        yield made


@pytest.fixture(params=["target", "draft"])
async def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    # Sessions are moved elsewhere (test_draft_moves.py), and not in the middle of what is counted here.
    monkeypatch.setattr(draft_move, "LOOK_S", 3600.0)
    async with fleet_of(request.param, tmp_path) as made:
        yield made


def said(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Prompt and answer."""
    return PROMPT + tuple(token for each in rounds for token in each.token_ids)


async def test_a_service_that_is_gone_finishes_its_session_and_another_gets_the_next(fleet: Fleet) -> None:
    """With the tokens of plain decoding and without a new opening; then its link closes, and no sooner."""
    old, new = await fleet.add(), await fleet.add()
    await fleet.list(old)
    async with fleet.session(b"a") as first, fleet.session(b"b") as second:
        rounds = [await anext(first) for _ in range(2)]
        num_answers = fleet.services[old].answers
        await fleet.list(new)
        assert [peer.address for peer in fleet.replicas.peers] == [new]
        assert [peer.address for peer in fleet.replicas.leaving] == [old]
        others = [await anext(second)]
        await eventually(lambda: [each.sessions for each in fleet.services.values()] == [1, 1])
        rounds += [each async for each in first]
        assert fleet.services[old].answers > num_answers
        assert fleet.services[old].links == fleet.services[old].open_links == 1
        others += [each async for each in second]
    assert said(rounds) == said(others) == GOLD
    assert [len(each.opens) for each in fleet.services.values()] == [1, 1]
    assert sum(each.verdict.reopens for each in (*rounds, *others)) == 0
    await fleet.until_closed(old)
    assert fleet.replicas.links == fleet.replicas.peers
    assert fleet.services[new].open_links == 1


async def test_an_address_that_comes_back_has_its_link_again(fleet: Fleet) -> None:
    """While a session is there: it is one link all the time, which gets new sessions again."""
    first, second = await fleet.add(), await fleet.add()
    await fleet.list(first)
    async with fleet.session(b"a") as rounds:
        begun = [await anext(rounds)]
        await fleet.list(second)
        await fleet.list(first, second)
        assert [peer.address for peer in fleet.replicas.peers] == [first, second]
        assert fleet.replicas.leaving == ()
        async with fleet.session(b"b") as others:
            assert said([each async for each in others]) == GOLD
        assert said([*begun, *[each async for each in rounds]]) == GOLD
    await fleet.discovery.look(fleet.place)
    assert fleet.services[first].links == fleet.services[first].open_links == 1
    assert len(fleet.services[first].opens) == 2


async def test_a_service_that_is_gone_and_ends_is_left_for_another(fleet: Fleet) -> None:
    """A session that it had goes on elsewhere with the same tokens, and it is not tried again."""
    old, new = await fleet.add(), await fleet.add()
    await fleet.list(old)
    async with fleet.session(b"a") as stream:
        rounds = [await anext(stream) for _ in range(2)]
        await fleet.list(new)
        await fleet.lives[old].aclose()
        rounds += [each async for each in stream]
    assert said(rounds) == GOLD
    assert fleet.services[new].answers > 0
    await fleet.discovery.look(fleet.place)
    assert fleet.replicas.leaving == ()


async def test_a_link_that_breaks_once_its_address_is_gone_has_no_session_again(fleet: Fleet) -> None:
    """Though its service is there and a new link is made: the session goes on elsewhere, with the same tokens."""
    old, new = await fleet.add(), await fleet.add()
    await fleet.list(old)
    async with fleet.session(b"a") as stream:
        rounds = [await anext(stream) for _ in range(2)]
        await fleet.list(new)
        [leaving] = fleet.replicas.leaving
        leaving.link()._call.cancel()
        await eventually(lambda: fleet.services[old].links == 2 and leaving.info is not None)
        await fleet.discovery.look(fleet.place)
        # Its session has not noticed yet.
        assert fleet.replicas.leaving == (leaving,)
        rounds += [each async for each in stream]
    assert said(rounds) == GOLD
    assert [len(each.opens) for each in fleet.services.values()] == [1, 1]
    await fleet.until_closed(old)


async def test_a_link_that_is_idle_closes_at_once(fleet: Fleet) -> None:
    """What was rolled back on it stays counted, since a counter never falls."""
    old, new = await fleet.add(), await fleet.add()
    await fleet.list(old)
    async with fleet.session(b"a") as stream:
        rounds = [await anext(stream)]
        fleet.services[old].drift = 1
        rounds += [await anext(stream)]
        fleet.services[old].drift = 0
        rounds += [each async for each in stream]
    assert said(rounds) == GOLD
    counted = fleet.replicas.rollbacks.seconds.count
    assert counted > 0
    await fleet.list(new)
    await fleet.until_closed(old)
    assert fleet.replicas.rollbacks.seconds.count == counted


async def test_nothing_is_left_of_services_that_have_gone() -> None:
    """After a thousand changes there is what there is of one service: links, books, deadlines, figures and work."""
    async with serving(made_service("draft", 1), "0.0.0.0:0") as anywhere:
        port, number, upkeep = int(anywhere.rpartition(":")[2]), count(), Upkeep()
        # All of 127 leads here, so that each look finds another address.
        places = (f"127.0.{each // 250}.{each % 250 + 1}:{port}" for each in number)
        [place] = places_of("draft", ["dns:pods:1"])
        replicas, deadline = Replicas([], "draft", place.words), DraftDeadline()
        discovery = Discovery(
            replicas,
            [place],
            lambda address, _name: ServicePeer("draft", address, lambda info: None, upkeep=upkeep),
            lambda _name, _port: [next(places)],
        )
        gone: list[ReferenceType[object]] = []
        for change in range(1000):
            await discovery.look(place)
            [peer] = replicas.peers
            # Every other one goes before it has answered.
            assert change % 2 == 0 or await peer.settled(60)
            deadline.of(peer).observe(0.1, 0)
            gone += [ref(peer), ref(peer.book), ref(deadline.of(peer))]
        await eventually(lambda: not replicas._closing)
        gc.collect()
        assert replicas.links == (peer,)
        assert [each() for each in gone if each() is not None] == [peer, peer.book, deadline.of(peer)]
        assert len(deadline._links) == 1
        await replicas.close()


async def test_without_any_address_there_is_an_error_that_says_where_they_are_looked_for(tmp_path: Path) -> None:
    """And as soon as there is one, it is used."""
    async with fleet_of("target", tmp_path) as fleet:
        with pytest.raises(PeerLost, match=f"^The target services at file:{tmp_path}/addresses cannot be reached$"):
            fleet.replicas.present()
        assert not await fleet.replicas.settled(0)
        await fleet.list(await fleet.add())
        assert (await fleet.replicas.after_handshake(60)).role == "target"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"# none yet\n\n", []),
        (b"a:1\n  b:2 # the second\n", ["a:1", "b:2"]),
        (b"[::1]:50052\n10.0.0.7:50052", ["[::1]:50052", "10.0.0.7:50052"]),
        (b'["a:1",\n "[::1]:2"]', ["a:1", "[::1]:2"]),
        (b"\xef\xbb\xbf[]", []),
        (b"a:1\nb", "entry is 'b', but must be HOST:PORT with a port in [1, 65535]"),
        (b"a:1,b:2", "entry is 'a:1,b:2', but must be HOST:PORT with a port in [1, 65535]"),
        (b'["a:1", 7]', "entry is '7', but must be HOST:PORT with a port in [1, 65535]"),
        (b'["a:1"', "entry is '[\"a:1\"', but must be HOST:PORT with a port in [1, 65535]"),
        (b"dns:a:1", "entry is 'dns:a:1', but must be HOST:PORT with a port in [1, 65535]"),
        (b"[" * 100_000, "entry is '[[[["),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"#" * (1 << 20) + b"#", "it has more than 1048576 bytes"),
        (None, "it is missing, or no regular file"),
    ],
)
async def test_a_file_changes_nothing_unless_it_lists_addresses(
    content: bytes | None, expected: list[str] | str, tmp_path: Path
) -> None:
    """One a line or as JSON; an empty or a wrong one is one line in the log, and an error when a gateway starts."""
    file = tmp_path / "addresses"
    file.write_text("known:1", encoding="utf-8")
    [place] = places_of("target", [f"file:{file}"])
    replicas = Replicas([], "target", place.words)
    discovery = Discovery(replicas, [place], lambda address, _name: new_link("target", address))
    await discovery.look(place)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with capture_logs() as logs:
        await discovery.look(place)
        await discovery.look(place)
    reasons = [line["reason"] for line in logs if line["event"] == "addresses stay as they are"]
    addresses = [peer.address for peer in replicas.peers]
    if expected and not isinstance(expected, str):
        assert (addresses, reasons) == (expected, [])
    else:
        [reason] = reasons
        assert addresses == ["known:1"]
    if isinstance(expected, str):
        assert expected in reason
        with pytest.raises(InvalidRequest) as caught:
            places_of("target", [place.words])
        assert caught.value.message == reason
        assert reason.startswith(
            f"target is {shown(place.words)}, but must be file:PATH of a file with addresses HOST:"
        )
    await replicas.close()


async def test_a_look_up_that_fails_changes_nothing() -> None:
    """Nor does an empty one, or one with more addresses than can be used; the log says so once, and what changes."""
    answers: list[Sequence[str] | Exception] = [
        ["b:1", "a:1"],
        OSError(-2, "Name or service not known"),
        OSError(-2, "Name or service not known"),
        [],
        [f"host{number}:1" for number in range(MAX_ADDRESSES + 1)],
        ["c:1", "b:1"],
    ]
    asked: list[tuple[str, int]] = []

    def answer(name: str, port: int) -> Sequence[str]:
        asked.append((name, port))
        found = answers[len(asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    [place] = places_of("draft", ["dns:pods:1"])
    names: dict[str, str] = {}

    def open_link(address: str, name: str) -> ServicePeer:
        names[address] = name
        return new_link("draft", address)

    replicas = Replicas([], "draft", place.words)
    discovery = Discovery(replicas, [place], open_link, answer)
    found = []
    with capture_logs() as logs:
        for _ in answers:
            await discovery.look(place)
            found.append([peer.address for peer in replicas.peers])
    await replicas.close()
    assert found == [["a:1", "b:1"]] * 5 + [["b:1", "c:1"]]
    assert asked == [("pods", 1)] * len(answers)
    assert names == {"a:1": "pods", "b:1": "pods", "c:1": "pods"}
    assert [line["reason"] for line in logs if line["event"] == "addresses stay as they are"] == [
        "Name or service not known",
        "there is no address",
        f"there are {MAX_ADDRESSES + 1} addresses, and at most {MAX_ADDRESSES} can be used",
    ]
    changes = [(line["joined"], line["gone"]) for line in logs if line["event"] == "addresses changed"]
    assert changes == [(["b:1", "a:1"], []), (["c:1"], ["a:1"])]


async def test_a_service_is_found_by_its_name() -> None:
    """The system's own look-up of a name that it has: every address has a link, and the name has a session."""
    service = made_service("target", 1)
    async with serving(service, "localhost:0") as address:
        port = int(address.rpartition(":")[2])
        [place] = places_of("target", [f"dns:localhost:{port}"])
        replicas = Replicas([], "target", place.words)
        Discovery(replicas, [place], lambda address, _name: new_link("target", address)).start(Upkeep())
        assert await replicas.settled(60)
        addresses = [peer.address for peer in replicas.peers]
        assert addresses == sorted(set(look_up("localhost", port)))
        assert {f"127.0.0.1:{port}", f"[::1]:{port}"} >= set(addresses) != set()
        log = TokenLog(PROMPT)
        planner = RoundPlanner(SpeculationPolicy(), 0, MAX_LEN, max_draft_count=8)
        session = RemoteTargetSession(replicas, TargetTimeouts(), SPEC, log, b"a" * 16, Placing("hash"))
        absent = RemoteDraftSession(replicas, DraftDeadline(), SPEC, log, b"a" * 16, warm=False)
        async with aclosing(speculate(log, planner, session, absent)) as rounds:
            assert said([each async for each in rounds]) == GOLD
        await replicas.close()


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        (
            "dns:a:0",
            {},
            "target is 'dns:a:0', but must be HOST:PORT or dns:NAME:PORT with a port in [1, 65535], or file:",
        ),
        ("dns:a", {}, "target is 'dns:a', but must be "),
        ("dns::1", {}, "target is 'dns::1', but must be "),
        ("dns:a..b:1", {}, "target is 'dns:a..b:1', but must be "),
        (f"dns:{'a' * 64}:1", {}, "target is 'dns:aaaa"),
        ("a:1,file:", {}, "target is 'file:', but must be "),
        ("a:1", {"draft": "small=dns:b:70000"}, "draft is 'dns:b:70000', but must be "),
        ("a:1", {"target_name": "b"}, "--target-name is 'b', but must be given with --service-tls-ca"),
        ("a:1", {"draft_name": "b"}, "--draft-name is 'b', but must be given with --service-tls-ca"),
        ("a:1", {"target_name": "b:1"}, "--target-name is 'b:1', but must be the name of a host"),
    ],
)
def test_places_that_are_none_are_refused(words: str, options: dict[str, str], sentence: str) -> None:
    """At the start, with the option, the value and what it may be; hosts may be called as the forms begin."""
    with pytest.raises(InvalidRequest) as caught:
        GatewaySettings(words, "model", **options)
    assert caught.value.message.startswith(sentence)
    GatewaySettings("dns:1,file:2,dns:a:1,file:a=b", "model", "small=file:a=b,file:./c=d,dns:e:2")


async def test_certificates_are_checked_against_the_name_that_was_given(tmp_path: Path) -> None:
    """Or the one that was looked up; an address that the certificate does not name is refused without it."""
    folder = issue(tmp_path, "gateway", "target", hosts=("models.test",))
    service, files = made_service("target", 1), TlsFiles(shown_by(folder, "gateway"))
    async with serving(service, tls=TlsFiles(server_of(folder, "target"))) as address:
        links = {
            name: ServicePeer("target", address, lambda info: None, tls=files, name=name)
            for name in ("", "models.test", "other.test")
        }
        assert await links["models.test"].settled(60)
        for name in ("", "other.test"):
            await eventually(lambda name=name: links[name].refusal is not None)  # type: ignore[misc]
            refusal = links[name].refusal
            assert isinstance(refusal, TlsFailed)
            assert refusal.message.startswith(f"The certificate of {address} is refused: ")
            assert links[name].info is None
        for link in links.values():
            await link.close()


@pytest.mark.parametrize(("place", "name"), [("dns:localhost:", ""), ("127.0.0.1:", "localhost")])
async def test_a_gateway_is_told_the_name_in_certificates(
    place: str, name: str, tokenizer: str, tmp_path: Path
) -> None:
    """By --target-name, or as the name that it looks up: both lead to a service that shows that name alone."""
    folder = issue(tmp_path, "gateway", "target", hosts=("localhost",))
    digests, files = Vocabulary.read(tokenizer).digests, shown_by(folder, "gateway")
    target = TargetServicer(ROLES["target"], MarkovModel(), digests)
    async with serving(target, "localhost:0", TlsFiles(server_of(folder, "target"))) as address:
        settings = GatewaySettings(
            place + address.rpartition(":")[2],
            tokenizer,
            listen="127.0.0.1:0",
            rest_listen="",
            target_name=name,
            service_tls_ca=files.ca,
            service_tls_cert=files.cert,
            service_tls_key=files.key,
        )
        with pytest.raises(TlsFailed, match=r"did not answer within 3 seconds: The certificate of .* is refused"):
            await start(replace(settings, target_name="other.test", target_wait_seconds=3.0))
        gateway = await start(settings)
        assert gateway.backend.target.present().role == "target"
        await gateway.stop(0)


async def test_a_gateway_follows_a_file(tokenizer: str, tmp_path: Path) -> None:
    """A target that is added to it is found, and gets the requests when the other one is taken out; figures follow."""
    digests, file = Vocabulary.read(tokenizer).digests, tmp_path / "targets"
    first, second = (TargetServicer(ROLES["target"], MarkovModel(), digests, instance_id=each) for each in (1, 2))
    async with serving(first) as old, serving(second) as new, AsyncExitStack() as stack:
        file.write_text(old, encoding="utf-8")
        settings = GatewaySettings(f"file:{file}", tokenizer, listen="127.0.0.1:0", rest_listen="127.0.0.1:0")
        gateway = await start(settings)
        stack.push_async_callback(gateway.stop, 0)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{gateway.rest_address}"))
        channel = await stack.enter_async_context(open_channel(gateway.address))

        async def tokens() -> list[int]:
            answers = [each async for each in GenerationServiceStub(channel).Generate(request())]
            return [token.token_id for each in answers for token in each.round.tokens]

        async def up() -> dict[str, str]:
            name = "outrider_service_up"
            lines = (await http.get("/metrics", params={"name[]": name})).text.splitlines()
            found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            return {key.split('"')[1]: value for key, value in found.items()}

        async def are_up(*addresses: str) -> bool:
            return await up() == dict.fromkeys(addresses, "1.0")

        alone = await tokens()
        assert await are_up(old)
        file.write_text(f'["{old}", "{new}"]', encoding="utf-8")
        await eventually(lambda: are_up(old, new))
        file.write_text(new, encoding="utf-8")
        await eventually(lambda: are_up(new))
        assert await tokens() == alone
        assert [len(each.opens) for each in (first, second)] == [1, 1]
        await eventually(lambda: first.open_links == 0)
        file.unlink()
        assert await tokens() == alone
        assert {address for address, *_ in gateway.backend.policies._known} == {new}


async def test_a_draft_may_come_after_its_gateway(tokenizer: str, tmp_path: Path) -> None:
    """While its file lists none, answers are plain, and the same."""
    digests, file = Vocabulary.read(tokenizer).digests, tmp_path / "drafts"
    target = TargetServicer(ROLES["target"], MarkovModel(), digests)
    draft = DraftServicer(ROLES["draft"], MarkovModel(noise=0.3), digests, instance_id=2)
    file.touch()
    async with serving(target) as address, serving(draft) as listed, AsyncExitStack() as stack:
        settings = GatewaySettings(
            address, tokenizer, f"file:{file}", lookup=False, listen="127.0.0.1:0", rest_listen="", draft_wait_seconds=0
        )
        gateway = await start(settings)
        stack.push_async_callback(gateway.stop, 0)
        channel = await stack.enter_async_context(open_channel(gateway.address))

        async def answer() -> tuple[list[int], int]:
            *rounds, last = [each async for each in GenerationServiceStub(channel).Generate(request())]
            tokens = [token.token_id for each in rounds for token in each.round.tokens]
            return tokens, last.completion.speculation.draft_tokens

        plain, num_guesses = await answer()
        assert num_guesses == draft.answers == 0
        file.write_text(listed, encoding="utf-8")
        assert gateway.backend.draft is not None
        assert await gateway.backend.draft.settled(60)
        guessed, num_guesses = await answer()
        assert guessed == plain
        assert num_guesses > 0
