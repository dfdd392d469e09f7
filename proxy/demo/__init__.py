"""`tokenproxy demo`: a conversation with a real model on a real vLLM, with no GPU and no model hub.

It shows on the user's own machine that prompts stay exact. Serving does not need it.
"""
