"""What of vLLM's internals is replaced, one patch a file.

Each file says what it replaces, why, what it is worth and by which command, which vLLM versions it knows, and what happens with
others. `rollout.vllm.patches` switches them: auto, none, or a list of names.

    patch            the record that each of them is
    choice           the table of them, and which ones an engine gets
    close_memory     a closed engine's memory is free for another one
    lora_layers      LoRA layers apply all adapters to all tokens at once
    lora_kernel      the GPU kernel of lora_layers
    direct_queue     requests go straight into the engine core, tokens straight out
    decode_schedule  decoding steps cost the scheduler little
    memory_publish   adapters go from the trainer's memory into LoRA slots
    token_map        which token uses which adapter is worked out on the CPU
"""
