"""openai-agents, unmodified: an agent with a function and a type of output, by both of its models. Prints answers."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel


class Report(BaseModel):
    """How the weather is."""

    city: str
    sunny: bool


@function_tool
def weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"It is sunny in {city}"


async def main(base_url: str) -> None:
    """Each run is a call, its result, and the report; whole and streamed."""
    set_tracing_disabled(True)
    client, told = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0), []
    for model in (OpenAIChatCompletionsModel("any", client), OpenAIResponsesModel("any", client)):
        agent = Agent(name="reporter", model=model, tools=[weather], output_type=Report)
        told.append((await Runner.run(agent, "How is the weather in Paris?")).final_output.model_dump())
        streamed = Runner.run_streamed(agent, "How is the weather in Paris?")
        async for _ in streamed.stream_events():
            pass
        told.append(streamed.final_output.model_dump())
    sys.stdout.write(json.dumps(told))


asyncio.run(main(sys.argv[1]))
