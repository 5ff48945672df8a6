"""The proposer for vLLM: guesses of a draft service that runs elsewhere, for `"method": "custom_class"`.

    OUTRIDER_DRAFT=127.0.0.1:50051 vllm serve MODEL --speculative-config \
        '{"method": "custom_class", "model": "outrider.drafting.vllm.RemoteProposer", "num_speculative_tokens": 4}'

docs/clients/engines.md has the settings. vLLM decides every token; what the draft says changes how soon, nothing else.
"""

import logging
import os
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from outrider.drafting.client import DraftClient
from outrider.drafting.rows import Counters, RowProposer
from outrider.drafting.settings import ProposerSettings
from outrider.model_files.digests import VocabularyDigests

log = logging.getLogger("outrider.drafting")


class RemoteProposer:
    """Proposer of a vLLM worker. `counters` say what it has done; the log has them now and then."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Raises InvalidRequest about settings; a draft that is away or does not fit is named in the log."""
        settings = ProposerSettings.read(os.environ)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.counters = Counters()
        self._rows: RowProposer | None = None
        self._log_s, self._told_s = settings.log_s, time.monotonic()
        # vLLM prints what its own loggers say.
        log.handlers, log.propagate = logging.getLogger("vllm").handlers, False
        log.setLevel(logging.INFO)
        tokenizer = cached_tokenizer_from_config(model)
        if tokenizer is None:
            log.warning("no guesses: without a tokenizer (skip_tokenizer_init) no draft can be checked")
            return
        if parallel.rank % parallel.tensor_parallel_size:
            # The guesses of the first rank are the ones that are used.
            return
        num_rows = model.get_vocab_size()
        tokens = tokenizer.get_vocab().items()
        vocabulary = VocabularyDigests.of((token, each) for token, each in tokens if each < num_rows)
        client = DraftClient(settings.addresses, vocabulary=vocabulary, credentials=settings.credentials)
        max_count = vllm_config.speculative_config.num_speculative_tokens
        self._rows = RowProposer(client, max_count, model.max_model_len, settings.deadline_s)
        self.counters = self._rows.counters

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Guesses of each row, as vLLM calls it after each step; slot_mappings are for drafts on its own device."""
        if self._rows is None:
            return [[] for _ in sampled_token_ids]
        found = self._rows.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        if time.monotonic() - self._told_s >= self._log_s:
            self._told_s = time.monotonic()
            log.info("outrider draft: %s", self._rows.told())
        return found

    def load_model(self, *_model: object, **_options: object) -> None:
        """Does nothing: the model is the draft service's."""
