"""`python -m draft_service`: see --help."""

from draft_service.server import start
from outrider.command_line import run_app
from outrider.model_service_flags import model_service_app

if __name__ == "__main__":
    run_app(model_service_app("draft", 50051, start))
