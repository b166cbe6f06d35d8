"""Where prompts and gold answers come from, and how a prompt is worded."""
