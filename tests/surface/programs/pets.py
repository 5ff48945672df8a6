"""What several clients are asked for. Imports nothing of the project, because they have environments of their own."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Rusty is a fox, three years old. Who is it?"


class Pet(BaseModel):
    """A pet."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    kind: Literal["cat", "dog", "fox"]
    age: int = Field(ge=0, le=20)
