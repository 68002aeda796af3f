"""Sampler `vllm`: an engine in this process, every agent a LoRA on one copy of the base.

Modules:
    engine            the sampler itself
    start             starting the engine
    public_interface  requests, adapters and closing by vLLM's public calls
    gpu_lending       lending the engine's GPU memory to the trainer
    patches/          what of vLLM's internals is replaced (a room of its own)
"""
