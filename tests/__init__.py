import os

# read when huggingface_hub is imported: without a network, it looks for an unknown model for a minute
os.environ.setdefault("HF_HUB_OFFLINE", "1")
