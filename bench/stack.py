"""The pair to measure, and real processes of it as `outrider generate` starts them. Measures nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.cli import options
from outrider.cli.bench import Cpus
from outrider.cli.local_stack import Addresses, Stack, Supervisor, choose_models, start_stack
from outrider.cli.running import Interrupts, note, service_log
from outrider.errors import ModelRefused
from outrider.model_service.settings import Dtype, available_cpus


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str]:
    """As outrider.cli.local_stack.choose_models; raises ModelRefused also when there is no draft for the target."""
    target_model, draft_model = choose_models(target, draft, no_draft=False)
    if draft_model is None:
        raise ModelRefused(f"There is no draft for {target_model}; name one with --draft.", model=target_model)
    return target_model, draft_model


def stack_of(models: options.Models, cpus: Cpus, *, needs_draft: bool = True) -> Stack:
    """The stack that the options name, on free ports. Raises ModelRefused, also without a draft that is needed."""
    target, draft = choose_models(models.target, models.draft if needs_draft else None, no_draft=not needs_draft)
    if needs_draft and draft is None:
        raise ModelRefused(f"There is no draft for {target}; name one with --draft.", model=target)
    return Stack(
        target=target,
        draft=draft,
        dtype=(models.dtype or Dtype.BFLOAT16).value,
        threads=cpus.threads or available_cpus(),
        draft_threads=cpus.draft_threads or 1,
        draft_dtype=models.draft_dtype.value if models.draft_dtype else None,
        top_n=models.top_n,
        # A prompt that is asked again under other settings must cost the same again.
        prefix_cache=False,
    )


@asynccontextmanager
async def served(stack: Stack, interrupts: Interrupts) -> AsyncIterator[Addresses]:
    """Serves a pair and yields where its processes answer; a second signal ends them at once."""
    async with Supervisor(note, service_log) as supervisor:
        interrupts.urgent = supervisor.kill
        yield await start_stack(supervisor, stack)
