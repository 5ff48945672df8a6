"""`outrider convert-head`: pickled drafting heads as safetensors, in a process of its own, because that needs torch."""

from outrider.cli.modules import Extra, run_module

CONVERTER = "outrider.model_service.convert_head"


def run_converter(folder: str, out: str, theta: float | None, *, as_json: bool) -> None:
    """Converts the head of a folder, prints what was written, and ends with the exit code."""
    switches = [] if theta is None else ["--theta", repr(theta)]
    # After -- nothing is an option, whatever a folder is called.
    run_module(CONVERTER, [*switches, *(["--json"] if as_json else []), "--", folder, out], Extra.ENGINE)
