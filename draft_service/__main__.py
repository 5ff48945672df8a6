"""`python -m draft_service`: see --help."""

from draft_service.flags import draft_service_app
from outrider.command_line import run_app

if __name__ == "__main__":
    run_app(draft_service_app())
