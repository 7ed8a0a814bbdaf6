"""What ORTTrainer is made of: model and loss as one function, steps, updates, states and files."""
