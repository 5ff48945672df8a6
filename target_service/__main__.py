"""`python -m target_service`: see --help."""

from outrider.command_line import run_app
from outrider.model_service_flags import model_service_app
from target_service.server import start

if __name__ == "__main__":
    run_app(model_service_app("target", 50052, start))
