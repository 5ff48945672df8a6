"""Everything that is measured without a service: bandwidth, PyTorch's operators and the bare engine, in this process.

One call of `sample` takes a few samples of each, so that a run can spread them over its whole time.
"""

from bench.engine_loop import EngineLoop, own_config
from bench.floors import Reading, key_value_bytes, past_caches, step_bytes
from bench.operator_step import OperatorStep
from bench.plan import Plan
from bench.samples import DRAFT, TARGET, Measurements, OperatorSample, StepPoint, StepSample
from bench.summary import CONTEXT_LEN, MEMORY, ModelShape
from outrider.engine.models.weights import DTYPES
from outrider.model_service.server import LoadedModel, load_model
from outrider.model_service_flags import ModelServiceSettings

OPERATOR_ROWS = (1, 5)


class Instruments:
    """Both models of a pair with their floors."""

    def __init__(self, plan: Plan) -> None:
        """Loads the pair as the services load it; takes seconds, and raises ModelRefused and InvalidRequest."""
        self._plan = plan
        self._threads = {TARGET: plan.stack.threads, DRAFT: plan.stack.draft_threads}
        names = {TARGET: plan.stack.target, DRAFT: plan.stack.draft or ""}
        self._dtypes = {TARGET: plan.stack.dtype, DRAFT: plan.stack.draft_dtype or plan.stack.dtype}
        models = {role: self._load(role, name) for role, name in names.items()}
        dtypes = {role: DTYPES[name] for role, name in self._dtypes.items()}
        self.loops = {role: EngineLoop(model.runner) for role, model in models.items()}
        self.shapes = {role: _shape(model, dtypes[role].itemsize) for role, model in models.items()}
        memory_bytes = plan.memory_bytes or past_caches()
        # Past the caches more bytes do not come faster, so a large model needs no second copy of its size.
        sizes = {role: min(shape.step_bytes, memory_bytes) for role, shape in self.shapes.items()}
        self._readings = [Reading(role, size, self._threads[role]) for role, size in sizes.items()]
        self._readings.append(Reading(MEMORY, memory_bytes, self._threads[TARGET]))
        self._operators = {
            role: OperatorStep(loop.config, dtypes[role], self._threads[role], max(OPERATOR_ROWS))
            for role, loop in self.loops.items()
        }
        self._points = [point for role in self.loops for point in self._points_of(role)]

    def sample(self, measurements: Measurements) -> None:
        """Takes plan.repeats samples of everything, one after the other."""
        for _ in range(self._plan.repeats):
            for reading in self._readings:
                measurements.reads += reading.measure()
            for role, step in self._operators.items():
                measurements.operators += [OperatorSample(role, rows, step.ms(rows)) for rows in OPERATOR_ROWS]
        for point in self._points:
            loop = self.loops[point.role]
            # The caches hold something else after the point before: one step brings the weights back, as in a row of
            # rounds of one request.
            loop.step_ms(point)
            measurements.steps += [StepSample(point, loop.step_ms(point)) for _ in range(self._plan.repeats)]

    def _load(self, role: str, model: str) -> LoadedModel:
        settings = ModelServiceSettings(
            model, dtype=self._dtypes[role], threads=self._threads[role], kv_tokens=self._plan.kv_tokens
        )
        return load_model(settings)

    def _points_of(self, role: str) -> list[StepPoint]:
        """All contexts at the first temperature, and the one that figures are taken at also at the others."""
        plan = self._plan
        longest = self.loops[role].longest_context(max(plan.row_counts))
        places = [(min(context, longest), plan.temperatures[0]) for context in plan.context_lens]
        places += [(CONTEXT_LEN, heat) for heat in plan.temperatures[1:]]
        return [StepPoint(role, rows, *place) for place in dict.fromkeys(places) for rows in plan.row_counts]


def _shape(model: LoadedModel, item_bytes: int) -> ModelShape:
    config = own_config(model.runner)
    name = model.runner.identity.model_name
    return ModelShape(name, step_bytes(config, item_bytes), key_value_bytes(config, CONTEXT_LEN))
