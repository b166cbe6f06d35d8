"""Episodes: a policy that calls tools, or acts in an environment, over several turns."""
