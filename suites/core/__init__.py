"""Claims about a sharded model: values, gradients, states, collectives, memory."""
