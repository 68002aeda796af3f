"""A process that helps the first one to play episodes, in commands that the first one carries out by itself."""

from __future__ import annotations

from teamtr_lora.common.ranks import process_ranks
from teamtr_lora.rollout.playable import Opening, PlayableTeam, Playing, open_recipe
from teamtr_lora.tasks import Task


def help_to_play() -> None:
    """Does what the first process tells, until there is nothing more."""
    ranks = process_ranks()
    playable: PlayableTeam | None = None
    task = Task()
    try:
        while (told := ranks.broadcast(None)) is not None:
            if isinstance(told, Opening):
                if playable is not None:
                    playable.close()
                    playable = None  # its base goes before another comes
                task = told.recipe.task.build(told.recipe.folder)
                playable = open_recipe(told.recipe, told.extra)
            elif isinstance(told, Playing) and playable is not None:
                for version, tensors in told.adapters:
                    playable.bank.load(version, tensors)
                    playable.publish(version)
                playable.play(task, told.plan, stand_in=told.stand_in)
    finally:
        if playable is not None:
            playable.close()
