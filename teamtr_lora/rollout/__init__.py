"""Playing episodes: the Sampler contract, its engines, and the collector that moves every episode along.

Modules:
    sampler              the contract: tokens in, tokens out; seeds
    collector            plays episodes, each at its own pace
    playable             base, adapters, protocol and sampler put together
    records              how a transcript is written down
    engines              which engine a recipe asks for
    transformers_engine  batched decoding on the trainer's own model
    vllm_engine          a vLLM engine in this process
    vllm_start           starting it, and sharing a GPU with it
    vllm_close           ending it, so that its memory is free
    vllm_queue           requests into its core, tokens out of it
    vllm_internals       adapters from memory into its LoRA slots
    vllm_lora            its LoRA layers' arithmetic: all adapters at once
    lora_kernel          the GPU kernel of that
    vllm_server          vLLM servers by URL
    server_client        one of them, over HTTP
    adapter_upload       a server's middleware that takes adapters over HTTP
    serve                `serve`: an OpenAI server for a team
"""
