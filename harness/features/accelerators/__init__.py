"""The state that a test leaves on an accelerator: queued work, errors, streams, and how torch computes."""
