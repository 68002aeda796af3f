"""Sampler `vllm`: an engine in this process, every agent a LoRA on one copy of the base.

engine       the sampler itself
start        starting the engine, and sharing a GPU with it
close        ending it, so that its memory is free
queue        requests into its core, tokens out of it
internals    adapters from memory into its LoRA slots
lora         its LoRA layers' arithmetic: all adapters at once
lora_kernel  the GPU kernel of that
"""
