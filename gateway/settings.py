"""What an operator can set. Every flag has a variable OUTRIDER_*; knows nothing about how the values are used."""

from dataclasses import dataclass

from gateway.sites import OWN_PAGE, Sites
from outrider.rpc.channels import check_address


def listed(text: str) -> tuple[str, ...]:
    """The entries of a list with commas, in order."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway process. `target` and `draft` are one address or several with commas, in order of
    preference; an empty draft means that there is no draft service. Without an address for REST or metrics they are not
    served, and the model is called as its service calls it unless served_model_name says otherwise.

    Raises InvalidRequest about an address that is not HOST:PORT.
    """

    target: str
    tokenizer: str
    draft: str = ""
    listen: str = "127.0.0.1:50050"
    max_requests: int = 256
    target_wait_s: float = 300.0
    draft_wait_s: float = 5.0
    stall_s: float = 30.0
    rebuild_budget_s: float = 30.0
    client_stall_s: float = 30.0
    draft_deadline_least_s: float = 0.25
    draft_deadline_most_s: float = 5.0
    audit_fraction: float = 0.0
    metrics_listen: str = ""
    rest_listen: str = ""
    reflection: bool = False
    queue_len: int = 64
    served_model_name: str = ""
    sites: Sites = OWN_PAGE
    vllm_metric_names: bool = False
    keep_alive_s: float = 15.0

    def __post_init__(self) -> None:
        for address in listed(self.target) or [""]:
            check_address("target", address)
        for address in listed(self.draft):
            check_address("draft", address)
        check_address("listen", self.listen, least_port=0)
        for name in ("metrics_listen", "rest_listen"):
            if getattr(self, name):
                check_address(name, getattr(self, name), least_port=0)
