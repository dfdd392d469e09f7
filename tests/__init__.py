"""The tests. No program that they start asks a hub for models."""

import os

# here, because huggingface_hub reads it once, when it is imported
os.environ["HF_HUB_OFFLINE"] = "1"
