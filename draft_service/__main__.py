"""`python -m draft_service`: see --help."""

from draft_service.server import start
from outrider.model_service_flags import model_service_app

if __name__ == "__main__":
    model_service_app("draft", 50051, start)()
