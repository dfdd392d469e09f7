"""A real model, a real vLLM and a real conversation, with no GPU and no model hub.

Not needed to serve anything: the package proves on the reader's own machine what the rest claims.
"""
