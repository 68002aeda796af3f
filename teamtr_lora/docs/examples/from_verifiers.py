"""Environments written for the package `verifiers` (0.4: tasksets of verifiers.v1), played by a team.

    TeamTRTrainer(team=..., task=FromVerifiers(MyTaskset(vf.TasksetConfig())), args=...)

Prompts, rewards, metrics and judges are the taskset's own: the team's messages become a verifiers trace, which the task scores as
it would score one agent's. A taskset that needs tool servers or a container needs verifiers' own harness, and is refused.
"""

import asyncio

import verifiers.v1 as vf

from teamtr_lora import Item, Task, UserError
from teamtr_lora.tasks.machinery.task import settled


class FromVerifiers(Task):
    """`test_share` of a finite taskset is held out; of one without an end, the first `limit` tasks are taken."""

    name = "verifiers"

    def __init__(self, taskset, test_share=0.2, limit=10_000, reward_range=(0.0, 1.0)):
        self.reward_range = reward_range
        self.tasks = list(taskset.take(limit))
        for task in self.tasks[:1]:
            if task.NEEDS_CONTAINER or type(task).toolsets(task.config):
                raise UserError(f"{type(task).__name__} needs a container or tool servers; run it with verifiers' own harness")
        self.held = round(test_share * len(self.tasks))

    def items(self, split):
        chosen = range(self.held) if split == "test" else range(self.held, len(self.tasks))
        prompts = {n: self.tasks[n].data for n in chosen}
        return [
            Item(f"{split}-{n}", "\n\n".join(filter(None, (d.system_prompt, d.prompt_text))), {"n": n})
            for n, d in prompts.items()
        ]

    def trace(self, episode):
        """The episode as verifiers records one: the prompt, then each message, the team's answer last, as rewards expect it."""
        task = self.tasks[episode.item.data["n"]]
        said = [(vf.UserMessage(content=task.data.prompt_text), False)]
        for message in sorted(episode.messages, key=lambda message: message is episode.answer_message):
            said.append((vf.AssistantMessage(content=message.text), True))
        nodes = [vf.MessageNode(parent=n - 1 if n else None, message=m, sampled=own) for n, (m, own) in enumerate(said)]
        recorded = vf.TraceTask(type=type(task).__name__, data=task.data)
        return vf.Trace(task=recorded, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True)

    def score(self, episodes):
        traces = [self.trace(episode) for episode in episodes]

        async def all_scores():
            await asyncio.gather(*(self.tasks[e.item.data["n"]].score(t) for e, t in zip(episodes, traces, strict=True)))

        settled(all_scores())
        return [trace.reward for trace in traces]
