"""The prompts of a model that makes vectors, as sentence-transformers lists them: texts that go before its inputs."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import TaskFacts


class PromptFacts(TaskFacts):
    """The default prompt, and those that an input may name in its place."""

    encoded: ClassVar[tuple[str, ...]] = ("prompt", "prompts")
    told: ClassVar[tuple[str, ...]] = ("prompt_names",)

    prompt: str = Field("", description="text that sentence-transformers puts before every input of this model")
    prompts: Mapping[str, str] = Field({}, description="texts that an input may have in its place, by their names")

    @property
    def prompt_names(self) -> list[str]:
        """The names of all prompts, sorted."""
        return sorted(self.prompts)

    def prompt_of(self, name: str) -> str:
        """The prompt of a name that was checked; empty means the default."""
        return self.prompts[name] if name else self.prompt


def check_prompt(name: str, facts: PromptFacts) -> None:
    """Refuses a name that is none of the model's prompts."""
    if name and name not in facts.prompts:
        known = ", ".join(facts.prompt_names) or "none"
        raise InvalidInput("prompt_name", f"is none of the model's prompts; they are: {known}")
