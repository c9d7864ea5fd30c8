"""One of some boxes is heavier: find it with a balance. A whole environment, tool included."""

import random
import re

from services.envs.environment import Message, Task, TimeStep
from services.envs.tools import ToolEnvironment, ToolError, tool


class OddBox(ToolEnvironment):
    """Find the heavier box with a balance."""

    max_turns = 6

    def __init__(self, boxes: int = 9):
        self._boxes = boxes

    async def start(self, task: Task, draw: random.Random) -> str:
        self._heavy = draw.randrange(self._boxes)
        return f"One of the boxes 0 to {self._boxes - 1} is heavier than the others. Weigh, then say its number."

    @tool
    def weigh(self, left: list[int], right: list[int]) -> str:
        """Puts boxes on a balance and says which side goes down."""
        if len(left) != len(right) or set(left) & set(right):
            raise ToolError("put equally many boxes on each side, none on both")
        return "left" if self._heavy in left else "right" if self._heavy in right else "neither"

    async def answer(self, message: Message) -> TimeStep:
        numbers = re.findall(r"\d+", message.content)
        return TimeStep(reward=float(numbers[-1:] == [str(self._heavy)]), terminated=True)
