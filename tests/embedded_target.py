"""What tests of the target service with the embedded model have in common."""

from pathlib import Path

from outrider.model_service.settings import ModelServiceSettings

MODEL = Path(__file__).resolve().parents[1] / "models" / "target"
SETTINGS = ModelServiceSettings(str(MODEL), threads=1, kv_tokens=8192)
PROMPT = (0, 401, 913, 260, 555, 12)
