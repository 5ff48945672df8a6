"""Backend of the gateway: the services, the lookup, and the choice of who guesses for a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.generation.audit import ShadowAudit
from gateway.generation.policies import Policies
from gateway.generation.request import CheckedRequest, Offers
from gateway.lookup.guesses import LookupGuesses, LookupSources
from gateway.rounds.choice import Table
from gateway.rounds.explanation import Outlook, compared, explained
from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import LOOKUP, DrafterId, Makes, Place
from gateway.sessions.draft_opening import DrafterSeat
from gateway.sessions.peer import ModelInfo
from gateway.sessions.placement import PlaceWish
from gateway.sessions.replicas import Placing, Replicas, Targets, need_of, wish_of
from gateway.sessions.session import DraftDeadline, TargetTimeouts
from gateway.text.tokenizer import Tokenizer
from outrider.parameters import Rule, SessionSpec
from outrider.process.upkeep import Upkeep
from outrider.token_tree import TreeShape


@dataclass(frozen=True, slots=True)
class Backend:
    """Services that the gateway calls, and what all requests share.

    `drafts` are draft services by name, of which each may be several replicas. Where no drafter is named, the first
    one guesses; it may have no name of its own, and is known by the drafters that it offers.
    """

    tokenizer: Tokenizer
    target: Targets
    drafts: Mapping[str, Replicas]
    policies: Policies
    draft_deadline: DraftDeadline
    target_timeouts: TargetTimeouts
    audit: ShadowAudit
    lookup: LookupSources | None = None
    """Sources beside a request's own text that are looked up; None where nothing is looked up."""
    branches: int = 0
    """Most branches that a draft makes for one request while the target verifies."""
    turn_ends: frozenset[int] = frozenset()
    """Tokens with which the chat template closes an assistant's turn; they end answers as those of the target do."""
    upkeep: Upkeep = field(default_factory=Upkeep)
    """The work in the background of all of it."""

    @property
    def draft(self) -> Replicas | None:
        """The draft that guesses where none is named; None when none is configured."""
        return next(iter(self.drafts.values()), None)

    def policy(self, target: ModelInfo) -> SpeculationPolicy:
        """The policy of a target."""
        return self.policies.of(target, self._draft_infos)

    def policy_at(self, address: str) -> SpeculationPolicy | None:
        """The policy of the target that is at an address now."""
        infos = (peer.info for peer in self.target.links if peer.address == address)
        return next((self.policy(info) for info in infos if info is not None), None)

    def weights_for(self, spec: SessionSpec, placing: Placing, least_len: int) -> ModelInfo | None:
        """Facts of a target whose weights a request should begin with, and which has room for so many tokens; None
        where none is open to it.
        """
        need = replace(need_of(spec, placing.model_hash), max_len=least_len)
        return self.target.weights_for(placing, need, self._wish(spec, placing))

    async def settle(self, spec: SessionSpec, target: ModelInfo, placing: Placing) -> None:
        """Gives a request its target, unless it has one; waits where all are full. Its weights are `target`'s."""
        need = need_of(spec, target.model_hash)
        if placing.peer is None or not self.target.takes(placing.peer, placing, need):
            self._learn()
            await self.target.place(placing, need, self._wish(spec, placing))

    def place(self, spec: SessionSpec, target: ModelInfo, placing: Placing) -> ModelInfo:
        """Facts of the target that a session of a request goes to, where its others are; `target` while none is there.

        Its weights are those of `target`.
        """
        need = need_of(spec, target.model_hash)
        if placing.peer is None or not self.target.takes(placing.peer, placing, need):
            self._learn()
            placing.peer = self.target.pick(placing, need, wish=self._wish(spec, placing), counts=True)
        return (placing.peer.info if placing.peer is not None else None) or target

    def _learn(self) -> None:
        """Notes at each target what its policy has learnt."""
        for peer in self.target.peers:
            if peer.info is not None:
                peer.book.costs = self.policy(peer.info).costs
        self.policies.keep({peer.address for peer in self.target.links})

    def _wish(self, spec: SessionSpec, placing: Placing) -> PlaceWish:
        return wish_of(spec, len(spec.token_ids), self.target.output, placing.prefix, placing.numerics_id)

    @property
    def _draft_infos(self) -> dict[str, ModelInfo | None]:
        return {name: replicas.info for name, replicas in self.drafts.items()}

    def offers(self, target: ModelInfo) -> Offers:
        """The drafters that requests may name: remote ones are each draft, and the drafters of the first one."""
        info = self.draft.info if self.draft is not None else None
        # A draft that names none that makes trees is of a version that does not say.
        chains = frozenset(info.drafters) - info.tree_drafters if info and info.tree_drafters else frozenset[str]()
        chains -= frozenset(self.drafts)
        remote: dict[str, frozenset[Rule]] | None = {} if self.draft is None else None
        if info is not None:
            remote = dict(info.drafters)
            for name, of_name in ((name, each.info) for name, each in self.drafts.items() if name):
                # What another draft that is away can do, it says when it is back.
                remote[name] = frozenset(Rule) if of_name is None else frozenset().union(*of_name.drafters.values())
        return Offers(remote, target.drafters, self.lookup is not None, target.tree_drafters, chains)

    def drafting(self, request: CheckedRequest, target: ModelInfo) -> Drafting:
        """Choice of the drafters that guess for a request, and of what they make."""
        rule = request.spec.acceptance.rule
        if request.draft_count == 0:
            return Drafting((), rule=rule)
        return self._drafting(target, self.policy(target), request.drafters, rule, request.shape)

    def _drafting(
        self,
        target: ModelInfo,
        policy: SpeculationPolicy,
        names: Sequence[str] = (),
        rule: Rule = Rule.MATCH,
        shape: TreeShape | None = None,
    ) -> Drafting:
        offers, remotes = self.offers(target), [name for name in names if name != LOOKUP.name]
        # Of several that make one proposal none is in the target's process.
        fitting = [name for name in (names or target.drafters) if Place.HOSTED in offers.places(name, rule, shape)]
        hosted = [DrafterId(name, Place.HOSTED) for name in fitting if len(names) < 2]
        if hosted and names:
            # A draft service that offers the same name may guess as well, where it can do what is asked for.
            remotes = [name for name in remotes if Place.REMOTE in offers.places(name, rule, shape)]
        elif hosted:
            hosted = [policy.pick(hosted)]
        drafters = [each._replace(makes=_makes(each.name in target.tree_drafters)) for each in hosted]
        if self.drafts and (remotes or not names):
            # All of them make trees, or else the first draft's own choice does.
            infos = [self._behind(name).info for name in remotes or [*self.drafts][:1]]
            grows = not rule.needs_distributions and all(info is not None and info.tree_drafters for info in infos)
            grows = grows and offers.remote_chains.isdisjoint(remotes)
            # Several go by one name, which users read.
            together = "+".join(names or [*self.drafts][:1])
            drafters.append(DrafterId(together, Place.REMOTE, _makes(grows or shape is not None)))
        if self.lookup is not None and (not names or LOOKUP.name in names):
            drafters.append(LOOKUP)
        return Drafting(tuple(drafters), shape, merges=len(names) > 1, rule=rule)

    def outlook(self, limit: int) -> Outlook:
        """What the policy knows now, and would choose for a session with up to so many guesses that names nothing.

        It is asked of a copy, so that no round is another one because somebody looked.
        """
        target = self.target.info
        policy = self.policies.latest.copied() if target is None else self.policies.copied(target, self._draft_infos)
        drafting = Drafting(()) if target is None else self._drafting(target, policy)
        is_draft_up = self.draft is not None and self.draft.info is not None
        drafters = tuple(each for each in drafting.drafters if is_draft_up or each.place is not Place.REMOTE)
        # Where there is none, a lookup stands for none: of it the policy learns nothing before it has found something.
        planner = RoundPlanner(policy, None, 0, limit, replace(drafting, drafters=drafters or (LOOKUP,)))
        choice = explained(planner.preview())
        known = policy.session(*policy.costs.drafters)
        table = policy.choose(limit, known, ready=False).table
        load = policy.costs.load
        return {
            "acceptance_rate": policy.costs.of(policy.costs.usual_drafter).acceptance.mean,
            "load": load,
            "plain_us": policy.costs.plain_us,
            "row_price": policy.row_price(known) * (load - 1) / load,
            "rest_tokens": policy.rest,
            "choice": {**choice, "drafters": compared(table) if isinstance(table, Table) else []},
        }

    def lookup_for(self, request: CheckedRequest, drafting: Drafting, max_rows: int) -> LookupGuesses:
        """The lookup of a request, whose proposals have at most max_rows rows."""
        if self.lookup is None or drafting.at(Place.LOOKUP) is None:
            return LookupGuesses()
        spec = request.spec
        session = self.lookup.session(spec.token_ids, request.prediction, spec.cache_salt.decode())
        return LookupGuesses(session, spec.acceptance.rule, max_rows, request.grammar)

    def drafts_for(self, request: CheckedRequest, drafting: Drafting) -> list[tuple[Replicas, DrafterSeat]]:
        """The services of each draft that guesses, and of which an address is known."""
        if drafting.at(Place.REMOTE) is None:
            return []
        names = [name for name in request.drafters if name != LOOKUP.name] or [next(iter(self.drafts))]
        return [
            (replicas, DrafterSeat("" if name in self.drafts else name, name, lane))
            for lane, name in enumerate(names)
            if (replicas := self._behind(name)).peers
        ]

    def branches_for(self, seats: Sequence[tuple[Replicas, DrafterSeat]], drafting: Drafting) -> int:
        """Most branches that the drafts of a request make: none where they are several, or one that makes none."""
        infos = [(replicas.info, seat.drafter) for replicas, seat in seats if len(seats) == 1]
        able = any(info is not None and info.makes_branches(drafter, drafting.rule) for info, drafter in infos)
        return self.branches if able and drafting.shape is None else 0

    def _behind(self, name: str) -> Replicas:
        """The draft of that name, or else the first one, which has a drafter of that name."""
        return self.drafts[name if name in self.drafts else next(iter(self.drafts))]


def _makes(grows_trees: bool) -> Makes:
    return Makes.TREE if grows_trees else Makes.CHAIN
