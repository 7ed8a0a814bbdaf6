"""The parts of an ORTTrainer: model and loss as one function, steps, updates, states and files."""
