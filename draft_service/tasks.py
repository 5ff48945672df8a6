"""Work of a draft service's sessions on the device thread: guesses of its model, of a search, of another drafter."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.beam_drafter import BeamDrafter, BeamDraftTask
from outrider.drafters.drafter import NO_PROPOSAL, DrafterProposal, HostedSession, guess
from outrider.drafters.model_drafter import DraftTask, ModelDrafter
from outrider.engine.device_thread import EndingTask, own_fault
from outrider.engine.session import Session
from outrider.token_tree import TokenTree


@dataclass(slots=True, eq=False)
class HostedTask(EndingTask):
    """A session on its way to the proposal of a drafter that needs none of the service's forwards."""

    session: Session
    hosted: HostedSession

    @property
    def found(self) -> DrafterProposal:
        """What its drafter proposes; nothing where the gateway has moved on before it was there."""
        return self.hosted.part.proposal or NO_PROPOSAL

    @property
    def proposal(self) -> TokenTree:
        return self.found.tree


Task = DraftTask | BeamDraftTask | HostedTask


class Steps:
    """Makes one step of all tasks at a time, whatever their kinds."""

    def __init__(self, drafter: ModelDrafter, beam_drafter: BeamDrafter) -> None:
        self._drafter = drafter
        self._beam_drafter = beam_drafter

    def advance(self, tasks: Sequence[Task]) -> bool:
        """Returns whether anything could be done."""
        hosted = [task for task in tasks if isinstance(task, HostedTask) and not task.stopped]
        searches = [task for task in tasks if isinstance(task, BeamDraftTask)]
        others = [task for task in tasks if isinstance(task, DraftTask)]
        guess([task.hosted for task in hosted], ())
        for task in hosted:
            with own_fault(task):
                if task.hosted.part.proposal is not None:
                    task.finish()
        could_search = bool(searches) and self._beam_drafter.advance(searches)
        return (bool(others) and self._drafter.advance(others)) or could_search or bool(hosted)
