"""The record of turns: recognise a conversation, plan its next prompt, record what was sampled."""
