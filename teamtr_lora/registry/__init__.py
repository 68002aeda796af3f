"""Adapters and teams on disk: immutable versions, manifests, cards, what is imported and what goes to and comes from the hub.

On disk:
    registry_store  writing: versions and teams, whole or absent, never overwritten
    reader          reading: names are checked before they become paths
    manifest        what a stored adapter and a stored team say of themselves
    identity        bases, tokenizers and protocols as hashes
    card            model cards, of an adapter and of a team's repository
    stored          what RUN_OR_TEAM means, for every command and function that takes one
    programs        programs that come with the dataset of a stored team: trusted once
    other_items     a trained team with another task, to measure it on other items
    overview        `adapters list`, `show` and `rm`
    verify          `adapters verify`: of the registry, or of a run directory
From elsewhere:
    imports         `adapters import`: a run's team, or a PEFT folder
    fit             whether an adapter can be used, and fits a base; pickles beside it are refused
The hub:
    hub             teams and agents there and back, in one commit or none
    hub_client      one repository, through huggingface_hub
    pushed_files    what a push uploads
    pulled_files    what a pull takes
    local_keys      what in a recipe is of one machine
"""
