"""Playing episodes: the Sampler contract, its engines, and the collector that moves every episode along.

Modules:
    sampler              the contract of engines, and what they share
    collector            plays episodes, each at its own pace
    patience             says which task and item is being waited for
    credit               credit by agent, where the task gives none
    dealing              which process plays which items
    playable             base, adapters, protocol and sampler put together
    helping              a process that only helps another one to play
    engines              the sampler of each engine, by name
    transformers_engine  batched decoding on the trainer's own model
    vllm/                a vLLM engine in this process (a room of its own)
    vllm_server          vLLM servers by URL
    server_client        one of them, over HTTP
    asgi                 what middleware needs: types, answers, requests to its own server
    adapter_upload       a server's middleware that takes adapters over HTTP
    team_model           a server's middleware that offers the whole team as a model
    serve                `serve`: an OpenAI server for a team
"""
