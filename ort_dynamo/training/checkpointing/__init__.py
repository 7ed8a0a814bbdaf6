"""Checkpointing reads and writes the files of ORTTrainer: whole or absent, checked before they are used."""
